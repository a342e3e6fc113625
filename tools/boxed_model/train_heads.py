"""Train the boxed model's Medusa heads, which its drafts are made with.

``python -m tools.boxed_model.train_heads --out DIR --tokens 1600000 --seed 0`` reads the text that
the model was trained on, expands it again, and trains heads on the model's final states: head ``i``
learns the token that stands ``i + 2`` places on. The model itself does not change, and its output
head serves all of them, so that the file has the heads' blocks alone.

The result is a function of the grammar, the model, the seed and the number of tokens. Nothing in
the package imports this module, and it knows nothing of the engine.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from pdserve.config.boxed import boxed_model_dir
from tools.boxed_model.grammar import Writer, parse_grammar
from tools.boxed_model.train import (
    CORPUS_FILE,
    demo_prompts,
    greedy,
    learning_rate,
    token_batches,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

TOKENS_PER_STEP: Final = 1024
CONTEXT: Final = 512
PEAK_LR: Final = 3e-3
LATER_COUNT_LESS: Final = 0.9
"""Weight of a head's loss, as a multiple of that of the head before: it is of use less often."""


class Heads(nn.Module):
    """Blocks of ``x + silu(W x + b)``, for all heads at once.

    Args:
        num_layers: Blocks of a head, which change nothing before they are trained.
    """

    def __init__(self, num_heads: int, num_layers: int, size: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_layers, num_heads, size, size))
        self.biases = nn.Parameter(torch.zeros(num_layers, num_heads, 1, size))

    def forward(self, hidden: Tensor) -> Tensor:
        """What the output head reads, ``[num_heads, N, size]``, of final states ``[N, size]``."""
        states = hidden.expand(self.weights.shape[1], *hidden.shape)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            states = states + functional.silu(torch.baddbmm(bias, states, weight.transpose(1, 2)))
        return states


def final_states(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Normed states ``[rows, context, size]`` of int64 ``[rows, context]``."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        states: Tensor = model.model(input_ids=batch, use_cache=False).last_hidden_state
    return states


def mean_loss(heads: Heads, model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Weighted cross entropy of what stands 2, 3, ... places behind each token, in nats."""
    num_heads = heads.weights.shape[1]
    hidden = final_states(model, batch)[:, : -num_heads - 1].flatten(0, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = functional.linear(heads(hidden), model.lm_head.weight)
    total = torch.zeros(())
    weight = 1.0
    for head in range(num_heads):
        end = batch.shape[1] - num_heads + 1 + head
        targets = batch[:, head + 2 : end].flatten()
        total = total + weight * functional.cross_entropy(logits[head].float(), targets)
        weight *= LATER_COUNT_LESS
    return total


def train(
    heads: Heads, model: LlamaForCausalLM, tokenizer: Tokenizer, writer: Writer, num_tokens: int
) -> None:
    """Train ``heads`` in place, and report on stdout."""
    optimizer = torch.optim.AdamW(
        [
            {"params": [heads.weights], "weight_decay": 0.05},
            {"params": [heads.biases], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    batches = token_batches(writer, tokenizer, TOKENS_PER_STEP, CONTEXT)
    num_steps = -(-num_tokens // TOKENS_PER_STEP)
    start_s = time.monotonic()
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(PEAK_LR, step, step / num_steps)
        loss = mean_loss(heads, model, next(batches))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            elapsed_s = time.monotonic() - start_s
            left_s = elapsed_s / (step + 1) * (num_steps - step - 1)
            print(f"step {step + 1}  loss {loss.item():.3f}  {left_s:.0f} s left", flush=True)


def save(heads: Heads, vocab_size: int, out: Path) -> None:
    """Write the heads in vLLM's format, in bf16."""
    out.mkdir(parents=True, exist_ok=True)
    num_layers, num_heads, size, _ = heads.weights.shape
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            name = f"blocks.{head}.layers.{layer}"
            weight, bias = heads.weights[layer, head], heads.biases[layer, head, 0]
            tensors[f"{name}.weight"] = weight.detach().bfloat16().contiguous()
            tensors[f"{name}.bias"] = bias.detach().bfloat16().contiguous()
    save_file(tensors, out / "model.safetensors")
    (out / "model.safetensors").chmod(0o644)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": vocab_size,
        "num_heads": num_heads,
        "num_hidden_layers": num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": True,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(directory: Path) -> Heads:
    """Read what ``save`` has written."""
    config = json.loads((directory / "config.json").read_text())
    heads = Heads(config["num_heads"], config["num_hidden_layers"], config["hidden_size"])
    tensors = load_file(directory / "model.safetensors")
    with torch.no_grad():
        for head in range(config["num_heads"]):
            for layer in range(config["num_hidden_layers"]):
                name = f"blocks.{head}.layers.{layer}"
                heads.weights[layer, head] = tensors[f"{name}.weight"].float()
                heads.biases[layer, head, 0] = tensors[f"{name}.bias"].float()
    return heads


@torch.inference_mode()
def tokens_per_step(
    heads: Heads, model: LlamaForCausalLM, ids: Sequence[int], start: int
) -> list[float]:
    """How many tokens a step has, for drafts of 1, 2, ... tokens, if ``ids`` are what is put out.

    Args:
        start: Where the answer begins, of which the first token is there already.
    """
    hidden = final_states(model, torch.tensor([ids]))[0]
    guesses = functional.linear(heads(hidden.float()), model.lm_head.weight).argmax(-1)
    found = []
    for most in range(1, len(guesses) + 1):
        at, num_steps = start, 0
        while at < len(ids) - 1:
            # What the state before token `at` guesses stands behind `at`.
            accepted = 0
            while accepted < most and at + 1 + accepted < len(ids):
                if guesses[accepted, at - 1] != ids[at + 1 + accepted]:
                    break
                accepted += 1
            at += accepted + 1
            num_steps += 1
        found.append((at - start) / max(1, num_steps))
    return found


def judge(heads: Heads, model: LlamaForCausalLM, tokenizer: Tokenizer, writer: Writer) -> None:
    """Print the tokens per step of greedy answers, and of held-out text."""
    answers = []
    for _, prompt in demo_prompts(tokenizer, boxed_model_dir()):
        tokens = [token for token, _ in greedy(model, prompt, 120)]
        answers.append(tokens_per_step(heads, model, prompt + tokens, len(prompt)))
    rows = next(token_batches(writer, tokenizer, 8 * CONTEXT, CONTEXT)).tolist()
    texts = [tokens_per_step(heads, model, row, 1) for row in rows]
    for name, kind in (("greedy answers", answers), ("held-out text", texts)):
        means = [sum(each) / len(kind) for each in zip(*kind, strict=True)]
        print(f"{name}: tokens per step {', '.join(f'{mean:.2f}' for mean in means)}")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line; train, or only judge."""
    parser = argparse.ArgumentParser(prog="python -m tools.boxed_model.train_heads")
    parser.add_argument("--out", type=Path, required=True, help="directory of the heads")
    parser.add_argument("--tokens", type=int, default=1_600_000, help="to train on")
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2, help="blocks of a head")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--judge", action="store_true", help="only judge the heads in --out")
    args = parser.parse_args(argv)

    torch.set_num_threads(args.threads)
    directory = boxed_model_dir()
    grammar = parse_grammar(CORPUS_FILE.read_text())
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.requires_grad_(False)
    if not args.judge:
        heads = Heads(args.heads, args.layers, model.config.hidden_size)
        train(heads, model, tokenizer, Writer(grammar, Random(args.seed)), args.tokens)
        save(heads, model.config.vocab_size, args.out)
    judge(load(args.out), model, tokenizer, Writer(grammar, Random(f"held out {args.seed}")))


if __name__ == "__main__":
    main()
