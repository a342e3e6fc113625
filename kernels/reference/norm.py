"""Reference RMS norms, with the rounding of transformers' Llama, or of its Gemma."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit root mean square, then by ``weight``.

    The row is normalised in fp32, rounded to the dtype of ``x``, then multiplied by ``weight`` in
    that dtype: two roundings, as in ``LlamaRMSNorm``. Weights in fp32 are multiplied before the
    only rounding, as in ``Gemma3RMSNorm``.

    Args:
        x: ``[..., D]``.
        weight: ``[D]``, same dtype as ``x``, or fp32.
        eps: Added to the mean square.

    Returns:
        Same shape and dtype as ``x``.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype != x.dtype:
        return (wide * scale * weight).to(x.dtype)
    return weight * (wide * scale).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add ``x`` to ``residual`` in place, in their dtype, and return the RMS norm of the sum.

    Args:
        x: ``[T, D]``.
        residual: ``[T, D]``, same dtype; holds the sum afterwards.
        weight: ``[D]``, same dtype, or fp32.
        eps: Added to the mean square.

    Returns:
        ``[T, D]``, same dtype.
    """
    residual += x
    return rms_norm(residual, weight, eps)
