"""The experts of a mixture-of-experts layer on a device: their weights, and their five launches.

Sizes that depend on routing stay on the device: each grid is large enough for any routing, and
programs without work end at once. A graph can capture all launches.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from pdserve.kernels.cuda.checks import check_float
from pdserve.kernels.cuda.fp8 import can_keep, run_of, write_fp8
from pdserve.kernels.cuda.launch import Tuning, launch
from pdserve.kernels.cuda.moe import (
    count_kernel,
    down_kernel,
    gate_up_kernel,
    sort_kernel,
    sum_kernel,
)
from pdserve.kernels.cuda.sizes import divided_up, next_power_of_2
from pdserve.kernels.cuda.tiles import experts_tiles
from pdserve.kernels.fp8 import Fp8Weight
from pdserve.kernels.reference.moe import PackedExperts

_MOST_PARTS_BYTES = 512 << 20
"""Limit for the experts' unsummed results; more tokens are computed in several rounds."""

_ALIGNMENT = 128
_IDS = 1024
_COLUMNS = 1024
_SORTING = Tuning(warps=4, overlaps=True)
_SUMMING = Tuning(warps=4, overlaps=True)


class CudaExperts(PackedExperts):
    """Experts in grouped products; weights lie as in `PackedExperts`, or in FP8 with their scales.

    The first weight that is written tells how all are kept. Ids of other experts, negative or too
    large, add nothing.

    Raises:
        NotTakenError: The dtype is none of bf16, fp16 and fp32.
    """

    def __init__(self, *sizes: int, **fields: Any) -> None:
        check_float(fields["dtype"])
        super().__init__(*sizes, **fields)

    def _allocate(self, num_experts: int, device: torch.device) -> None:
        self._bytes = torch.empty((num_experts, 0), dtype=torch.uint8, device=device)
        self._run: int | None = None
        self._scales: tuple[Tensor, Tensor] | None = None

    def keep(self, fp8: Fp8Weight | None = None) -> None:
        """Allocate all experts, unset: in FP8 if one of their weights is."""
        num_experts, device = len(self._bytes), self._bytes.device
        if fp8 is None:
            super()._allocate(num_experts, device)
            return
        width, inner, form = self._width, self._inner, self._form
        self._run = run_of(fp8)
        of_both, of_down = (divided_up(depth, self._run or depth) for depth in (width, inner))
        bias_size = self._dtype.itemsize * (2 * inner + width) if form.has_bias else 0
        sizes = (
            2 * inner * width,
            width * inner,
            4 * 2 * inner * of_both,
            4 * width * of_down,
            bias_size,
        )
        places = [0, *itertools.accumulate(_aligned(size) for size in sizes)]
        shape = num_experts, places[-1]
        self._bytes = torch.empty(shape, dtype=torch.uint8, device=device)
        both, down, both_scales, down_scales, bias = (
            self._bytes[:, place : place + size] for place, size in zip(places, sizes, strict=False)
        )
        self._gate_up = both.view(num_experts, 2 * inner, width)
        self._down = down.view(num_experts, width, inner)
        self._scales = (
            both_scales.view(torch.float32).view(num_experts, 2 * inner, of_both),
            down_scales.view(torch.float32).view(num_experts, width, of_down),
        )
        self._bias = bias.view(self._dtype)

    def write_down(self, local: int, weight: Tensor | Fp8Weight) -> None:
        """See `PackedExperts.write_down`."""
        self._prepare(weight)
        if self._scales is None or not isinstance(weight, Fp8Weight):
            assert self._scales is None
            super().write_down(local, weight)
            return
        write_fp8(weight, self._down[local], self._scales[1][local])

    def _write_gate_up(self, local: int, first: int, weight: Tensor | Fp8Weight) -> None:
        self._prepare(weight)
        if self._scales is None or not isinstance(weight, Fp8Weight):
            assert self._scales is None
            super()._write_gate_up(local, first, weight)
            return
        write_fp8(weight, self._gate_up[local, first:], self._scales[0][local, first:])

    def _write_bias(self, local: int, first: int, bias: Tensor) -> None:
        self._prepare(None)
        super()._write_bias(local, first, bias)

    def _prepare(self, weight: Tensor | Fp8Weight | None) -> None:
        if not self._bytes.shape[1]:
            self.keep(None if weight is None else can_keep(weight))

    def __call__(self, x: Tensor, local_ids: Tensor, weights: Tensor) -> Tensor:
        """See `PackedExperts.__call__`.

        Raises:
            TypeError: A dtype is wrong, or a tensor is strided.
        """
        if x.dtype != self._dtype or x.shape[1] != self._width:
            raise TypeError(f"want [T, {self._width}] {self._dtype}, got {x.shape} {x.dtype}")
        if local_ids.dtype != torch.int64 or weights.dtype != torch.float32:
            raise TypeError(f"want int64 and fp32, got {local_ids.dtype} and {weights.dtype}")
        if not (x.is_contiguous() and local_ids.is_contiguous() and weights.is_contiguous()):
            raise TypeError("want contiguous tensors")
        out = torch.empty_like(x)
        num_tokens, top_k = local_ids.shape
        most = max(1, _MOST_PARTS_BYTES // (4 * top_k * self._width))
        for first in range(0, num_tokens, most):
            turn = slice(first, first + most)
            self._sum_experts(x[turn], local_ids[turn], weights[turn], out[turn])
        return out

    def _sum_experts(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        num_tokens, top_k = ids.shape
        num_experts, width, inner = self._down.shape
        num_ids = ids.numel()
        gate_up_tile, down_tile = experts_tiles(num_ids, num_experts, x.dtype)
        if self._scales is not None:
            gate_up_tile, down_tile = gate_up_tile.for_fp8(), down_tile.for_fp8()
        of_both, of_down = self._biases or (None, None)
        glu = self._form.glu
        of_both_scales, of_down_scales = self._scales or (None, None)
        to_bias = 0 if of_both is None else of_both.stride(0)
        order, tiles = _sort(ids, num_experts, down_tile.rows)
        middle = torch.empty((num_ids, inner), dtype=x.dtype, device=x.device)
        launch(
            gate_up_kernel,
            (len(tiles) * divided_up(inner, gate_up_tile.cols),),
            x,
            self._gate_up,
            of_both_scales,
            of_both,
            middle,
            order,
            tiles,
            len(tiles),
            top_k,
            inner,
            width,
            1 if of_both_scales is None else of_both_scales.shape[2],
            inner * width,
            self._gate_up.stride(0),
            0 if of_both_scales is None else of_both_scales.stride(0),
            to_bias,
            tuning=gate_up_tile.tuning,
            RUN=self._run or 0,
            GROUP=gate_up_tile.group,
            ALPHA=None if glu is None else glu.alpha,
            LIMIT=None if glu is None else glu.limit,
            **gate_up_tile.constants(inner, width),
        )
        parts = torch.empty((num_ids, width), dtype=torch.float32, device=x.device)
        launch(
            down_kernel,
            (len(tiles) * divided_up(width, down_tile.cols),),
            middle,
            self._down,
            of_down_scales,
            of_down,
            parts,
            order,
            tiles,
            len(tiles),
            width,
            inner,
            1 if of_down_scales is None else of_down_scales.shape[2],
            self._down.stride(0),
            0 if of_down_scales is None else of_down_scales.stride(0),
            to_bias,
            tuning=down_tile.tuning,
            RUN=self._run or 0,
            GROUP=down_tile.group,
            **down_tile.constants(width, inner),
        )
        launch(
            sum_kernel,
            (num_tokens, divided_up(width, _COLUMNS)),
            parts,
            ids,
            weights,
            out,
            width,
            num_experts,
            tuning=_SUMMING,
            TOP_K=top_k,
            BLOCK=_COLUMNS,
        )


def _aligned(size: int) -> int:
    """Round bytes up to what vectors of a device begin at."""
    return divided_up(size, _ALIGNMENT) * _ALIGNMENT


def _sort(ids: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return ``order`` and ``tiles`` of `sort_kernel` for tiles with this number of rows."""
    num_ids = ids.numel()
    # Each expert that is chosen at all may fill its last tile by one row only.
    num_tiles = (num_ids + min(num_ids, num_experts) * (rows - 1)) // rows
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    order = torch.empty(num_ids, dtype=torch.int32, device=ids.device)
    tiles = torch.empty((num_tiles, 3), dtype=torch.int32, device=ids.device)
    launch(count_kernel, (num_experts,), ids, counts, num_ids, tuning=_SORTING, BLOCK=_IDS)
    launch(
        sort_kernel,
        (num_experts,),
        ids,
        counts,
        order,
        tiles,
        num_ids,
        num_tiles,
        num_experts,
        tuning=_SORTING,
        ROWS=rows,
        EXPERTS=next_power_of_2(num_experts),
        BLOCK=_IDS,
    )
    return order, tiles
