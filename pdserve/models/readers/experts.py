"""Models with experts and grouped queries, and what all models with experts share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.models.arch import GluArch, GroupScore, MoeArch, QkNorm, RopeArch, RopeKind, Scoring
from pdserve.models.readers.decoder import (
    Biases,
    Defaults,
    no_windows,
    num_extra_layers,
    read_decoder,
    window_of,
    windows_of,
)
from pdserve.models.readers.dense import hunyuan
from pdserve.models.readers.rope import mscale_of, rope_section

if TYPE_CHECKING:
    from pdserve.models.arch import ModelArch
    from pdserve.models.config_json import Fields


def mixtral(fields: Fields) -> ModelArch:
    """Mixtral: experts in every layer, whose scores are normalised."""
    num_layers = fields.count("num_hidden_layers")
    window = None if fields.get("sliding_window") is None else fields.count("sliding_window")
    return read_decoder(
        fields,
        windows=(window,) * num_layers,
        defaults=Defaults(8, eps=1e-5, theta=1e6),
        moe=read_moe(
            fields,
            (True,) * num_layers,
            num_experts=fields.count("num_local_experts", 8),
            top_k=fields.count("num_experts_per_tok", 2),
            intermediate_size=fields.count("intermediate_size"),
            normalize_weights=True,
        ),
    )


def qwen3_moe(fields: Fields) -> ModelArch:
    """Qwen3-MoE: experts in every n-th layer but those named as dense."""
    bias = fields.flag("attention_bias", default=False)
    num_layers = fields.count("num_hidden_layers")
    slides = fields.flag("use_sliding_window", default=False)
    step = fields.count("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise fields.error("mlp_only_layers", dense, "a list of layers is needed")
    # transformers 5 writes the second of these names.
    name = "num_experts" if "num_experts" in fields else "num_local_experts"
    return read_decoder(
        fields,
        windows=(window_of(fields) if slides else None,) * num_layers,
        defaults=Defaults(4),
        biases=Biases(qkv=bias, o=bias),
        qk_norm=QkNorm.HEAD,
        moe=read_moe(
            fields,
            tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
            num_experts=fields.count(name, 128),
            top_k=fields.count("num_experts_per_tok", 8),
            intermediate_size=fields.count("moe_intermediate_size", 768),
            normalize_weights=fields.flag("norm_topk_prob", default=False),
        ),
    )


def glm4_moe(fields: Fields) -> ModelArch:
    """GLM-4.5 to 4.7: DeepSeek-V3's experts; a half of each head is rotated."""
    moe = deepseek_moe(
        fields,
        num_experts=128,
        num_shared=1,
        first_dense=1,
        intermediate_size=1408,
        **sigmoid_rule(fields, top_k=8, scale=1.0),
    )
    arch = read_decoder(
        fields,
        windows=no_windows(fields),
        defaults=Defaults(8, eps=1e-5, partial_rotary=0.5),
        biases=Biases(qkv=fields.flag("attention_bias", default=False)),
        qk_norm=QkNorm.HEAD if fields.flag("use_qk_norm", default=False) else QkNorm.NONE,
        moe=moe,
    )
    return msgspec.structs.replace(arch, num_extra_layers=num_extra_layers(fields))


def gpt_oss(fields: Fields) -> ModelArch:
    """gpt-oss: sinks and biases everywhere; every second layer slides, unless layers have types."""
    num_layers = fields.count("num_hidden_layers")
    alternate = [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)
    ]
    bias = fields.flag("attention_bias", default=True)
    arch = read_decoder(
        fields,
        windows=windows_of(fields.with_defaults(sliding_window=128), alternate),
        defaults=Defaults(8, head_dim=64, eps=1e-5, theta=150_000.0),
        biases=Biases(qkv=bias, o=bias),
        moe=read_moe(
            fields,
            (True,) * num_layers,
            num_experts=fields.count("num_local_experts", 128),
            top_k=fields.count("num_experts_per_tok", 4),
            intermediate_size=fields.count("intermediate_size"),
            # The softmax of those that are chosen is that of all, divided by its sum over them.
            normalize_weights=True,
            router_bias=True,
            experts_bias=True,
            glu=GluArch(
                alpha=fields.number("swiglu_alpha", 1.702),
                limit=fields.above(0, "swiglu_limit", 7.0),
            ),
        ),
    )
    rope = arch.rope
    if rope_section(fields) is None:
        rope = RopeArch(
            theta=rope.theta,
            kind=RopeKind.YARN,
            factor=32.0,
            original_max_positions=4096,
            attention_factor=mscale_of(32.0, 1.0),
            truncate=False,
        )
    return msgspec.structs.replace(arch, attention_sinks=True, rope=rope)


def qwen2_moe(fields: Fields) -> ModelArch:
    """Qwen2-MoE: experts as in Qwen3-MoE, beside shared ones with a gate; biases on q, k and v."""
    fields.only("use_sliding_window", False)
    fields = fields.with_defaults(
        num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408, num_key_value_heads=16
    )
    arch = qwen3_moe(fields)
    moe = arch.moe
    if moe is not None:
        shared = fields.count("shared_expert_intermediate_size", 5632)
        moe = msgspec.structs.replace(moe, shared_intermediate_size=shared, shared_gate=True)
    bias = fields.flag("qkv_bias", default=True)
    return msgspec.structs.replace(arch, moe=moe, qkv_bias=bias, o_bias=False, qk_norm=QkNorm.NONE)


def hunyuan_moe(fields: Fields) -> ModelArch:
    """Hunyuan with experts: a shared one of the same size in each layer."""
    num_layers, inner = fields.count("num_hidden_layers"), fields.count("intermediate_size")

    def same(name: str, default: int) -> int:
        """A number, or a list with it for each layer."""
        value = fields.get(name)
        if not isinstance(value, list):
            return fields.count(name, default)
        if len(value) != num_layers or any(each != value[0] for each in value):
            raise fields.error(name, value, f"{num_layers} times the same number is supported")
        return fields.replaced(**{name: value[0]}).count(name)

    fields.only("use_mixed_mlp_moe", True)
    for name in ("use_cla", "group_limited_greedy"):
        fields.only(name, False)
    for name, value in (
        ("moe_intermediate_size", inner),
        ("num_shared_expert", 1),
        ("moe_layer_num_skipped", 0),
    ):
        if fields.get(name) is not None and same(name, value) != value:
            raise fields.error(name, fields.get(name), f"only {value} is supported")
    moe = read_moe(
        fields,
        (True,) * num_layers,
        num_experts=same("num_experts", 1),
        top_k=same("moe_topk", 1),
        intermediate_size=inner,
        shared_intermediate_size=inner,
    )
    return msgspec.structs.replace(hunyuan(fields), moe=moe)


def minimax_m2(fields: Fields) -> ModelArch:
    """MiniMax-M2: sigmoid scores, a bias on the choice; norms of all heads of q, and of k."""
    num_layers = fields.count("num_hidden_layers")
    fields.only("attn_type_list", [1] * num_layers)
    fields.only("qk_norm_type", "per_layer")
    fields.only("use_qk_norm", True)
    fields.only("use_routing_bias", True)
    fields.only("scoring_func", "sigmoid")
    fields.only("shared_intermediate_size", 0)
    fields.only("sliding_window")
    for each in ("full_attention", "linear_attention", "mlp"):
        fields.only(f"layernorm_{each}_beta", 1, 1.0)
    if fields.get("rotary_dim") is not None:
        part = fields.count("rotary_dim") / fields.count("head_dim", 128)
        fields = fields.with_defaults(partial_rotary_factor=part)
    arch = read_decoder(
        fields,
        windows=no_windows(fields),
        defaults=Defaults(8, head_dim=128, theta=5e6, partial_rotary=1.0),
        qk_norm=QkNorm.ALL_HEADS,
        moe=read_moe(
            fields,
            (True,) * num_layers,
            num_experts=fields.count("num_local_experts", 256),
            top_k=fields.count("num_experts_per_tok", 8),
            intermediate_size=fields.count("intermediate_size"),
            scoring=Scoring.SIGMOID,
            has_correction_bias=True,
        ),
    )
    extra = int(fields.number("num_mtp_modules", 0))
    return msgspec.structs.replace(arch, num_extra_layers=extra)


def dots1(fields: Fields) -> ModelArch:
    """dots.llm1: DeepSeek-V3's experts; norms of each head; upper layers may slide."""
    fields.only("scoring_func", "noaux_tc", "sigmoid")  # the former is what its publisher writes
    fields = fields.replaced(scoring_func="sigmoid")
    num_layers = fields.count("num_hidden_layers")
    bias = fields.flag("attention_bias", default=False)
    moe = deepseek_moe(
        fields,
        num_experts=fields.count("n_routed_experts"),
        num_shared=0,
        first_dense=0,
        intermediate_size=1408,
        **sigmoid_rule(
            fields, top_k=fields.count("num_experts_per_tok"), scale=1.0, normalize=False
        ),
    )
    fields = fields.with_defaults(sliding_window=4096)
    slides = fields.get("sliding_window") is not None
    first = int(fields.number("max_window_layers", 62)) if slides else num_layers
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return read_decoder(
        fields,
        windows=windows_of(fields, kinds),
        defaults=Defaults(32),
        biases=Biases(qkv=bias, o=bias),
        qk_norm=QkNorm.HEAD,
        moe=moe,
    )


def ernie4_5_moe(fields: Fields) -> ModelArch:
    """ERNIE 4.5: softmax scores with a bias on the choice; pairs rotate as neighbours."""
    num_layers = fields.count("num_hidden_layers")
    fields.only("use_bias", False)
    fields.only("moe_use_aux_free", True)
    fields.only("compression_ratio", 1, 1.0)
    first = int(fields.number("moe_layer_start_index", 1))
    last = int(fields.number("moe_layer_end_index", -1))
    step = fields.count("moe_layer_interval", 1)
    inner = fields.count("moe_intermediate_size", 1536)
    last = num_layers - 1 if last == -1 else last
    shared = int(fields.number("moe_num_shared_experts", 2))
    arch = read_decoder(
        fields,
        windows=no_windows(fields),
        defaults=Defaults(4, eps=1e-5, theta=5e5, tied=True),
        moe=read_moe(
            fields,
            tuple(
                (layer + 1) % step == 0 and first <= layer <= last for layer in range(num_layers)
            ),
            num_experts=fields.count("moe_num_experts", 64),
            top_k=fields.count("moe_k", 6),
            intermediate_size=inner,
            shared_intermediate_size=shared * inner,
            has_correction_bias=True,
        ),
    )
    return msgspec.structs.replace(arch, interleaved_rope=True)


def sigmoid_rule(
    fields: Fields,
    *,
    top_k: int,
    scale: float,
    groups: tuple[int, int] = (1, 1),
    normalize: bool = True,
) -> dict[str, Any]:
    """How routers of DeepSeek-V3 and GLM choose experts; the numbers are a family's defaults.

    Args:
        groups: Groups of experts, and how many of them may be chosen from.
    """
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    return {
        "top_k": fields.count("num_experts_per_tok", top_k),
        "scoring": Scoring.SIGMOID,
        "normalize_weights": fields.flag("norm_topk_prob", default=normalize),
        "routed_scaling_factor": fields.number("routed_scaling_factor", scale),
        "num_groups": fields.count("n_group", groups[0]),
        "top_k_groups": fields.count("topk_group", groups[1]),
        "group_score": GroupScore.SUM_OF_TOP_2,
        "has_correction_bias": True,
    }


def deepseek_moe(
    fields: Fields,
    *,
    num_experts: int,
    num_shared: int,
    first_dense: int,
    intermediate_size: int,
    **rule: Any,
) -> MoeArch | None:
    """Read the fields that DeepSeek and GLM name alike; the numbers are a family's defaults."""
    num_layers = fields.count("num_hidden_layers")
    first = int(fields.number("first_k_dense_replace", first_dense))
    frequency = fields.count("moe_layer_freq", 1)
    inner = fields.count("moe_intermediate_size", intermediate_size)
    is_null = "n_shared_experts" in fields and fields.get("n_shared_experts") is None
    shared = 0 if is_null else int(fields.number("n_shared_experts", num_shared))
    return read_moe(
        fields,
        tuple(layer >= first and layer % frequency == 0 for layer in range(num_layers)),
        num_experts=fields.count("n_routed_experts", num_experts),
        intermediate_size=inner,
        shared_intermediate_size=shared * inner,
        **rule,
    )


def read_moe(fields: Fields, layers: tuple[bool, ...], **rule: Any) -> MoeArch | None:
    """Check that a choice is possible. None if no layer has experts."""
    if not any(layers):
        return None
    moe = MoeArch(layers=layers, **rule)
    if moe.num_experts % moe.num_groups:
        raise fields.error("n_group", moe.num_groups, f"it must divide {moe.num_experts} experts")
    size = moe.num_experts // moe.num_groups
    if moe.top_k_groups > moe.num_groups:
        raise fields.error("topk_group", moe.top_k_groups, f"n_group is only {moe.num_groups}")
    if moe.num_groups > 1 and moe.group_score is GroupScore.SUM_OF_TOP_2 and size < 2:
        raise fields.error("n_group", moe.num_groups, "groups of at least two experts are needed")
    if moe.top_k > moe.top_k_groups * size:
        raise fields.error(
            "num_experts_per_tok",
            moe.top_k,
            f"only {moe.top_k_groups * size} experts can be chosen from",
        )
    return moe
