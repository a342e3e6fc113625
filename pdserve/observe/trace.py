"""Records the last seconds of this process in a ring of events, bounded in time and bytes.

Recording an event costs under a microsecond beside the making of it. It is kept as the JSON that a
dump sends, in buffers that are used again: as objects, events of requests would take eight times as
much memory as those of steps, and lie for minutes among whatever was made for a moment beside
them, so that the heap cannot shrink behind a burst. Who records passes the time along. Knows no
sockets, and nothing of what the events mean.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.wire.trace import EVENTS, ClockReading, ProcessTrace, TracedProcess

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pdserve.observe.clock import Clock
    from pdserve.wire.trace import Event, Part

HORIZON_S = 120.0
"""How long events are kept."""
MAX_BYTES = 8 << 20
"""How much is kept: about two minutes of steps of five milliseconds."""
PIECE_BYTES = 1 << 16
"""At least one event, and as many as fit."""
_EVENTS_PER_PIECE = 2048
"""Of those that are not kept: encoded at a time, in about a millisecond."""

_encode = msgspec.json.Encoder().encode


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


class _Piece:
    """Events that came one behind the other: JSON, each with a comma behind it.

    Attributes:
        last_s: When the last of them was over.
    """

    __slots__ = ("_buffer", "_num_bytes", "last_s", "num_events")

    def __init__(self) -> None:
        self._buffer = bytearray(PIECE_BYTES)
        self._num_bytes = self.num_events = 0
        self.last_s = float("-inf")

    def clear(self) -> None:
        """Forget the events, and keep the memory."""
        del self._buffer[PIECE_BYTES:]
        self._num_bytes = self.num_events = 0

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much more fits. An empty one takes anything."""
        return self._num_bytes + num_bytes <= PIECE_BYTES

    def add(self, data: bytes, at_s: float) -> None:
        """Add an event."""
        start, self._num_bytes = self._num_bytes, self._num_bytes + len(data)
        self._buffer[start : self._num_bytes] = data
        self.num_events += 1
        self.last_s = at_s

    def json(self) -> bytes:
        """The events, without a comma behind the last one."""
        return bytes(memoryview(self._buffer)[: self._num_bytes - 1])


class Recorder:
    """A ring of events. One thread records and reads.

    It keeps the memory that it once needed, `max_bytes` at most.

    Attributes:
        num_dropped: Events that gave way to others before their time was up.
    """

    def __init__(self, *, horizon_s: float = HORIZON_S, max_bytes: int = MAX_BYTES) -> None:
        self._pieces: deque[_Piece] = deque()
        self._unused: list[_Piece] = []
        self._max_pieces = max_bytes // PIECE_BYTES
        self._horizon_s = horizon_s
        self._complete_since_s = float("-inf")
        self.num_dropped = 0

    def add(self, event: Event) -> None:
        """Take an event that is over now: `at_s` never goes back. O(its size), amortised."""
        data = _encode(event) + b","
        pieces = self._pieces
        if not (pieces and pieces[-1].has_room(len(data))):
            self._begin_piece(event.at_s)
        pieces[-1].add(data, event.at_s)

    def since(self, since_s: float) -> list[Event]:
        """The events that were not over before `since_s`, oldest first."""
        return _read(b",".join(self._json_since(since_s)))

    def _begin_piece(self, now_s: float) -> None:
        """Make room, in the memory of what is too old, or where more would be too much."""
        pieces, unused = self._pieces, self._unused
        while pieces and pieces[0].last_s < now_s - self._horizon_s:
            unused.append(self._let_go())
        if len(pieces) == self._max_pieces:
            self.num_dropped += pieces[0].num_events
            unused.append(self._let_go())
        pieces.append(unused.pop() if unused else _Piece())

    def _let_go(self) -> _Piece:
        piece = self._pieces.popleft()
        self._complete_since_s = piece.last_s
        piece.clear()
        return piece

    def _json_since(self, since_s: float) -> list[bytes]:
        """`since`, as the pieces of a dump."""
        pieces = [piece.json() for piece in self._pieces if piece.last_s >= since_s]
        if pieces:  # the first may have begun before
            events = _read(pieces[0])
            pieces[:1] = encoded([event for event in events if event.at_s >= since_s])
        return pieces

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
            itertools.chain(self._json_since(since_s), encoded([*running])),
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

    Attributes:
        pieces: The events, some at a time: JSON without the brackets around all of them. To be
            gone through once.
    """

    def __init__(
        self,
        pieces: Iterator[bytes],
        *,
        since_s: float,
        num_dropped: int,
        clock: Clock,
        part: Part,
        role: str = "",
        engine_id: str = "",
    ) -> None:
        self.pieces = pieces
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


def encoded(events: Sequence[Event]) -> Iterator[bytes]:
    """Events as the pieces of a dump."""
    for start in range(0, len(events), _EVENTS_PER_PIECE):
        yield _encode(events[start : start + _EVENTS_PER_PIECE])[1:-1]


def _read(piece: bytes) -> list[Event]:
    return EVENTS.decode(b"[%b]" % piece)


def whole(process: TracedProcess, pieces: Iterable[bytes]) -> ProcessTrace:
    """A dump that was sent in pieces."""
    events = b"".join([b"[", b",".join(pieces), b"]"])
    return ProcessTrace(process=process, events=msgspec.Raw(events))


def reading(clock: Clock) -> ClockReading:
    """The time by this process's monotonic clock."""
    return ClockReading(clock_id=CLOCK_ID, monotonic_s=clock.monotonic_s())
