"""Links over shared memory, for ranks on the core's own machine.

Steps go through one ring that all ranks read; each rank answers through a ring of its own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from pdserve.executor.channel import RingReader, RingWriter, Waiter, WakeEvent, make_eventfd

if TYPE_CHECKING:
    from collections.abc import Callable

_STEP_BYTES = 256 << 10
_REPLY_BYTES = 256 << 10


class RingEnds(msgspec.Struct, frozen=True, kw_only=True, tag="rings"):
    """Ends of the rings that a rank inherits to open its `RingLink`.

    Attributes:
        rank: Number of the rank within its engine, below `num_ranks`.
        spin_s: Seconds that it polls for a step before it sleeps.
    """

    rank: int
    num_ranks: int
    steps_memory_fd: int
    steps_event_fd: int
    replies_memory_fd: int
    replies_event_fd: int
    spin_s: float

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors to inherit."""
        return (
            self.steps_memory_fd,
            self.steps_event_fd,
            self.replies_memory_fd,
            self.replies_event_fd,
        )


class RingHub:
    """See `Hub`."""

    def __init__(
        self,
        num_ranks: int,
        *,
        step_bytes: int = _STEP_BYTES,
        reply_bytes: int = _REPLY_BYTES,
    ) -> None:
        self._steps = RingWriter.create(capacity_bytes=step_bytes, num_readers=num_ranks)
        self._replies_event_fd = make_eventfd()
        # A reply ring's writer lives in the rank's process: only its memory is made here.
        self._replies: list[RingReader] = []
        for _ in range(num_ranks):
            writer = RingWriter.create(
                capacity_bytes=reply_bytes, event_fd=os.dup(self._replies_event_fd)
            )
            self._replies.append(RingReader(os.dup(writer.memory_fd)))
            writer.close()

    def ends(self, rank: int, *, spin_s: float) -> RingEnds:
        """Return the ends with which `rank` opens its link."""
        return RingEnds(
            rank=rank,
            num_ranks=len(self._replies),
            steps_memory_fd=self._steps.memory_fd,
            steps_event_fd=self._steps.event_fd,
            replies_memory_fd=self._replies[rank].memory_fd,
            replies_event_fd=self._replies_event_fd,
            spin_s=spin_s,
        )

    def wake_on(self, waiter: Waiter) -> None:
        """See `Hub`."""
        waiter.hear(self._replies_event_fd)

    def broadcast(self, frame: bytes, *, on_full: Callable[[], None]) -> None:
        """See `Hub`."""
        self._steps.send(frame, on_full=on_full)

    def receive(self) -> tuple[int, bytes] | None:
        """See `Hub`."""
        for rank, ring in enumerate(self._replies):
            frame = ring.take()
            if frame is not None:
                return rank, frame
        return None

    def lost(self) -> dict[int, str]:
        """See `Hub`: shared memory is always there."""
        return {}

    def has_heard_out(self, rank: int) -> bool:
        """See `Hub`: what was written is there."""
        return True

    def close(self) -> None:
        """See `Hub`."""
        self._steps.close()
        for ring in self._replies:
            ring.close()
        os.close(self._replies_event_fd)


class RingLink:
    """See `Link`."""

    def __init__(self, ends: RingEnds) -> None:
        self._steps = RingReader(ends.steps_memory_fd, reader=ends.rank, num_readers=ends.num_ranks)
        self._replies = RingWriter(ends.replies_memory_fd, ends.replies_event_fd)
        self._steps_event_fd = ends.steps_event_fd
        self._interrupt = WakeEvent()
        self._waiter = Waiter(spin_s=ends.spin_s)
        self._waiter.hear(ends.steps_event_fd)
        self._waiter.watch(self._interrupt.fd)

    def recv(self) -> bytes | None:
        """See `Link`."""
        frame = self._waiter.wait(self._steps.take)
        if frame is None:
            self._interrupt.clear()
        return frame

    def send(self, frame: bytes) -> None:
        """See `Link`."""
        self._replies.send(frame)

    def interrupt(self) -> None:
        """See `Link`."""
        self._interrupt.set()

    def close(self) -> None:
        """See `Link`."""
        self._waiter.close()
        self._steps.close()
        self._replies.close()
        os.close(self._steps_event_fd)
        self._interrupt.close()
