"""The model of Hopper's tensor core, against sums that tell its features apart."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.cuda.mma_model import multiply_add

ULP = 2.0**-23
QUARTER = (2.0**-12, 2.0**-13)
"""Whose product is a quarter of the last bit of 1."""
ZERO = (0.0, 0.0)


@pytest.mark.parametrize(
    ("factors", "c", "wanted"),
    [
        pytest.param([QUARTER] * 4, 1.0, 1 + ULP, id="25 bits are added exactly"),
        pytest.param([(2.0**-13, 2.0**-13)] * 16, 1.0, 1.0, id="lower bits are cut off before"),
        pytest.param([QUARTER] * 3, 1.0, 1.0, id="the sum is cut off and not rounded"),
        pytest.param([(-1.0, 1.0), *[(-(2.0**-12), 2.0**-13)] * 3], 0.0, -1.0, id="to zero"),
        pytest.param([*[QUARTER] * 3, *[ZERO] * 13, QUARTER], 1.0, 1.0, id="16 at a time"),
        pytest.param([(1.5, 1.5), (-1.5, 1.5), QUARTER], 0.0, ULP / 4, id="1.5 * 1.5 is of 2**0"),
        pytest.param([(2.0**-24, 1.0)], 2.0**-40, 2.0**-24, id="subnormal"),
        pytest.param([(0.0, 2.0**15), (2.0**-14, 1.0)], 0.0, 2.0**-14, id="zero"),
        pytest.param([(float("inf"), 1.0)], 1.0, float("inf"), id="infinite"),
    ],
)
def test_a_sum_has_the_bits_of_the_hardware(
    factors: list[tuple[float, float]], c: float, wanted: float
) -> None:
    a, b = np.zeros((2, 1, -(-len(factors) // 16) * 16), "f2")
    a[0, : len(factors)], b[0, : len(factors)] = zip(*factors, strict=True)
    assert multiply_add(a, b.T, np.full((1, 1), c, "f4")).item() == wanted


def test_what_is_no_number_stays_with_its_row() -> None:
    a = np.ones((2, 16), "f2")
    a[1, 3] = np.nan
    found = multiply_add(a, np.ones((16, 3), "f2"), np.zeros((2, 3), "f4"))
    assert (found[0] == 16).all()
    assert np.isnan(found[1]).all()


def test_sums_of_other_orders_have_other_bits() -> None:
    random = np.random.default_rng(1)
    a, b = (
        random.standard_normal((8, 64)).astype("f2"),
        random.standard_normal((64, 8)).astype("f2"),
    )
    zero = np.zeros((8, 8), "f4")
    ascending = multiply_add(a, b, zero)
    assert (multiply_add(a[:, ::-1], b[::-1], zero) != ascending).any()
    halves = multiply_add(a[:, :32], b[:32], zero) + multiply_add(a[:, 32:], b[32:], zero)
    assert (halves != ascending).any()
    other = np.arange(64).reshape(4, 16)[:, ::-1].ravel()  # within the 16, none matters
    assert (multiply_add(a[:, other], b[other], zero) == ascending).all()
