"""The life of a request: states, legal transitions, what it waits for, timestamps."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from pdserve.wire.request import RequestStages
from pdserve.wire.trace import StageSpan
from pdserve.wire.transfer import KVMode

if TYPE_CHECKING:
    from pdserve.wire.transfer import Fetched, Received

_MAX_STORY = 64  # lines


class State(enum.Enum):
    """Where a request stands.

    WAITING has no blocks. RECEIVING has blocks that a load, or a peer, fills; one load may follow
    another. RUNNING is in the batch; its connector may have its blocks read meanwhile. LEASED has
    finished here, but a peer may read its blocks. CLOSING has ended for the client, but a transfer
    or a step may still touch its blocks. DONE holds nothing.
    """

    WAITING = "waiting"
    RECEIVING = "receiving"
    RUNNING = "running"
    LEASED = "leased"
    CLOSING = "closing"
    DONE = "done"


LEGAL_MOVES = frozenset(
    {
        (State.WAITING, State.RUNNING),
        (State.WAITING, State.RECEIVING),
        (State.WAITING, State.DONE),
        (State.RECEIVING, State.RUNNING),
        (State.RECEIVING, State.WAITING),
        (State.RECEIVING, State.CLOSING),
        (State.RECEIVING, State.DONE),
        (State.RUNNING, State.WAITING),
        (State.RUNNING, State.RECEIVING),
        (State.RUNNING, State.LEASED),
        (State.RUNNING, State.CLOSING),
        (State.RUNNING, State.DONE),
        (State.LEASED, State.DONE),
        (State.CLOSING, State.DONE),
    }
)


OVER = frozenset({State.LEASED, State.CLOSING, State.DONE})
"""States in which the client gets nothing more from this engine."""


class Wait(enum.Enum):
    """Event that a CLOSING request awaits before its blocks may be freed.

    STEP: the last step in flight that includes it retires. LOAD: the load that writes its blocks is
    reported. HOLD: the last read of its blocks that its connector began ends.
    """

    STEP = "step"
    LOAD = "load"
    HOLD = "hold"


class Timeline:
    """Marks of one request on the engine's monotonic clock, in seconds.

    The stages follow from them, without gaps: their sum is the time from the arrival to the end of
    the step that gave the first token, or at D the second.

    Attributes:
        is_aside: Whether it waits outside the line because its peer must act first.
        notes: Events with their times; the request's story.
    """

    def __init__(self, *, queued_s: float) -> None:
        self.queued_s = queued_s
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.load_ready_s: float | None = None
        self.load_transfer_s = 0.0
        self.load_digest_s = 0.0
        self.load_bytes = 0
        self.fetched: Fetched | None = None
        self.first_step_at_s: float | None = None
        self.first_step_end_s: float | None = None
        self.step_wait_s = 0.0
        self.over_s: float | None = None
        self._spans: list[StageSpan] = []
        self._waits_since_s = queued_s
        self._load_began_s = queued_s
        self._queue_s = 0.0
        self._peer_wait_s = 0.0
        self.is_aside = False
        self.notes: list[tuple[float, str]] = []

    def note(self, now_s: float, event: str) -> None:
        """Add a line to the story; the oldest of more than 64 are forgotten."""
        # A deque would take 600 bytes from the first line on, and leave a hole in the heap later.
        if len(self.notes) == _MAX_STORY:
            del self.notes[0]
        self.notes.append((now_s, event))

    def begin_step(self, now_s: float, *, waited_s: float) -> None:
        """Mark its first step; its KV had been ready for `waited_s` while another step ran."""
        self.first_step_at_s, self.step_wait_s = now_s, waited_s

    def end_step(self, now_s: float) -> None:
        """Mark the end of its first step."""
        self.first_step_end_s = now_s

    def sample(self, now_s: float) -> None:
        """Mark the first token that was computed here."""
        self.first_token_s = now_s

    def end(self, now_s: float) -> None:
        """Mark the moment after which its client gets nothing more from here."""
        if self.over_s is None:
            self.over_s = now_s

    def start(self, now_s: float) -> None:
        """Leave the queue: a step runs it, or its load begins."""
        if self.started_s is None:
            self.started_s = self._load_began_s = now_s
            self._queue_s += now_s - self._waits_since_s
            self._spans.append(StageSpan("queue", self._waits_since_s, now_s))

    def begin_load_again(self, now_s: float) -> None:
        """Load again, or load more; a failed attempt counts as waiting for the peer."""
        self._load_began_s = now_s

    def wait_for_peer(self, now_s: float) -> None:
        """Stand aside until the peer has done something."""
        self._queue_s += now_s - self._waits_since_s
        self._spans.append(StageSpan("queue", self._waits_since_s, now_s))
        self._waits_since_s = now_s
        self.is_aside = True
        self.note(now_s, "waits for its peer")

    def queue_again(self, now_s: float) -> None:
        """Queue again, after a wait for the peer or a failed load."""
        since_s = self._waits_since_s if self.started_s is None else self.started_s
        self._peer_wait_s += now_s - since_s
        self._spans.append(StageSpan("kv_wait", since_s, now_s))
        self._waits_since_s, self.started_s, self.is_aside = now_s, None, False
        self.load_ready_s, self.load_transfer_s = None, 0.0

    def receive(self, received: Received, now_s: float) -> None:
        """Take the times of a load that was complete some time before `now_s`."""
        took_s = received.elapsed_s
        if not took_s:
            took_s = (
                received.wait_s + received.transfer_s
                if received.mode is KVMode.PULL
                else now_s - self._load_began_s
            )
        # The time between the last byte and this report is part of the hand-over.
        ready_s = min(now_s, self._load_began_s + took_s)
        self.load_ready_s = ready_s
        transfer_s = min(received.transfer_s, ready_s - self._load_began_s)
        self.load_transfer_s += transfer_s
        self.load_digest_s += min(received.digest_s, transfer_s)
        self.load_bytes += received.num_bytes

    def fetch(self, fetched: Fetched) -> None:
        """Note a fetch from a store; its time lies inside other stages."""
        self.fetched = fetched

    def stages(self) -> RequestStages:
        """Return the durations between the marks that exist."""
        started, ready = self.started_s, self.load_ready_s
        first_step_at, first_token = self.first_step_at_s, self.first_token_s
        peer_wait_s, handover_s, prefill_s, first_step_s = self._peer_wait_s, 0.0, 0.0, 0.0
        if started is not None and ready is not None:
            peer_wait_s += ready - started - self.load_transfer_s
            if first_step_at is not None:
                handover_s = first_step_at - ready
                if self.first_step_end_s is not None:
                    first_step_s = self.first_step_end_s - first_step_at
        elif started is not None and first_token is not None:
            prefill_s = first_token - started
        return RequestStages(
            queue_s=self._queue_s,
            prefill_s=prefill_s,
            kv_wait_s=peer_wait_s,
            kv_transfer_s=self.load_transfer_s,
            handover_s=handover_s,
            first_step_s=first_step_s,
            kv_bytes=self.load_bytes,
            kv_digest_s=self.load_digest_s,
            step_wait_s=self.step_wait_s,
            store_tokens=self.fetched.num_tokens if self.fetched else 0,
            store_bytes=self.fetched.num_bytes if self.fetched else 0,
            store_s=self.fetched.seconds if self.fetched else 0.0,
        )

    def spans(self, now_s: float, *, after: str) -> list[StageSpan]:
        """Return the stages as spans of time, in order and without gaps, until `now_s`.

        The last span of a request that has not ended runs until `now_s`. After a preemption, the
        wait for another turn lies inside `prefill` or `decode`.

        Args:
            after: Name of the span from its end here until it is forgotten.
        """
        end_s = now_s if self.over_s is None else self.over_s
        spans = list(self._spans)
        started, ready = self.started_s, self.load_ready_s
        marks: list[tuple[str, float | None]]
        if started is None:
            marks = [("kv_wait" if self.is_aside else "queue", None)]
            begin_s = self._waits_since_s
        elif ready is not None:
            begin_s = started
            marks = [
                ("kv_wait", ready - self.load_transfer_s),
                ("kv_transfer", ready),
                ("handover", self.first_step_at_s),
                ("first_step", self.first_step_end_s),
                ("decode", None),
            ]
        else:
            begin_s = started
            marks = [("prefill", self.first_token_s), ("decode", None)]
            if self.first_step_at_s is None:
                marks = [("kv_wait", None)]  # its KV is on its way
        for name, mark_s in marks:
            until_s = end_s if mark_s is None else min(mark_s, end_s)
            spans.append(StageSpan(name, begin_s, until_s))
            begin_s = until_s
            if mark_s is None:
                break
        if self.over_s is not None and now_s > self.over_s:
            spans.append(StageSpan(after, self.over_s, now_s))
        return [span for span in spans if span.end_s > span.start_s]
