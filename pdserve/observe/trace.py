"""The last seconds of this process, always at hand: a ring of events, bounded in time and number.

Recording an event costs well under a microsecond beside the making of it, and allocates nothing
else. Who records passes the time along. Knows no sockets, and nothing of what the events mean.
"""

from __future__ import annotations

import os
import socket
from bisect import bisect_left
from collections import deque
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.wire.trace import ClockReading, ProcessTrace, TracedProcess

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pdserve.observe.clock import Clock
    from pdserve.wire.trace import Event, Part

HORIZON_S = 120.0
"""How long events are kept."""
MAX_EVENTS = 1 << 16
"""How many are kept: some minutes of steps of a few milliseconds, about 20 MB."""
EVENTS_PER_PIECE = 2048
"""Encoded at a time, in about a millisecond."""

_at_s = attrgetter("at_s")


def _clock_id() -> str:
    """Names this process's monotonic clock: equal ids, equal clocks.

    CLOCK_MONOTONIC is one for all processes of a running kernel (clock_gettime(2)), but for those
    in another time namespace (time_namespaces(7)). Where neither can be read, no other process
    is taken to have the same one.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"
    return f"{boot_id}/{namespace}"


CLOCK_ID: Final = _clock_id()
"""Of this process. Read once: it cannot change, and files are not read in an event loop."""


class Recorder:
    """A ring of events. One thread records and reads.

    Attributes:
        num_dropped: Events that gave way to others before their time was up.
    """

    def __init__(self, *, horizon_s: float = HORIZON_S, max_events: int = MAX_EVENTS) -> None:
        self._events: deque[Event] = deque(maxlen=max_events)
        self._max_events = max_events
        self._horizon_s = horizon_s
        self._complete_since_s = float("-inf")
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: Event) -> None:
        """Take an event that is over now: `at_s` never goes back. O(1), amortised."""
        events = self._events
        oldest_s = event.at_s - self._horizon_s
        while events and events[0].at_s < oldest_s:
            self._complete_since_s = events.popleft().at_s
        if len(events) == self._max_events:
            self._complete_since_s = events[0].at_s
            self.num_dropped += 1
        events.append(event)

    def since(self, since_s: float) -> list[Event]:
        """The events that were not over before `since_s`, oldest first."""
        events = list(self._events)
        return events[bisect_left(events, since_s, key=_at_s) :]

    def dump(
        self,
        seconds: float,
        *,
        clock: Clock,
        part: Part,
        role: str,
        engine_id: str,
        running: Iterable[Event],
    ) -> Dump:
        """The last `seconds` until now.

        Args:
            running: Events of what is not over yet.
        """
        since_s = clock.monotonic_s() - seconds
        return Dump(
            [*self.since(since_s), *running],
            since_s=max(since_s, self._complete_since_s),
            num_dropped=self.num_dropped,
            clock=clock,
            part=part,
            role=role,
            engine_id=engine_id,
        )


class Dump:
    """What one process says of itself: pieces of events as JSON, then whose they are.

    Args:
        since_s: Nothing is missing from then on.
    """

    def __init__(
        self,
        events: Sequence[Event],
        *,
        since_s: float,
        num_dropped: int,
        clock: Clock,
        part: Part,
        role: str = "",
        engine_id: str = "",
    ) -> None:
        self._events = events
        self.process = TracedProcess(
            part=part,
            role=role,
            engine_id=engine_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            clock_id=CLOCK_ID,
            monotonic_s=clock.monotonic_s(),
            wall_s=clock.wall_s(),
            since_s=since_s,
            num_dropped=num_dropped,
        )

    def pieces(self) -> Iterator[bytes]:
        """The events, some at a time: JSON without the brackets around all of them."""
        for start in range(0, len(self._events), EVENTS_PER_PIECE):
            yield msgspec.json.encode(self._events[start : start + EVENTS_PER_PIECE])[1:-1]


def whole(process: TracedProcess, pieces: Iterable[bytes]) -> ProcessTrace:
    """A dump that was sent in pieces."""
    events = b"".join([b"[", b",".join(pieces), b"]"])
    return ProcessTrace(process=process, events=msgspec.Raw(events))


def reading(clock: Clock) -> ClockReading:
    """The time by this process's monotonic clock."""
    return ClockReading(clock_id=CLOCK_ID, monotonic_s=clock.monotonic_s())
