"""Models with multi-head latent attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pdserve.models.arch import GroupScore, MlaArch, RopeKind, Scoring
from pdserve.models.readers.decoder import (
    Biases,
    Defaults,
    no_windows,
    num_extra_layers,
    read_decoder,
)
from pdserve.models.readers.experts import deepseek_moe, read_moe, sigmoid_rule
from pdserve.models.readers.rope import mscale_of, rope_section

if TYPE_CHECKING:
    from pdserve.models.arch import ModelArch, MoeArch
    from pdserve.models.config_json import Fields


class _LatentSizes(NamedTuple):
    """A family's sizes of latent attention where `config.json` leaves them out."""

    q_lora_rank: int = 1536
    nope: int = 128
    v: int = 128


_DEEPSEEK_SIZES = _LatentSizes()


def deepseek_v2(fields: Fields) -> ModelArch:
    """DeepSeek-V2 and its Lite: scores by softmax, groups by their best expert."""
    fields.only("scoring_func", "softmax")
    fields.only("topk_method", "greedy", "group_limited_greedy")
    # transformers does not normalise here, the model's own code does.
    fields.only("norm_topk_prob", False)
    fields.only("mlp_bias", False)
    grouped = fields.get("topk_method") == "group_limited_greedy"
    moe = deepseek_moe(
        fields,
        num_experts=64,
        num_shared=2,
        first_dense=0,
        top_k=fields.count("num_experts_per_tok"),
        intermediate_size=1407,
        scoring=Scoring.SOFTMAX,
        normalize_weights=False,
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        num_groups=fields.count("n_group") if grouped else 1,
        top_k_groups=fields.count("topk_group") if grouped else 1,
        group_score=GroupScore.MAX,
    )
    return _latent(fields, moe, interleaved_rope=True)


def deepseek_v3(fields: Fields) -> ModelArch:
    """DeepSeek-V3 and Kimi-K2: sigmoid scores, groups by their two best, a bias on the choice."""
    # transformers takes its rotary table from it, the model's own code does not.
    fields.only("head_dim", fields.count("qk_rope_head_dim", 64))
    moe = deepseek_moe(
        fields,
        num_experts=256,
        num_shared=1,
        first_dense=3,
        intermediate_size=2048,
        **sigmoid_rule(fields, top_k=8, scale=2.5, groups=(8, 4)),
    )
    return _latent(fields, moe, interleaved_rope=fields.flag("rope_interleave", default=True))


def glm4_moe_lite(fields: Fields) -> ModelArch:
    """GLM-4.7-Flash: DeepSeek-V3's form; a list says which layers have experts."""
    num_layers = fields.count("num_hidden_layers")
    fields.only("head_dim", fields.count("qk_rope_head_dim", 64))
    kinds = fields.get("mlp_layer_types")
    if kinds is None:
        fields.only("first_k_dense_replace", 1)  # transformers reads only the list
        kinds = ["dense", *["sparse"] * (num_layers - 1)]
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or any(kind not in ("dense", "sparse") for kind in kinds):
        raise fields.error("mlp_layer_types", kinds, f"{num_layers} of dense or sparse are needed")
    inner = fields.count("moe_intermediate_size", 1536)
    moe = read_moe(
        fields,
        tuple(kind == "sparse" for kind in kinds),
        num_experts=fields.count("n_routed_experts", 64),
        intermediate_size=inner,
        shared_intermediate_size=inner * int(fields.number("n_shared_experts", 1)),
        **sigmoid_rule(fields, top_k=4, scale=1.8),
    )
    return _latent(
        fields,
        moe,
        interleaved_rope=fields.flag("rope_interleave", default=True),
        sizes=_LatentSizes(q_lora_rank=768, nope=192, v=256),
        eps=1e-5,
    )


def _latent(
    fields: Fields,
    moe: MoeArch | None,
    *,
    interleaved_rope: bool,
    sizes: _LatentSizes = _DEEPSEEK_SIZES,
    eps: float = 1e-6,
) -> ModelArch:
    """Read a decoder with multi-head latent attention."""
    num_heads = fields.count("num_attention_heads")
    fields.only("num_key_value_heads", num_heads)
    fields.only("sliding_window")
    bias = fields.flag("attention_bias", default=False)
    nope = fields.count("qk_nope_head_dim", sizes.nope)
    rotary = fields.count("qk_rope_head_dim", 64)
    if rotary % 2:
        raise fields.error("qk_rope_head_dim", rotary, "rotary embedding needs an even number")
    latent = fields.count("kv_lora_rank", 512)
    is_null = "q_lora_rank" in fields and fields.get("q_lora_rank") is None
    arch = read_decoder(
        fields,
        windows=no_windows(fields),
        # No head is a share of the hidden size.
        defaults=Defaults(num_heads, head_dim=rotary, eps=eps),
        biases=Biases(qkv=bias, o=bias),
        moe=moe,
    )
    section = rope_section(fields)
    all_dim = 0.0 if section is None else section.number("mscale_all_dim", 0.0)
    stretch = 1.0
    if all_dim and arch.rope.kind is not RopeKind.DEFAULT:
        stretch = mscale_of(arch.rope.factor, all_dim)
    return msgspec.structs.replace(
        arch,
        num_kv_heads=1,
        num_extra_layers=num_extra_layers(fields),
        head_dim=latent + rotary,
        mla=MlaArch(
            q_lora_rank=None if is_null else fields.count("q_lora_rank", sizes.q_lora_rank),
            kv_lora_rank=latent,
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rotary,
            v_head_dim=fields.count("v_head_dim", sizes.v),
            softmax_scale=(nope + rotary) ** -0.5 * stretch * stretch,
            interleaved_rope=interleaved_rope,
        ),
    )
