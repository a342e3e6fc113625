"""The product of a linear layer, loaded through tensor descriptors (TMA): an experiment.

The same sums as `pdserve.kernels.cuda.linear`, whose tiles are loaded through pointers; if it is
faster, it belongs there.
"""

# ruff: noqa: N803  # constants of kernels are upper case

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pdserve.kernels.cuda.launch import launch
from pdserve.kernels.cuda.product import place_of

if TYPE_CHECKING:
    from torch import Tensor

    from pdserve.kernels.cuda.tiles import ProductTile


@triton.jit(do_not_specialize=["num_rows"])
def described_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_cols: tl.tensor,
    depth: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAPPED: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Compute one tile of ``x @ weight.T``; grid (tiles,)."""
    row_tile, col_tile = place_of(
        tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_cols, BLOCK_N), GROUP
    )
    row = row_tile * BLOCK_M
    col = col_tile * BLOCK_N
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
    m = row.to(tl.int64) + tl.arange(0, BLOCK_M)
    n = col + tl.arange(0, BLOCK_N)
    tl.store(
        out + (m * num_cols)[:, None] + n[None, :],
        total.to(out.dtype.element_ty),
        mask=(m < num_rows)[:, None] & (n < num_cols)[None, :],
    )


def multiply_described(x: Tensor, weight: Tensor, out: Tensor, tile: ProductTile) -> None:
    """Write ``x @ weight.T`` to ``out``; all contiguous matrices."""
    num_rows, depth = x.shape
    num_cols = len(weight)
    launch(
        described_kernel,
        (triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_cols, tile.cols),),
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.cols, tile.depth]),
        out,
        num_rows,
        num_cols,
        depth,
        tuning=tile.tuning,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.cols,
        BLOCK_K=tile.depth,
        SWAPPED=tile.swapped,
        GROUP=tile.group,
    )
