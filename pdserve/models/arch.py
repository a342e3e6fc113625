"""What a model is: a Hugging Face `config.json` read into one frozen `ModelArch`.

Nothing of a configuration is silently ignored: a feature that would change the numbers
and is not built is a `ConfigError` that names it. Free of torch, so that a server may
read it. Knows neither weights nor devices.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class RopeKind(enum.Enum):
    """How rotary frequencies are stretched beyond the length a model was trained for."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


class RopeArch(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding (Su et al. 2021, and its scalings).

    Attributes:
        theta: Base of the wavelengths.
        factor: How many times longer the context becomes; 1 for the default kind.
        original_max_positions: Context of the pretraining, for llama3 and yarn.
        low_freq_factor, high_freq_factor: llama3's two limits.
        beta_fast, beta_slow: yarn's two limits, in rotations (Peng et al. 2023, section 3.2).
        attention_factor: yarn's factor on cosine and sine; 1 elsewhere.
        truncate: Whether yarn rounds its limits to whole dimensions.
    """

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


class Scoring(enum.Enum):
    """How a router's logits become scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class GroupScore(enum.Enum):
    """What a group of experts is ranked by."""

    MAX = "max"
    SUM_OF_TOP_2 = "sum_of_top_2"


class MoeArch(msgspec.Struct, frozen=True, kw_only=True):
    """The mixture-of-experts layers of a model.

    Attributes:
        layers: Per layer, whether it is one; the others have a dense MLP.
        top_k: Experts per token.
        intermediate_size: Of one expert.
        shared_intermediate_size: Of the shared experts together; 0 = there are none.
        scoring: How logits become scores.
        normalize_weights: The chosen scores are divided by their sum.
        routed_scaling_factor: On the weights, after that.
        num_groups, top_k_groups: Only the experts of the best groups may be chosen
            (DeepSeek-V2, section 2.2.2); 1 and 1 = no groups.
        group_score: What a group is ranked by.
        has_correction_bias: A bias per expert decides who is chosen, not with which weight
            (DeepSeek-V3, section 2.1.2).
    """

    layers: tuple[bool, ...]
    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    scoring: Scoring = Scoring.SOFTMAX
    normalize_weights: bool = True
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    top_k_groups: int = 1
    group_score: GroupScore = GroupScore.MAX
    has_correction_bias: bool = False


class MlaArch(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2, section 2.1): what is cached is one latent.

    Attributes:
        q_lora_rank: Of the compressed query; None = the query is not compressed.
        kv_lora_rank: Of the latent that keys and values are made from.
        qk_nope_head_dim, qk_rope_head_dim: Parts of a query and key head.
        v_head_dim: Of a value head.
        interleaved_rope: Whether rotated dimensions are paired as neighbours.
        softmax_scale: Factor on the scores, with what yarn adds to it.
        lora_norm_eps: Of the norms of the compressed query and of the latent; a constant of the
            family, whatever `rms_norm_eps` is.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    interleaved_rope: bool = True
    lora_norm_eps: float = 1e-6


class ModelArch(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder-only transformer, whole (before any slicing over ranks).

    Attributes:
        architecture: Class name in `config.json`; the key of the model registry.
        head_dim: May differ from `hidden_size / num_heads`.
        tie_embeddings: The output head is the embedding.
        qk_norm: A per-head RMS norm of q and k before rotation.
        qkv_bias, o_bias, mlp_bias: Which linear layers have a bias.
        windows: Per layer: the sliding window in tokens (a token sees itself and the
            `window - 1` before it), or None for full attention.
        max_position_embeddings: As in `config.json`.
        eos_token_ids, bos_token_id: As in `config.json`; generation_config.json may say more.
        dtype: The checkpoint's, as torch names it, or None if the config is silent.
        initializer_range: Standard deviation of dummy weights.
        moe: Its mixture-of-experts layers, if it has any.
        mla: Its latent attention; then `num_kv_heads` is 1 and `head_dim` is what is cached
            of a token (`kv_lora_rank + qk_rope_head_dim`).
        num_extra_layers: Layers that checkpoints may have after these, which predict further
            tokens (DeepSeek-V3, section 2.2); they are not run.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_embeddings: bool
    rope: RopeArch
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str | None
    initializer_range: float
    moe: MoeArch | None = None
    mla: MlaArch | None = None
    num_extra_layers: int = 0

    @property
    def max_context_len(self) -> int:
        """Tokens a request may have, with the context extension of the rope scaling."""
        if self.rope.kind is RopeKind.LINEAR:
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.kind is RopeKind.YARN:
            extended = int(self.rope.original_max_positions * self.rope.factor)
            return max(self.max_position_embeddings, extended)
        return self.max_position_embeddings

    @property
    def digest(self) -> str:
        """Short name of this shape; equal for equal shapes, wherever they are stored."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]


def read_arch(directory: Path) -> ModelArch:
    """Read `directory/config.json`.

    Raises:
        ConfigError: There is no such directory or file, or `parse_arch` refuses it.
    """
    return parse_arch(read_config(directory))


def read_config(directory: Path) -> dict[str, Any]:
    """Return the JSON object in `directory/config.json`.

    Raises:
        ConfigError: It is missing or is not a JSON object.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"model {str(directory)!r} is not a directory: give the path of a model in "
            "Hugging Face format (config.json, *.safetensors, tokenizer.json)",
            param="model",
        )
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"model {str(directory)!r} has no config.json: it is not in Hugging Face format",
            param="model",
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", param="model") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object", param="model")
    return config


def parse_arch(config: dict[str, Any]) -> ModelArch:
    """Read a `config.json` object, as transformers 4 or 5 writes it.

    Fields that are absent take the default of the architecture's class in transformers.

    Raises:
        ConfigError: The architecture is unknown (the known ones are listed), a feature is
            not supported, or a field is missing or impossible.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1:
        raise ConfigError(
            f"config.json: architectures is {names!r}: exactly one name is needed", param="model"
        )
    (name,) = names
    if name not in _FAMILIES:
        raise ConfigError(
            f"architecture {name!r} is not supported: known are {', '.join(KNOWN)}", param="model"
        )
    return _FAMILIES[name](_Fields(name, config))


class _Fields:
    """Typed access to a configuration, with errors that name the field."""

    def __init__(self, architecture: str, config: dict[str, Any], path: str = "") -> None:
        self.architecture = architecture
        self._config = config
        self._path = path

    def number(self, name: str, default: float | None = None) -> float:
        value = self._config.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, value, "a number is needed")
        return float(value)

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.number(name, default)
        if value != int(value) or value <= 0:
            raise self.error(name, value, "a positive integer is needed")
        return int(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._config.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false is needed")
        return value

    def get(self, name: str) -> Any:
        return self._config.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._config

    def names(self) -> set[str]:
        return set(self._config)

    def section(self, name: str) -> _Fields | None:
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, value, "an object is needed")
        return _Fields(self.architecture, value, f"{self._path}{name}.")

    def only(self, name: str, *allowed: object) -> None:
        """Refuse a feature that is not built. Absent is always allowed."""
        value = self._config.get(name)
        if value is not None and value not in allowed:
            remedy = f"only {' or '.join(repr(a) for a in allowed)} is supported"
            raise self.error(name, value, remedy if allowed else "this is not supported")

    def error(self, name: str, value: object, remedy: str) -> ConfigError:
        return ConfigError(
            f"config.json ({self.architecture}): {self._path}{name} is {value!r}: {remedy}",
            param="model",
        )


def _decoder(
    fields: _Fields,
    *,
    windows: tuple[int | None, ...],
    default_kv_heads: int,
    default_head_dim: int | None = None,
    default_eps: float = 1e-6,
    default_theta: float = 10_000.0,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    moe: MoeArch | None = None,
) -> ModelArch:
    """What all families share."""
    for name in ("quantization_config", "compression_config"):
        fields.only(name)
    fields.only("hidden_act", "silu", "swish")
    fields.only("is_encoder_decoder", False)
    fields.only("partial_rotary_factor", 1, 1.0)
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", default_kv_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", num_kv_heads, f"it must divide num_attention_heads ({num_heads})"
        )
    if default_head_dim is None:
        default_head_dim = hidden_size // num_heads
    head_dim = fields.count("head_dim", default_head_dim)
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
        rms_norm_eps=fields.number("rms_norm_eps", default_eps),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        rope=_rope(fields, max_positions, default_theta),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        windows=windows,
        max_position_embeddings=max_positions,
        eos_token_ids=_token_ids(fields, "eos_token_id"),
        bos_token_id=next(iter(_token_ids(fields, "bos_token_id")), None),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        initializer_range=fields.number("initializer_range", 0.02),
        moe=moe,
    )


def _token_ids(fields: _Fields, name: str) -> tuple[int, ...]:
    value = fields.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise fields.error(name, value, "a token id or a list of them is needed")
    return tuple(ids)


_ROPE_FIELDS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
}


def _rope_section(fields: _Fields) -> _Fields | None:
    return fields.section("rope_parameters") or fields.section("rope_scaling")


def _rope(fields: _Fields, max_positions: int, default_theta: float) -> RopeArch:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    scaling = _rope_section(fields)
    theta = fields.number("rope_theta", default_theta)
    if scaling is None:
        return RopeArch(theta=theta)
    for name in scaling.names() - _ROPE_FIELDS:
        raise scaling.error(name, scaling.get(name), "this is not supported")
    theta = scaling.number("rope_theta", theta)
    scaling.only("partial_rotary_factor", 1, 1.0)
    label = scaling.get("rope_type") or scaling.get("type") or "default"
    try:
        kind = RopeKind(label)
    except ValueError:
        known = ", ".join(kind.value for kind in RopeKind)
        raise scaling.error("rope_type", label, f"supported are {known}") from None
    outer_original = fields.get("original_max_position_embeddings")
    match kind:
        case RopeKind.DEFAULT:
            return RopeArch(theta=theta)
        case RopeKind.LINEAR:
            return RopeArch(theta=theta, kind=kind, factor=scaling.number("factor"))
        case RopeKind.LLAMA3:
            return RopeArch(
                theta=theta,
                kind=kind,
                factor=scaling.number("factor"),
                low_freq_factor=scaling.number("low_freq_factor"),
                high_freq_factor=scaling.number("high_freq_factor"),
                original_max_positions=outer_original
                or scaling.count("original_max_position_embeddings", max_positions),
            )
        case RopeKind.YARN:
            original = outer_original or scaling.count(
                "original_max_position_embeddings", max_positions
            )
            factor = scaling.number("factor", max_positions / original)
            return RopeArch(
                theta=theta,
                kind=kind,
                factor=factor,
                original_max_positions=original,
                beta_fast=scaling.get("beta_fast") or 32.0,
                beta_slow=scaling.get("beta_slow") or 1.0,
                attention_factor=_yarn_attention_factor(scaling, factor),
                truncate=scaling.flag("truncate", default=True),
            )


def _yarn_attention_factor(scaling: _Fields, factor: float) -> float:
    """Peng et al. 2023, equation 22, and DeepSeek's generalisation by two mscales."""
    if scaling.get("attention_factor") is not None:
        return scaling.number("attention_factor")
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama(fields: _Fields) -> ModelArch:
    bias = fields.flag("attention_bias", default=False)
    fields.only("sliding_window")
    return _decoder(
        fields,
        windows=_no_windows(fields),
        default_kv_heads=fields.count("num_attention_heads"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
    )


def _mistral(fields: _Fields) -> ModelArch:
    fields.only("layer_types")
    num_layers = fields.count("num_hidden_layers")
    return _decoder(fields, windows=(_window(fields),) * num_layers, default_kv_heads=8)


def _qwen2(fields: _Fields) -> ModelArch:
    return _decoder(fields, windows=_qwen_windows(fields), default_kv_heads=32, qkv_bias=True)


def _qwen3(fields: _Fields) -> ModelArch:
    bias = fields.flag("attention_bias", default=False)
    return _decoder(
        fields,
        windows=_qwen_windows(fields),
        default_kv_heads=32,
        default_head_dim=128,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
    )


def _mixtral(fields: _Fields) -> ModelArch:
    num_layers = fields.count("num_hidden_layers")
    window = None if fields.get("sliding_window") is None else fields.count("sliding_window")
    return _decoder(
        fields,
        windows=(window,) * num_layers,
        default_kv_heads=8,
        default_eps=1e-5,
        default_theta=1e6,
        moe=_moe(
            fields,
            (True,) * num_layers,
            num_experts=fields.count("num_local_experts", 8),
            top_k=fields.count("num_experts_per_tok", 2),
            intermediate_size=fields.count("intermediate_size"),
            normalize_weights=True,
        ),
    )


def _qwen3_moe(fields: _Fields) -> ModelArch:
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
        default_kv_heads=4,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        moe=_moe(
            fields,
            tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
            num_experts=fields.count(name, 128),
            top_k=fields.count("num_experts_per_tok", 8),
            intermediate_size=fields.count("moe_intermediate_size", 768),
            normalize_weights=fields.flag("norm_topk_prob", default=False),
        ),
    )


def _deepseek_v2(fields: _Fields) -> ModelArch:
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


def _deepseek_v3(fields: _Fields) -> ModelArch:
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
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
    fields: _Fields,
    *,
    num_experts: int,
    num_shared: int,
    first_dense: int,
    intermediate_size: int,
    **rule: Any,
) -> MoeArch | None:
    """Read what both families name alike; the numbers are defaults."""
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


def _moe(fields: _Fields, layers: tuple[bool, ...], **rule: Any) -> MoeArch | None:
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


def _latent(fields: _Fields, moe: MoeArch | None, *, interleaved_rope: bool) -> ModelArch:
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
        default_kv_heads=num_heads,
        qkv_bias=bias,
        o_bias=bias,
        moe=moe,
    )
    section = _rope_section(fields)
    all_dim = None if section is None else section.get("mscale_all_dim")
    stretch = 1.0
    if all_dim and arch.rope.kind is not RopeKind.DEFAULT:
        stretch = _mscale(arch.rope.factor, all_dim)
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


def _no_windows(fields: _Fields) -> tuple[int | None, ...]:
    return (None,) * fields.count("num_hidden_layers")


def _window(fields: _Fields) -> int | None:
    """Absent means 4096 and null means none: so does transformers read it."""
    if "sliding_window" in fields and fields.get("sliding_window") is None:
        return None
    return fields.count("sliding_window", 4096)


def _qwen_windows(fields: _Fields) -> tuple[int | None, ...]:
    """Layers from `max_window_layers` on slide, if any do; `layer_types` overrides it."""
    num_layers = fields.count("num_hidden_layers")
    if not fields.flag("use_sliding_window", default=False):
        kinds = fields.get("layer_types") or []
        if "sliding_attention" in kinds:
            raise fields.error(
                "layer_types", kinds, "sliding layers need use_sliding_window and sliding_window"
            )
        return _no_windows(fields)
    window = _window(fields)
    if window is None:
        return _no_windows(fields)
    first = int(fields.number("max_window_layers", 28))
    kinds = fields.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    if len(kinds) != num_layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise fields.error(
            "layer_types", kinds, f"{num_layers} of sliding_attention or full_attention are needed"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


_FAMILIES: dict[str, Callable[[_Fields], ModelArch]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _deepseek_v3,
}

KNOWN = tuple(sorted(_FAMILIES))
"""Names of every architecture that can be read."""
