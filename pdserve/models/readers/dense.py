"""Dense models with grouped queries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.models.arch import FarQueriesArch, QkNorm
from pdserve.models.readers.decoder import (
    Biases,
    Defaults,
    layer_types,
    no_windows,
    read_decoder,
    window_of,
    windows_of,
)
from pdserve.models.readers.rope import with_alpha

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


def ministral3(fields: Fields) -> ModelArch:
    """Ministral 3: Mistral with stretched rotation, and a factor on queries far from the start."""
    positions = fields.count("max_position_embeddings", 262_144)
    section = fields.get("rope_parameters") or {
        "type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    fields.only("rope_scaling")
    rope = fields.replaced(rope_parameters=section).section("rope_parameters")
    assert rope is not None
    rope.only("max_position_embeddings", positions)
    names = rope.names() - {"llama_4_scaling_beta", "max_position_embeddings"}
    window = None if fields.get("sliding_window") is None else fields.count("sliding_window")
    arch = read_decoder(
        fields.replaced(rope_parameters={name: rope.get(name) for name in names}),
        windows=(window,) * fields.count("num_hidden_layers"),
        defaults=Defaults(8, head_dim=128, eps=1e-5),
    )
    far = FarQueriesArch(
        beta=rope.number("llama_4_scaling_beta"),
        period=rope.count("original_max_position_embeddings"),
    )
    return msgspec.structs.replace(arch, far_queries=far)


def hunyuan(fields: Fields) -> ModelArch:
    """Hunyuan: Llama's form with norms of rotated heads; `alpha` stretches the base of rotation."""
    bias = fields.flag("attention_bias", default=False)
    fields.only("use_qk_norm", True)
    fields.only("mlp_bias", False)
    return read_decoder(
        with_alpha(fields),
        windows=no_windows(fields),
        defaults=Defaults(fields.count("num_attention_heads"), eps=1e-5),
        biases=Biases(qkv=bias, o=bias),
        qk_norm=QkNorm.ROTATED_HEAD,
    )


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
        qk_norm=QkNorm.HEAD,
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


def smollm3(fields: Fields) -> ModelArch:
    """SmolLM3: Llama's form; every fourth layer does not rotate, and those layers may slide."""
    num_layers = fields.count("num_hidden_layers")
    bias = fields.flag("attention_bias", default=False)
    rotates = fields.get("no_rope_layers")  # 1 where a layer has rope, whatever its name says
    if rotates is None:
        step = fields.count("no_rope_layer_interval", 4)
        rotates = [int((layer + 1) % step != 0) for layer in range(num_layers)]
    is_list = isinstance(rotates, list) and len(rotates) >= num_layers
    if not is_list or any(each not in (0, 1) for each in rotates[:num_layers]):
        raise fields.error("no_rope_layers", rotates, f"{num_layers} of 0 or 1 are needed")
    unrotated = tuple(layer for layer in range(num_layers) if not rotates[layer])
    slides = fields.flag("use_sliding_window", default=False)
    if slides and fields.get("sliding_window") is not None:
        kinds = [
            "sliding_attention" if layer in unrotated else "full_attention"
            for layer in range(num_layers)
        ]
        windows = windows_of(fields, kinds)
    else:
        fields.only("layer_types", ["full_attention"] * num_layers)
        windows = no_windows(fields)
    arch = read_decoder(
        fields,
        windows=windows,
        defaults=Defaults(4, theta=2e6, tied=True),
        biases=Biases(qkv=bias, o=bias, mlp=fields.flag("mlp_bias", default=False)),
    )
    return msgspec.structs.replace(arch, unrotated=unrotated)


def granite(fields: Fields) -> ModelArch:
    """Granite 3: Llama's form, with factors on embeddings, scores, what is added, and logits."""
    return msgspec.structs.replace(
        llama(fields),
        embedding_scale=fields.above(0, "embedding_multiplier", 1.0),
        softmax_scale=fields.above(0, "attention_multiplier", 1.0),
        residual_scale=fields.above(0, "residual_multiplier", 1.0),
        logits_scale=1 / fields.above(0, "logits_scaling", 1.0),
    )


def ernie4_5(fields: Fields) -> ModelArch:
    """ERNIE 4.5: Llama's form, whose pairs rotate as neighbours."""
    fields.only("compression_ratio", 1, 1.0)
    bias = fields.flag("use_bias", default=False)
    is_null = "head_dim" in fields and fields.get("head_dim") is None
    arch = read_decoder(
        fields,
        windows=no_windows(fields),
        defaults=Defaults(2, head_dim=None if is_null else 128, eps=1e-5, theta=5e5, tied=True),
        biases=Biases(qkv=bias, o=bias, mlp=bias),
    )
    return msgspec.structs.replace(arch, interleaved_rope=True)


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
