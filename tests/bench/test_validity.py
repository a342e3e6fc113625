from __future__ import annotations

import pytest

from pdserve.bench.records import CoresUsed, Outcome
from pdserve.bench.validity import judge
from tests.bench.runs import outcome


def outcomes(lag_s: float, *, number: int = 100) -> list[Outcome]:
    """Requests with a TTFT of 0.1 s and gaps of 10 ms, all sent late by as much."""
    return [
        outcome(n, n + lag_s, [n + lag_s + 0.1, n + lag_s + 0.11], scheduled_s=float(n))
        for n in range(number)
    ]


def test_a_client_that_keeps_up_is_valid() -> None:
    health = judge(outcomes(0.0049), [0.001] * 100, [0.5])
    assert (health.valid, health.why_not, health.notes) == (True, [], [])
    assert abs(health.send_lag_p99_s - 0.0049) < 1e-9


def test_sending_later_than_a_twentieth_of_the_median_ttft_is_not_valid() -> None:
    health = judge(outcomes(0.0051), [], [])
    assert not health.valid
    assert "at least 5.10 ms late" in health.why_not[0]


def test_one_late_request_of_many_is_no_verdict() -> None:
    late = outcome(1000, 7.0, [7.1, 7.11], scheduled_s=5.0)
    assert judge([*outcomes(0.0, number=1000), late], [], []).valid


def test_timers_as_late_are_not_valid() -> None:
    health = judge(outcomes(0.0), [0.006] * 100, [])
    assert not health.valid
    assert "measured late" in health.why_not[0]


def test_timers_that_matter_for_gaps_alone_are_noted() -> None:
    health = judge(outcomes(0.0), [0.0045] * 100, [])
    assert health.valid
    assert "gaps between tokens (p99 10.00 ms) may be off" in health.notes[0]


def test_a_process_without_time_left_is_not_valid() -> None:
    health = judge(outcomes(0.0), [], [0.2, 0.95])
    assert "95% of a core" in health.why_not[0]
    assert health.num_processes == 2


def test_turns_that_were_never_sent_do_not_count_as_late() -> None:
    unsent = outcome(500, 90.0, [], scheduled_s=0.0, status=0, error="not answered")
    assert judge([*outcomes(0.0), unsent], [], []).send_lag_p99_s < 0.001


@pytest.mark.parametrize(
    ("others", "hypervisor", "words"),
    [
        (1.15, 0.0, "Other programs used 1.15 (of which process 812, node: 0.90) of the 2 cores"),
        (0.004, 0.3, "The hypervisor took 0.30 of the 2 cores, which is over 10% of them."),
        (
            0.15,
            0.15,
            "Other programs used 0.15 (of which process 812, node: 0.90) and the hypervisor",
        ),
    ],
)
def test_cores_that_others_took_are_not_valid(others: float, hypervisor: float, words: str) -> None:
    cores = CoresUsed(
        num_cores=2,
        parts={"engines": 0.5},
        others=others,
        hypervisor=hypervisor,
        greediest="process 812, node",
        greediest_cores=0.9,
    )
    health = judge(outcomes(0.0), [], [], cores=cores)
    assert not health.valid
    assert health.why_not[0].startswith(words)


def test_what_the_kernel_does_for_a_run_is_not_stolen() -> None:
    cores = CoresUsed(num_cores=2, parts={"engines": 1.6}, others=0.15, hypervisor=0.04)
    assert judge(outcomes(0.0), [], [], cores=cores).valid
