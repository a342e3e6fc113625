"""Dense models with grouped queries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.models.readers.decoder import (
    Biases,
    Defaults,
    layer_types,
    no_windows,
    read_decoder,
    window_of,
)

if TYPE_CHECKING:
    from pdserve.models.arch import ModelArch
    from pdserve.models.config_json import Fields


def llama(fields: Fields) -> ModelArch:
    """Llama: biases by configuration; no windows."""
    bias = fields.flag("attention_bias", default=False)
    fields.only("sliding_window")
    return read_decoder(
        fields,
        windows=no_windows(fields),
        defaults=Defaults(fields.count("num_attention_heads")),
        biases=Biases(qkv=bias, o=bias, mlp=fields.flag("mlp_bias", default=False)),
    )


def mistral(fields: Fields) -> ModelArch:
    """Mistral: a sliding window in every layer, or in none."""
    fields.only("layer_types")
    num_layers = fields.count("num_hidden_layers")
    return read_decoder(fields, windows=(window_of(fields),) * num_layers, defaults=Defaults(8))


def qwen2(fields: Fields) -> ModelArch:
    """Qwen2: biases on q, k and v; upper layers may slide."""
    return read_decoder(
        fields, windows=_qwen_windows(fields), defaults=Defaults(32), biases=Biases(qkv=True)
    )


def qwen3(fields: Fields) -> ModelArch:
    """Qwen3: norms of q and k; biases by configuration."""
    bias = fields.flag("attention_bias", default=False)
    return read_decoder(
        fields,
        windows=_qwen_windows(fields),
        defaults=Defaults(32, head_dim=128),
        biases=Biases(qkv=bias, o=bias),
        qk_norm=True,
    )


def seed_oss(fields: Fields) -> ModelArch:
    """Seed-OSS: Llama's form; the attention's output has its own flag for a bias."""
    return read_decoder(
        fields,
        windows=no_windows(fields),
        defaults=Defaults(8, head_dim=128),
        biases=Biases(
            qkv=fields.flag("attention_bias", default=True),
            o=fields.flag("attention_out_bias", default=False),
            mlp=fields.flag("mlp_bias", default=False),
        ),
    )


def phi3(fields: Fields) -> ModelArch:
    """Phi-3 and Phi-4: a sliding window in every layer, or in none; a part of a head may rotate."""
    window = None if fields.get("sliding_window") is None else fields.count("sliding_window")
    return read_decoder(
        fields,
        windows=(window,) * fields.count("num_hidden_layers"),
        defaults=Defaults(fields.count("num_attention_heads"), eps=1e-5, partial_rotary=1.0),
    )


def _qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """If any layers slide, those from `max_window_layers` on do; `layer_types` overrides this."""
    num_layers = fields.count("num_hidden_layers")
    slides = fields.flag("use_sliding_window", default=False)
    kinds = layer_types(fields)
    if "sliding_attention" in kinds and not slides:
        raise fields.error(
            "layer_types", kinds, "sliding layers need use_sliding_window and sliding_window"
        )
    window = window_of(fields) if slides else None
    if window is None:
        return no_windows(fields)
    first = int(fields.number("max_window_layers", 28))
    kinds = kinds or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
