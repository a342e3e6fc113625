"""A byte ring in shared memory between processes: one writer, one or several readers.

Every reader gets every frame, in order. The memory has no name (memfd), and a reader is
woken by an eventfd; both are inherited by file descriptor, so nothing is left behind however the
processes end. A frame may be larger than the ring: it is written and read in pieces, and
the writer waits for the slowest reader.

Memory: a cache line with the writer's position, one for each reader's, then the data.
Positions only grow, are multiples of 8, and are each written by one side, after the bytes
they cover were written or read. On x86-64 others see both in that order (total store order);
elsewhere there is a fence between the two, and one after each read of a position.

One eventfd serves all readers of a ring: it is never read, and every reader waits for its edges
by an epoll of its own (epoll(7), EPOLLET). So a broadcast is one system call for any number of
readers, and a wake-up takes one too.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import threading
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

_LINE_BYTES = 64
_LINE_WORDS = 8
_ALIGN = 8
_FULL_WAIT_S = 0.0002
_NEEDS_FENCES = platform.machine() not in ("x86_64", "AMD64")

SPIN_S = 50e-6
"""How long to look for a frame before sleeping.

Waking a core that has gone idle takes longer (30 to 60 us in a virtual machine) than a round
trip between two that are awake. Whoever spins gives way at every look (sched_yield(2)), so
where processes outnumber cores it takes but what nobody else wants: with 5 on 2 cores, idle or
loaded, it was never slower than sleeping at once.
"""


class ChannelClosedError(Exception):
    """The other side has ended."""


class RingWriter:
    """The writing side.

    Args:
        memory_fd: Memory made by `create`; closed by `close`, like `event_fd`.
    """

    def __init__(self, memory_fd: int, event_fd: int, *, num_readers: int = 1) -> None:
        self.memory_fd, self.event_fd = memory_fd, event_fd
        self._memory = _Memory(memory_fd, num_readers)
        self._readers = [_LINE_WORDS * (1 + reader) for reader in range(num_readers)]
        self._written = self._memory.words[0]
        self._slowest = 0  # as of when room was last short

    @classmethod
    def create(
        cls, *, capacity_bytes: int, num_readers: int = 1, event_fd: int | None = None
    ) -> RingWriter:
        """Make a ring.

        Args:
            capacity_bytes: Size of the data; a multiple of 8.
            event_fd: An eventfd to write to, which this writer then owns. None makes one.
        """
        memory_fd = os.memfd_create("pdserve-ring")
        os.ftruncate(memory_fd, _LINE_BYTES * (1 + num_readers) + capacity_bytes)
        return cls(
            memory_fd,
            make_eventfd() if event_fd is None else event_fd,
            num_readers=num_readers,
        )

    def send(self, frame: bytes, *, on_full: Callable[[], None] | None = None) -> None:
        """Write one frame; waits while the ring is full.

        Args:
            on_full: Called repeatedly meanwhile. A writer that also reads a ring in the other
                direction must read it then: the other side may be waiting for room there.
                It may raise to give up, after which the ring is unusable.
        """
        memory, at, size = self._memory, self._written, len(frame)
        start = memory.first + at % memory.capacity
        end = start + _ALIGN + size
        after = at + _ALIGN + -(-size // _ALIGN) * _ALIGN
        if end > memory.end or after - self._slowest > memory.capacity:
            self._send_in_pieces(frame, on_full)
            return
        memory.words[start // _ALIGN] = size
        memory.bytes[start + _ALIGN : end] = frame
        self._publish(after)

    def close(self) -> None:
        """Unmap and close this side."""
        self._memory.close()
        os.close(self.memory_fd)
        os.close(self.event_fd)

    def _publish(self, at: int) -> None:
        if _NEEDS_FENCES:
            self._memory.fence()
        self._written = self._memory.words[0] = at
        os.eventfd_write(self.event_fd, 1)

    def _send_in_pieces(self, frame: bytes, on_full: Callable[[], None] | None) -> None:
        memory, at = self._memory, self._written
        self._wait_for_room(at, on_full)
        memory.words[(memory.first + at % memory.capacity) // _ALIGN] = len(frame)
        at += _ALIGN
        view = memoryview(frame)
        while True:
            num = min(len(view), memory.capacity - (at - self._slowest))
            start = memory.first + at % memory.capacity
            num_before = min(num, memory.end - start)
            memory.bytes[start : start + num_before] = view[:num_before]
            memory.bytes[memory.first : memory.first + num - num_before] = view[num_before:num]
            # All but the last piece fill the ring, so positions stay aligned.
            at += -(-num // _ALIGN) * _ALIGN
            self._publish(at)
            if num == len(view):
                return
            view = view[num:]
            self._wait_for_room(at, on_full)

    def _wait_for_room(self, at: int, on_full: Callable[[], None] | None) -> None:
        """Wait for an aligned word of room at position `at`."""
        memory = self._memory
        while True:
            self._slowest = min(memory.words[reader] for reader in self._readers)
            if at - self._slowest < memory.capacity:
                return
            if on_full is not None:
                on_full()
            time.sleep(_FULL_WAIT_S)


class RingReader:
    """One reading side.

    Args:
        memory_fd: Memory of a ring made by `RingWriter.create`; closed by `close`.
        reader: Index of this reader among the ring's `num_readers`.
    """

    def __init__(self, memory_fd: int, *, reader: int = 0, num_readers: int = 1) -> None:
        self.memory_fd = memory_fd
        self._memory = _Memory(memory_fd, num_readers)
        self._mine = _LINE_WORDS * (1 + reader)
        self._read = self._memory.words[self._mine]
        self._partial: bytearray | None = None
        self._missing = 0

    def take(self) -> bytes | None:
        """Read and return one frame; None if no complete one has arrived. Never blocks."""
        memory, at = self._memory, self._read
        available = memory.words[0] - at
        if not available:
            return None
        if _NEEDS_FENCES:
            memory.fence()
        if self._partial is not None:
            return self._take_more(self._partial, available)
        start = memory.first + at % memory.capacity
        size = memory.words[start // _ALIGN]
        start += _ALIGN
        if size > available - _ALIGN or start + size > memory.end:
            self._partial, self._missing = bytearray(), size
            self._advance(_ALIGN)
            return self._take_more(self._partial, available - _ALIGN)
        frame = memory.bytes[start : start + size]
        self._advance(_ALIGN + size)
        return frame

    def close(self) -> None:
        """Unmap and close this side."""
        self._memory.close()
        os.close(self.memory_fd)

    def _advance(self, num_bytes: int) -> None:
        if _NEEDS_FENCES:
            self._memory.fence()
        self._read += -(-num_bytes // _ALIGN) * _ALIGN
        self._memory.words[self._mine] = self._read

    def _take_more(self, partial: bytearray, available: int) -> bytes | None:
        memory = self._memory
        while self._missing and available:
            start = memory.first + self._read % memory.capacity
            num = min(self._missing, available, memory.end - start)
            partial += memory.bytes[start : start + num]
            self._missing -= num
            self._advance(num)
            available -= num
        if self._missing:
            return None
        self._partial = None
        return bytes(partial)


class Waiter:
    """Waits for eventfds, and for descriptors that are readable."""

    def __init__(self, *, spin_s: float) -> None:
        self._spin_s = spin_s
        self._epoll = select.epoll()
        self._watched: set[int] = set()

    def hear(self, event_fd: int) -> None:
        """Wake at every write to an eventfd."""
        self._epoll.register(event_fd, select.EPOLLIN | select.EPOLLET)

    def watch(self, fd: int) -> None:
        """Wake while `fd` is readable."""
        self._watched.add(fd)
        self._epoll.register(fd, select.EPOLLIN)

    def forget(self, fd: int) -> None:
        """Undo `watch`."""
        self._watched.remove(fd)
        self._epoll.unregister(fd)

    def fileno(self) -> int:
        """Return a descriptor that is readable while `poll` has something to consume."""
        return self._epoll.fileno()

    def poll(self) -> bool:
        """Consume wake-ups; look for frames afterwards, not before.

        Returns:
            Whether a watched descriptor is readable.
        """
        return self._is_watched(self._epoll.poll(0.0))

    def wait(self, take: Callable[[], _T | None], timeout_s: float | None = None) -> _T | None:
        """Call `take` until it returns something, and sleep in between.

        Returns None if `timeout_s` passed, or a watched descriptor became readable, and there
        was nothing to take.
        """
        found = take()
        if found is None and self._spin_s:
            stop = time.perf_counter() + self._spin_s
            while found is None and time.perf_counter() < stop:
                os.sched_yield()
                found = take()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while found is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            events = self._epoll.poll(left)
            found = take()
            if found is None and self._is_watched(events):
                break
        return found

    def close(self) -> None:
        """Stop watching; the descriptors stay open."""
        self._epoll.close()

    def _is_watched(self, events: list[tuple[int, int]]) -> bool:
        return bool(events) and any(fd in self._watched for fd, _ in events)


class WakeEvent:
    """Wakes a waiter of this process; any thread may set it, even after `close`."""

    def __init__(self) -> None:
        self.fd = make_eventfd()
        self._lock = threading.Lock()
        self._is_closed = False

    def set(self) -> None:
        """Make `fd` readable."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> bool:
        """Make `fd` unreadable; return whether it was set."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Close it."""
        with self._lock:
            self._is_closed = True
            os.close(self.fd)


def make_eventfd() -> int:
    """Return an eventfd that does not block."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


class _Memory:
    """A ring's memory, mapped.

    Attributes:
        words: The memory in words, for positions and frames' lengths.
        bytes: The memory in bytes; the ring is from `first` to `end`.
    """

    def __init__(self, memory_fd: int, num_readers: int) -> None:
        self.first = _LINE_BYTES * (1 + num_readers)
        self.end = os.fstat(memory_fd).st_size
        self.capacity = self.end - self.first
        # Populated, since a step must not wait for page faults.
        self.bytes = mmap.mmap(memory_fd, self.end, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.words = memoryview(self.bytes).cast("Q")
        self._lock = threading.Lock()
        self._lock.acquire()

    def fence(self) -> None:
        """Make this thread's earlier accesses visible to others before its later ones.

        No access moves past a release or ahead of an acquire, and these two stay in order.
        """
        self._lock.release()
        self._lock.acquire()

    def close(self) -> None:
        self.words.release()
        self.bytes.close()
