"""Tiles of the matrix products: tables by shape, and no measuring at run time.

How many rows there are chooses a tile, and a tile never changes bits: of bf16 and fp16 because the
tensor core sums any tile in the same order (`product`), of fp32 because it has only one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pdserve.kernels.cuda.launch import Tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTile:
    """What one program computes of a product, and how.

    Attributes:
        rows: Of ``x``: a power of two, at least 16.
        cols: Of the result, which are rows of the weight: likewise.
        depth: Elements of a row that are loaded at once: likewise.
        group: Row tiles whose columns are computed at about the same time.
        swapped: The weight is the left operand, whose tile has at least 64 rows: few rows of ``x``
            then still run as ``wgmma``, which reads the weight from shared memory.
        tuning: How the kernel is compiled.
    """

    rows: int
    cols: int
    depth: int
    tuning: Tuning
    group: int = 8
    swapped: bool = False

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


_Table = tuple[tuple[int, ProductTile], ...]
"""Most rows, ascending -> tile; the last takes any number."""

_ANY = 1 << 62

# fp32 runs on the plain cores, whose order of summation is the compiler's for a tile's shape.
FP32 = ProductTile(rows=32, cols=64, depth=16, tuning=Tuning(4, 3))

_DECODE_16 = ProductTile(rows=16, cols=32, depth=256, tuning=Tuning(4, 4))
_DECODE_16_WIDE = ProductTile(rows=16, cols=64, depth=128, tuning=Tuning(4, 5))
_DECODE_64 = ProductTile(rows=64, cols=64, depth=128, tuning=Tuning(4, 3))
_MIXED = ProductTile(rows=128, cols=128, depth=64, tuning=Tuning(8, 4))
_PREFILL = ProductTile(rows=128, cols=256, depth=64, tuning=Tuning(8, 3))

_NARROW: _Table = ((16, _DECODE_16), (64, _DECODE_64), (512, _MIXED), (_ANY, _PREFILL))
_WIDE: _Table = ((16, _DECODE_16_WIDE), (64, _DECODE_64), (512, _MIXED), (_ANY, _PREFILL))

# Not measured: chosen by registers and shared memory.
_BY_SHAPE: Mapping[tuple[int, int], _Table] = {}

# From so many columns on, tiles of 64 give every multiprocessor several.
_WIDE_FROM = 8192


def linear_tile(num_rows: int, num_cols: int, depth: int, dtype: torch.dtype) -> ProductTile:
    """Return the tile of ``[num_rows, depth] @ [num_cols, depth].T``."""
    if dtype == torch.float32:
        return FP32
    table = _BY_SHAPE.get((num_cols, depth), _WIDE if num_cols >= _WIDE_FROM else _NARROW)
    return _chosen(table, num_rows)


_HEADS: _Table = (
    (16, ProductTile(rows=16, cols=32, depth=128, tuning=Tuning(4, 4))),
    (64, _DECODE_64),
    (_ANY, _MIXED),
)


def heads_tile(num_rows: int, dtype: torch.dtype) -> ProductTile:
    """Return the tile of many small products at once, as of `linear_tile`."""
    if dtype == torch.float32:
        return FP32
    return _chosen(_HEADS, num_rows)


# Gate and up are two products at once: twice the weight and the sums of a tile.
_GATE_UP: _Table = (
    (16, ProductTile(rows=16, cols=32, depth=128, tuning=Tuning(4, 5))),
    (64, ProductTile(rows=64, cols=64, depth=64, tuning=Tuning(4, 4))),
    (_ANY, ProductTile(rows=128, cols=128, depth=64, tuning=Tuning(8, 3))),
)
_DOWN: _Table = (
    (16, _DECODE_16_WIDE),
    (64, _DECODE_64),
    (_ANY, ProductTile(rows=128, cols=128, depth=64, tuning=Tuning(8, 4))),
)


def gated_tile(num_rows: int, dtype: torch.dtype) -> ProductTile:
    """Return the tile of a product whose gate and up are computed together."""
    return FP32 if dtype == torch.float32 else _chosen(_GATE_UP, num_rows)


def experts_tiles(
    num_choices: int, num_experts: int, dtype: torch.dtype
) -> tuple[ProductTile, ProductTile]:
    """Return the tiles of gate and up, and of down, of as many rows, by rows for an expert."""
    if dtype == torch.float32:
        return FP32, FP32
    mean = num_choices / num_experts
    return _chosen(_GATE_UP, mean), _chosen(_DOWN, mean)


def _chosen(table: _Table, num_rows: float) -> ProductTile:
    return next(tile for most, tile in table if num_rows <= most)
