"""One core's part in the waves, with a scripted scheduler. Many cores: tests/stateful."""

from __future__ import annotations

import pytest

from pdserve.engine.waves import Phase, Waves
from pdserve.errors import InternalError
from pdserve.wire.ids import RequestId
from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput, WaveStep


class ScriptedSource:
    """A scheduler of which the test says what it can run."""

    def __init__(self) -> None:
        self.num_runnable = 0
        self.num_tokens = 0
        self.has_gone = False
        self._step_id = 0

    def schedule(self) -> SchedulerOutput | None:
        """A step, if there is anything to say or run."""
        return self._step(self.num_tokens) if self.num_tokens or self.has_gone else None

    def empty_step(self) -> SchedulerOutput:
        """A step without tokens."""
        return self._step(0)

    def _step(self, num_tokens: int) -> SchedulerOutput:
        self._step_id += 1
        return SchedulerOutput(
            step_id=self._step_id,
            num_scheduled_tokens={RequestId("r"): num_tokens} if num_tokens else {},
        )


def answer(*, is_wave_over: bool = False) -> ModelRunnerOutput:
    """What comes back of a step."""
    return ModelRunnerOutput(step_id=0, is_wave_over=is_wave_over)


def test_work_waits_for_a_wave_that_is_asked_for_once() -> None:
    source = ScriptedSource()
    waves = Waves(source)
    assert waves.wish() is None
    source.num_runnable = source.num_tokens = 1
    assert waves.schedule() is None
    assert (waves.wish(), waves.wish()) == (1, None)
    waves.start(1)
    step = waves.schedule()
    assert step is not None
    assert step.wave == WaveStep(1, is_unfinished=True)


def test_ranks_may_be_told_who_is_gone_outside_of_waves() -> None:
    source = ScriptedSource()
    waves = Waves(source)
    source.has_gone = True
    step = waves.schedule()
    assert step is not None
    assert step.wave is None
    waves.collected(answer())
    assert waves.is_at_rest


def test_inside_a_wave_there_is_always_a_step() -> None:
    waves = Waves(ScriptedSource())
    waves.start(1)
    for _ in range(3):
        step = waves.schedule()
        assert step is not None
        assert step.wave == WaveStep(1, is_unfinished=False)
        assert not step.num_tokens


def test_nothing_is_submitted_once_a_wave_is_over_until_it_has_drained() -> None:
    waves = Waves(ScriptedSource())
    waves.start(1)
    waves.schedule()
    waves.schedule()
    waves.collected(answer(is_wave_over=True))
    assert waves.schedule() is None
    assert waves.phase is Phase.DRAINING
    waves.collected(answer(is_wave_over=True))
    assert waves.is_at_rest


def test_a_wave_started_while_the_last_drains_begins_after_it() -> None:
    waves = Waves(ScriptedSource())
    waves.start(1)
    waves.schedule()
    waves.schedule()
    waves.collected(answer(is_wave_over=True))
    waves.start(2)
    assert waves.schedule() is None
    waves.collected(answer())
    assert (waves.wave, waves.phase) == (2, Phase.INSIDE)


def test_a_wave_out_of_turn_is_our_own_mistake() -> None:
    waves = Waves(ScriptedSource())
    with pytest.raises(InternalError, match="wave 2 was started in wave 0"):
        waves.start(2)
    waves.start(1)
    with pytest.raises(InternalError, match="wave 1"):
        waves.start(1)


def test_requests_that_no_step_can_help_keep_no_wave_alive() -> None:
    """They wait for blocks that a peer still reads, say."""
    source = ScriptedSource()
    waves = Waves(source)
    source.num_runnable = 1
    assert waves.wish() == 1
    waves.start(1)
    step = waves.schedule()
    assert step is not None
    assert step.wave == WaveStep(1, is_unfinished=False)
    waves.collected(answer(is_wave_over=True))
    assert waves.wish() is None
    waves.news()
    assert waves.wish() == 2


def test_what_is_in_flight_may_help_requests_that_cannot_run_yet() -> None:
    source = ScriptedSource()
    waves = Waves(source)
    source.num_runnable = source.num_tokens = 1
    waves.start(1)
    waves.schedule()
    source.num_tokens = 0
    step = waves.schedule()
    assert step is not None
    assert step.wave == WaveStep(1, is_unfinished=True)
