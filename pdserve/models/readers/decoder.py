"""The fields of a `config.json` that all families share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pdserve.kernels.gates import Activation
from pdserve.models.arch import ModelArch, QkNorm
from pdserve.models.quantised import read_quantised
from pdserve.models.readers.rope import read_partial_rotary, read_rope

if TYPE_CHECKING:
    from pdserve.models.arch import MoeArch
    from pdserve.models.config_json import Fields


class Defaults(NamedTuple):
    """A family's meaning of fields that its `config.json` leaves out.

    Attributes:
        head_dim: None: the hidden size divided by the heads.
        partial_rotary: Share of a head that is rotated; None: a field that says so is refused.
        activation: The only one that is served.
        tied: Whether the output head is the embedding.
    """

    num_kv_heads: int
    head_dim: int | None = None
    eps: float = 1e-6
    theta: float = 10_000.0
    partial_rotary: float | None = None
    activation: Activation = Activation.SILU
    tied: bool = False


class Biases(NamedTuple):
    """Which projections have a bias."""

    qkv: bool = False
    o: bool = False
    mlp: bool = False


_NO_BIAS = Biases()
_ACTIVATIONS = {
    Activation.SILU: ("hidden_act", ("silu", "swish")),
    Activation.GELU_TANH: ("hidden_activation", ("gelu_pytorch_tanh",)),
}
"""The field that names an activation, and its names."""


def read_decoder(
    fields: Fields,
    *,
    windows: tuple[int | None, ...],
    defaults: Defaults,
    biases: Biases = _NO_BIAS,
    qk_norm: QkNorm = QkNorm.NONE,
    moe: MoeArch | None = None,
) -> ModelArch:
    """The fields that all families share."""
    read_quantised(fields)  # or it is not quantised
    name, allowed = _ACTIVATIONS[defaults.activation]
    fields.only(name, *allowed)
    fields.only("is_encoder_decoder", False)
    if not fields.flag("is_causal", default=True):
        raise fields.error("is_causal", fields.get("is_causal"), "only True is supported")
    fields.only("attention_chunk_size")
    fields.only("per_layer_config", {})
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
    partial_rotary = read_partial_rotary(fields, defaults.partial_rotary)
    if (rotary_dim := int(head_dim * partial_rotary)) % 2 or not rotary_dim:
        what = f"{rotary_dim} of its elements are rotated, which must be an even number"
        raise fields.error("head_dim", head_dim, what)
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
        tie_embeddings=fields.flag("tie_word_embeddings", default=defaults.tied),
        rope=read_rope(fields, max_positions, defaults.theta),
        partial_rotary_factor=partial_rotary,
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
        activation=defaults.activation,
    )


def _token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    value = fields.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise fields.error(name, value, "a token id or a list of them is needed")
    return tuple(ids)


def num_extra_layers(fields: Fields) -> int:
    """Layers behind the model's own that predict further tokens."""
    return int(fields.number("num_nextn_predict_layers", 0))


def no_windows(fields: Fields) -> tuple[int | None, ...]:
    """Full attention in every layer."""
    return (None,) * fields.count("num_hidden_layers")


def window_of(fields: Fields) -> int | None:
    """Absent means 4096 and null means none, as in transformers."""
    if "sliding_window" in fields and fields.get("sliding_window") is None:
        return None
    return fields.count("sliding_window", 4096)


def windows_of(fields: Fields, default: list[str]) -> tuple[int | None, ...]:
    """Window of each layer by `layer_types`; sliding layers need one.

    Args:
        default: What `layer_types` says where it is absent.
    """
    kinds = layer_types(fields) or default
    if "sliding_attention" not in kinds:
        return no_windows(fields)
    window = fields.get("sliding_window")
    if window is None:
        raise fields.error("sliding_window", None, "sliding layers need one")
    window = fields.count("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def layer_types(fields: Fields) -> list[str]:
    """`sliding_attention` or `full_attention` for each layer; empty if it is not there."""
    num_layers = fields.count("num_hidden_layers")
    kinds = fields.get("layer_types") or []
    is_list = isinstance(kinds, list) and len(kinds) in (0, num_layers)
    if not is_list or any(kind not in ("sliding_attention", "full_attention") for kind in kinds):
        raise fields.error(
            "layer_types", kinds, f"{num_layers} of sliding_attention or full_attention are needed"
        )
    return list(kinds)
