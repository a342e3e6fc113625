"""Rotary embedding as a `config.json` describes it, in transformers' two ways."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pdserve.models.arch import RopeArch, RopeKind

if TYPE_CHECKING:
    from pdserve.models.config_json import Fields

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


def rope_section(fields: Fields) -> Fields | None:
    """The scaling of rotary embedding, from transformers 5's or 4's field; None = not there.

    Raises:
        ConfigError: Both are there and differ; transformers would take the older one alone.
    """
    found = [
        section
        for name in ("rope_parameters", "rope_scaling")
        if (section := fields.section(name)) is not None and section.names()
    ]
    if len(found) == 2 and fields.get("rope_parameters") != fields.get("rope_scaling"):
        raise fields.error(
            "rope_scaling",
            fields.get("rope_scaling"),
            "rope_parameters differs from it: keep one of them, with all of its fields",
        )
    return found[0] if found else None


def read_rope(fields: Fields, max_positions: int, default_theta: float) -> RopeArch:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4).

    Args:
        max_positions: The model's context, tokens.

    Raises:
        ConfigError: A kind or a field is not supported.
    """
    scaling = rope_section(fields)
    theta = fields.above(1, "rope_theta", default_theta)
    if scaling is None:
        return RopeArch(theta=theta)
    for name in scaling.names() - _ROPE_FIELDS:
        raise scaling.error(name, scaling.get(name), "this is not supported")
    theta = scaling.above(1, "rope_theta", theta)
    label = scaling.get("rope_type") or scaling.get("type") or "default"
    try:
        kind = RopeKind(label)
    except ValueError:
        known = ", ".join(kind.value for kind in RopeKind)
        raise scaling.error("rope_type", label, f"supported are {known}") from None
    match kind:
        case RopeKind.DEFAULT:
            return RopeArch(theta=theta)
        case RopeKind.LINEAR:
            return RopeArch(theta=theta, kind=kind, factor=scaling.above(0, "factor"))
        case RopeKind.LLAMA3:
            return RopeArch(
                theta=theta,
                kind=kind,
                factor=scaling.above(0, "factor"),
                low_freq_factor=scaling.above(0, "low_freq_factor"),
                high_freq_factor=scaling.above(0, "high_freq_factor"),
                original_max_positions=_original(fields, scaling, max_positions),
            )
        case RopeKind.YARN:
            original = _original(fields, scaling, max_positions)
            factor = scaling.above(0, "factor", max_positions / original)
            return RopeArch(
                theta=theta,
                kind=kind,
                factor=factor,
                original_max_positions=original,
                beta_fast=_rotations(scaling, "beta_fast", 32.0),
                beta_slow=_rotations(scaling, "beta_slow", 1.0),
                attention_factor=_yarn_attention_factor(scaling, factor),
                truncate=scaling.flag("truncate", default=True),
            )


def read_ropes(fields: Fields, *, thetas: tuple[float, float]) -> tuple[Fields, Fields]:
    """Fields as `read_rope` reads them, of layers that attend fully and of those that slide.

    transformers 5 has an object for each in `rope_parameters`; 4 scales the former alone, and names
    the latter's base `rope_local_base_freq`.

    Args:
        thetas: Base of the wavelengths of both, where the fields do not say.
    """
    whole = fields.section("rope_parameters")
    if whole is None:
        return fields.with_defaults(rope_theta=thetas[0]), fields.replaced(
            rope_theta=fields.above(1, "rope_local_base_freq", thetas[1]), rope_scaling=None
        )
    fields.only("rope_scaling")
    kinds = ("full_attention", "sliding_attention")
    for name in whole.names() - {*kinds}:
        raise whole.error(name, whole.get(name), f"only {' and '.join(kinds)} are supported")
    full, sliding = (
        fields.replaced(rope_parameters=whole.get(kind), rope_theta=fields.above(1, name, theta))
        for kind, name, theta in zip(
            kinds, ("rope_theta", "rope_local_base_freq"), thetas, strict=True
        )
    )
    return full, sliding


def with_alpha(fields: Fields) -> Fields:
    """The same fields, with Hunyuan's `alpha` of a "dynamic" rotation as a base of wavelengths."""
    scaling = rope_section(fields)
    if scaling is None or (scaling.get("rope_type") or scaling.get("type")) != "dynamic":
        return fields
    for name, neutral in (("factor", 1), ("mscale", 1), ("mscale_all_dim", 1)):
        scaling.only(name, neutral, float(neutral))
    heads = fields.count("num_attention_heads")
    dim = fields.count("head_dim", fields.count("hidden_size") // heads)
    theta = scaling.above(1, "rope_theta", fields.above(1, "rope_theta", 10_000.0))
    stretched = theta * scaling.above(0, "alpha") ** (dim / (dim - 2))
    return fields.replaced(rope_parameters=None, rope_scaling=None, rope_theta=stretched)


def read_partial_rotary(fields: Fields, default: float | None) -> float:
    """Read which share of a head is rotated.

    Args:
        default: The family's; None: it rotates whole heads.

    Raises:
        ConfigError: It is not a share, or a part of what is rotated whole.
    """
    name = "partial_rotary_factor"
    told = [each for each in (rope_section(fields), fields) if each is not None and name in each]
    if default is None:
        for each in told:
            each.only(name, 1, 1.0)
        return 1.0
    factor = told[0].above(0, name, default) if told else default
    if factor > 1:
        raise told[0].error(name, factor, "it must be at most 1")
    return factor


def _original(fields: Fields, scaling: Fields, max_positions: int) -> int:
    """Context of the pretraining, tokens; a value outside of the section comes first."""
    name = "original_max_position_embeddings"
    return (fields if fields.get(name) else scaling).count(name, max_positions)


def _rotations(scaling: Fields, name: str, default: float) -> float:
    """A limit of yarn; 0 means the default, as in transformers."""
    return scaling.above(0, name, default) if scaling.get(name) else default


def _yarn_attention_factor(scaling: Fields, factor: float) -> float:
    """Peng et al. 2023, equation 22, and DeepSeek's generalisation by two mscales."""
    if scaling.get("attention_factor") is not None:
        return scaling.number("attention_factor")
    mscale, mscale_all_dim = (scaling.number(name, 0.0) for name in ("mscale", "mscale_all_dim"))
    if mscale and mscale_all_dim:
        return mscale_of(factor, mscale) / mscale_of(factor, mscale_all_dim)
    return mscale_of(factor, 1.0)


def mscale_of(factor: float, mscale: float) -> float:
    """Factor that sharpens attention over `factor` times the context (YaRN)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
