"""Sizes that the host computes for a launch.

They are plain integers, because Triton's own functions, which kernels may also call, take
microseconds each.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

FEW_ROWS = 16
"""Maximum rows of a product whose tiles are not loaded by descriptors, and whose programs do not
overlap with the previous kernel."""
_ROWS = (64, 128, 256)
"""Rows of tiles that are, ascending."""


def divided_up(size: int, by: int) -> int:
    """Return ``size / by``, rounded up."""
    return -(-size // by)


@cache
def next_power_of_2(size: int) -> int:
    """Return the least power of 2 that is at least ``size``, which is positive or 0."""
    return 1 << max(0, size - 1).bit_length() if size else 0


def empty_rows(num_rows: int, width: int, like: Tensor) -> Tensor:
    """Allocate ``[num_rows, width]`` for a product to read, with extra rows that fill its tiles.

    Tiles that reach beyond a matrix are slow to load by descriptor: on an H100 a product of 17 rows
    takes 1.25 to 1.5 times as long, one of 65 rows 1.2 to 1.6 times. The extra rows have arbitrary
    contents, which affect no kept row.
    """
    whole = num_rows
    if num_rows > FEW_ROWS:
        tile = next((rows for rows in _ROWS if num_rows <= rows), _ROWS[-1])
        whole = divided_up(num_rows, tile) * tile
    return torch.empty((whole, width), dtype=like.dtype, device=like.device)[:num_rows]


def with_whole_tiles(x: Tensor, rows: int) -> Tensor | None:
    """Return ``x``, ``[M, K]``, extended in memory to the end of its last tile of ``rows``.

    Returns:
        None if its memory ends earlier.
    """
    num_rows = divided_up(len(x), rows) * rows
    if num_rows == len(x):
        return x
    end = x.storage_offset() + num_rows * x.stride(0)
    if end * x.element_size() > x.untyped_storage().nbytes():
        return None
    return x.as_strided((num_rows, x.shape[1]), x.stride())
