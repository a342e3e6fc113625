"""Ways to compute the product of a linear layer, of which the best for each shape is sought."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.timing import sized
from pdserve.kernels.cuda.launch import Tuning
from pdserve.kernels.cuda.linear import multiply
from pdserve.kernels.cuda.tiles import ProductTile

if TYPE_CHECKING:
    from torch import Tensor


def tile(rows: int, cols: int, depth: int, warps: int, stages: int, **more: Any) -> ProductTile:
    tuning = Tuning(warps, stages, overlaps=True)
    return ProductTile(rows=rows, cols=cols, depth=depth, tuning=tuning, **more)


DRY = [tile(16, 32, 32, 4, 3), tile(16, 64, 16, 4, 3, swapped=True), tile(32, 32, 16, 4, 3)]
FEW_ROWS = [
    tile(16, 16, 256, 4, 4),
    tile(16, 16, 512, 4, 3),
    tile(16, 32, 128, 4, 6),
    tile(16, 32, 256, 4, 3),
    tile(16, 32, 256, 4, 4),
    tile(16, 32, 512, 4, 3),
    tile(16, 32, 128, 2, 6),
    tile(16, 64, 128, 4, 3),
    tile(16, 64, 128, 4, 5),
    tile(16, 64, 256, 4, 3),
    tile(16, 64, 256, 8, 3),
    tile(16, 64, 64, 4, 8, swapped=True),
    tile(16, 64, 128, 4, 4, swapped=True),
    tile(16, 64, 128, 4, 5, swapped=True),
    tile(16, 64, 256, 4, 3, swapped=True),
    tile(16, 128, 128, 4, 3, swapped=True),
    tile(16, 128, 128, 8, 4, swapped=True),
]
SOME_ROWS = [
    tile(64, 16, 256, 4, 4),
    tile(64, 32, 128, 4, 4),
    tile(64, 32, 256, 4, 3),
    tile(64, 64, 64, 4, 5),
    tile(64, 64, 128, 4, 3),
    tile(64, 64, 128, 4, 4),
    tile(64, 64, 128, 4, 4, swapped=True),
    tile(64, 128, 64, 4, 4),
    tile(64, 128, 64, 4, 4, swapped=True),
    tile(64, 128, 128, 8, 3),
]
MANY_ROWS = [
    tile(64, 128, 64, 4, 4),
    tile(64, 256, 64, 4, 4),
    tile(128, 128, 64, 4, 4),
    tile(128, 128, 64, 8, 4),
    tile(128, 128, 128, 8, 3),
    tile(128, 256, 64, 8, 3),
    tile(128, 256, 64, 8, 4),
    tile(128, 256, 64, 8, 4, group=16),
    tile(256, 128, 64, 8, 3),
    tile(256, 128, 64, 8, 4, group=4),
]


DESCRIBED_FEW = [
    tile(16, 16, 256, 4, 4),
    tile(16, 32, 256, 4, 4),
    tile(16, 32, 256, 4, 6),
    tile(16, 32, 512, 4, 4),
    tile(16, 64, 128, 4, 5),
    tile(16, 64, 256, 4, 4),
    tile(16, 64, 128, 4, 5, swapped=True),
    tile(16, 64, 256, 4, 3, swapped=True),
    tile(16, 128, 128, 4, 3, swapped=True),
]
DESCRIBED_SOME = [
    tile(64, 32, 128, 4, 5),
    tile(64, 32, 256, 4, 4),
    tile(64, 64, 128, 4, 3),
    tile(64, 64, 128, 4, 5),
    tile(64, 64, 256, 4, 3),
    tile(64, 128, 64, 4, 4),
    tile(64, 128, 128, 4, 4),
]
DESCRIBED_MANY = [
    tile(128, 128, 64, 4, 4),
    tile(128, 128, 64, 8, 4),
    tile(128, 256, 64, 8, 3),
    tile(128, 256, 64, 8, 4),
    tile(128, 256, 64, 8, 4, group=16),
    tile(256, 128, 64, 8, 4),
]


BASE = sized(tile(128, 256, 64, 8, 3), DRY[-1])
"""Whose bits the others are compared with."""


def ways(tiles: list[ProductTile], described: list[ProductTile]) -> list[ProductTile]:
    return tiles + [replace(of, described=True) for of in described]


FEW, SOME, MANY = sized(
    (
        ways(FEW_ROWS, DESCRIBED_FEW),
        ways(SOME_ROWS, DESCRIBED_SOME),
        ways(MANY_ROWS, DESCRIBED_MANY),
    ),
    (ways(DRY, DRY[:2]),) * 3,
)


def swept(num_rows: int) -> list[ProductTile]:
    """Return the tiles worth timing for a number of rows."""
    if num_rows <= 16:
        return FEW
    return SOME if num_rows <= 64 else MANY


def named(of: ProductTile) -> str:
    tuning = of.tuning
    text = "tma " if of.described else ""
    text += f"{of.rows}x{of.cols}x{of.depth} w{tuning.warps} s{tuning.stages}"
    text += "" if of.group == 8 else f" g{of.group}"
    text += " swapped" if of.swapped else ""
    return text + (f" a{of.ahead}" if of.ahead else "")


def run_tile(of: ProductTile, x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write ``x @ weight.T`` to ``out``, of contiguous matrices."""
    multiply(x[:, None], weight[None], None, out[:, None], of)
