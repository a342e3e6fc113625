"""Records when a rank waited and computed in its steps, for traces.

One thread adds, another one takes. Costs about a microsecond a step; knows no connector.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pdserve.wire.trace import RankSlice

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.wire.step import SchedulerOutput

TELL_EVERY_S = 0.25
MAX_SLICES = 4096
MIN_WAIT_S = 0.0005
"""What is shorter is no wait for another stage, and only a gap in front of the forward."""


class StepSlices:
    """A bounded list of stretches of time.

    Args:
        rank: Rank within its engine.
        wake: Called now and then while there are steps: `take` has something.
    """

    def __init__(self, rank: int, *, wake: Callable[[], None]) -> None:
        self._track = f"rank {rank}"
        self._wake = wake
        self._told_s = 0.0
        self._kept: deque[RankSlice] = deque(maxlen=MAX_SLICES)

    def add(self, step: SchedulerOutput, began_s: float, forward_s: float, end_s: float) -> None:
        """Record a step that is over.

        Args:
            began_s, forward_s, end_s: Monotonic times of its start here, of its forward pass
                (after the previous stage's data has come), and of its end, after sampling or
                sending on.
        """
        facts: dict[str, int | float | str] = {
            "step": step.step_id,
            "batch_size": len(step.num_scheduled_tokens),
        }
        if forward_s - began_s >= MIN_WAIT_S:
            self._kept.append(RankSlice(began_s, forward_s, self._track, "wait", facts))
        self._kept.append(RankSlice(forward_s, end_s, self._track, "forward", facts))
        if end_s - self._told_s >= TELL_EVERY_S:
            self._told_s = end_s
            self._wake()

    def take(self) -> list[RankSlice]:
        """Return all since the last call."""
        return [self._kept.popleft() for _ in range(len(self._kept))]
