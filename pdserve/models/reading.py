"""Reads a Hugging Face `config.json` into a `ModelArch`: one reader for each family.

No part of a configuration is silently ignored: an unsupported feature that would change the numbers
is a `ConfigError` that names it. Free of torch, so that servers can use it. Knows neither weights
nor devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pdserve.errors import ConfigError
from pdserve.models.arch import (
    GroupScore,
    MlaArch,
    ModelArch,
    MoeArch,
    RopeKind,
    Scoring,
)
from pdserve.models.config_json import Fields, read_config
from pdserve.models.fp8 import read_fp8
from pdserve.models.rope_reading import mscale_of, read_rope, rope_section

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_MAX_LAYERS = 10_000


def read_arch(directory: Path) -> ModelArch:
    """Read `directory/config.json`.

    Raises:
        ConfigError: There is no such directory or file, `parse_arch` refuses it, or there is an
            adapter beside it.
    """
    if (adapter := directory / "adapter_config.json").exists():
        raise ConfigError(
            f"{adapter}: adapters are not applied: merge it into the weights, or remove it",
            param="model",
        )
    return parse_arch(read_config(directory))


def parse_arch(config: dict[str, Any]) -> ModelArch:
    """Read a `config.json` object, as transformers 4 or 5 writes it.

    Absent fields have the default of the architecture's class in transformers.

    Raises:
        ConfigError: The architecture is unknown (the known ones are listed), a feature is
            not supported, or a field is missing or impossible.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(
            f"config.json: architectures is {names!r}: it must have exactly one name", param="model"
        )
    (name,) = names
    if name not in _FAMILIES:
        raise ConfigError(
            f"architecture {name!r} is not supported: use one of {', '.join(KNOWN)}", param="model"
        )
    fields = Fields(name, config)
    read, model_types = _FAMILIES[name]
    fields.only("model_type", *model_types)
    if "num_hidden_layers" in fields and (num := fields.count("num_hidden_layers")) > _MAX_LAYERS:
        raise fields.error("num_hidden_layers", num, f"at most {_MAX_LAYERS} layers are served")
    return read(fields)


class _Defaults(NamedTuple):
    """A family's meaning of fields that its `config.json` leaves out.

    Attributes:
        head_dim: None: the hidden size divided by the heads.
    """

    num_kv_heads: int
    head_dim: int | None = None
    eps: float = 1e-6
    theta: float = 10_000.0


class _Biases(NamedTuple):
    """Which projections have a bias."""

    qkv: bool = False
    o: bool = False
    mlp: bool = False


_NO_BIAS = _Biases()


def _decoder(
    fields: Fields,
    *,
    windows: tuple[int | None, ...],
    defaults: _Defaults,
    biases: _Biases = _NO_BIAS,
    qk_norm: bool = False,
    moe: MoeArch | None = None,
) -> ModelArch:
    """The fields that all families share."""
    read_fp8(fields)  # or it is not quantised
    fields.only("hidden_act", "silu", "swish")
    fields.only("is_encoder_decoder", False)
    if not fields.flag("is_causal", default=True):
        raise fields.error("is_causal", fields.get("is_causal"), "only True is supported")
    fields.only("attention_chunk_size")
    fields.only("per_layer_config", {})
    fields.only("partial_rotary_factor", 1, 1.0)
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    is_null = "num_key_value_heads" in fields and fields.get("num_key_value_heads") is None
    num_kv_heads = fields.count(
        "num_key_value_heads", num_heads if is_null else defaults.num_kv_heads
    )
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", num_kv_heads, f"it must divide num_attention_heads ({num_heads})"
        )
    head_dim = fields.count("head_dim", defaults.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", head_dim, "rotary embedding needs an even number")
    max_positions = fields.count("max_position_embeddings")
    dtype = fields.get("dtype") or fields.get("torch_dtype")
    return ModelArch(
        architecture=fields.architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", defaults.eps),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        rope=read_rope(fields, max_positions, defaults.theta),
        qk_norm=qk_norm,
        qkv_bias=biases.qkv,
        o_bias=biases.o,
        mlp_bias=biases.mlp,
        windows=windows,
        max_position_embeddings=max_positions,
        eos_token_ids=_token_ids(fields, "eos_token_id"),
        bos_token_id=next(iter(_token_ids(fields, "bos_token_id")), None),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        initializer_range=fields.number("initializer_range", 0.02),
        moe=moe,
    )


def _token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    value = fields.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise fields.error(name, value, "a token id or a list of them is needed")
    return tuple(ids)


def _llama(fields: Fields) -> ModelArch:
    bias = fields.flag("attention_bias", default=False)
    fields.only("sliding_window")
    return _decoder(
        fields,
        windows=_no_windows(fields),
        defaults=_Defaults(fields.count("num_attention_heads")),
        biases=_Biases(qkv=bias, o=bias, mlp=fields.flag("mlp_bias", default=False)),
    )


def _mistral(fields: Fields) -> ModelArch:
    fields.only("layer_types")
    num_layers = fields.count("num_hidden_layers")
    return _decoder(fields, windows=(_window(fields),) * num_layers, defaults=_Defaults(8))


def _qwen2(fields: Fields) -> ModelArch:
    return _decoder(
        fields, windows=_qwen_windows(fields), defaults=_Defaults(32), biases=_Biases(qkv=True)
    )


def _qwen3(fields: Fields) -> ModelArch:
    bias = fields.flag("attention_bias", default=False)
    return _decoder(
        fields,
        windows=_qwen_windows(fields),
        defaults=_Defaults(32, head_dim=128),
        biases=_Biases(qkv=bias, o=bias),
        qk_norm=True,
    )


def _mixtral(fields: Fields) -> ModelArch:
    num_layers = fields.count("num_hidden_layers")
    window = None if fields.get("sliding_window") is None else fields.count("sliding_window")
    return _decoder(
        fields,
        windows=(window,) * num_layers,
        defaults=_Defaults(8, eps=1e-5, theta=1e6),
        moe=_moe(
            fields,
            (True,) * num_layers,
            num_experts=fields.count("num_local_experts", 8),
            top_k=fields.count("num_experts_per_tok", 2),
            intermediate_size=fields.count("intermediate_size"),
            normalize_weights=True,
        ),
    )


def _qwen3_moe(fields: Fields) -> ModelArch:
    bias = fields.flag("attention_bias", default=False)
    num_layers = fields.count("num_hidden_layers")
    slides = fields.flag("use_sliding_window", default=False)
    step = fields.count("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise fields.error("mlp_only_layers", dense, "a list of layers is needed")
    # transformers 5 writes the second of these names.
    name = "num_experts" if "num_experts" in fields else "num_local_experts"
    return _decoder(
        fields,
        windows=(_window(fields) if slides else None,) * num_layers,
        defaults=_Defaults(4),
        biases=_Biases(qkv=bias, o=bias),
        qk_norm=True,
        moe=_moe(
            fields,
            tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
            num_experts=fields.count(name, 128),
            top_k=fields.count("num_experts_per_tok", 8),
            intermediate_size=fields.count("moe_intermediate_size", 768),
            normalize_weights=fields.flag("norm_topk_prob", default=False),
        ),
    )


def _deepseek_v2(fields: Fields) -> ModelArch:
    fields.only("scoring_func", "softmax")
    fields.only("topk_method", "greedy", "group_limited_greedy")
    # transformers does not normalise here, the model's own code does.
    fields.only("norm_topk_prob", False)
    fields.only("mlp_bias", False)
    grouped = fields.get("topk_method") == "group_limited_greedy"
    moe = _deepseek_moe(
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


def _deepseek_v3(fields: Fields) -> ModelArch:
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    # transformers takes its rotary table from it, the model's own code does not.
    fields.only("head_dim", fields.count("qk_rope_head_dim", 64))
    moe = _deepseek_moe(
        fields,
        num_experts=256,
        num_shared=1,
        first_dense=3,
        top_k=fields.count("num_experts_per_tok", 8),
        intermediate_size=2048,
        scoring=Scoring.SIGMOID,
        normalize_weights=fields.flag("norm_topk_prob", default=True),
        routed_scaling_factor=fields.number("routed_scaling_factor", 2.5),
        num_groups=fields.count("n_group", 8),
        top_k_groups=fields.count("topk_group", 4),
        group_score=GroupScore.SUM_OF_TOP_2,
        has_correction_bias=True,
    )
    return _latent(fields, moe, interleaved_rope=fields.flag("rope_interleave", default=True))


def _deepseek_moe(
    fields: Fields,
    *,
    num_experts: int,
    num_shared: int,
    first_dense: int,
    intermediate_size: int,
    **rule: Any,
) -> MoeArch | None:
    """Read the fields that both families name alike; the numbers are defaults."""
    num_layers = fields.count("num_hidden_layers")
    first = int(fields.number("first_k_dense_replace", first_dense))
    frequency = fields.count("moe_layer_freq", 1)
    inner = fields.count("moe_intermediate_size", intermediate_size)
    is_null = "n_shared_experts" in fields and fields.get("n_shared_experts") is None
    shared = 0 if is_null else int(fields.number("n_shared_experts", num_shared))
    return _moe(
        fields,
        tuple(layer >= first and layer % frequency == 0 for layer in range(num_layers)),
        num_experts=fields.count("n_routed_experts", num_experts),
        intermediate_size=inner,
        shared_intermediate_size=shared * inner,
        **rule,
    )


def _moe(fields: Fields, layers: tuple[bool, ...], **rule: Any) -> MoeArch | None:
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


def _latent(fields: Fields, moe: MoeArch | None, *, interleaved_rope: bool) -> ModelArch:
    """Read a decoder with multi-head latent attention."""
    num_heads = fields.count("num_attention_heads")
    fields.only("num_key_value_heads", num_heads)
    fields.only("sliding_window")
    bias = fields.flag("attention_bias", default=False)
    nope = fields.count("qk_nope_head_dim", 128)
    rotary = fields.count("qk_rope_head_dim", 64)
    if rotary % 2:
        raise fields.error("qk_rope_head_dim", rotary, "rotary embedding needs an even number")
    latent = fields.count("kv_lora_rank", 512)
    is_null = "q_lora_rank" in fields and fields.get("q_lora_rank") is None
    arch = _decoder(
        fields,
        windows=_no_windows(fields),
        defaults=_Defaults(num_heads, head_dim=rotary),  # no head is a share of the hidden size
        biases=_Biases(qkv=bias, o=bias),
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
        num_extra_layers=int(fields.number("num_nextn_predict_layers", 0)),
        head_dim=latent + rotary,
        mla=MlaArch(
            q_lora_rank=None if is_null else fields.count("q_lora_rank", 1536),
            kv_lora_rank=latent,
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rotary,
            v_head_dim=fields.count("v_head_dim", 128),
            softmax_scale=(nope + rotary) ** -0.5 * stretch * stretch,
            interleaved_rope=interleaved_rope,
        ),
    )


def _no_windows(fields: Fields) -> tuple[int | None, ...]:
    return (None,) * fields.count("num_hidden_layers")


def _window(fields: Fields) -> int | None:
    """Absent means 4096 and null means none, as in transformers."""
    if "sliding_window" in fields and fields.get("sliding_window") is None:
        return None
    return fields.count("sliding_window", 4096)


def _qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """If any layers slide, those from `max_window_layers` on do; `layer_types` overrides this."""
    num_layers = fields.count("num_hidden_layers")
    slides = fields.flag("use_sliding_window", default=False)
    kinds = fields.get("layer_types") or []
    is_list = isinstance(kinds, list) and len(kinds) in (0, num_layers)
    if not is_list or any(kind not in ("sliding_attention", "full_attention") for kind in kinds):
        raise fields.error(
            "layer_types", kinds, f"{num_layers} of sliding_attention or full_attention are needed"
        )
    if "sliding_attention" in kinds and not slides:
        raise fields.error(
            "layer_types", kinds, "sliding layers need use_sliding_window and sliding_window"
        )
    window = _window(fields) if slides else None
    if window is None:
        return _no_windows(fields)
    first = int(fields.number("max_window_layers", 28))
    kinds = kinds or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


_FAMILIES: dict[str, tuple[Callable[[Fields], ModelArch], tuple[str, ...]]] = {
    "LlamaForCausalLM": (_llama, ("llama",)),
    "MistralForCausalLM": (_mistral, ("mistral",)),
    "Qwen2ForCausalLM": (_qwen2, ("qwen2",)),
    "Qwen3ForCausalLM": (_qwen3, ("qwen3",)),
    "MixtralForCausalLM": (_mixtral, ("mixtral",)),
    "Qwen3MoeForCausalLM": (_qwen3_moe, ("qwen3_moe",)),
    "DeepseekV2ForCausalLM": (_deepseek_v2, ("deepseek_v2",)),
    "DeepseekV3ForCausalLM": (_deepseek_v3, ("deepseek_v3", "kimi_k2")),
}
"""Reader of each architecture, and the values of `model_type`, by which transformers chooses the
model that it builds."""

KNOWN = tuple(sorted(_FAMILIES))
"""Names of all architectures that can be read."""
