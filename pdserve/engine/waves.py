"""Decides when cores whose ranks share experts may run the model. Pure.

A step whose tokens meet experts on other cores' ranks runs on all cores or on none. So the
cores step together, in *waves*:

    OUTSIDE --the coordinator starts a wave--> INSIDE --no core is unfinished--> DRAINING
       ^--------------------- every step in flight has come back ------------------'

Inside, every core has its executor's `max_in_flight` steps submitted whenever it waits for
one: steps without tokens where it has no work. Each step says whether its core needs more,
and its answer, equal on all cores, whether any does. The number of steps that each core had
submitted before that answer is equal too, so all run equally many steps of a wave.

Outside, steps name only the requests that are gone; a core with work asks for the next wave and
waits until it is started. Knows no sockets; the coordinator's side is
`pdserve.engine.coordinator`.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING, Protocol, assert_never

import msgspec

from pdserve.errors import InternalError
from pdserve.wire.step import WaveStep

if TYPE_CHECKING:
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput


class StepSource(Protocol):
    """The part of a scheduler that waves need."""

    @property
    def num_runnable(self) -> int:
        """Requests that could be in a step."""
        ...

    def schedule(self) -> SchedulerOutput | None:
        """Plan a step; None = nothing to do now."""
        ...

    def empty_step(self) -> SchedulerOutput:
        """Return a step without tokens."""
        ...


class Phase(enum.Enum):
    """A core's phase in the waves."""

    OUTSIDE = "outside"
    INSIDE = "inside"
    DRAINING = "draining"


class Waves:
    """One core's part in the waves.

    Attributes:
        wave: The current wave, or the last; they are numbered from 1.
        phase: This core's phase in it.
    """

    def __init__(self, source: StepSource) -> None:
        self._source = source
        self.wave = 0
        self.phase = Phase.OUTSIDE
        self._is_next_started = False
        self._last_asked = 0
        self._in_flight: deque[bool] = deque()  # of each step, whether it has tokens
        self._is_stuck = False

    @property
    def is_at_rest(self) -> bool:
        """Whether this core is outside all waves, with no step in flight."""
        return self.phase is Phase.OUTSIDE and not self._in_flight

    def start(self, wave: int) -> None:
        """Take the start of `wave`; it begins here when the previous one has drained.

        Raises:
            InternalError: It is not the next wave.
        """
        if wave != self.wave + 1 or self._is_next_started:
            raise InternalError(f"wave {wave} was started in wave {self.wave}, {self.phase.value}")
        self._is_next_started = True
        self._begin_if_ready()

    def news(self) -> None:
        """Note news, after which requests that could not run may be able to."""
        self._is_stuck = False

    def wish(self) -> int | None:
        """Return, once, the wave to ask the coordinator for; None if this core needs none."""
        is_needed = self.phase is Phase.OUTSIDE and self._source.num_runnable > 0
        if not is_needed or self._is_stuck or self._last_asked > self.wave:
            return None
        self._last_asked = self.wave + 1
        return self._last_asked

    def schedule(self) -> SchedulerOutput | None:
        """Return the next step to submit, while there is room in flight; None = none now."""
        source = self._source
        step: SchedulerOutput | None
        match self.phase:
            case Phase.OUTSIDE:
                if source.num_runnable:
                    return None  # it would have tokens
                step = source.schedule()
                if step is None:
                    return None
            case Phase.INSIDE:
                planned = source.schedule()
                # If no step can change that, more steps would only keep all cores busy.
                self._is_stuck = planned is None and not any(self._in_flight)
                is_unfinished = source.num_runnable > 0 and not self._is_stuck
                step = msgspec.structs.replace(
                    planned or source.empty_step(), wave=WaveStep(self.wave, is_unfinished)
                )
            case Phase.DRAINING:
                return None
            case _:
                assert_never(self.phase)
        self._in_flight.append(bool(step.num_scheduled_tokens))
        return step

    def collected(self, output: ModelRunnerOutput) -> None:
        """Take the result of the oldest step in flight."""
        self._in_flight.popleft()
        if self.phase is Phase.INSIDE and output.is_wave_over:
            self.phase = Phase.DRAINING
        if self.phase is Phase.DRAINING and not self._in_flight:
            self.phase = Phase.OUTSIDE
            self._begin_if_ready()

    def _begin_if_ready(self) -> None:
        if self._is_next_started and self.phase is Phase.OUTSIDE:
            self._is_next_started = False
            self.wave += 1
            self.phase = Phase.INSIDE
