"""What a tensor core of Hopper computes, bit for bit, in NumPy.

``mma.sync`` m16n8k16 and ``wgmma`` k16 of fp16 and bf16 are one operation (MMA-Sim, arXiv
2511.10909, which was compared with the hardware): 16 products and the accumulator are aligned to
the largest exponent among them, cut off 25 bits below it, added exactly, and what comes out is cut
off to fp32. A product's exponent is the sum of its factors', before normalization. A longer k is a
chain of such operations, ascending, each of which has the last one's result as its accumulator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_DEPTH = 16
_FRACTION_BITS = 25
_ZERO = -126
"""The exponent that a zero counts with, and of fp32 and bf16 the least."""

_Array = npt.NDArray[Any]


def multiply_add(a: _Array, b: _Array, c: _Array) -> _Array:
    """Return ``a @ b + c`` as a chain of Hopper's operations, ``[M, N]`` fp32.

    Args:
        a: ``[M, K]`` fp16, or fp32 that holds bf16; K is a multiple of 16.
        b: ``[K, N]``, likewise.
        c: ``[M, N]`` fp32.
    """
    for k in range(0, a.shape[1], _DEPTH):
        c = _fused(a[:, k : k + _DEPTH], b[k : k + _DEPTH], c)
    return c


def multiply_add_one_by_one(a: _Array, b: _Array, c: _Array) -> _Array:
    """Return ``a @ b + c`` of fp32 as plain cores add it: product by product, k ascending."""
    total = c
    for k in range(a.shape[1]):
        product = a[:, k : k + 1].astype("f8") * b[k].astype("f8")
        total = (total + product).astype("f4")
    return total


def _fused(a: _Array, b: _Array, c: _Array) -> _Array:
    a_exponent, b_exponent = _exponent(a), _exponent(b)
    top = _exponent(c)
    for k in range(a.shape[1]):
        np.maximum(top, a_exponent[:, k : k + 1] + b_exponent[k], out=top)
    unit = np.ldexp(1.0, _FRACTION_BITS - top)
    x, y, exact = a.astype("f8"), b.astype("f8"), c.astype("f8")
    total = np.zeros_like(exact)
    total += np.trunc(exact * unit)
    with np.errstate(invalid="ignore", over="ignore"):
        for k in range(a.shape[1]):
            total += np.trunc(x[:, k : k + 1] * y[k] * unit)
        exact += x @ y
        return np.where(np.isfinite(exact), _cut_off(total / unit), exact.astype("f4"))


def _exponent(x: _Array) -> _Array:
    """Return the exponents of the leading bits; subnormal numbers have the least normal one."""
    _, exponent = np.frexp(x)
    least = -14 if x.dtype == np.float16 else _ZERO
    return np.where(x == 0, _ZERO, np.maximum(exponent - 1, least))


def _cut_off(x: _Array) -> _Array:
    """Round fp64 to fp32 toward zero; what is 2**128 or more is infinite."""
    nearest = x.astype("f4")
    is_beyond = (np.abs(nearest.astype("f8")) > np.abs(x)) & (np.abs(x) < 2.0**128)
    return np.where(is_beyond, np.nextafter(nearest, np.float32(0)), nearest)
