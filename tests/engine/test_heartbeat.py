"""When a core that does not answer is not ready, and when it is given up. Nothing waits here."""

from __future__ import annotations

import pytest

from pdserve.config.schema import LivenessConfig
from pdserve.engine.heartbeat import CoreWatch
from pdserve.observe.liveness import ProcessState, ProcessWatch

CONFIG = LivenessConfig(heartbeat_timeout_s=5.0, step_timeout_s=600.0)


class Core:
    """A core's process as a server sees it, a look per second."""

    def __init__(self, *, has_begun: bool = True) -> None:
        self.letter, self.cpu_ticks = "S", 0
        self.heartbeat = CoreWatch(
            ProcessWatch(1, read=lambda pid: ProcessState(self.letter, self.cpu_ticks)), CONFIG
        )
        if has_begun:
            self.heartbeat.expect()

    def looks(
        self, num_looks: int, *, answers: bool = False, is_busy: bool = False
    ) -> list[str | None]:
        """What the server concludes, once per second."""
        found = []
        for _ in range(num_looks):
            self.cpu_ticks += is_busy
            found.append(self.heartbeat.look())
            number = self.heartbeat.next()
            if answers and number is not None:
                self.heartbeat.answered(number)
        return found


def test_a_core_that_answers_is_ready_however_idle_it_is() -> None:
    core = Core()
    assert not any(core.looks(1000, answers=True))
    assert core.heartbeat.stall_reason is None


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_core_whose_answers_all_come_late_is_ready(is_busy: bool) -> None:
    core = Core()
    for _ in range(1000):
        (verdict,) = core.looks(1, is_busy=is_busy)
        core.heartbeat.answered(core.heartbeat._last_sent - 1)
        assert (verdict, core.heartbeat.stall_reason) == (None, None)
    *_, last = core.looks(601, is_busy=is_busy)
    assert "did not answer" in str(last), "once it answers no more"


def test_a_stopped_core_is_not_ready_within_two_looks_and_given_up_within_five() -> None:
    core = Core()
    core.looks(3, answers=True)
    core.letter = "T"
    assert core.looks(1) == [None]
    assert core.heartbeat.stall_reason is None
    assert core.looks(1) == [None]
    assert "stopped" in str(core.heartbeat.stall_reason)
    *before, last = core.looks(3)
    assert not any(before)
    assert last == "the engine core was stopped for 5 s (--heartbeat-timeout)"


def test_a_core_that_is_stopped_while_it_loads_is_given_up_as_well() -> None:
    core = Core(has_begun=False)
    core.letter = "T"
    assert "stopped" in str(core.looks(5)[-1])


def test_a_core_that_loads_owes_no_answer() -> None:
    core = Core(has_begun=False)
    assert not any(core.looks(10_000))
    assert core.heartbeat.stall_reason is None


def test_a_core_that_sleeps_and_does_not_answer_is_given_up() -> None:
    core = Core()
    core.looks(3, answers=True)
    *before, last = core.looks(6)
    assert not any(before)
    assert "did nothing and did not answer for 5 s" in str(last)


def test_a_busy_core_that_does_not_answer_is_not_ready_and_is_left_its_time() -> None:
    core = Core()
    core.looks(3, answers=True)
    assert not any(core.looks(5, is_busy=True))
    assert core.heartbeat.stall_reason is None
    assert not any(core.looks(595, is_busy=True))
    assert "has not answered for 599 s" in str(core.heartbeat.stall_reason)
    assert "600 s (--step-timeout)" in str(core.looks(1, is_busy=True)[0])


def test_a_core_that_answers_again_is_ready_again() -> None:
    core = Core()
    core.looks(3, answers=True)
    core.looks(100, is_busy=True)
    assert core.heartbeat.stall_reason is not None
    core.looks(2, answers=True)
    assert core.heartbeat.stall_reason is None
