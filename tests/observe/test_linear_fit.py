"""A fit of times: what it makes of its own samples, and of what others have learned."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.observe.linear_fit import LinearFit
from pdserve.wire.learned import FitSums


def fitted(constant_s: float, each_s: float, num: int = 100) -> LinearFit:
    """One that has seen times of so much, and so much for each of some."""
    rng, fit = random.Random(0), LinearFit(3, min_samples=5)
    for _ in range(num):
        number = float(rng.randint(1, 50))
        fit.learn((1.0, number, number * number), constant_s + each_s * number)
    return fit


def told(*fits: LinearFit) -> LinearFit:
    """One that others have told what they have learned."""
    fit, sums = LinearFit(3), FitSums()
    for each in fits:
        sums = sums.plus(each.sums)
    fit.begin_with(sums)
    return fit


def test_a_measurement_that_is_far_too_small_is_not_believed():
    fit = LinearFit(3)
    for number in range(60):
        fit.learn((1.0, 1.0, 0.0), 1e-5 if number in (0, 30) else 0.0012)
    assert fit.predict((1.0, 1.0, 0.0)) == pytest.approx(0.0012, rel=0.1)


@given(
    st.lists(
        st.tuples(st.floats(0, 1e6), st.floats(0, 1e9), st.floats(0, 1e5)), min_size=1, max_size=40
    )
)
def test_a_fit_is_never_negative_nor_not_a_number(samples):
    fit = LinearFit(3)
    for one, other, value in samples:
        fit.learn((1.0, one, other), value)
        assert all(0 <= weight < float("inf") for weight in fit.weights)


def test_who_is_told_what_another_has_learned_knows_it_with_its_error():
    fit = told(fitted(0.01, 0.001))
    assert fit.is_known
    assert fit.weights == pytest.approx([0.01, 0.001, 0.0], rel=1e-3, abs=1e-8)
    assert fit.error < 0.01
    assert (fit.num_samples, fit.reported_share) == (0, 1.0)


def test_of_others_as_many_samples_are_needed_as_of_its_own_and_may_be_of_several():
    some = fitted(0.01, 0.001, num=10)
    assert not told(some).is_known
    assert told(some, some).is_known


def test_others_that_differ_are_one_with_an_error_as_large_as_their_difference():
    fit = told(fitted(0.01, 0.0), fitted(0.02, 0.0))
    assert 0.01 < fit.predict((1.0, 10.0, 100.0)) < 0.02
    assert 0.2 < fit.error < 0.4


def test_own_samples_take_over_from_what_others_have_learned():
    fit, found = told(fitted(0.01, 0.0)), []
    for _ in range(300):
        fit.learn((1.0, 10.0, 100.0), 0.016)
        found.append((fit.predict((1.0, 10.0, 100.0)), fit.error, fit.reported_share))
    assert found[0] == pytest.approx((0.0103, 0.02, 0.95), rel=0.2)
    assert 0.011 < found[19][0] < 0.015
    assert found[-1] == pytest.approx((0.016, 0.0, 0.0), abs=0.04)
    assert found[-1][0] == pytest.approx(0.016, rel=0.03)


def test_what_is_told_again_takes_the_place_of_what_was_told_before():
    fit = told(fitted(0.01, 0.0))
    fit.begin_with(fitted(0.03, 0.0).sums)
    assert fit.predict((1.0, 10.0, 100.0)) == pytest.approx(0.03, rel=1e-3)
    fit.begin_with(FitSums())
    assert not fit.is_known
