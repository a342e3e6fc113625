"""config.json -> ModelArch: what is read, what defaults, and what is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ConfigError
from pdserve.models.arch import KNOWN, RopeKind, parse_arch, read_arch

if TYPE_CHECKING:
    from pathlib import Path

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def config(**fields: Any) -> dict[str, Any]:
    return {**LLAMA, **fields}


def qwen(**fields: Any) -> dict[str, Any]:
    return config(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2, **fields)


def test_absent_fields_take_the_defaults_of_the_family() -> None:
    arch = parse_arch(config())
    assert (arch.num_kv_heads, arch.head_dim, arch.rms_norm_eps) == (4, 16, 1e-6)
    assert (arch.rope.kind, arch.rope.theta) == (RopeKind.DEFAULT, 10_000.0)
    assert not any((arch.qkv_bias, arch.o_bias, arch.mlp_bias, arch.qk_norm))
    assert not arch.tie_embeddings
    assert arch.windows == (None,) * 4
    assert (arch.eos_token_ids, arch.bos_token_id, arch.dtype) == ((), None, None)


def test_token_ids_and_dtype_are_read_in_all_their_forms() -> None:
    arch = parse_arch(config(eos_token_id=[2, 7], bos_token_id=1, torch_dtype="bfloat16"))
    assert (arch.eos_token_ids, arch.bos_token_id, arch.dtype) == ((2, 7), 1, "bfloat16")
    assert parse_arch(config(eos_token_id=2, dtype="float16")).eos_token_ids == (2,)


def test_only_qwen2_has_qkv_biases_without_saying_so() -> None:
    arch = parse_arch(qwen())
    assert (arch.qkv_bias, arch.o_bias) == (True, False)


def test_qwen3_has_qk_norms_and_heads_of_128() -> None:
    arch = parse_arch(config(architectures=["Qwen3ForCausalLM"], num_key_value_heads=2))
    assert (arch.qk_norm, arch.head_dim, arch.qkv_bias) == (True, 128, False)


@pytest.mark.parametrize("absent", [True, False])
def test_a_mistral_window_that_is_absent_is_4096_and_null_is_none(absent: bool) -> None:
    fields = {} if absent else {"sliding_window": None}
    arch = parse_arch(config(architectures=["MistralForCausalLM"], num_key_value_heads=2, **fields))
    assert arch.windows == ((4096,) * 4 if absent else (None,) * 4)


def test_qwen_layers_slide_from_max_window_layers_on() -> None:
    fields = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}
    assert parse_arch(qwen(**fields)).windows == (None, None, None, 9)
    assert parse_arch(qwen(**{**fields, "use_sliding_window": False})).windows == (None,) * 4


def test_layer_types_override_max_window_layers() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    arch = parse_arch(qwen(use_sliding_window=True, sliding_window=9, layer_types=kinds))
    assert arch.windows == (9, None, None, 9)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    ],
    ids=["transformers 4", "transformers 5", "mixed"],
)
def test_rope_is_read_as_either_transformers_writes_it(fields: dict[str, Any]) -> None:
    arch = parse_arch(config(**fields))
    assert (arch.rope.kind, arch.rope.theta, arch.rope.factor) == (RopeKind.LINEAR, 5e5, 4.0)
    assert arch.max_context_len == 1024


def test_yarn_extends_the_context_beyond_its_pretraining() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    arch = parse_arch(config(rope_scaling=scaling))
    assert arch.max_context_len == 1024
    assert arch.rope.attention_factor == pytest.approx(1.1386294)


def test_equal_shapes_have_equal_digests_and_others_not() -> None:
    assert parse_arch(config()).digest == parse_arch(config(transformers_version="9")).digest
    assert parse_arch(config()).digest != parse_arch(config(rope_theta=5e5)).digest


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="GPT2LMHeadModel") as error:
        parse_arch(config(architectures=["GPT2LMHeadModel"]))
    assert all(name in str(error.value) for name in KNOWN)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            "rope_parameters.full_attention",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"sliding_window": 100}, "sliding_window"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"architectures": []}, r"architectures is \[\]"),
        ({"architectures": None}, r"architectures is \[\]"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_arch(config(**fields))


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*is not a directory"):
        read_arch(tmp_path / "nowhere")


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_arch(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "version https://git-lfs.github.com/spec/v1"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="JSON"):
        read_arch(tmp_path)


def test_a_server_can_read_an_architecture_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    code = (
        "import sys, pathlib; from pdserve.models.arch import read_arch; "
        f"read_arch(pathlib.Path({str(tmp_path)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
