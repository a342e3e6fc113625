"""Tile sizes of matrix products: tables by architecture and shape, without autotuning.

The number of rows chooses a tile, and a tile never changes bits: for bf16 and fp16 because the
tensor core sums any tile in the same order (`product`), for fp32 because it has only one tile.

A product of at most 16 rows does not overlap with the kernel before it (`launch`): on an H100 a
layer's products and norms of one row take 164 us where no kernel overlaps and 176 us where all do,
and a decode step of Llama-3.1-8B 5.81 ms where only the kernels between products overlap, 6.30 ms
where products do too and have the L2 cache fetch weights meanwhile. For 64 rows overlapping saves 6
of 174 us; for 256 it changes nothing.

The times behind the tables are those of an H100 (benchmarks/results/2026-11-23-h100-*.json). Tables
of other architectures have only been compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from pdserve.kernels.cuda.launch import Tuning
from pdserve.kernels.cuda.sizes import FEW_ROWS, divided_up
from pdserve.kernels.cuda.target import Architecture, LaunchTarget, target

FP8_RUN = 128
"""Numbers of a weight in FP8 that share a scale are a multiple of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTile:
    """One program's part of a product, and how it is computed.

    Attributes:
        rows: Rows of ``x``: a power of two, at least 16.
        cols: Columns of the result, which are rows of the weight: likewise.
        depth: Elements of a row loaded at once: likewise.
        group: Row tiles whose columns are computed at about the same time.
        swapped: Whether the weight is the left operand, whose tile has at least 64 rows: few rows
            of ``x`` then still run as ``wgmma``, which reads the weight from shared memory.
        described: Whether both operands are loaded by descriptors, if their addresses allow it.
        tuning: How to compile the kernel.
        extra_cols: Columns beside ``cols``, with sums of their own: 0, or a power of two of at
            least 16. Only where both operands are loaded by descriptors.
    """

    rows: int
    cols: int
    depth: int
    tuning: Tuning
    group: int = 8
    swapped: bool = False
    described: bool = False
    extra_cols: int = 0

    def constants(self, num_cols: int, depth: int) -> dict[str, int | bool]:
        """Return the constants of a kernel for a weight ``[num_cols, depth]``."""
        return {
            "BLOCK_M": self.rows,
            "BLOCK_N": self.cols,
            "BLOCK_K": self.depth,
            "EVEN_N": num_cols % self.cols == 0,
            "EVEN_K": depth % self.depth == 0,
            "SWAPPED": self.swapped,
        }

    def for_fp8(self) -> ProductTile:
        """Return a tile for a weight in FP8, of which a step takes numbers of one scale per row."""
        depth = min(self.depth, FP8_RUN)
        return replace(self, depth=depth, described=False, extra_cols=0)

    def num_programs(self, num_rows: int, num_cols: int) -> int:
        """Return the number of such tiles in a product."""
        width = self.cols + self.extra_cols
        return divided_up(num_rows, self.rows) * divided_up(num_cols, width)


def _tile(rows: int, cols: int, depth: int, warps: int, stages: int, **more: Any) -> ProductTile:
    tuning = Tuning(warps, stages, overlaps=rows > FEW_ROWS)
    return ProductTile(rows=rows, cols=cols, depth=depth, tuning=tuning, **more)


# fp32 runs on the plain cores, whose order of summation is the compiler's for a tile's shape.
FP32 = _tile(32, 64, 16, 4, 3)

_Table = tuple[tuple[float, ProductTile], ...]
"""Maximum of a quantity, ascending -> tile; the last one applies to any number."""

_ANY = float("inf")


@dataclass(frozen=True, slots=True)
class _Cost:
    """Microseconds of a tile with depth 4096, alone on a multiprocessor.

    Attributes:
        rows: Numbers of rows that the tile is used for.
    """

    tile: ProductTile
    us: float
    rows: range = range(1 << 31)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """The tiles of one architecture.

    Attributes:
        few: For at most `FEW_ROWS`, by columns per multiprocessor. The time is that of reading the
            weight, in which every multiprocessor should take part: narrow tiles if 64 columns per
            program would leave half of them idle, wide ones if there are several programs for each.
        some: For at most `_SOME_ROWS`, likewise.
        many: For more. The time is that of the tensor cores, and a multiprocessor that has no tile
            of the last wave waits for the others. So time is waves times that of a tile.
        heads: For many small products at once, by rows.
        gate_up: For two products at once, with twice the weight and the sums of a tile, by rows.
        down: For the experts' products after those, by rows; the same numbers of rows as
            ``gate_up``.
    """

    few: _Table
    some: _Table
    many: tuple[_Cost, ...]
    heads: _Table
    gate_up: _Table
    down: _Table


_SOME_ROWS = 64
_MEASURED = range(129, 1025)
"""With fewer rows reading the weight takes the time, and too few programs ask for it."""

# Heads, gate and up, down: not measured, chosen by registers and shared memory.
_HOPPER = _Tables(
    few=(
        (32, _tile(16, 32, 256, 4, 4)),
        (128, _tile(16, 64, 128, 4, 5, swapped=True)),
        (_ANY, _tile(16, 128, 128, 8, 4, swapped=True)),
    ),
    some=(
        (32, _tile(64, 32, 256, 4, 4, described=True)),
        (128, _tile(64, 64, 128, 4, 5, described=True)),
        (_ANY, _tile(64, 64, 128, 4, 3, described=True)),
    ),
    many=(
        _Cost(_tile(256, 128, 64, 8, 4, described=True), 46.5),
        _Cost(_tile(128, 256, 64, 8, 4, described=True, swapped=True), 43.6, _MEASURED),
        _Cost(_tile(128, 128, 64, 8, 5, described=True, extra_cols=64), 40.4),
        _Cost(_tile(128, 128, 64, 4, 6, described=True, extra_cols=32), 34.6),
        _Cost(_tile(128, 128, 64, 4, 6, described=True), 24.9),
        _Cost(_tile(64, 256, 64, 4, 5, described=True), 26.4),
        _Cost(_tile(64, 128, 128, 4, 4, described=True, extra_cols=32), 19.9),
        _Cost(_tile(64, 128, 128, 4, 4, described=True), 16.9),
        _Cost(_tile(64, 64, 128, 4, 5, described=True, extra_cols=32), 16.5),
        _Cost(_tile(64, 64, 128, 4, 5, described=True), 15.1),
    ),
    heads=(
        (16, _tile(16, 32, 128, 4, 4)),
        (64, _tile(64, 64, 128, 4, 3)),
        (_ANY, _tile(128, 128, 64, 8, 4)),
    ),
    gate_up=(
        (16, _tile(16, 32, 128, 4, 5)),
        (64, _tile(64, 64, 64, 4, 4, described=True)),
        (_ANY, _tile(128, 128, 64, 8, 3, described=True)),
    ),
    down=(
        (16, _tile(16, 64, 128, 4, 5)),
        (64, _tile(64, 64, 128, 4, 3)),
        (_ANY, _tile(128, 128, 64, 8, 4)),
    ),
)

# No tile of these has run: they are Hopper's, with fewer stages where shared memory is less.
_AMPERE = _Tables(
    few=(
        (32, _tile(16, 32, 256, 4, 4)),
        (128, _tile(16, 64, 128, 4, 5)),
        (_ANY, _tile(16, 128, 128, 8, 4)),
    ),
    some=(
        (32, _tile(64, 32, 256, 4, 3)),
        (128, _tile(64, 64, 128, 4, 4)),
        (_ANY, _tile(64, 64, 128, 4, 3)),
    ),
    many=(
        _Cost(_tile(256, 128, 64, 8, 3), 46.5),
        _Cost(_tile(128, 128, 64, 8, 4), 27.0),
        _Cost(_tile(64, 128, 128, 4, 3), 17.9),
        _Cost(_tile(64, 64, 128, 4, 4), 14.9),
    ),
    heads=_HOPPER.heads,
    gate_up=(
        (16, _tile(16, 32, 128, 4, 5)),
        (64, _tile(64, 64, 64, 4, 4)),
        (_ANY, _tile(128, 128, 64, 8, 3)),
    ),
    down=_HOPPER.down,
)
_ADA = _Tables(
    few=(
        (32, _tile(16, 32, 256, 4, 3)),
        (128, _tile(16, 64, 128, 4, 4)),
        (_ANY, _tile(16, 128, 64, 4, 4)),
    ),
    some=(
        (32, _tile(64, 32, 128, 4, 3)),
        (_ANY, _tile(64, 64, 64, 4, 4)),
    ),
    many=(
        _Cost(_tile(256, 128, 32, 8, 3), 46.5),
        _Cost(_tile(128, 128, 32, 8, 4), 27.0),
        _Cost(_tile(64, 128, 64, 4, 3), 17.9),
        _Cost(_tile(64, 64, 64, 4, 4), 14.9),
    ),
    heads=(
        (16, _tile(16, 32, 128, 4, 4)),
        (64, _tile(64, 64, 64, 4, 4)),
        (_ANY, _tile(128, 128, 32, 8, 4)),
    ),
    gate_up=(
        (16, _tile(16, 32, 128, 4, 4)),
        (64, _tile(64, 64, 64, 4, 3)),
        (_ANY, _tile(128, 128, 32, 8, 3)),
    ),
    down=(
        (16, _tile(16, 64, 128, 4, 4)),
        (64, _tile(64, 64, 64, 4, 4)),
        (_ANY, _tile(128, 128, 32, 8, 4)),
    ),
)
_TABLES = {
    Architecture.SM_80: _AMPERE,
    Architecture.SM_89: _ADA,
    Architecture.SM_90: _HOPPER,
    Architecture.SM_100: _HOPPER,
}


def linear_tile(num_rows: int, num_cols: int, dtype: torch.dtype) -> ProductTile:
    """Return the tile of ``[num_rows, K] @ [num_cols, K].T``: K lengthens all waves equally."""
    return FP32 if dtype == torch.float32 else _half_tile(num_rows, num_cols, target())


@lru_cache(4096)
def _half_tile(num_rows: int, num_cols: int, here: LaunchTarget) -> ProductTile:
    tables, multiprocessors = _TABLES[here.architecture], here.multiprocessors
    if num_rows <= _SOME_ROWS:
        table = tables.few if num_rows <= FEW_ROWS else tables.some
        return _chosen(table, num_cols / multiprocessors)

    def us(of: _Cost) -> float:
        return divided_up(of.tile.num_programs(num_rows, num_cols), multiprocessors) * of.us

    return min((of for of in tables.many if num_rows in of.rows), key=us).tile


def heads_tile(num_rows: int, dtype: torch.dtype) -> ProductTile:
    """Return the tile for many small products at once; see `linear_tile`."""
    if dtype == torch.float32:
        return FP32
    return _chosen(_here().heads, num_rows)


GATED_ROWS = 64
"""Maximum rows of ``x`` whose gate and up are computed at once with their activation: the best
tiles for more rows have no registers left for twice the sums."""


def gated_tile(num_rows: int, dtype: torch.dtype) -> ProductTile:
    """Return the tile of a product whose gate and up are computed together."""
    return FP32 if dtype == torch.float32 else _chosen(_here().gate_up, num_rows)


def experts_tiles(
    num_choices: int, num_experts: int, dtype: torch.dtype
) -> tuple[ProductTile, ProductTile]:
    """Return the tiles of gate and up, and of down, with equal rows, by rows per expert."""
    if dtype == torch.float32:
        return FP32, FP32
    mean = num_choices / num_experts
    return _chosen(_here().gate_up, mean), _chosen(_here().down, mean)


def _here() -> _Tables:
    return _TABLES[target().architecture]


def _chosen(table: _Table, size: float) -> ProductTile:
    return next(tile for most, tile in table if size <= most)
