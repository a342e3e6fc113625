"""Finds engines that wait for one another.

An engine for both roles leases blocks to others, and needs blocks for what others have leased to
it. If all blocks of two such engines are leased, each waits for the other to read.

P and D wait for one another if all of P's blocks are leased to requests that D has no blocks for,
because it has reserved its own for pushes, which have no blocks at P.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.connectors.base import KVSource
from pdserve.scheduler.ladder import Remedy
from pdserve.wire.transfer import LoadFailure

if TYPE_CHECKING:
    from pdserve.scheduler.request import Request
    from pdserve.scheduler.state import SchedulerState

STUCK_AFTER_S: Final = 30.0
"""A busy reader may take as long to come to its leases, and is not stuck."""
RESERVED_S: Final = 1.0
"""A push that is given up is pulled instead, which costs little."""
_NEXT_AFTER_S: Final = 5.0
"""In that time, the engine whose blocks have become free should have gone on."""


class StuckKV:
    """Chooses requests whose ready KV waits for blocks that only other engines can free.

    The end of one ends its lease, so that the engine which has that KV can go on. Its sender has
    other ways.
    """

    why = (
        f"for {STUCK_AFTER_S:g} s this engine has lacked blocks for the KV: all that could be "
        "freed are leased to other engines, which do not read them"
    )

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._since_s: float | None = None
        self._idle_since_s: float | None = None

    def went_on(self) -> None:
        """Note that a step computes something."""
        self._since_s = self._idle_since_s = None

    def end_reservations(self, now_s: float) -> None:
        """Have pushes given up that wait for blocks. Call when no step can be planned."""
        state = self._state
        if len(state.steps) or not (state.leased and len(state.waiting)):
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        elif now_s >= self._idle_since_s + RESERVED_S:
            self._idle_since_s = now_s
            state.connector.end_reservations()

    def next_to_end(self, now_s: float) -> Request | None:
        """Return the request to end now, if any. Call when no step can be planned."""
        state = self._state
        request = state.waiting.head(KVSource.READY)
        is_moving = len(state.steps) or state.receiving or not state.leased
        if request is None or is_moving:
            self._since_s = None
            return None
        if self._since_s is None:
            self._since_s = now_s
        if now_s < self._since_s + STUCK_AFTER_S:
            return None
        self._since_s += _NEXT_AFTER_S
        state.counters.count_failure(LoadFailure.TIMEOUT)
        state.counters.count_remedy(Remedy.REPORT)
        return request
