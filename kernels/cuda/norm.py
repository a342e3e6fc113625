"""RMS norms: one program per row, whose order of summation depends only on the width."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.backend import NotTakenError
from pdserve.kernels.cuda.checks import check_contiguous, same_type
from pdserve.kernels.cuda.launch import Tuning, launch, wait_for_previous
from pdserve.kernels.cuda.sizes import empty_rows, next_power_of_2

_MAX_WIDTH = 1 << 15
"""What a program holds in registers: 64 elements for each of 512 threads."""


@triton.jit
def norm_row(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Norm one row of ``x``, or of ``residual += x``; grid (rows,)."""
    wait_for_previous(OVERLAPS)
    dtype = x.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + first + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        at = residual + first + column
        total = (value + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(at, total, mask=inside)
        value = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    normed = value * scale
    if weight.dtype.element_ty == dtype:
        normed = normed.to(dtype).to(tl.float32)
    tl.store(out + first + column, (normed * factor).to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.norm.rms_norm``; contiguous.

    Raises:
        NotTakenError: The dtype or the width is not taken.
        TypeError: Dtypes differ, or a tensor is strided.
    """
    return _norm(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.norm.add_rms_norm``; contiguous.

    Raises:
        NotTakenError: The dtype or the width is not taken.
        TypeError: Dtypes or shapes differ, or a tensor is strided.
    """
    if x.shape != residual.shape:
        raise TypeError(f"want residual {tuple(x.shape)}, got {tuple(residual.shape)}")
    return _norm(x, residual, weight, eps)


def check_norms(dtype: torch.dtype, *weights: Tensor | None) -> None:
    """Raise TypeError if weights of norms have neither the model's dtype nor fp32."""
    for weight in weights:
        if weight is not None and weight.dtype not in (dtype, torch.float32):
            raise TypeError(f"want norms of {dtype} or of fp32, got {weight.dtype}")


@cache
def tuning_of(width: int) -> Tuning:
    """Return how to norm rows of a width: 16 elements per thread, with at most 16 warps."""
    return Tuning(warps=min(16, max(1, next_power_of_2(width) // 512)), overlaps=True)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    same_type(x, residual)
    check_norms(x.dtype, weight)
    check_contiguous(x, residual, weight)
    width = x.shape[-1]
    if not 0 < width <= _MAX_WIDTH:
        raise NotTakenError(f"rows of 1 to {_MAX_WIDTH} elements are normed, not of {width}")
    if weight.shape != (width,):
        raise TypeError(f"want weight ({width},), got {tuple(weight.shape)}")
    num_rows = x.numel() // width
    out = empty_rows(num_rows, width, x).view(x.shape)
    launch(
        norm_row,
        (num_rows,),
        x,
        x if residual is None else residual,
        weight,
        out,
        eps,
        tuning=tuning_of(width),
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        ADDS=residual is not None,
    )
    return out
