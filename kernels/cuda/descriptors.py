"""Descriptors of matrices, with which Hopper's copy engine (TMA) loads whole tiles.

A tile that extends beyond its matrix is filled with zeros there, and no thread computes addresses.
The host writes a descriptor into the launch's own arguments, so that a graph keeps it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pdserve.kernels.cuda.sizes import with_whole_tiles

if TYPE_CHECKING:
    from pdserve.kernels.cuda.tiles import ProductTile

_ALIGNMENT = 16
"""Alignment in bytes of a matrix and each of its rows."""


_MANY_ROWS = 1024
"""From this size on, one tile that is slow to load by descriptor costs less than loading all tiles
without descriptors."""


class Descriptors:
    """Descriptors of one matrix at a fixed address, each made once.

    Args:
        matrix: ``[N, K]``, contiguous.
    """

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix
        self._made: dict[tuple[int, int], TensorDescriptor] = {}

    def of_tiles(self, rows: int, cols: int) -> TensorDescriptor:
        """Return the descriptor of tiles ``[rows, cols]``."""
        found = self._made.get((rows, cols))
        if found is None:
            found = TensorDescriptor.from_tensor(self._matrix, [rows, cols])
            self._made[rows, cols] = found
        return found


def descriptors_of(
    x: Tensor, weight: Tensor, tile: ProductTile, kept: Descriptors | None
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Return the descriptors of both operands; None if they cannot or should not be described.

    Args:
        kept: Those of ``weight``, if its address is fixed.
    """
    whole = with_whole_tiles(x, tile.rows)
    if whole is None and len(x) > _MANY_ROWS:
        whole = x
    if whole is None or not can_describe(whole, weight):
        return None, None
    tiles = TensorDescriptor.from_tensor(whole, [tile.rows, tile.depth])
    return tiles, (kept or Descriptors(weight)).of_tiles(tile.cols, tile.depth)


def can_describe(*matrices: Tensor) -> bool:
    """Return whether each matrix has elements and can be described."""
    return all(
        matrix.numel() > 0 and matrix.stride(-1) == 1 and _is_aligned(matrix) for matrix in matrices
    )


def _is_aligned(tensor: Tensor) -> bool:
    """Return whether rows begin at multiples of 16 bytes."""
    row_bytes = tensor.stride(-2) * tensor.element_size()
    return row_bytes % _ALIGNMENT == 0 and tensor.data_ptr() % _ALIGNMENT == 0
