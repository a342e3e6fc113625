"""A byte ring in shared memory between two processes: one writer, one reader.

The memory has no name (memfd) and the doorbell is an eventfd; both are inherited by
file descriptor, so nothing is left behind however the processes end. A frame may be
larger than the ring: it is written and read in pieces.

The positions only grow; each is written by one side. They are 8-byte aligned words in
their own cache lines, stored after the bytes they cover: on x86-64 a store is not seen
before an earlier one (total store order), and on other machines the eventfd system call
that follows every write orders them for a reader that waits for the doorbell.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_HEADER_BYTES = 128
_WRITTEN, _READ = 0, 8  # indices of the two positions, in 8-byte words
_FULL_WAIT_S = 0.0002


class ChannelClosedError(Exception):
    """The other side has ended."""


class Ring:
    """One direction. Each side uses either `send` or `recv`, never both.

    Args:
        memory_fd: A memfd of `_HEADER_BYTES` plus a power of two.
        doorbell_fd: An eventfd.
        spin_s: How long a reader looks before it sleeps. Spinning takes a core from
            whoever computes; it pays where there are more cores than ranks.
    """

    def __init__(self, memory_fd: int, doorbell_fd: int, *, spin_s: float) -> None:
        self.memory_fd, self.doorbell_fd = memory_fd, doorbell_fd
        size = os.fstat(memory_fd).st_size
        self._map = mmap.mmap(memory_fd, size)
        self._view = memoryview(self._map)
        self._words = self._view[:_HEADER_BYTES].cast("Q")
        self._data = self._view[_HEADER_BYTES:]
        self._capacity = size - _HEADER_BYTES
        self._spin_s = spin_s
        self._poller = select.poll()
        self._poller.register(doorbell_fd, select.POLLIN)
        self._peer_fd: int | None = None

    @classmethod
    def create(cls, *, capacity_bytes: int, spin_s: float) -> Ring:
        """Make a ring whose file descriptors a child can inherit."""
        memory_fd = os.memfd_create("pdserve-ring", 0)
        os.ftruncate(memory_fd, _HEADER_BYTES + capacity_bytes)
        return cls(memory_fd, os.eventfd(0, os.EFD_NONBLOCK), spin_s=spin_s)

    def watch_peer(self, peer_fd: int) -> None:
        """Never wait for a process that has ended.

        Args:
            peer_fd: Readable once the other side has ended (a pidfd); it stays the caller's.
        """
        self._peer_fd = peer_fd
        self._poller.register(peer_fd, select.POLLIN)

    def send(self, frame: bytes, *, on_full: Callable[[], None] | None = None) -> None:
        """Write one frame; waits while the ring is full.

        Args:
            on_full: Called again and again meanwhile. Who is also the reader of a ring the
                other way must read it then: the other side may be waiting for room there.

        Raises:
            ChannelClosedError: The ring was full and the other side has ended.
        """
        self._write(len(frame).to_bytes(8, "little"), on_full)
        self._write(frame, on_full)

    def has_frame(self) -> bool:
        """Whether `recv` would find something."""
        return self._words[_WRITTEN] != self._words[_READ]

    def recv(self, timeout_s: float | None, *, watch: Sequence[int] = ()) -> bytes | None:
        """Read one frame.

        None = `timeout_s` passed, or a file descriptor of `watch` became readable, while
        there was no frame.

        Raises:
            ChannelClosedError: The other side has ended, and left no whole frame.
        """
        if not self._wait(timeout_s, watch):
            return None
        return self._read(int.from_bytes(self._read(8), "little"))

    def drain_doorbell(self) -> None:
        """Silence the doorbell; look at `has_frame` after it, not before."""
        try:
            os.eventfd_read(self.doorbell_fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Unmap and close this side."""
        for view in (self._words, self._data, self._view):
            view.release()
        self._map.close()
        os.close(self.memory_fd)
        os.close(self.doorbell_fd)

    def _wait(self, timeout_s: float | None, watch: Sequence[int]) -> bool:
        if self.has_frame():
            return True
        if self._spin_s:
            stop = time.perf_counter() + self._spin_s
            while time.perf_counter() < stop:
                if self.has_frame():
                    return True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for fd in watch:
            self._poller.register(fd, select.POLLIN)
        try:
            while True:
                self.drain_doorbell()
                if self.has_frame():
                    return True
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready = [fd for fd, _ in self._poller.poll(None if left is None else left * 1e3)]
                if self.has_frame():
                    return True
                if self._peer_fd in ready:
                    raise ChannelClosedError("the other side has ended")
                if not ready or any(fd != self.doorbell_fd for fd in ready):
                    return False
        finally:
            for fd in watch:
                self._poller.unregister(fd)

    def _write(self, data: bytes, on_full: Callable[[], None] | None) -> None:
        view = memoryview(data)
        while view:
            written = self._words[_WRITTEN]
            room = self._capacity - (written - self._words[_READ])
            if room == 0:
                if self._has_peer_ended():
                    raise ChannelClosedError("the other side has ended")
                if on_full is not None:
                    on_full()
                time.sleep(_FULL_WAIT_S)
                continue
            at = written % self._capacity
            num = min(len(view), room, self._capacity - at)
            self._data[at : at + num] = view[:num]
            self._words[_WRITTEN] = written + num
            os.eventfd_write(self.doorbell_fd, 1)
            view = view[num:]

    def _has_peer_ended(self) -> bool:
        if self._peer_fd is None:
            return False
        poller = select.poll()
        poller.register(self._peer_fd, select.POLLIN)
        return bool(poller.poll(0))

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            self._wait(None, ())
            read = self._words[_READ]
            at = read % self._capacity
            num = min(size, self._words[_WRITTEN] - read, self._capacity - at)
            parts.append(bytes(self._data[at : at + num]))
            self._words[_READ] = read + num
            size -= num
        return parts[0] if len(parts) == 1 else b"".join(parts)
