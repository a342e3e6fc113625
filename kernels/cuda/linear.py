"""Products with row-major weights: linear layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.activation import gated
from pdserve.kernels.cuda.checks import check_float
from pdserve.kernels.cuda.descriptors import Descriptors, descriptors_of
from pdserve.kernels.cuda.fp8 import RunScales, can_keep, write_fp8
from pdserve.kernels.cuda.launch import launch, wait_for_previous
from pdserve.kernels.cuda.product import (
    described_pair,
    described_product,
    place_of,
    product,
    product_pair,
)
from pdserve.kernels.cuda.sizes import empty_rows
from pdserve.kernels.cuda.tiles import ProductTile, gated_tile, linear_tile
from pdserve.kernels.fp8 import Fp8Weight
from pdserve.kernels.reference.linear import PackedLinear


@triton.jit(do_not_specialize=["num_rows"])
def multiply_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor | None,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_cols: tl.tensor,
    depth: tl.tensor,
    num_runs: tl.tensor,
    x_row: tl.tensor,
    out_row: tl.tensor,
    x_head: tl.tensor,
    out_head: tl.tensor,
    x_tiles: tl.tensor_descriptor | None,
    weight_tiles: tl.tensor_descriptor | None,
    extra_tiles: tl.tensor_descriptor | None,
    RUN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXTRA_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAPPED: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Compute one tile of ``out[:, h] = x[:, h] @ weight[h].T + bias``; grid (tiles, heads).

    Args:
        x: ``[num_rows, heads, depth]``, strides ``x_row``, ``x_head`` and 1.
        weight: ``[heads, num_cols, depth]``, contiguous.
        scales: ``[heads, num_cols, num_runs]`` fp32 of a weight in FP8, see `product`; or None.
        bias: ``[num_cols]``; read if ``HAS_BIAS``.
        out: ``[num_rows, heads, num_cols]``, strides ``out_row``, ``out_head`` and 1.
        x_tiles: None, or the descriptor of ``x`` with one head.
        weight_tiles: None, or the same for ``weight``.
        extra_tiles: ``weight`` by tiles of ``EXTRA_N`` rows; None where that is 0.
    """
    wait_for_previous(OVERLAPS)
    head = tl.program_id(1).to(tl.int64)
    WIDTH: tl.constexpr = BLOCK_N + EXTRA_N
    row_tile, col_tile = place_of(
        tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_cols, WIDTH), GROUP
    )
    col = col_tile * WIDTH
    if EXTRA_N:
        # The last tile begins earlier instead of ending beyond the weight, which is slow to load:
        # what two programs compute has the same bits. In units of 16 columns, to store 16 bytes.
        last = tl.cdiv(tl.maximum(num_cols - WIDTH, 0), 16)
        col = tl.minimum(col_tile * (WIDTH // 16), last) * 16
    m = row_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = col.to(tl.int64) + tl.arange(0, BLOCK_N)
    weight_rows = weight + (head * num_cols + n) * depth
    scale_rows = None
    if scales is not None:
        scale_rows = scales + (head * num_cols + n) * num_runs
    if x_tiles is None:
        total = product(
            x + head * x_head + m * x_row,
            m < num_rows,
            weight_rows,
            n < num_cols,
            scale_rows,
            depth,
            RUN,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            EVEN_N,
            EVEN_K,
            SWAPPED,
        )
    elif EXTRA_N:
        total, extra = described_pair(
            x_tiles,
            weight_tiles,
            extra_tiles,
            row_tile * BLOCK_M,
            col,
            col + BLOCK_N,
            depth,
            BLOCK_M,
            BLOCK_N,
            EXTRA_N,
            BLOCK_K,
            SWAPPED,
        )
    else:
        total = described_product(
            x_tiles,
            weight_tiles,
            row_tile * BLOCK_M,
            col,
            depth,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            SWAPPED,
        )
    out += head * out_head
    _store(out, total, m, n, num_rows, num_cols, out_row, bias, HAS_BIAS)
    if EXTRA_N:
        n = col.to(tl.int64) + BLOCK_N + tl.arange(0, EXTRA_N)
        _store(out, extra, m, n, num_rows, num_cols, out_row, bias, HAS_BIAS)


@triton.jit
def _store(
    out: tl.tensor,
    total: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    num_rows: tl.tensor,
    num_cols: tl.tensor,
    out_row: tl.tensor,
    bias: tl.tensor,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Store ``total`` and its bias to rows ``m`` and columns ``n`` of what is there of ``out``."""
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < num_cols, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + (m * out_row)[:, None] + n[None, :],
        total.to(out.dtype.element_ty),
        mask=(m < num_rows)[:, None] & (n < num_cols)[None, :],
    )


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: ProductTile,
    kept: Descriptors | None = None,
    *,
    scales: RunScales | None = None,
) -> None:
    """Write ``x[:, h] @ weight[h].T + bias`` to ``out[:, h]``, summed in fp32 and rounded once.

    Args:
        x: ``[M, H, K]``, elements contiguous.
        weight: ``[H, N, K]``, contiguous; the bytes of FP8 with ``scales``.
        bias: ``[N]`` or None.
        out: ``[M, H, N]``, elements contiguous.
        tile: Any tile, but for fp32 always the same one.
        kept: Descriptors of ``weight``, if its address is fixed.
        scales: Of a weight in FP8 and one head.
    """
    num_rows, num_heads, depth = x.shape
    num_cols = weight.shape[1]
    x_tiles = weight_tiles = extra_tiles = None
    if scales is not None:
        tile = tile.for_fp8()
    if tile.described and num_heads == 1:
        kept = kept or Descriptors(weight[0])
        x_tiles, weight_tiles = descriptors_of(x[:, 0], weight[0], tile, kept)
        if tile.extra_cols and weight_tiles:
            extra_tiles = kept.of_tiles(tile.extra_cols, tile.depth)
    if tile.extra_cols and extra_tiles is None:
        tile = replace(tile, extra_cols=0)
    grid = tile.num_programs(num_rows, num_cols), num_heads
    launch(
        multiply_kernel,
        grid,
        x,
        weight,
        None if scales is None else scales.values,
        x if bias is None else bias,
        out,
        num_rows,
        num_cols,
        depth,
        1 if scales is None else scales.values.shape[1],
        x.stride(0),
        out.stride(0),
        x.stride(1),
        out.stride(1),
        x_tiles,
        weight_tiles,
        extra_tiles,
        tuning=tile.tuning,
        RUN=0 if scales is None else scales.run,
        EXTRA_N=tile.extra_cols,
        GROUP=tile.group,
        HAS_BIAS=bias is not None,
        **tile.constants(num_cols, depth),
    )


@triton.jit(do_not_specialize=["num_rows"])
def multiply_gated_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor | None,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    inner: tl.tensor,
    depth: tl.tensor,
    num_runs: tl.tensor,
    to_up: tl.tensor,
    x_tiles: tl.tensor_descriptor | None,
    weight_tiles: tl.tensor_descriptor | None,
    RUN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAPPED: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Compute one tile of ``silu_and_mul(x @ weight.T + bias)``; grid (tiles,).

    Args:
        x: ``[num_rows, depth]``, contiguous.
        weight: ``[2 * inner, depth]``, contiguous: gate and, ``to_up`` elements after it, up.
        scales: ``[2 * inner, num_runs]`` fp32 of a weight in FP8; or None.
        bias: ``[2 * inner]``; read if ``HAS_BIAS``.
        out: ``[num_rows, inner]``, contiguous.
        x_tiles: As of `multiply_kernel`; ``weight_tiles`` likewise.
    """
    wait_for_previous(OVERLAPS)
    row_tile, col_tile = place_of(
        tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.cdiv(inner, BLOCK_N), GROUP
    )
    m = row_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_rows = weight + n.to(tl.int64) * depth
    scale_rows = None
    if scales is not None:
        scale_rows = scales + n * num_runs
    if x_tiles is None:
        gate, up = product_pair(
            x + m * depth,
            m < num_rows,
            weight_rows,
            n < inner,
            to_up,
            scale_rows,
            inner * num_runs,
            depth,
            RUN,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            EVEN_N,
            EVEN_K,
            SWAPPED,
        )
    else:
        gate, up = described_pair(
            x_tiles,
            weight_tiles,
            weight_tiles,
            row_tile * BLOCK_M,
            col_tile * BLOCK_N,
            col_tile * BLOCK_N + inner,
            depth,
            BLOCK_M,
            BLOCK_N,
            BLOCK_N,
            BLOCK_K,
            SWAPPED,
        )
    if HAS_BIAS:
        gate += tl.load(bias + n, mask=n < inner, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + inner + n, mask=n < inner, other=0.0).to(tl.float32)[None, :]
    dtype = out.dtype.element_ty
    tl.store(
        out + (m * inner)[:, None] + n[None, :],
        gated(gate.to(dtype), up.to(dtype)),
        mask=(m < num_rows)[:, None] & (n < inner)[None, :],
    )


def multiply_gated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: ProductTile,
    kept: Descriptors | None = None,
    *,
    scales: RunScales | None = None,
) -> None:
    """Write ``silu_and_mul(x @ weight.T + bias)`` to ``out``, with the bits of both in turn.

    Args:
        x: ``[M, K]``, contiguous.
        weight: ``[2 * I, K]``, contiguous.
        bias: ``[2 * I]`` or None.
        out: ``[M, I]``, contiguous, of the same dtype.
        tile: See `multiply`; its columns count for gate and for up.
        kept: See `multiply`; ``scales`` likewise.
    """
    num_rows, depth = x.shape
    inner = len(weight) // 2
    x_tiles = weight_tiles = None
    if scales is not None:
        tile = tile.for_fp8()
    if tile.described:
        x_tiles, weight_tiles = descriptors_of(x, weight, tile, kept)
    launch(
        multiply_gated_kernel,
        (tile.num_programs(num_rows, inner),),
        x,
        weight,
        None if scales is None else scales.values,
        x if bias is None else bias,
        out,
        num_rows,
        inner,
        depth,
        1 if scales is None else scales.values.shape[1],
        inner * depth,
        x_tiles,
        weight_tiles,
        tuning=tile.tuning,
        RUN=0 if scales is None else scales.run,
        GROUP=tile.group,
        HAS_BIAS=bias is not None,
        **tile.constants(inner, depth),
    )


class CudaLinear(PackedLinear):
    """A linear layer, one launch; the weight lies as in `PackedLinear`, or so in FP8.

    The first rows that are written tell how the weight is kept.

    Raises:
        NotTakenError: The dtype is none of bf16, fp16 and fp32.
    """

    _scales: RunScales | None = None
    _descriptors: Descriptors | None = None

    def __init__(self, *sizes: int, **fields: Any) -> None:
        check_float(fields["dtype"])
        super().__init__(*sizes, **fields)

    def _allocate(self, device: torch.device, *, has_bias: bool) -> None:
        self._weight = torch.empty(0, dtype=torch.uint8, device=device)
        self._bias = None
        if has_bias:
            self._bias = torch.empty(self.out_features, dtype=self.dtype, device=device)

    def keep(self, fp8: Fp8Weight | None = None) -> None:
        """Allocate the weight, unset: in FP8 if there are such rows of it."""
        shape, device = (self.out_features, self.in_features), self._weight.device
        dtype = self.dtype if fp8 is None else torch.uint8
        self._weight = torch.empty(shape, dtype=dtype, device=device)
        if fp8 is None:
            self._descriptors = Descriptors(self._weight)
        else:
            self._scales = RunScales.of(fp8, self.out_features, device)

    def write(self, first: int, weight: Tensor | Fp8Weight) -> None:
        """See `PackedLinear.write`."""
        fp8 = can_keep(weight)
        if not len(self._weight):
            self.keep(fp8)
        if fp8 is None or self._scales is None:
            assert self._scales is None
            super().write(first, weight)
            return
        write_fp8(fp8, self._weight[first:], self._scales.values[first:])

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `PackedLinear.__call__`."""
        self._check(x, out)
        num_rows = len(x)
        if out is None:
            out = torch.empty((num_rows, self.out_features), dtype=self.out_dtype, device=x.device)
        tile = linear_tile(num_rows, self.out_features, self.dtype)
        multiply(
            x[:, None],
            self._weight[None],
            self._bias,
            out[:, None],
            tile,
            self._descriptors,
            scales=self._scales,
        )
        return out

    def call_gated(self, x: Tensor) -> Tensor:
        """Return ``silu_and_mul(self(x))`` in one launch, ``[M, N / 2]``, bit for bit.

        Raises:
            TypeError: As for a call.
        """
        self._check(x, None)
        out = empty_rows(len(x), self.out_features // 2, x)
        tile = gated_tile(len(x), self.dtype)
        kept, scales = self._descriptors, self._scales
        multiply_gated(x, self._weight, self._bias, out, tile, kept, scales=scales)
        return out
