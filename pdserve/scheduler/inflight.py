"""Steps that were submitted and have not come back, and what must wait for them.

A step in flight may still write the blocks of every request in it. A request that ends
meanwhile keeps its blocks until the last such step has retired.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pdserve.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.scheduler.request import Request
    from pdserve.wire.ids import RequestId


_NUM_REMEMBERED = 64


class Step:
    """One submitted step.

    Attributes:
        num_computed_after: For each request in it, the tokens computed once it retires.
        num_prefill_tokens, num_decode_tokens: Prompt tokens it computes, and all others.
        closing: Requests that wait for it to retire.
        loading: Requests whose first tokens are loaded inside it.
        void: Requests for which what it computes means nothing.
    """

    def __init__(
        self,
        step_id: int,
        num_computed_after: dict[RequestId, int],
        submitted_s: float,
        *,
        num_prefill_tokens: int = 0,
        num_decode_tokens: int = 0,
        loading: Sequence[RequestId] = (),
    ) -> None:
        self.step_id = step_id
        self.num_prefill_tokens = num_prefill_tokens
        self.num_decode_tokens = num_decode_tokens
        self.num_computed_after = num_computed_after
        self.submitted_s = submitted_s
        self.closing: list[Request] = []
        self.loading = loading
        self.void: set[RequestId] = set()


class InFlight:
    """A queue of submitted steps; they retire in order."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self._past: deque[tuple[float, float]] = deque(maxlen=_NUM_REMEMBERED)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_computing(self) -> bool:
        """Whether any of them has tokens, so that it may write blocks."""
        return any(step.num_computed_after for step in self._steps)

    def submit(self, step: Step) -> None:
        """Add the newest step."""
        self._steps.append(step)

    def retire(self, step_id: int, now_s: float) -> Step:
        """Remove and return the oldest step, which must be `step_id`."""
        if not self._steps or self._steps[0].step_id != step_id:
            raise InternalError(f"step {step_id} retired out of order")
        step = self._steps.popleft()
        if step.num_computed_after:
            self._past.append((step.submitted_s, now_s))
        return step

    def step_wait_s(self, since_s: float, now_s: float) -> float:
        """How long something that came at `since_s` had to wait for the step that ran then.

        0.0 if none did; until `now_s` if it still does.
        """
        for submitted_s, retired_s in self._past:
            if submitted_s <= since_s <= retired_s:
                return min(retired_s, now_s) - since_s
        is_running = any(
            step.num_computed_after and step.submitted_s <= since_s for step in self._steps
        )
        return now_s - since_s if is_running else 0.0

    def void(self, request_id: RequestId) -> None:
        """What the steps that have it compute for this request means nothing."""
        for step in self._steps:
            if request_id in step.num_computed_after:
                step.void.add(request_id)

    def close_after(self, request: Request) -> bool:
        """`request` is over, and waits for the last step that has it; False if none has."""
        for step in reversed(self._steps):
            if request.request_id in step.num_computed_after:
                step.closing.append(request)
                return True
        return False
