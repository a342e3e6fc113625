"""What the soak says of what it has seen: growth, too short a run, and what speaks against it."""

from __future__ import annotations

import random

import pytest

from tests.chaos.soak import MIN_SAMPLES, objections, slope

MIB = 1 << 20
pytestmark = pytest.mark.short_form("")


def grown(bytes_per_request: float, *, num: int = 120) -> list[tuple[float, int, float]]:
    """Ten minutes of samples: memory that has a warm-up, some noise, and a slope."""
    noise = random.Random(0)
    return [
        (
            5.0 * at,
            60 * at,
            100 + min(at, 20) + 60 * at * bytes_per_request / MIB + noise.uniform(-0.05, 0.05),
        )
        for at in range(num)
    ]


def result(**changes: object) -> dict[str, object]:
    return {
        "wrong_tokens": 0,
        "without_final_state": 0,
        "blocks_not_free": 0,
        "engines_lost": 0,
        "ends": {"finished": 100},
        "kv_bytes_to_survivor": 1,
        "memory": {"proxy": slope(grown(0.0))},
        "descriptors": {"proxy": {"third_quarter": 50, "last_quarter": 52}},
        "itl": {"p99_ratio": 1.5},
        **changes,
    }


def test_what_grows_while_it_warms_up_is_flat_if_it_does_not_go_on() -> None:
    assert slope(grown(0.0))["is_flat"] is True


def test_a_few_hundred_bytes_per_request_are_growth() -> None:
    found = slope(grown(400.0))
    assert found["is_flat"] is False
    assert found["bytes_per_request"] is not None
    assert abs(found["bytes_per_request"] - 400.0) < 40.0


def test_a_run_without_enough_samples_in_its_second_half_has_no_slope() -> None:
    assert slope(grown(400.0, num=2 * MIN_SAMPLES - 2))["is_flat"] is None
    assert slope(grown(400.0, num=2 * MIN_SAMPLES))["is_flat"] is False


def test_nothing_speaks_against_a_good_soak() -> None:
    assert objections(result()) == []


def test_each_fault_speaks_against_a_soak_by_its_name() -> None:
    for what in ("wrong_tokens", "without_final_state", "blocks_not_free", "engines_lost"):
        assert objections(result(**{what: 2})) == [f"2 {what.replace('_', ' ')}"]
    assert objections(result(kv_bytes_to_survivor=0)) == ["no KV has moved"]
    assert objections(result(ends={"left": 3})) == ["no request has finished"]


def test_memory_that_grows_speaks_against_a_soak_and_so_does_too_short_a_run() -> None:
    (growth,) = objections(result(memory={"prefill1": slope(grown(400.0))}))
    assert growth.startswith("prefill1 grows by ")
    (unknown,) = objections(result(memory={"proxy": slope(grown(0.0, num=3))}))
    assert "too short" in unknown


def test_others_gaps_between_tokens_and_descriptors_speak_against_a_soak() -> None:
    (slow,) = objections(result(itl={"p99_ratio": 2.1}))
    assert "2.1 times" in slow
    (unknown,) = objections(result(itl={}))
    assert "too short" in unknown
    (leak,) = objections(
        result(descriptors={"decode1": {"third_quarter": 50, "last_quarter": 120}})
    )
    assert leak == "decode1 has 70 descriptors more"
