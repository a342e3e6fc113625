from __future__ import annotations

import math

import numpy as np
import pytest

from pdserve.bench.arrivals import ArrivalLaw, cancel_some, due_times, schedule
from pdserve.bench.records import Planned
from pdserve.config.bench import RampUp
from pdserve.errors import ConfigError


def plan(number: int, **fields: object) -> list[Planned]:
    return [
        Planned(**{"index": index, "prompt": "x", "max_tokens": 10, **fields})  # type: ignore[arg-type]
        for index in range(number)
    ]


def gaps(arrivals: ArrivalLaw, number: int = 5000, seed: int = 3) -> np.ndarray:
    return np.diff([0.0, *due_times(number, arrivals, seed)])


def test_without_a_rate_all_are_due_at_once() -> None:
    assert due_times(3, ArrivalLaw(), 0) == [0.0, 0.0, 0.0]


def test_an_infinite_burstiness_is_a_constant_gap() -> None:
    times = due_times(4, ArrivalLaw(rate=4, burstiness=math.inf), 0)
    assert times == pytest.approx([0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_vary_as_a_gamma_distribution_of_that_shape(burstiness: float) -> None:
    found = gaps(ArrivalLaw(rate=10, burstiness=burstiness))
    assert found.mean() == pytest.approx(0.1)
    assert found.std() / found.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.08)


def test_the_last_request_is_due_when_the_rate_says() -> None:
    assert due_times(50, ArrivalLaw(rate=10), 1)[-1] == pytest.approx(5.0)


@pytest.mark.parametrize(("ramp", "middle"), [(RampUp.LINEAR, 8.5), (RampUp.EXPONENTIAL, 4.0)])
def test_a_ramp_follows_its_rate_from_request_to_request(ramp: RampUp, middle: float) -> None:
    arrivals = ArrivalLaw(burstiness=math.inf, ramp=ramp, ramp_start_rps=1, ramp_end_rps=16)
    found = gaps(arrivals, number=101)
    assert [1 / found[0], 1 / found[50], 1 / found[100]] == pytest.approx([1, middle, 16])


def test_equal_seeds_draw_equal_times_and_others_do_not() -> None:
    law = ArrivalLaw(rate=5)
    assert due_times(9, law, 1) == due_times(9, law, 1)
    assert due_times(9, law, 1) != due_times(9, law, 2)


def test_times_that_a_data_set_has_and_later_turns_are_left_alone() -> None:
    requests = [
        Planned(index=0, prompt="x", max_tokens=1, at_s=7.0),
        Planned(index=1, prompt="x", max_tokens=1),
        Planned(index=2, prompt="x", max_tokens=1, after=1),
    ]
    found = schedule(requests, ArrivalLaw(rate=1, burstiness=math.inf), 0)
    assert [each.at_s for each in found] == [7.0, 1.0, None]


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"rate": 0}, "request-rate"),
        ({"burstiness": 0}, "burstiness"),
        ({"ramp_start_rps": 1}, "ramp-up-start-rps"),
        ({"ramp": RampUp.LINEAR, "ramp_start_rps": 1}, "ramp-up-end-rps"),
        ({"ramp": RampUp.LINEAR, "rate": 2}, "request-rate"),
    ],
)
def test_a_law_that_is_none_is_refused_by_its_flag(fields: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        ArrivalLaw(**fields)  # type: ignore[arg-type]
    assert refusal.value.param == flag


@pytest.mark.parametrize(
    "fields", [{"rate": 1.0, "burstiness": 1e-9}, {"rate": 1e-320}, {"rate": 1e-8}]
)
def test_a_law_whose_gaps_are_all_nothing_or_endless_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"make all gaps 0, or endless|use a higher rate"):
        due_times(5, ArrivalLaw(**fields), 1)


def test_a_share_is_given_up_at_points_over_the_whole_answer() -> None:
    found = cancel_some(plan(1000), 0.3, 5)
    points = [p.cancel_after_tokens for p in found if p.cancel_after_tokens is not None]
    assert len(points) == 300
    assert set(points) == set(range(10))
    assert found == cancel_some(plan(1000), 0.3, 5)


def test_a_turn_that_is_followed_is_never_given_up() -> None:
    requests = [*plan(5), Planned(index=5, prompt="x", max_tokens=10, after=4)]
    found = cancel_some(requests, 1.0, 5)
    assert found[4].cancel_after_tokens is None
    assert all(each.cancel_after_tokens is not None for each in found if each.index != 4)
