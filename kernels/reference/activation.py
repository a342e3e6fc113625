"""Reference gated activations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


def silu_and_mul(x: Tensor) -> Tensor:
    """Gate the second half of each row by SiLU of the first.

    SiLU is computed in fp32 and rounded to the dtype of ``x``, and so is the product: two
    roundings, as in transformers.

    Args:
        x: ``[T, 2 * I]``: gate, then up.

    Returns:
        ``[T, I]``, same dtype.
    """
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate.float()).to(x.dtype) * up


def gelu_and_mul(x: Tensor) -> Tensor:
    """Gate the second half of each row by GELU of the first, in its approximation by tanh.

    Args:
        x: ``[T, 2 * I]``: gate, then up.

    Returns:
        ``[T, I]``, same dtype, rounded as in `silu_and_mul`.
    """
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate.float(), approximate="tanh").to(x.dtype) * up


@dataclass(frozen=True, slots=True)
class ClampedGlu:
    """gpt-oss's gate: ``(up + 1) * gate * sigmoid(alpha * gate)`` of clamped values.

    Attributes:
        alpha: Factor in the sigmoid.
        limit: ``gate`` is at most this, and ``up`` between this and its negative.
    """

    alpha: float
    limit: float


def clamped_glu(x: Tensor, glu: ClampedGlu) -> Tensor:
    """Gate the second half of each row by the first, in fp32, rounded once.

    Args:
        x: ``[T, 2 * I]``: gate, then up.
        glu: Its numbers.

    Returns:
        ``[T, I]``, same dtype.
    """
    gate, up = x.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=glu.limit), up.clamp(-glu.limit, glu.limit)
    return ((up + 1.0) * (gate * torch.sigmoid(glu.alpha * gate))).to(x.dtype)
