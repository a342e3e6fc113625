"""A packed weight that comes in pieces, and rows taken from one by id."""

from __future__ import annotations

import pytest
import torch

from pdserve.errors import InternalError
from pdserve.kernels.reference.linear import take_rows
from tests.kernels.builds import CPU, KERNELS, needs_native

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


# 33 columns pad the depth of a bf16 step; no piece ends where a group of 32 does.
@dtypes
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_pieces_in_any_order_make_the_whole_weight(
    dtype: torch.dtype, order: tuple[int, ...]
) -> None:
    weight, bias = torch.randn(101, 33).to(dtype), torch.randn(101).to(dtype)
    whole = KERNELS.linear_of(weight, bias)
    layer = KERNELS.linear(101, 33, dtype=dtype, device=CPU, has_bias=True)
    ends = [0, 5, 40, 70, 101]
    for piece in order:
        rows = slice(ends[piece], ends[piece + 1])
        layer.write(rows.start, weight[rows])
        layer.write_bias(rows.start, bias[rows])
    x = torch.randn(3, 33).to(dtype)

    assert torch.equal(layer.unpack(), weight)
    assert torch.equal(layer(x), whole(x))


@dtypes
def test_a_piece_may_be_a_slice_of_columns_and_of_another_dtype(dtype: torch.dtype) -> None:
    stored = torch.randn(50, 90)
    layer = KERNELS.linear(50, 30, dtype=dtype, device=CPU)
    layer.write(0, stored[:, 30:60])
    other = KERNELS.linear(50, 30, dtype=dtype, device=CPU)
    other.write(0, stored.to(dtype)[:, 30:60])

    assert torch.equal(layer.unpack(), stored[:, 30:60].to(dtype))
    assert torch.equal(other.unpack(), layer.unpack())


@dtypes
def test_rows_are_those_of_the_ids_and_zero_elsewhere(dtype: torch.dtype) -> None:
    weight = torch.randn(50, 33).to(dtype)
    ids = torch.randint(0, 211, (100,))
    expected = torch.zeros(100, 33, dtype=dtype)
    here = (ids >= 53) & (ids < 103)
    expected[here] = weight[ids[here] - 53]

    assert here.any()
    assert torch.equal(KERNELS.linear_of(weight).rows(ids, first_id=53, num_ids=211), expected)
    assert torch.equal(take_rows(weight, ids, first_id=53, num_ids=211), expected)


def test_a_weight_without_rows_multiplies_to_nothing_and_finds_nothing() -> None:
    layer = KERNELS.linear(0, 32, dtype=torch.float32, device=CPU)
    ids = torch.tensor([0, 3])

    assert layer(torch.randn(2, 32)).shape == (2, 0)
    assert torch.equal(layer.rows(ids, first_id=5, num_ids=5), torch.zeros(2, 32))
    assert torch.equal(
        take_rows(torch.empty(0, 32), ids, first_id=5, num_ids=5), torch.zeros(2, 32)
    )


@needs_native
@pytest.mark.parametrize("token", [-1, 50])
def test_an_id_that_there_is_nowhere_is_refused(token: int) -> None:
    with pytest.raises(InternalError, match="outside the table"):
        KERNELS.linear_of(torch.randn(50, 32)).rows(
            torch.tensor([0, token]), first_id=0, num_ids=50
        )
