"""The shared-memory ring between one writer and its readers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.executor.channel import RingReader, RingWriter, Waiter, WakeEvent

if TYPE_CHECKING:
    from collections.abc import Iterator

CAPACITY = 64

# Reads frames of a broadcast ring and writes each back through a ring of its own.
ECHO = """
import sys
from pdserve.executor.channel import RingReader, RingWriter, Waiter
memory, eventfd, back_memory, back_eventfd, reader, num_readers = map(int, sys.argv[1:])
inbox = RingReader(memory, reader=reader, num_readers=num_readers)
back_writer = RingWriter(back_memory, back_eventfd)
waiter = Waiter(spin_s=0.0)
waiter.hear(eventfd)
while (frame := waiter.wait(inbox.take)) != b"end":
    back_writer.send(frame)
"""


def reader_of(ring: RingWriter, reader: int = 0, num_readers: int = 1) -> RingReader:
    """A reading side in the same process."""
    return RingReader(os.dup(ring.memory_fd), reader=reader, num_readers=num_readers)


def waiter_for(ring: RingWriter, *, spin_s: float = 0.0) -> Waiter:
    """What hears the ring's eventfd."""
    waiter = Waiter(spin_s=spin_s)
    waiter.hear(ring.event_fd)
    return waiter


@given(
    frames=st.lists(st.binary(max_size=3 * CAPACITY), max_size=12),
    num_readers=st.integers(1, 3),
)
def test_every_reader_gets_every_frame_in_order(frames: list[bytes], num_readers: int) -> None:
    writer = RingWriter.create(capacity_bytes=CAPACITY, num_readers=num_readers)
    readers = [reader_of(writer, index, num_readers) for index in range(num_readers)]
    got: list[list[bytes | None]] = [[] for _ in readers]

    def read_a_little() -> None:
        # Readers go at different speeds: each takes what it can, in turns.
        for index, reader in enumerate(readers):
            frame = reader.take()
            if frame is not None:
                got[index].append(frame)

    for frame in frames:
        writer.send(frame, on_full=read_a_little)
    for _ in range(len(frames) + 1):
        read_a_little()
    writer.close()
    for reader in readers:
        reader.close()
    assert got == [frames] * num_readers


def test_the_writer_waits_for_the_slowest_reader() -> None:
    writer = RingWriter.create(capacity_bytes=CAPACITY, num_readers=2)
    fast, slow = reader_of(writer, 0, 2), reader_of(writer, 1, 2)
    calls = 0

    def when_full() -> None:
        nonlocal calls
        calls += 1
        assert fast.take() is None
        if calls == 3:
            assert slow.take() == b"a" * 40

    writer.send(b"a" * 40)
    assert fast.take() == b"a" * 40
    writer.send(b"b" * 40, on_full=when_full)
    assert calls == 3
    assert fast.take() == slow.take() == b"b" * 40
    for side in (writer, fast, slow):
        side.close()


def test_a_writer_can_give_up_on_a_reader_that_never_reads() -> None:
    writer = RingWriter.create(capacity_bytes=CAPACITY)

    def give_up() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        writer.send(b"y" * 1000, on_full=give_up)
    writer.close()


def test_one_write_to_the_eventfd_wakes_every_reader() -> None:
    writer = RingWriter.create(capacity_bytes=CAPACITY, num_readers=3)
    readers = [reader_of(writer, index, 3) for index in range(3)]
    got: list[bytes | None] = []
    threads = [
        threading.Thread(
            target=lambda reader=reader: got.append(waiter_for(writer).wait(reader.take, 10))
        )
        for reader in readers
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.05)  # until they sleep, most likely; right either way
    writer.send(b"up")
    for thread in threads:
        thread.join(10)
    writer.close()
    for reader in readers:
        reader.close()
    assert got == [b"up"] * 3


@pytest.mark.parametrize("spin_s", [0.0, 1e-3])
def test_waiting_ends_after_the_timeout(spin_s: float) -> None:
    writer = RingWriter.create(capacity_bytes=CAPACITY)
    reader, waiter = reader_of(writer), waiter_for(writer, spin_s=spin_s)
    assert waiter.wait(reader.take, 0.01) is None
    for side in (writer, reader, waiter):
        side.close()


def test_a_watched_descriptor_ends_the_wait_but_a_frame_comes_first() -> None:
    writer = RingWriter.create(capacity_bytes=CAPACITY)
    reader, waiter = reader_of(writer), waiter_for(writer)
    event = WakeEvent()
    waiter.watch(event.fd)
    event.set()
    writer.send(b"x")
    assert waiter.wait(reader.take, 5) == b"x"
    assert waiter.wait(reader.take, 5) is None
    assert waiter.poll()
    assert event.clear()
    assert not waiter.poll()
    for side in (writer, reader, waiter, event):
        side.close()


def test_a_frame_written_before_anybody_listens_is_found() -> None:
    writer = RingWriter.create(capacity_bytes=CAPACITY)
    writer.send(b"early")
    reader, waiter = reader_of(writer), waiter_for(writer)
    assert waiter.wait(reader.take, 5) == b"early"
    for side in (writer, reader, waiter):
        side.close()


def test_a_bell_may_be_rung_after_it_was_closed() -> None:
    event = WakeEvent()
    event.close()
    event.set()


def test_a_frame_that_comes_within_the_spin_is_taken_without_a_sleep() -> None:
    writer = RingWriter.create(capacity_bytes=CAPACITY)
    reader, waiter = reader_of(writer), Waiter(spin_s=10.0)  # which hears no eventfd
    thread = threading.Timer(0.01, writer.send, [b"x"])
    thread.start()
    assert waiter.wait(reader.take, 20) == b"x"
    thread.join()
    for side in (writer, reader, waiter):
        side.close()


class Recorded:
    """A view of memory that notes what is done to it."""

    def __init__(self, view: Any, events: list[str], names: dict[int, str]) -> None:
        self._view, self._events, self._names = view, events, names

    def __getitem__(self, index: Any) -> Any:
        self._events.append(f"read {self._name(index)}")
        return self._view[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._events.append(f"write {self._name(index)}")
        self._view[index] = value

    def _name(self, index: Any) -> str:
        return "data" if isinstance(index, slice) else self._names.get(index, "data")


def test_where_stores_may_be_seen_out_of_order_fences_keep_positions_behind_their_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdserve.executor.channel._NEEDS_FENCES", True)
    writer = RingWriter.create(capacity_bytes=CAPACITY)
    reader = reader_of(writer)
    with monkeypatch.context() as patch:
        events: list[str] = []
        for side in (writer, reader):
            memory, fence = side._memory, side._memory.fence
            for name in ("words", "bytes"):
                view = Recorded(getattr(memory, name), events, {0: "written", 8: "taken"})
                patch.setattr(memory, name, view)
            patch.setattr(memory, "fence", lambda fence=fence: (events.append("fence"), fence()))
        writer.send(b"frame")
        assert events == ["write data", "write data", "fence", "write written"]
        del events[:]
        assert reader.take() == b"frame"
        wanted = ["read written", "fence", "read data", "read data", "fence", "write taken"]
        assert events == wanted
    writer.close()
    reader.close()


@contextmanager
def echoing(there: RingWriter, backs: list[RingWriter]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A process per ring back, each a reader of `there`; killed if still there at the end."""
    processes = []
    for index, back in enumerate(backs):
        fds = [there.memory_fd, there.event_fd, back.memory_fd, back.event_fd]
        numbers = map(str, [*fds, index, len(backs)])
        processes.append(subprocess.Popen([sys.executable, "-c", ECHO, *numbers], pass_fds=fds))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_processes_that_answer_while_they_are_written_to_get_all_of_it() -> None:
    capacity = 1 << 12
    there = RingWriter.create(capacity_bytes=capacity, num_readers=2)
    backs = [RingWriter.create(capacity_bytes=capacity) for _ in range(2)]
    answers = [reader_of(back) for back in backs]
    waiters = [waiter_for(back) for back in backs]
    frames = [os.urandom(size) for size in (0, 1, 100, capacity - 8, capacity, 3 * capacity)] * 4
    got: list[list[bytes]] = [[], []]

    def take() -> None:
        for index, answer in enumerate(answers):
            while (frame := answer.take()) is not None:
                got[index].append(frame)

    with echoing(there, backs) as processes:
        for frame in frames:
            # Both rings are full at times: who did not read here would wait for ever.
            there.send(frame, on_full=take)
        for index in range(2):
            while len(got[index]) < len(frames):
                frame = waiters[index].wait(answers[index].take, 20)
                assert frame is not None
                got[index].append(frame)
        assert got == [frames, frames]
        there.send(b"end")
        assert [process.wait(20) for process in processes] == [0, 0]
    for side in (there, *backs, *answers, *waiters):
        side.close()


def test_bytes_survive_many_turns_of_the_ring_between_two_processes() -> None:
    there = RingWriter.create(capacity_bytes=1 << 9)
    back = RingWriter.create(capacity_bytes=1 << 9)
    answer, waiter = reader_of(back), waiter_for(back)
    with echoing(there, [back]):
        for turn in range(3000):
            frame = bytes([turn % 251]) * (turn % 300)
            there.send(frame)
            assert waiter.wait(answer.take, 20) == frame
    for side in (there, back, answer, waiter):
        side.close()
