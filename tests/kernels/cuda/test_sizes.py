"""Rows that fill a product's tiles, behind those that are asked for."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.cuda.sizes import empty_rows, next_power_of_2, with_whole_tiles


@pytest.mark.parametrize(
    ("num_rows", "tile", "whole"),
    [(17, 64, 64), (64, 64, 64), (65, 64, 128), (65, 128, 128), (130, 256, 256), (300, 128, 384)],
)
def test_what_a_product_reads_has_rows_behind_that_fill_its_tiles(
    num_rows: int, tile: int, whole: int
) -> None:
    x = empty_rows(num_rows, 32, torch.empty(0, dtype=torch.bfloat16))
    assert x.shape == (num_rows, 32)
    tiles = with_whole_tiles(x, tile)
    assert tiles is not None
    assert (len(tiles), tiles.data_ptr(), tiles.stride()) == (whole, x.data_ptr(), x.stride())


def test_few_rows_have_none_behind() -> None:
    assert empty_rows(16, 32, torch.empty(0)).untyped_storage().nbytes() == 16 * 32 * 4


def test_rows_are_not_taken_from_behind_the_end_of_a_tensors_memory() -> None:
    x = torch.empty(70, 32)
    assert with_whole_tiles(x, 64) is None
    assert with_whole_tiles(x[:64], 64) is not None
    assert with_whole_tiles(x[3:], 64) is None
    part = with_whole_tiles(x[6:60], 64)
    assert part is not None
    assert (len(part), part.storage_offset()) == (64, 6 * 32)


def test_powers_of_2_are_those_at_or_above() -> None:
    assert [next_power_of_2(size) for size in (0, 1, 2, 3, 64, 65)] == [0, 1, 2, 4, 64, 128]
