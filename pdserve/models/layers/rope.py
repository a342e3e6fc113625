"""Tables of cosines and sines for rotary position embedding."""

from __future__ import annotations

import math
from typing import assert_never

import torch
from torch import Tensor

from pdserve.models.arch import RopeArch, RopeKind


def cos_sin_table(rope: RopeArch, head_dim: int, max_positions: int) -> Tensor:
    """Return the table that `rope_and_cache` reads.

    Frequencies and angles are computed in fp32 by the formulas of transformers, in their order, so
    that the table equals, to the last bit, the one with which checkpoints were tested.

    Returns:
        `[max_positions, head_dim]` fp32: the first half cosines, the second half sines.
    """
    angle = torch.arange(max_positions).float()[:, None] * inverse_frequencies(rope, head_dim)
    return torch.cat((angle.cos(), angle.sin()), dim=-1) * rope.attention_factor


def no_rotation(max_positions: int) -> Tensor:
    """Return a table by which every position turns by nothing, `[max_positions, 2]` fp32."""
    return torch.tensor([1.0, 0.0]).repeat(max_positions, 1)


def inverse_frequencies(rope: RopeArch, head_dim: int) -> Tensor:
    """Radians per position, `[head_dim / 2]` fp32."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    match rope.kind:
        case RopeKind.DEFAULT:
            return plain
        case RopeKind.LINEAR:
            return plain / rope.factor
        case RopeKind.LLAMA3:
            return _llama3(rope, plain)
        case RopeKind.YARN:
            return _yarn(rope, head_dim)
        case _:
            assert_never(rope.kind)


def _llama3(rope: RopeArch, plain: Tensor) -> Tensor:
    """Long wavelengths are stretched, short ones kept, and those between blended."""
    original = rope.original_max_positions
    wavelength = 2 * math.pi / plain
    longest, shortest = original / rope.low_freq_factor, original / rope.high_freq_factor
    stretched = torch.where(wavelength > longest, plain / rope.factor, plain)
    smooth = (original / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, blended, stretched)


def _yarn(rope: RopeArch, head_dim: int) -> Tensor:
    """Peng et al. 2023, section 3.2: a ramp over dimensions from kept to stretched."""

    def dimension(rotations: float) -> float:
        span = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    wavelength = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return 1.0 / (rope.factor * wavelength) * (1 - kept) + 1.0 / wavelength * kept
