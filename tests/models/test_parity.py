"""Our decoders against transformers: tiny random models, a paged cache of scattered blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pdserve.config.schema import ModelConfig
from pdserve.models.decoder import StepInputs
from pdserve.models.registry import LoadedModel, load_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BLOCK_SIZE = 16
NUM_STEPS = 40
PROMPT_LENS = [1, 2, 15, 16, 17, 33, 100, 300]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, grouped queries": ("llama", {}),
    "llama, tied head": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-4}),
    "llama, biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 32}),
    "llama, linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}},
    ),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn with every option": (
        "llama",
        {
            "rope_parameters": {
                **YARN,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
                "truncate": False,
            }
        },
    ),
    "llama, yarn attention factor": (
        "llama",
        {"rope_parameters": {**YARN, "attention_factor": 1.25}},
    ),
    "mistral, window": ("mistral", {"sliding_window": 23}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2, upper layers slide": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3, tied, biases, layers by type": (
        "qwen3",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def greedy(loaded: LoadedModel, prompts: list[list[int]]) -> tuple[list[list[int]], torch.Tensor]:
    """Continue all prompts together; return their tokens and the logits of every step."""
    arch = loaded.arch
    per_request = -(-(max(map(len, prompts)) + NUM_STEPS) // BLOCK_SIZE)
    num_blocks = per_request * len(prompts)
    shape = (num_blocks, arch.num_layers, 2, arch.num_kv_heads, BLOCK_SIZE, arch.head_dim)
    kv = torch.full(shape, float("nan"), dtype=loaded.dtype)
    layers = [kv[:, layer] for layer in range(arch.num_layers)]
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    tables = blocks.view(len(prompts), per_request)
    tokens = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    logits = []
    with torch.inference_mode():
        for _ in range(NUM_STEPS):
            positions = [
                torch.arange(done, len(t)) for done, t in zip(computed, tokens, strict=True)
            ]
            slots = [
                table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
                for table, at in zip(tables, positions, strict=True)
            ]
            new = [t[done:] for done, t in zip(computed, tokens, strict=True)]
            starts = torch.tensor([0, *map(len, new)]).cumsum(0)
            step = StepInputs(
                token_ids=torch.tensor([token for row in new for token in row]),
                positions=torch.cat(positions),
                slot_mapping=torch.cat(slots),
                block_tables=tables.int(),
                query_start=starts.int(),
                context_lens=torch.tensor([len(t) for t in tokens]).int(),
            )
            hidden = loaded.model.forward(step, layers)
            logits.append(loaded.model.logits(hidden[starts[1:] - 1]))
            computed = [len(t) for t in tokens]
            for row, token in zip(tokens, logits[-1].argmax(-1).tolist(), strict=True):
                row.append(token)
    return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)], torch.stack(logits, 1)


@pytest.mark.parametrize(("family", "fields"), SHAPES.values(), ids=SHAPES)
def test_tokens_and_logits_are_those_of_transformers(
    save_model: Callable[..., Any], tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    reference = save_model(family, **fields)
    loaded = load_model(ModelConfig(model=str(tmp_path)), torch.device("cpu"), lambda _: None)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(211, (n,), generator=generator).tolist() for n in PROMPT_LENS]

    outputs, logits = greedy(loaded, prompts)

    for prompt, output, ours in zip(prompts, outputs, logits, strict=True):
        # Scoring our own tokens: if each is the reference's argmax, greedy search finds them.
        with torch.inference_mode():
            theirs = reference(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        assert theirs.argmax(-1).tolist() == output
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert len({token for output in outputs for token in output}) > 20, "tokens do not vary"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close_to_full(
    save_model: Callable[..., Any], tmp_path: Path, dtype: str
) -> None:
    save_model("qwen3", initializer_range=0.1)
    prompts = [list(range(40))]
    full, half = (
        greedy(
            load_model(ModelConfig(model=str(tmp_path), dtype=d), torch.device("cpu"), print),
            prompts,
        )[1]
        for d in ("float32", dtype)
    )
    assert half.dtype == torch.float32
    difference = (full[:, 0] - half[:, 0]).abs().max() / full[:, 0].std()
    assert 0 < difference < (0.25 if dtype == "bfloat16" else 0.03)
