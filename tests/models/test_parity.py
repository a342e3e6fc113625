"""Our decoders against transformers: tiny random models, a paged cache of scattered blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.models.decoding import final_states, greedy, load
from tests.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
    "llama, heads of 8": ("llama", {"head_dim": 8}),
    "llama, heads of 24": ("llama", {"head_dim": 24, "attention_bias": True}),
    "llama, heads of 272": ("llama", {"head_dim": 272}),
    "mistral, heads of 100, window": ("mistral", {"head_dim": 100, "sliding_window": 23}),
    "qwen3, heads of 40": ("qwen3", {"head_dim": 40}),
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
    "phi3": ("phi3", {}),
    "phi3, window, three quarters rotate": (
        "phi3",
        {
            "sliding_window": 23,
            "num_key_value_heads": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 25e4,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "seed_oss": ("seed_oss", {}),
    "seed_oss, other biases": (
        "seed_oss",
        {
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "head_dim": 16,
            "num_key_value_heads": 4,
        },
    ),
}


LATER: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {}),
    "gemma3, tied": ("gemma3_text", {"tie_word_embeddings": True, "initializer_range": 0.03}),
    "gemma3, biases, layers by type, rotation by default": (
        "gemma3_text",
        {
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": None,
        },
    ),
    "gemma3, the decoder of a model that sees": ("gemma3", {}),
    "mistral3, the decoder of a model that sees": ("mistral3", {"sliding_window": None}),
    "smollm3": ("smollm3", {}),
    "smollm3, tied, layers by list, biases, windows": (
        "smollm3",
        {
            "tie_word_embeddings": True,
            "no_rope_layers": [0, 1, 0],
            "attention_bias": True,
            "mlp_bias": True,
            "use_sliding_window": True,
            "sliding_window": 20,
        },
    ),
    "granite": ("granite", {}),
    "granite, biases, tied": (
        "granite",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5, no biases, heads by size": ("ernie4_5", {"use_bias": False, "head_dim": None}),
    "olmo2": ("olmo2", {}),
    "olmo2, one KV head": ("olmo2", {"num_key_value_heads": 1}),
    "olmo3": ("olmo3", {}),
    "olmo3, layers by type, rotation by default": (
        "olmo3",
        {
            "rope_parameters": None,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "exaone4": ("exaone4", {}),
    "exaone4, no windows": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "ministral3": ("ministral3", {}),
    "ministral3, the decoder of a model that sees": (
        "mistral3",
        {
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 50,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "hunyuan, tied, biases, rotation by default": (
        "hunyuan_v1_dense",
        {"tie_word_embeddings": True, "attention_bias": True, "rope_parameters": None},
    ),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4, no biases, a quarter rotates": (
        "glm4",
        {
            "attention_bias": False,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e5,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
}
ROWS = [pytest.param(*row, id=name) for name, row in SHAPES.items()]
ROWS += [
    pytest.param(*row, id=name, marks=[pytest.mark.slow] * ("," in name))
    for name, row in LATER.items()
]


@pytest.mark.parametrize(("family", "fields"), ROWS)
def test_tokens_and_logits_are_those_of_transformers(
    save_model: Callable[..., Any], tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    reference = save_model(family, **fields)
    loaded = load(tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(211, (n,), generator=generator).tolist() for n in PROMPT_LENS]

    outputs, logits = greedy(loaded, prompts, NUM_STEPS)

    for prompt, output, ours in zip(prompts, outputs, logits, strict=True):
        # Scoring our own tokens: if each is the reference's argmax, greedy search finds them.
        with torch.inference_mode():
            theirs = reference(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        assert theirs.argmax(-1).tolist() == output
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert len({token for output in outputs for token in output}) > 20, "tokens do not vary"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", sorted({family for family, _ in LATER.values()}))
def test_chunks_of_a_prompt_change_no_bit(tmp_path: Path, family: str, dtype: str) -> None:
    loaded = load(write_tiny_model(tmp_path, family), dtype=dtype)
    prompt = torch.randint(211, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    whole = final_states(loaded, prompt, [300])
    assert torch.equal(final_states(loaded, prompt, [1, 16, 100, 150, 33]), whole)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({family for family, _ in LATER.values()}))
def test_bf16_stays_close_to_fp32(tmp_path: Path, family: str) -> None:
    directory, prompt = write_tiny_model(tmp_path, family, initializer_range=0.1), list(range(17))
    full, half = (
        final_states(load(directory, dtype=dtype), prompt, [17])
        for dtype in ("float32", "bfloat16")
    )
    assert 0 < (full - half).norm() / full.norm() < 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close_to_full(
    save_model: Callable[..., Any], tmp_path: Path, dtype: str
) -> None:
    save_model("qwen3", initializer_range=0.1)
    prompts = [list(range(40))]
    full, half = (
        greedy(
            load(tmp_path, dtype=d),
            prompts,
            NUM_STEPS,
        )[1]
        for d in ("float32", dtype)
    )
    assert half.dtype == torch.float32
    difference = (full[:, 0] - half[:, 0]).abs().max() / full[:, 0].std()
    assert 0 < difference < (0.25 if dtype == "bfloat16" else 0.03)
