"""The product that linear layers, heads and experts share, inside a Triton kernel.

Each element is summed into one fp32 accumulator over ascending k, whatever the tile. On Hopper both
tensor core instructions (``mma.sync`` for 16 rows, ``wgmma`` for 64) add 16 products at a time in
the same way (arXiv 2511.10909), so the tile never changes the bits of bf16 and fp16.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(
    x_rows: tl.tensor,
    x_live: tl.tensor,
    weight_rows: tl.tensor,
    weight_live: tl.tensor,
    scale_rows: tl.tensor | None,
    depth: tl.tensor,
    RUN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAPPED: tl.constexpr,
) -> tl.tensor:
    """Multiply rows of ``x`` by rows of a weight, both contiguous along k.

    Args:
        x_rows: ``[BLOCK_M]`` pointers to rows.
        x_live: ``[BLOCK_M]``: whether the row exists; others count as zeros and are not read.
        weight_rows: ``[BLOCK_N]`` pointers to rows.
        weight_live: ``[BLOCK_N]``, likewise; unused if ``EVEN_N``.
        scale_rows: ``[BLOCK_N]`` pointers to the scales of rows in FP8; None: rows are as ``x``.
        depth: Elements of a row.
        RUN: Elements that share a scale, a multiple of ``BLOCK_K``; 0: all of a row.
        EVEN_N: Whether all rows of the weight exist.
        EVEN_K: Whether ``depth`` is a multiple of ``BLOCK_K``.
        SWAPPED: Whether the weight is the left operand of the tensor core instruction.

    Returns:
        ``[BLOCK_M, BLOCK_N]`` fp32.
    """
    k = tl.arange(0, BLOCK_K)
    if SWAPPED:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, depth, BLOCK_K):
        x = load_rows(x_rows, x_live, at + k, depth, False, EVEN_K)
        weight = load_rows(weight_rows, weight_live, at + k, depth, EVEN_N, EVEN_K)
        if scale_rows is not None:
            weight = widened(weight, scale_rows, weight_live, at, x.dtype, RUN, EVEN_N)
        if SWAPPED:
            total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
        else:
            total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    if SWAPPED:
        total = tl.trans(total)
    return total


@triton.jit
def product_pair(
    x_rows: tl.tensor,
    x_live: tl.tensor,
    weight_rows: tl.tensor,
    weight_live: tl.tensor,
    to_other: tl.tensor,
    scale_rows: tl.tensor | None,
    to_other_scale: tl.tensor,
    depth: tl.tensor,
    RUN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAPPED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return `product` of two weights.

    Args:
        to_other: Elements from the first to the second.
        to_other_scale: Likewise from scales to scales.
    """
    k = tl.arange(0, BLOCK_K)
    if SWAPPED:
        first = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        second = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        first = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        second = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, depth, BLOCK_K):
        x = load_rows(x_rows, x_live, at + k, depth, False, EVEN_K)
        one = load_rows(weight_rows, weight_live, at + k, depth, EVEN_N, EVEN_K)
        other = load_rows(weight_rows + to_other, weight_live, at + k, depth, EVEN_N, EVEN_K)
        if scale_rows is not None:
            other_scale_rows = scale_rows + to_other_scale
            one = widened(one, scale_rows, weight_live, at, x.dtype, RUN, EVEN_N)
            other = widened(other, other_scale_rows, weight_live, at, x.dtype, RUN, EVEN_N)
        if SWAPPED:
            first = tl.dot(one, tl.trans(x), first, input_precision="ieee")
            second = tl.dot(other, tl.trans(x), second, input_precision="ieee")
        else:
            first = tl.dot(x, tl.trans(one), first, input_precision="ieee")
            second = tl.dot(x, tl.trans(other), second, input_precision="ieee")
    if SWAPPED:
        first = tl.trans(first)
        second = tl.trans(second)
    return first, second


@triton.jit
def described_product(
    x: tl.tensor_descriptor,
    weight: tl.tensor_descriptor,
    row: tl.tensor,
    col: tl.tensor,
    depth: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAPPED: tl.constexpr,
) -> tl.tensor:
    """Return `product` of two matrices for the tile at the given row and column.

    Args:
        x: Descriptor with tiles ``[BLOCK_M, BLOCK_K]``, with zeros beyond the matrix.
        weight: The same with tiles ``[BLOCK_N, BLOCK_K]``.
    """
    if SWAPPED:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, depth, BLOCK_K):
        rows = x.load([row, at])
        cols = weight.load([col, at])
        if SWAPPED:
            total = tl.dot(cols, tl.trans(rows), total)
        else:
            total = tl.dot(rows, tl.trans(cols), total)
    if SWAPPED:
        total = tl.trans(total)
    return total


@triton.jit
def described_pair(
    x: tl.tensor_descriptor,
    weight: tl.tensor_descriptor,
    other_weight: tl.tensor_descriptor,
    row: tl.tensor,
    col: tl.tensor,
    other_col: tl.tensor,
    depth: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OTHER_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAPPED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return `described_product` of two weights, the other of tiles ``[OTHER_N, BLOCK_K]``."""
    if SWAPPED:
        first = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        second = tl.zeros([OTHER_N, BLOCK_M], tl.float32)
    else:
        first = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        second = tl.zeros([BLOCK_M, OTHER_N], tl.float32)
    for at in range(0, depth, BLOCK_K):
        rows = x.load([row, at])
        one = weight.load([col, at])
        other = other_weight.load([other_col, at])
        if SWAPPED:
            first = tl.dot(one, tl.trans(rows), first)
            second = tl.dot(other, tl.trans(rows), second)
        else:
            first = tl.dot(rows, tl.trans(one), first)
            second = tl.dot(rows, tl.trans(other), second)
    if SWAPPED:
        first = tl.trans(first)
        second = tl.trans(second)
    return first, second


@triton.jit
def load_rows(
    rows: tl.tensor,
    live: tl.tensor,
    k: tl.tensor,
    depth: tl.tensor,
    ALL_LIVE: tl.constexpr,
    EVEN_K: tl.constexpr,
) -> tl.tensor:
    """Load columns ``k`` of rows, with zeros where there are none."""
    at = rows[:, None] + k[None, :]
    if ALL_LIVE and EVEN_K:
        tile = tl.load(at)
    elif ALL_LIVE:
        tile = tl.load(at, mask=(k < depth)[None, :], other=0.0)
    elif EVEN_K:
        tile = tl.load(at, mask=live[:, None], other=0.0)
    else:
        tile = tl.load(at, mask=live[:, None] & (k < depth)[None, :], other=0.0)
    return tile


@triton.jit
def widened(
    tile: tl.tensor,
    scale_rows: tl.tensor,
    live: tl.tensor,
    at: tl.tensor,
    dtype: tl.constexpr,
    RUN: tl.constexpr,
    ALL_LIVE: tl.constexpr,
) -> tl.tensor:
    """Return rows of a weight in FP8, from column ``at`` on, times their scales, in a dtype.

    The bits of E4M3 are those of fp16, but for the place of the sign and a factor of 256; NaN is
    none of them. Architectures before sm_89 convert by no other way.
    """
    run = 0 if RUN == 0 else at // RUN
    if ALL_LIVE:
        scale = tl.load(scale_rows + run)
    else:
        scale = tl.load(scale_rows + run, mask=live, other=0.0)
    bits = tile.to(tl.uint16)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return (half.to(tl.float32) * (scale * 256.0)[:, None]).to(dtype)


@triton.jit
def place_of(
    program: tl.tensor, num_rows: tl.tensor, num_cols: tl.tensor, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return a program's row tile and column tile.

    Programs that run at once cover all columns of ``GROUP`` row tiles, so that their inputs stay in
    the L2 cache.
    """
    per_group = GROUP * num_cols
    first = program // per_group * GROUP
    size = tl.minimum(num_rows - first, GROUP)
    inside = program % per_group
    return first + inside % size, inside // size
