"""The shared-memory ring between two processes."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.executor.channel import ChannelClosedError, Ring

if TYPE_CHECKING:
    from collections.abc import Iterator

ECHO = """
import sys
from pdserve.executor.channel import Ring
a, b, c, d = map(int, sys.argv[1:])
inbox, outbox = Ring(a, b, spin_s=0.0), Ring(c, d, spin_s=0.0)
while (frame := inbox.recv(None)) != b"end":
    outbox.send(frame)
"""


def reader_of(ring: Ring) -> Ring:
    """The other side of a ring, in the same process."""
    return Ring(os.dup(ring.memory_fd), os.dup(ring.doorbell_fd), spin_s=0.0)


@given(frames=st.lists(st.binary(max_size=200), max_size=20))
def test_frames_of_any_size_come_out_as_they_went_in(frames: list[bytes]) -> None:
    writer = Ring.create(capacity_bytes=64, spin_s=0.0)
    reader = reader_of(writer)
    got: list[bytes | None] = []
    thread = threading.Thread(target=lambda: got.extend(reader.recv(10) for _ in frames))
    thread.start()
    for frame in frames:
        writer.send(frame)
    thread.join(10)
    writer.close()
    reader.close()
    assert got == frames


def test_an_empty_ring_gives_none_after_the_timeout() -> None:
    writer = Ring.create(capacity_bytes=64, spin_s=1e-4)
    assert writer.recv(0.01) is None
    writer.close()


def test_a_watched_descriptor_ends_the_wait_but_a_frame_comes_first() -> None:
    writer = Ring.create(capacity_bytes=64, spin_s=0.0)
    reader = reader_of(writer)
    bell = os.eventfd(1)
    writer.send(b"x")
    assert reader.recv(5, watch=[bell]) == b"x"
    assert reader.recv(5, watch=[bell]) is None
    os.close(bell)
    writer.close()
    reader.close()


@pytest.fixture
def ended_fd() -> Iterator[int]:
    """What says that a process has ended."""
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    pid_fd = os.pidfd_open(process.pid)
    assert select.select([pid_fd], [], [], 10)[0]
    process.wait()
    yield pid_fd
    os.close(pid_fd)


def test_a_full_ring_whose_reader_died_raises_instead_of_waiting_for_ever(ended_fd: int) -> None:
    writer = Ring.create(capacity_bytes=64, spin_s=0.0)
    writer.watch_peer(ended_fd)
    with pytest.raises(ChannelClosedError):
        writer.send(b"y" * 1000)
    writer.close()


def test_what_a_writer_left_is_read_and_then_its_end_is_noticed(ended_fd: int) -> None:
    writer = Ring.create(capacity_bytes=64, spin_s=0.0)
    reader = reader_of(writer)
    writer.send(b"last words")
    reader.watch_peer(ended_fd)
    assert reader.recv(None) == b"last words"
    with pytest.raises(ChannelClosedError):
        reader.recv(None)
    writer.close()
    reader.close()


def test_a_writer_that_died_within_a_frame_raises_instead_of_waiting_for_ever(
    ended_fd: int,
) -> None:
    writer = Ring.create(capacity_bytes=64, spin_s=0.0)
    reader = reader_of(writer)
    writer.watch_peer(ended_fd)  # which ends it when the ring is full: within the frame
    with pytest.raises(ChannelClosedError):
        writer.send(b"z" * 1000)
    reader.watch_peer(ended_fd)
    with pytest.raises(ChannelClosedError):
        reader.recv(None)
    writer.close()
    reader.close()


def test_two_sides_that_send_more_than_the_rings_hold_do_not_wait_for_one_another() -> None:
    there = Ring.create(capacity_bytes=1 << 12, spin_s=0.0)
    back = Ring.create(capacity_bytes=1 << 12, spin_s=0.0)
    fds = [there.memory_fd, there.doorbell_fd, back.memory_fd, back.doorbell_fd]
    process = subprocess.Popen([sys.executable, "-c", ECHO, *map(str, fds)], pass_fds=fds)
    frames = [os.urandom(50_000) for _ in range(4)]
    got: list[bytes | None] = []

    def take() -> None:
        while back.has_frame():
            got.append(back.recv(20))

    for frame in frames:
        there.send(frame, on_full=take)
    while len(got) < len(frames):
        got.append(back.recv(20))
    assert got == frames
    there.send(b"end")
    assert process.wait(20) == 0
    there.close()
    back.close()


def test_two_processes_echo_frames_larger_than_the_ring() -> None:
    there = Ring.create(capacity_bytes=1 << 12, spin_s=0.0)
    back = Ring.create(capacity_bytes=1 << 12, spin_s=0.0)
    fds = [there.memory_fd, there.doorbell_fd, back.memory_fd, back.doorbell_fd]
    process = subprocess.Popen([sys.executable, "-c", ECHO, *map(str, fds)], pass_fds=fds)
    for size in (0, 1, 100, 5000, 3):
        frame = os.urandom(size)
        sender = threading.Thread(target=there.send, args=(frame,))
        sender.start()
        assert back.recv(20) == frame
        sender.join()
    there.send(b"end")
    assert process.wait(20) == 0
    there.close()
    back.close()
