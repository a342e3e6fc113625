"""The reader's side of the KV events' wire, for one engine core: a state machine without I/O.

    LIVE    every batch so far was applied
    RESYNC  some are missing, or it has just started: asks, and buffers what arrives meanwhile
    STALE   as LIVE, but nothing has arrived for a while; the next batch ends it

A late answer is never applied, because it would restore grains removed since. Lost, duplicated or
reordered batches are repaired: once traffic stops, the index matches the engine.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, Protocol, assert_never

from pdserve.wire.event_stream import apply
from pdserve.wire.events import Ask, Batch, MissingBatches, SnapshotPart, is_later_epoch

if TYPE_CHECKING:
    from pdserve.wire.events import Answer, GrainEvent, RoutingLoad
    from pdserve.wire.learned import LearnedTimes

STALE_S: Final = 1.0
"""Silence of four heartbeats."""
GONE_S: Final = 3.0
"""Silence after which the index no longer describes the engine."""
_ANSWER_S: Final = 1.0
_FIRST_BACKOFF_S: Final = 0.2
_LONGEST_BACKOFF_S: Final = 5.0
_MAX_BUFFERED: Final = 1024
"""Batches buffered while waiting for an answer: more than a publisher keeps is of no use."""
_UNKNOWN: Final = -1
"""The epoch of a reader that needs a snapshot."""


class GrainIndex(Protocol):
    """The part of an index for one engine core, which a reader keeps in step."""

    def retire(self) -> None:
        """Forget all grains."""

    def apply(self, event: GrainEvent) -> None:
        """Change the grains as the event says."""


class GrainSet:
    """An index of one engine core alone.

    Attributes:
        grains: Grains by medium.
    """

    def __init__(self) -> None:
        self.grains: dict[str, set[int]] = {}

    def retire(self) -> None:
        """See `GrainIndex`."""
        self.grains = {}

    def apply(self, event: GrainEvent) -> None:
        """See `GrainIndex`."""
        apply(event, self.grains)


class ReaderState(enum.Enum):
    """See the module."""

    LIVE = "live"
    RESYNC = "resync"
    STALE = "stale"


class EventReader:
    """Keeps an index in step with one engine core.

    Args:
        now_s: Monotonic seconds, here and in every method.

    Attributes:
        num_resyncs: Number of resyncs, including the first.
        load: The core's last reported load; None if not reported yet.
        learned: The core's last reported step times; None if not reported yet.
    """

    def __init__(self, index: GrainIndex, *, now_s: float) -> None:
        self._index = index
        self._epoch = _UNKNOWN
        self._next_seq = 0
        self._heard_s = now_s
        self._buffered: list[Batch] = []
        self._parts: dict[int, SnapshotPart] = {}
        self._ask = 0
        self._ask_at_s = now_s
        self._backoff_s = _FIRST_BACKOFF_S
        self._state = ReaderState.RESYNC
        self.num_resyncs = 1
        self.load: RoutingLoad | None = None
        self.learned: LearnedTimes | None = None

    def state(self, now_s: float) -> ReaderState:
        """Return the state at `now_s`."""
        if self._state is ReaderState.LIVE and now_s - self._heard_s >= STALE_S:
            return ReaderState.STALE
        return self._state

    def silent_s(self, now_s: float) -> float:
        """Return the seconds since the engine was last heard from."""
        return max(0.0, now_s - self._heard_s)

    def is_exact(self, now_s: float) -> bool:
        """Return whether to trust the index; if not, treat the engine as one without events."""
        return self._state is ReaderState.LIVE and now_s - self._heard_s < GONE_S

    def heard(self, batch: Batch, now_s: float) -> None:
        """Take any batch of the stream."""
        self._heard_s = now_s
        self.load = batch.load or self.load
        self.learned = batch.learned or self.learned
        if self._state is ReaderState.RESYNC:
            self._buffer(batch, now_s)
        elif batch.epoch == self._epoch:
            if batch.seq == self._next_seq:
                self._apply(batch)
            elif batch.seq > self._next_seq:
                self._resync(batch, now_s)
        elif is_later_epoch(batch.epoch, self._epoch):
            self._index.retire()
            self._epoch, self._next_seq = _UNKNOWN, 0  # it need not have started empty
            self._resync(batch, now_s)

    def due(self, now_s: float) -> Ask | None:
        """Return the question to send now, if there is one. Call this often."""
        if self._state is not ReaderState.RESYNC or now_s < self._ask_at_s:
            return None
        self._ask += 1
        self._parts.clear()
        self._ask_at_s = now_s + _ANSWER_S + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _LONGEST_BACKOFF_S)
        return Ask(self._ask, self._epoch, self._next_seq)

    def answered(self, answer: Answer, now_s: float) -> None:
        """Take an answer or a part of one; answers to earlier questions are ignored."""
        if self._state is not ReaderState.RESYNC or answer.ask != self._ask:
            return
        self._heard_s = now_s
        match answer:
            case MissingBatches(batches=batches):
                for batch in batches:
                    if batch.epoch == self._epoch and batch.seq == self._next_seq:
                        self._apply(batch)
            case SnapshotPart():
                self._parts[answer.part] = answer
                self._ask_at_s = now_s + _ANSWER_S
                if len(self._parts) < answer.num_parts:
                    return
                self._load(answer)
            case _:
                assert_never(answer)
        self._catch_up(now_s)

    def _load(self, last: SnapshotPart) -> None:
        """Replace the index with a whole snapshot."""
        self._index.retire()
        for part in self._parts.values():
            for event in part.stored:
                self._index.apply(event)
        self._parts.clear()
        self._epoch, self._next_seq = last.epoch, last.resume_seq

    def _catch_up(self, now_s: float) -> None:
        """Apply the buffered batches; ask again if they have a gap."""
        buffered, self._buffered = self._buffered, []
        for batch in sorted(buffered, key=lambda each: each.seq):
            if batch.epoch == self._epoch and batch.seq >= self._next_seq:
                if batch.seq > self._next_seq:
                    self._resync(batch, now_s)
                    return
                self._apply(batch)
        self._state = ReaderState.LIVE
        self._backoff_s = _FIRST_BACKOFF_S

    def _apply(self, batch: Batch) -> None:
        for event in batch.events:
            self._index.apply(event)
        self._next_seq += 1

    def _resync(self, batch: Batch, now_s: float) -> None:
        self._state = ReaderState.RESYNC
        self._ask_at_s = now_s
        self.num_resyncs += 1
        self._buffered = [batch]

    def _buffer(self, batch: Batch, now_s: float) -> None:
        if len(self._buffered) == _MAX_BUFFERED:  # the answer would have a gap behind it
            self._resync(batch, now_s)
        else:
            self._buffered.append(batch)
