"""config.json -> ModelArch: what is read, what defaults, and what is refused by name."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ConfigError
from pdserve.kernels.gates import Activation
from pdserve.models.arch import (
    FarQueriesArch,
    GluArch,
    GroupScore,
    MlaArch,
    ModelArch,
    MoeArch,
    NormArch,
    QkNorm,
    RopeKind,
    Scoring,
)
from pdserve.models.reading import KNOWN, parse_arch, read_arch

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
    assert not any((arch.qkv_bias, arch.o_bias, arch.mlp_bias))
    assert arch.qk_norm is QkNorm.NONE
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
    assert (arch.qk_norm, arch.head_dim, arch.qkv_bias) == (QkNorm.HEAD, 128, False)


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


def test_rope_that_is_written_in_both_ways_alike_is_read() -> None:
    linear = {"rope_type": "linear", "factor": 2.5}
    for other in ({}, linear):
        arch = parse_arch(config(rope_parameters=other, rope_scaling=linear))
        assert (arch.rope.kind, arch.rope.factor) == (RopeKind.LINEAR, 2.5)


def test_kv_heads_that_are_null_are_as_many_as_query_heads() -> None:
    arch = parse_arch(config(architectures=["MistralForCausalLM"], num_key_value_heads=None))
    assert arch.num_kv_heads == 4


def test_yarn_extends_the_context_beyond_its_pretraining() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    arch = parse_arch(config(rope_scaling=scaling))
    assert arch.max_context_len == 1024
    assert arch.rope.attention_factor == pytest.approx(1.1386294)


def moe_of(**fields: Any) -> MoeArch:
    moe = parse_arch(config(**fields)).moe
    assert moe is not None
    return moe


def mla_of(**fields: Any) -> tuple[ModelArch, MlaArch]:
    arch = parse_arch(config(**fields))
    assert arch.mla is not None
    return arch, arch.mla


def test_every_layer_of_mixtral_has_experts_as_wide_as_the_config_says() -> None:
    fields = {"architectures": ["MixtralForCausalLM"], "num_key_value_heads": 2}
    moe = moe_of(**fields)
    assert (moe.layers, moe.num_experts, moe.top_k) == ((True,) * 4, 8, 2)
    assert (moe.intermediate_size, moe.normalize_weights) == (96, True)
    arch = parse_arch(config(**fields))
    assert (arch.rms_norm_eps, arch.rope.theta, arch.windows) == (1e-5, 1e6, (None,) * 4)
    assert parse_arch(config(**fields, sliding_window=7)).windows == (7,) * 4


def qwen3_moe(**fields: Any) -> dict[str, Any]:
    return {"architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 2, **fields}


def test_layers_of_qwen3_moe_are_dense_by_step_and_by_list() -> None:
    assert moe_of(**qwen3_moe()).layers == (True,) * 4
    assert moe_of(**qwen3_moe(decoder_sparse_step=2)).layers == (False, True, False, True)
    moe = moe_of(**qwen3_moe(decoder_sparse_step=2, mlp_only_layers=[1]))
    assert moe.layers == (False, False, False, True)
    assert parse_arch(config(**qwen3_moe(mlp_only_layers=[0, 1, 2, 3]))).moe is None


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_qwen3_moe_counts_experts_under_the_name_of_either_transformers(name: str) -> None:
    assert moe_of(**qwen3_moe(**{name: 16})).num_experts == 16


def test_qwen3_moe_slides_in_every_layer_or_none() -> None:
    fields = qwen3_moe(sliding_window=9, max_window_layers=3)
    assert parse_arch(config(**fields)).windows == (None,) * 4
    assert parse_arch(config(**fields, use_sliding_window=True)).windows == (9,) * 4


V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
}
"""What the hub's config of DeepSeek-V2-Lite says."""

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
    "use_qk_norm": True,
}
"""GLM-4.5's, as transformers 4 writes it, but for the sizes that `LLAMA` has."""

GLM_LITE: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "num_key_value_heads": 4,
}


def test_a_half_of_each_head_of_glm_is_rotated_unless_it_says_another_part() -> None:
    arch = parse_arch(config(**GLM))
    assert (arch.head_dim, arch.rotary_dim, arch.rope.theta) == (128, 64, 1e6)
    assert (arch.qkv_bias, arch.o_bias, arch.qk_norm, arch.num_extra_layers) == (
        True,
        False,
        QkNorm.HEAD,
        1,
    )
    plain = {name: value for name, value in GLM.items() if name != "partial_rotary_factor"}
    assert parse_arch(config(**plain)) == arch
    section = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    assert parse_arch(config(**GLM, rope_parameters=section)).rotary_dim == 32


def test_the_routers_of_glm_are_read() -> None:
    rule: dict[str, Any] = {
        "scoring": Scoring.SIGMOID,
        "group_score": GroupScore.SUM_OF_TOP_2,
        "has_correction_bias": True,
    }
    assert moe_of(**GLM) == MoeArch(
        layers=(False, False, False, True),
        num_experts=160,
        top_k=8,
        intermediate_size=1536,
        shared_intermediate_size=1536,
        routed_scaling_factor=2.5,
        **rule,
    )
    assert moe_of(**GLM_LITE) == MoeArch(
        layers=(False, True, True, True),
        num_experts=64,
        top_k=4,
        intermediate_size=1536,
        shared_intermediate_size=1536,
        routed_scaling_factor=1.8,
        **rule,
    )


def test_heads_of_glm_lite_have_sizes_of_their_own() -> None:
    arch, mla = mla_of(**GLM_LITE)
    assert (mla.q_lora_rank, mla.qk_nope_head_dim, mla.v_head_dim) == (768, 192, 256)
    assert arch.rms_norm_eps == 1e-5


OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 32,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}
"""gpt-oss-20b's, but for the sizes that `LLAMA` has."""


def test_gpt_oss_says_by_default_what_its_checkpoints_say() -> None:
    arch = parse_arch(config(**OSS))
    assert arch.moe is not None
    assert (arch.windows, arch.attention_sinks) == ((128, None, 128, None), True)
    assert (arch.qkv_bias, arch.o_bias, arch.moe.router_bias, arch.moe.experts_bias) == (True,) * 4
    assert arch.moe.glu == GluArch(alpha=1.702, limit=7.0)
    assert arch.max_context_len == 131072
    assert (arch.rope.theta, arch.rope.truncate) == (150_000.0, False)
    assert arch.rope.attention_factor == pytest.approx(0.1 * math.log(32) + 1)
    silent = (
        "architectures",
        "num_key_value_heads",
        "num_local_experts",
        "max_position_embeddings",
    )
    assert parse_arch(config(**{name: OSS[name] for name in silent})) == arch


def later(name: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [name], "num_key_value_heads": 2, **fields}


GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}
"""What the hub's config of gemma-3-4b-it says."""


def test_gemma_3_says_little_and_means_what_transformers_does() -> None:
    arch = parse_arch(GEMMA3)
    assert (arch.architecture, arch.dtype) == ("Gemma3ForCausalLM", "bfloat16")
    assert (arch.num_heads, arch.num_kv_heads, arch.head_dim) == (8, 4, 256)
    assert arch.windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert arch.window_rope is not None
    assert (arch.window_rope.kind, arch.window_rope.theta) == (RopeKind.DEFAULT, 1e4)
    assert (arch.rope.kind, arch.rope.theta, arch.rope.factor) == (RopeKind.LINEAR, 1e6, 8.0)
    assert arch.max_context_len == 131072  # it is what the scaling has led to
    assert (arch.softmax_scale, arch.embedding_scale) == (256**-0.5, 2560**0.5)
    assert arch.activation is Activation.GELU_TANH
    assert arch.norms == NormArch(after=True, wide=True, less_one=True)
    assert (arch.eos_token_ids, arch.vocab_size, arch.tie_embeddings) == ((1, 106), 262208, True)
    text = GEMMA3["text_config"] | {"eos_token_id": [1, 106], "dtype": "bfloat16"}
    assert parse_arch({**text, "architectures": ["Gemma3ForCausalLM"]}) == arch


def test_a_decoder_may_rotate_in_two_ways_as_either_transformers_says() -> None:
    text = GEMMA3["text_config"] | {"architectures": ["Gemma3ForCausalLM"]}
    one = parse_arch({**text, "rope_theta": 5e5, "rope_local_base_freq": 1e3})
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    sliding = {"rope_type": "default", "rope_theta": 1e3}
    both = {"full_attention": full, "sliding_attention": sliding}
    assert parse_arch({**text, "rope_scaling": None, "rope_parameters": both}) == one


MINIMAX: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 4,
    "head_dim": 128,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "mlp_intermediate_size": 8192,
    "model_type": "minimax",
    "num_experts_per_tok": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
}
"""MiniMax-M2's, but for the sizes that `LLAMA` has."""


def test_minimax_m2_is_read_as_it_was_published() -> None:
    arch = parse_arch(config(**MINIMAX))
    assert (arch.qk_norm, arch.rotary_dim, arch.rope.theta) == (QkNorm.ALL_HEADS, 64, 5e6)
    assert arch.num_extra_layers == 3
    assert arch.moe == MoeArch(
        layers=(True,) * 4,
        num_experts=256,
        top_k=8,
        intermediate_size=96,
        scoring=Scoring.SIGMOID,
        has_correction_bias=True,
    )


def test_dots1_slides_in_upper_layers_and_has_the_defaults_of_its_class() -> None:
    fields = later("Dots1ForCausalLM", n_routed_experts=16, num_experts_per_tok=2)
    arch = parse_arch(config(**fields, max_window_layers=3, sliding_window=9))
    assert arch.windows == (None, None, None, 9)
    assert (arch.moe is not None and arch.moe.normalize_weights) is False
    assert parse_arch(config(**fields)).windows == (None,) * 4
    published = parse_arch(config(**fields, scoring_func="noaux_tc"))
    assert published == parse_arch(config(**fields, scoring_func="sigmoid"))


def test_layers_that_do_not_rotate_are_read() -> None:
    assert parse_arch(config(**later("SmolLM3ForCausalLM"))).unrotated == (3,)
    fields = later("Exaone4ForCausalLM", sliding_window_pattern=2, sliding_window=9)
    arch = parse_arch(config(**fields))
    assert (arch.windows, arch.unrotated) == ((9, None, 9, None), (1, 3))
    kinds = ["sliding_attention", "full_attention"] * 2
    named = later("Exaone4ForCausalLM", sliding_window_pattern="LG", layer_types=kinds)
    assert parse_arch(config(**named, sliding_window=9)) == arch
    arch = parse_arch(config(**later("Exaone4ForCausalLM", sliding_window=None)))
    assert (arch.windows, arch.unrotated) == ((None,) * 4, ())


def test_ministral_3_multiplies_far_queries_also_beside_eyes() -> None:
    arch = parse_arch(config(**later("Ministral3ForCausalLM", max_position_embeddings=262144)))
    assert arch.far_queries == FarQueriesArch(beta=0.1, period=16384)
    assert (arch.rope.kind, arch.rope.factor, arch.rope.attention_factor) == (
        RopeKind.YARN,
        16.0,
        1.0,
    )
    text = config(model_type="ministral3", num_key_value_heads=2, max_position_embeddings=262144)
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    assert parse_arch(whole) == arch
    text["model_type"] = "mistral"
    assert parse_arch(whole).architecture == "MistralForCausalLM"


def test_alpha_of_hunyuan_stretches_the_base() -> None:
    fields = later("HunYuanMoEV1ForCausalLM", num_experts=[8] * 4, moe_topk=[2] * 4)
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0}
    arch = parse_arch(config(**fields, rope_scaling=scaling, head_dim=128))
    assert arch.rope.theta == pytest.approx(1e4 * 1000 ** (128 / 126))
    assert arch.qk_norm is QkNorm.ROTATED_HEAD
    assert arch.moe is not None
    assert (arch.moe.num_experts, arch.moe.top_k, arch.moe.shared_intermediate_size) == (8, 2, 96)


def test_shared_experts_of_qwen2_moe_have_a_gate() -> None:
    fields = {"architectures": ["Qwen2MoeForCausalLM"]}
    arch = parse_arch(config(**fields, num_key_value_heads=2, shared_expert_intermediate_size=40))
    assert (arch.qkv_bias, arch.o_bias, arch.qk_norm) == (True, False, QkNorm.NONE)
    assert arch.moe is not None
    assert (arch.moe.num_experts, arch.moe.top_k, arch.moe.intermediate_size) == (60, 4, 1408)
    assert (arch.moe.shared_intermediate_size, arch.moe.shared_gate) == (40, True)


def test_experts_of_ernie_lie_between_two_layers() -> None:
    fields = later("Ernie4_5_MoeForCausalLM", num_hidden_layers=6, moe_layer_interval=2)
    moe = moe_of(**fields, moe_layer_start_index=2, moe_layer_end_index=4)
    assert moe.layers == (False, False, False, True, False, False)
    assert (moe.shared_intermediate_size, moe.has_correction_bias) == (2 * 1536, True)


def test_what_is_cached_of_a_token_is_its_latent_and_one_rotated_key() -> None:
    arch, mla = mla_of(**V2_LITE)
    assert (arch.num_kv_heads, arch.head_dim, arch.num_heads) == (1, 576, 4)
    assert (mla.q_lora_rank, mla.kv_lora_rank, mla.qk_rope_head_dim) == (None, 512, 64)
    assert mla_of(**{**V2_LITE, "q_lora_rank": 7})[1].q_lora_rank == 7


def test_heads_of_latent_attention_need_be_no_even_share_of_the_hidden_size() -> None:
    for fields in (V2_LITE, V3):
        arch, mla = mla_of(**fields, hidden_size=60)
        assert arch.head_dim == mla.kv_lora_rank + mla.qk_rope_head_dim


def test_the_router_of_deepseek_v2_is_read() -> None:
    moe = moe_of(**V2_LITE)
    assert moe == MoeArch(
        layers=(False, True, True, True),
        num_experts=64,
        top_k=6,
        intermediate_size=1408,
        shared_intermediate_size=2816,
        normalize_weights=False,
    )
    grouped = moe_of(
        **{**V2_LITE, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    )
    assert (grouped.num_groups, grouped.top_k_groups) == (8, 3)
    assert grouped.group_score is GroupScore.MAX


def test_the_router_of_deepseek_v3_is_read() -> None:
    moe = moe_of(**V3)
    assert moe == MoeArch(
        layers=(False, False, False, True),
        num_experts=256,
        top_k=8,
        intermediate_size=2048,
        shared_intermediate_size=2048,
        scoring=Scoring.SIGMOID,
        routed_scaling_factor=2.5,
        num_groups=8,
        top_k_groups=4,
        group_score=GroupScore.SUM_OF_TOP_2,
        has_correction_bias=True,
    )


def test_experts_may_come_every_so_many_layers_or_without_shared_ones() -> None:
    moe = moe_of(**{**V2_LITE, "moe_layer_freq": 2, "n_shared_experts": None})
    assert moe.layers == (False, False, True, False)
    assert moe.shared_intermediate_size == 0


def test_the_softmax_scale_of_latent_attention_has_yarns_factor_squared() -> None:
    arch, mla = mla_of(**V2_LITE)
    stretch = 0.1 * 0.707 * math.log(40) + 1
    assert mla.softmax_scale == pytest.approx(192**-0.5 * stretch**2)
    assert arch.rope.attention_factor == 1.0
    assert mla_of(**{**V2_LITE, "rope_scaling": None})[1].softmax_scale == 192**-0.5


def test_pairs_rotate_as_neighbours_unless_deepseek_v3_says_halves() -> None:
    assert mla_of(**V2_LITE)[1].interleaved_rope
    assert mla_of(**V3)[1].interleaved_rope
    assert not mla_of(**V3, rope_interleave=False)[1].interleaved_rope


@pytest.mark.parametrize("name", ["norm_topk_prob", "rope_interleave"])
def test_a_flag_of_deepseek_v3_that_is_null_is_false(name: str) -> None:
    assert parse_arch(config(**{**V3, name: None})) == parse_arch(config(**{**V3, name: False}))
    assert parse_arch(config(**{**V3, name: None})) != parse_arch(config(**V3))


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
        ({"compression_config": {"format": "int"}}, "compression_config is {'format': 'int'}"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0.0: a number above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": -2.0}}, "factor is -2.0"),
        (
            {"rope_scaling": {"type": "yarn", "rope_theta": 1}},
            "rope_theta is 1.0: a number above 1",
        ),
        ({"rope_scaling": {"type": "yarn", "beta_slow": -1}}, "beta_slow is -1.0"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 0}},
            "low_freq_factor is 0.0",
        ),
        ({"rope_theta": 0}, "rope_theta is 0.0"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            "rope_parameters.full_attention",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "linear"}},
            "rope_scaling is {'type': 'linear'}: rope_parameters differs",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"is_causal": False}, "is_causal is False"),
        ({"is_causal": None}, "is_causal is None"),
        ({"attention_chunk_size": 16}, "attention_chunk_size is 16"),
        ({"per_layer_config": {"1": {"rms_norm_eps": 0.1}}}, "per_layer_config is"),
        ({"model_type": "mistral"}, "model_type is 'mistral': only 'llama'"),
        ({"sliding_window": 100}, "sliding_window"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**30}, r"num_hidden_layers is 1e\+30"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: at most"),
        ({"vocab_size": 1 << 31}, "vocab_size is 2147483648"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"hidden_size": float("nan")}, "hidden_size is nan"),
        ({"rope_scaling": {"type": "yarn", "beta_fast": "32"}}, "beta_fast is '32'"),
        ({"rope_scaling": {"type": "yarn", "mscale": "1"}}, "mscale is '1'"),
        (
            {"rope_scaling": {"type": "yarn"}, "original_max_position_embeddings": "8"},
            "original_max_position_embeddings is '8'",
        ),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures is"),
        ({"architectures": []}, r"architectures is \[\]"),
        ({"architectures": None}, r"architectures is \[\]"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_arch(config(**fields))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (qwen3_moe(mlp_only_layers="0"), "mlp_only_layers is '0'"),
        (qwen3_moe(num_experts=4), "num_experts_per_tok is 8: only 4 experts"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": 3}, "layer_types is 3"),
        ({**V2_LITE, "scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ({**V2_LITE, "topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ({**V2_LITE, "norm_topk_prob": True}, "norm_topk_prob is True"),
        ({**V2_LITE, "mlp_bias": True}, "mlp_bias is True"),
        ({**V2_LITE, "num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({**V2_LITE, "qk_rope_head_dim": 63}, "qk_rope_head_dim is 63"),
        ({**V2_LITE, "num_experts_per_tok": None}, "num_experts_per_tok is None"),
        (
            {**V2_LITE, "topk_method": "group_limited_greedy", "n_group": None},
            "n_group is None",
        ),
        ({**V3, "scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({**V3, "topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({**V3, "head_dim": 192}, "head_dim is 192: only 64"),
        ({**V3, "n_group": 7}, "n_group is 7: it must divide 256"),
        ({**V3, "topk_group": 9}, "topk_group is 9"),
        ({**V3, "n_group": 256}, "n_group is 256: groups of at least two"),
        ({**V3, "n_group": 64, "topk_group": 1}, "num_experts_per_tok is 8: only 4 experts"),
        ({**GLM, "partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5: it must be at most"),
        ({**GLM, "partial_rotary_factor": 0}, "partial_rotary_factor is 0.0: a number above 0"),
        ({**GLM, "head_dim": 30}, "head_dim is 30: 15 of its elements are rotated"),
        ({**GLM, "scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({**GLM_LITE, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: only 1"),
        ({**GLM_LITE, "mlp_layer_types": ["dense"] * 3}, "4 of dense or sparse are needed"),
        ({**GLM_LITE, "first_k_dense_replace": 2}, "first_k_dense_replace is 2: only 1"),
        ({**OSS, "sliding_window": None}, "sliding_window is None: sliding layers need one"),
        ({**OSS, "layer_types": ["full_attention"]}, "4 of sliding_attention or full_attention"),
        ({**OSS, "swiglu_limit": 0}, "swiglu_limit is 0.0: a number above 0"),
        ({**MINIMAX, "attn_type_list": [1, 0, 1, 1]}, r"attn_type_list is \[1, 0, 1, 1\]"),
        ({**MINIMAX, "qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'"),
        ({**MINIMAX, "use_qk_norm": False}, "use_qk_norm is False"),
        ({**MINIMAX, "use_routing_bias": False}, "use_routing_bias is False"),
        ({**MINIMAX, "scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({**MINIMAX, "shared_intermediate_size": 64}, "shared_intermediate_size is 64"),
        ({**MINIMAX, "layernorm_mlp_beta": 2.0}, "layernorm_mlp_beta is 2.0"),
        ({**MINIMAX, "rotary_dim": 65}, "65 of its elements are rotated"),
        (later("Dots1ForCausalLM"), "n_routed_experts is None"),
        (later("Dots1ForCausalLM", scoring_func="softmax"), "scoring_func is 'softmax'"),
        (later("Ernie4_5_MoeForCausalLM", use_bias=True), "use_bias is True"),
        (later("Ernie4_5_MoeForCausalLM", compression_ratio=2.0), "compression_ratio is 2.0"),
        (later("Ernie4_5_MoeForCausalLM", moe_use_aux_free=False), "moe_use_aux_free is False"),
        ({**OSS, "num_experts_per_tok": 33}, "num_experts_per_tok is 33: only 32 experts"),
    ],
)
def test_routers_that_are_not_built_or_cannot_choose_are_refused(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_arch(config(**fields))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (later("Gemma3ForCausalLM", attn_logit_softcapping=50.0), "attn_logit_softcapping is 50.0"),
        (later("Gemma3ForCausalLM", final_logit_softcapping=30), "final_logit_softcapping is 30"),
        (later("Gemma3ForCausalLM", use_bidirectional_attention=True), "use_bidirectional_at"),
        (later("Gemma3ForCausalLM", hidden_activation="gelu"), "hidden_activation is 'gelu'"),
        (later("Gemma3ForCausalLM", sliding_window=None), "sliding layers need one"),
        (
            later("Gemma3ForCausalLM", rope_parameters={"rope_theta": 1e4}),
            "rope_parameters.rope_theta is 10000.0: only full_attention and sliding_attention",
        ),
        (
            later("Gemma3ForCausalLM", rope_parameters={}, rope_scaling={"factor": 2.0}),
            "rope_scaling is",
        ),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config is None"),
        (
            {
                "architectures": ["Mistral3ForConditionalGeneration"],
                "text_config": {"model_type": "mistral4"},
            },
            "text_config.model_type is 'mistral4': only 'mistral' or 'ministral3'",
        ),
        (
            later("Ministral3ForCausalLM", rope_parameters={"type": "yarn", "factor": 2.0}),
            "llama_4_scaling_beta is None",
        ),
        (
            later("HunYuanDenseV1ForCausalLM", rope_scaling={"type": "dynamic", "factor": 2.0}),
            "factor is 2.0: only 1",
        ),
        (later("HunYuanDenseV1ForCausalLM", use_qk_norm=False), "use_qk_norm is False"),
        (later("HunYuanMoEV1ForCausalLM", num_experts=[8, 8, 4, 8]), r"num_experts is \[8, 8, 4"),
        (later("HunYuanMoEV1ForCausalLM", use_cla=True), "use_cla is True"),
        (later("HunYuanMoEV1ForCausalLM", num_shared_expert=2), "num_shared_expert is 2: only 1"),
        (later("Qwen2MoeForCausalLM", use_sliding_window=True), "use_sliding_window is True"),
        ({**GEMMA3, "model_type": "gemma3n"}, "model_type is 'gemma3n': only 'gemma3'"),
        (later("SmolLM3ForCausalLM", no_rope_layers=[1]), r"no_rope_layers is \[1\]"),
        (
            later("SmolLM3ForCausalLM", layer_types=["sliding_attention"] * 4),
            "layer_types is",
        ),
        (later("GraniteForCausalLM", logits_scaling=0), "logits_scaling is 0.0"),
        (later("Olmo3ForCausalLM", rope_theta=1e4), "rope_theta is 10000.0"),
        (later("Olmo2ForCausalLM", layer_types=["full_attention"] * 4), "layer_types is"),
        (
            later("Exaone4ForCausalLM", sliding_window_pattern="LLLG"),
            "sliding_window_pattern is 'LLLG': write layer_types",
        ),
    ],
)
def test_what_later_families_cannot_be_asked_for_is_refused_by_name(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_arch(config(**fields))


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*is not a directory"):
        read_arch(tmp_path / "nowhere")


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_arch(tmp_path)


def test_an_adapter_beside_the_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"adapter_config\.json: adapters are not applied"):
        read_arch(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", "[" * 10**5, "version https://git-lfs.github.com/spec/v1"]
)
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="JSON"):
        read_arch(tmp_path)


def test_a_server_can_read_an_architecture_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    code = (
        "import sys, pathlib; from pdserve.models.reading import read_arch; "
        f"read_arch(pathlib.Path({str(tmp_path)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
