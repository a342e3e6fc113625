"""Train the boxed model: the small Llama that ships inside the package.

``python -m tools.boxed_model.train --out DIR --minutes 40 --seed 0`` expands the grammar in
``pdserve/models/boxed/corpus.txt`` into chats, stories and explanations, trains a tokenizer and a
model on them on one CPU core, and writes a Hugging Face directory that any loader of Llama can
read.

The text is a function of the grammar and the seed alone. The weights are reproducible only with
``--tokens``: with ``--minutes`` the learning rate follows the clock, so that the run ends on time
on any machine.

Nothing in the package imports this module, and it knows nothing of the engine.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pdserve.config.boxed import boxed_model_dir
from tools.boxed_model.grammar import BOS, EOS, Writer, parse_grammar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

CORPUS_FILE: Final = boxed_model_dir() / "corpus.txt"

SPECIAL_TOKENS: Final = (BOS, EOS, "<|user|>", "<|assistant|>", "<|system|>")
BOS_ID: Final = 0
EOS_ID: Final = 1
VOCAB_SIZE: Final = 2048
MAX_POSITIONS: Final = 4096
ROPE_THETA: Final = 10000.0

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

TOKENS_PER_STEP: Final = 4096
# Tokens per row of a batch, step by step. Long rows cost more and are needed all along: a model
# that has seen 512 positions only has a loss of 0.8 instead of 0.23 in rows of 2048 and more.
CONTEXT_CYCLE: Final = (512, 2048, 512, 4096)
PEAK_LR: Final = 3e-3
WARMUP_STEPS: Final = 60

DEMO_COMPLETIONS: Final = (
    "Disaggregated serving means",
    "The prefill engine",
    "The decode engine",
    "Once upon a time",
)
DEMO_CHATS: Final = (
    "What is disaggregated serving?",
    "Who are you?",
    "Tell me a short story.",
    "What is a KV cache?",
    "Why should I use pdserve?",
    "Hello!",
    "What colour is the sky?",
    "Who won the world cup in 1990?",
)


# ----------------------------------------------------------------------------- the tokenizer


def train_tokenizer(documents: Sequence[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of ``VOCAB_SIZE`` tokens; any UTF-8 text survives it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, BOS_ID)],
    )
    return tokenizer


def token_batches(
    writer: Writer, tokenizer: Tokenizer, num_tokens: int, context: int
) -> Iterator[torch.Tensor]:
    """Documents laid end to end and cut into batches, without end.

    Yields:
        int64 ``[num_tokens // context, context]``.
    """
    stream: list[int] = []
    while True:
        while len(stream) < num_tokens:
            documents = [writer.document() for _ in range(32)]
            for encoding in tokenizer.encode_batch(documents, add_special_tokens=False):
                stream.extend(encoding.ids)
        yield torch.tensor(stream[:num_tokens]).view(-1, context)
        del stream[:num_tokens]


# --------------------------------------------------------------------------------- the model


def make_config() -> LlamaConfig:
    """The shape: 3.5 million parameters, heads of 64 because the attention kernels like it."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


@dataclass(frozen=True)
class Budget:
    """When training ends: after ``max_tokens`` if given, otherwise after ``max_s`` seconds."""

    max_s: float
    max_tokens: int | None

    def progress(self, elapsed_s: float, num_tokens: int) -> float:
        """The share that is done, from 0 to 1."""
        if self.max_tokens is not None:
            return min(1.0, num_tokens / self.max_tokens)
        return min(1.0, elapsed_s / self.max_s)


def learning_rate(peak: float, step: int, progress: float) -> float:
    """Linear warm-up, then a cosine down to nothing."""
    warm_up = min(1.0, (step + 1) / WARMUP_STEPS)
    return peak * warm_up * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    """AdamW; matrices decay, vectors (the norms) do not."""
    weights = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [w for w in weights if w.dim() >= 2], "weight_decay": 0.1},
            {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
        ],
        lr=PEAK_LR,
        betas=(0.9, 0.95),
        fused=True,
    )


def mean_loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next token, in nats. ``batch`` is int64 ``[rows, context]``."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=batch, use_cache=False).logits
    targets = batch[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets)


def train(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    writer: Writer,
    *,
    budget: Budget,
    peak_lr: float,
    out: Path,
    save_every_s: float,
) -> None:
    """Train ``model`` in place, report on stdout, leave a usable copy in ``out`` on the way."""
    optimizer = make_optimizer(model)
    start_s = saved_s = time.monotonic()
    step = num_tokens = 0
    recent_loss = math.nan
    batches = {
        context: token_batches(writer, tokenizer, TOKENS_PER_STEP, context)
        for context in CONTEXT_CYCLE
    }
    while (progress := budget.progress(time.monotonic() - start_s, num_tokens)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(peak_lr, step, progress)
        context = CONTEXT_CYCLE[step % len(CONTEXT_CYCLE)]
        loss = mean_loss(model, next(batches[context]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        value = loss.item()
        recent_loss = value if step == 0 else 0.97 * recent_loss + 0.03 * value
        step += 1
        num_tokens += TOKENS_PER_STEP
        if step % 20 == 0:
            elapsed_s = time.monotonic() - start_s
            progress = budget.progress(elapsed_s, num_tokens)
            print(
                f"step {step:5d}  loss {recent_loss:.3f}  "
                f"{num_tokens / elapsed_s:.0f} tokens/s  {progress:6.1%}  "
                f"ETA {elapsed_s * (1 - progress) / max(progress, 1e-9) / 60:.1f} min",
                flush=True,
            )
        if time.monotonic() - saved_s > save_every_s:
            save(model, tokenizer, out)
            saved_s = time.monotonic()
    print(f"trained {step} steps, {num_tokens} tokens, loss {recent_loss:.3f}", flush=True)


# ------------------------------------------------------------------------ writing and judging


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the Hugging Face directory, weights in bf16. ``model`` is unchanged."""
    out.mkdir(parents=True, exist_ok=True)
    shipped = LlamaForCausalLM(model.config)
    shipped.load_state_dict(model.state_dict())
    shipped.to(torch.bfloat16).save_pretrained(out)  # type: ignore[arg-type]
    (out / "model.safetensors").chmod(0o644)
    # transformers 5 writes "rope_parameters" and "dtype"; other readers know the names before it.
    config = json.loads((out / "config.json").read_text())
    _write_json(out / "config.json", config | {"rope_theta": ROPE_THETA, "torch_dtype": "bfloat16"})
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": EOS,
            "model_max_length": MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        out / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID},
    )


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, prompt: list[int], max_tokens: int) -> list[tuple[int, float]]:
    """The greedy continuation: each token with its lead over the second best, in logits."""
    ids = list(prompt)
    steps: list[tuple[int, float]] = []
    while len(steps) < max_tokens and (not steps or steps[-1][0] != EOS_ID):
        top = model(input_ids=torch.tensor([ids])).logits[0, -1].float().topk(2)
        steps.append((int(top.indices[0]), float(top.values[0] - top.values[1])))
        ids.append(steps[-1][0])
    return steps


def demo_prompts(tokenizer: Tokenizer, directory: Path) -> list[tuple[str, list[int]]]:
    """The prompts that answers are judged by, with their tokens."""
    templated = AutoTokenizer.from_pretrained(directory)
    prompts = [(text, tokenizer.encode(text).ids) for text in DEMO_COMPLETIONS]
    for question in DEMO_CHATS:
        rendered = templated.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompts.append((question, tokenizer.encode(rendered, add_special_tokens=False).ids))
    return prompts


def judge(directory: Path, writer: Writer, *, num_batches: int) -> None:
    """Load what was written and print its held-out loss, its answers and their margins.

    Args:
        directory: A Hugging Face directory.
        writer: Writes the held-out text (same grammar, so the loss measures fit, not knowledge);
            its seed must differ from that of the training.
        num_batches: How many batches of ``TOKENS_PER_STEP`` to measure the loss on.
    """
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    batches = token_batches(writer, tokenizer, TOKENS_PER_STEP, 512)
    with torch.inference_mode():
        losses = [mean_loss(model, next(batches)).item() for _ in range(num_batches)]
    print(f"held-out loss {sum(losses) / len(losses):.3f} nats/token")

    margins = []
    for text, ids in demo_prompts(tokenizer, directory):
        steps = greedy(model, ids, 200)
        margins += [margin for _, margin in steps]
        answer = tokenizer.decode([token for token, _ in steps])
        end = "" if steps[-1][0] == EOS_ID else " [cut]"
        print(f"\n> {text}\n{answer}{end}")
    confident = sum(margin > 1.0 for margin in margins)
    print(f"\n{confident / len(margins):.1%} of {len(margins)} steps lead by more than 1.0")
    size_bytes = sum(path.stat().st_size for path in directory.iterdir())
    num_parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{num_parameters} parameters, {size_bytes / 1e6:.2f} MB in {directory}")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line; train, or only judge, or only show the text."""
    parser = argparse.ArgumentParser(prog="python -m tools.boxed_model.train")
    parser.add_argument("--out", type=Path, required=True, help="directory of the model")
    parser.add_argument("--minutes", type=float, default=40.0, help="training time")
    parser.add_argument("--tokens", type=int, help="train on so many tokens instead (repeatable)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=PEAK_LR, help="highest learning rate")
    parser.add_argument("--init", type=Path, metavar="DIR", help="go on from the model in DIR")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--corpus", type=Path, default=CORPUS_FILE, help="the grammar")
    parser.add_argument("--judge", action="store_true", help="only judge the model in --out")
    parser.add_argument("--show", type=int, metavar="N", help="only print N documents")
    args = parser.parse_args(argv)

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    grammar = parse_grammar(args.corpus.read_text())
    writer = Writer(grammar, Random(args.seed))
    if args.show is not None:
        for _ in range(args.show):
            print(writer.document(), end="\n\n")
        return
    if not args.judge:
        if args.init is None:
            tokenizer = train_tokenizer([writer.document() for _ in range(20_000)])
            model = LlamaForCausalLM(make_config())
        else:
            tokenizer = Tokenizer.from_file(str(args.init / "tokenizer.json"))
            model = LlamaForCausalLM.from_pretrained(args.init, dtype=torch.float32)
        budget = Budget(args.minutes * 60, args.tokens)
        train(
            model,
            tokenizer,
            writer,
            budget=budget,
            peak_lr=args.lr,
            out=args.out,
            save_every_s=300,
        )
        save(model, tokenizer, args.out)
    judge(args.out, Writer(grammar, Random(f"held out {args.seed}")), num_batches=16)


if __name__ == "__main__":
    main()
