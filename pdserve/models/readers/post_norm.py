"""Dense models that norm what each half of a layer adds to the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.kernels.gates import Activation
from pdserve.models.arch import NormArch, QkNorm
from pdserve.models.readers.decoder import Biases, Defaults, no_windows, read_decoder, windows_of
from pdserve.models.readers.rope import read_rope, read_ropes

if TYPE_CHECKING:
    from pdserve.models.arch import ModelArch
    from pdserve.models.config_json import Fields


def gemma3(fields: Fields) -> ModelArch:
    """Gemma 3: layers with a window rotate at their own frequencies; norms on both sides."""
    fields = fields.with_defaults(
        vocab_size=262_208,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        max_position_embeddings=131_072,
        sliding_window=4096,
        eos_token_id=1,
        bos_token_id=2,
    )
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        fields.only(name)
    fields.only("use_bidirectional_attention", False)
    bias = fields.flag("attention_bias", default=False)
    full, sliding = read_ropes(fields, thetas=(1e6, 1e4))
    arch = read_decoder(
        full,
        windows=windows_of(fields, _every(fields.count("sliding_window_pattern", 6), fields)),
        defaults=Defaults(4, head_dim=256, theta=1e6, activation=Activation.GELU_TANH, tied=True),
        biases=Biases(qkv=bias, o=bias),
        qk_norm=QkNorm.HEAD,
    )
    return msgspec.structs.replace(
        arch,
        norms=NormArch(after=True, wide=True, less_one=True),
        softmax_scale=fields.above(0, "query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=arch.hidden_size**0.5,
        window_rope=read_rope(sliding, arch.max_position_embeddings, 1e4),
    )


def olmo2(fields: Fields) -> ModelArch:
    """OLMo 2: no norms before the halves; those of q and k are of all heads together."""
    arch = _olmo(
        fields, no_windows(fields), Defaults(fields.count("num_attention_heads"), eps=1e-5)
    )
    fields.only("layer_types")
    return arch


def olmo3(fields: Fields) -> ModelArch:
    """OLMo 3: OLMo 2 with windows in three of four layers, which are never stretched."""
    theta = 5e5
    if fields.section("rope_parameters") is None:
        fields.only("rope_theta", theta)  # transformers reads it for a part of the layers
    full, sliding = read_ropes(fields, thetas=(theta, theta))
    arch = _olmo(
        full,
        windows_of(fields.with_defaults(sliding_window=4096), _every(4, fields)),
        Defaults(fields.count("num_attention_heads"), eps=1e-5, theta=theta),
    )
    return msgspec.structs.replace(
        arch, window_rope=read_rope(sliding, arch.max_position_embeddings, theta)
    )


def exaone4(fields: Fields) -> ModelArch:
    """EXAONE 4: no norms before the halves; where some layers slide, only those rotate."""
    fields = fields.with_defaults(sliding_window=4096)
    if fields.get("sliding_window") is None:
        fields.only("layer_types", ["full_attention"] * fields.count("num_hidden_layers"))
        windows = no_windows(fields)
    else:
        pattern = [] if fields.get("layer_types") else _exaone_pattern(fields)
        windows = windows_of(fields, pattern)
    arch = read_decoder(
        fields, windows=windows, defaults=Defaults(32, eps=1e-5), qk_norm=QkNorm.HEAD
    )
    full = tuple(layer for layer, window in enumerate(windows) if window is None)
    return msgspec.structs.replace(
        arch,
        norms=NormArch(before=False, after=True),
        unrotated=() if fields.get("sliding_window") is None else full,
    )


def glm4(fields: Fields) -> ModelArch:
    """GLM-4: norms on both sides of the halves; a half of each head is rotated, as neighbours."""
    return msgspec.structs.replace(glm(fields), norms=NormArch(after=True))


def glm(fields: Fields) -> ModelArch:
    """GLM-4 of 2024: norms as in Llama; rotation as in GLM-4."""
    arch = read_decoder(
        fields,
        windows=no_windows(fields),
        defaults=Defaults(2, head_dim=128, eps=1.5625e-7, partial_rotary=0.5),
        biases=Biases(qkv=fields.flag("attention_bias", default=True)),
    )
    return msgspec.structs.replace(arch, interleaved_rope=True)


def _olmo(fields: Fields, windows: tuple[int | None, ...], defaults: Defaults) -> ModelArch:
    bias = fields.flag("attention_bias", default=False)
    arch = read_decoder(
        fields,
        windows=windows,
        defaults=defaults,
        biases=Biases(qkv=bias, o=bias),
        qk_norm=QkNorm.ALL_HEADS,
    )
    return msgspec.structs.replace(arch, norms=NormArch(before=False, after=True, wide=True))


def _exaone_pattern(fields: Fields) -> list[str]:
    """Kinds of layers by `sliding_window_pattern`: every so many, or letters for each."""
    pattern = fields.get("sliding_window_pattern")
    if isinstance(pattern, str):
        raise fields.error("sliding_window_pattern", pattern, "write layer_types instead")
    return _every(fields.count("sliding_window_pattern", 4), fields)


def _every(period: int, fields: Fields) -> list[str]:
    """Kinds of layers where every so many attend fully, and the others slide."""
    num_layers = fields.count("num_hidden_layers")
    return [
        "sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)
    ]
