"""How connections end whose owner is destroyed: behind what was sent, and never with a reset."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from typing import TYPE_CHECKING

import pytest

from pdserve.connectors.nixl.descriptors import close_gently
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    there.settimeout(10.0)
    here.settimeout(10.0)
    with here, there:
        yield here, there


def num_holders(inode: int) -> int:
    """Descriptors of this process for a socket."""
    held = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            held += os.fstat(int(name)).st_ino == inode
    return held


def wait_until_held_once(inode: int) -> None:
    """Engines of other tests, whose threads end late, copy every connection for a moment, too."""
    wait_until(lambda: num_holders(inode) == 1)


def inode_of(end: socket.socket) -> int:
    return os.fstat(end.fileno()).st_ino


@pytest.mark.slow
def test_a_peer_finds_the_end_behind_all_questions_though_its_answers_were_not_read() -> None:
    with connection() as (here, there):
        there.sendall(b"an answer that nobody has read")
        here.sendall(b"a question")
        close_gently(here.close, quiet_s=0.01)
        for _ in range(64):
            there.sendall(bytes(1 << 16))  # more than the sockets hold
        assert there.recv(100) == b"a question"
        assert there.recv(100) == b""


@pytest.mark.slow
def test_a_peer_that_sleeps_finds_no_end_before_it_has_woken_and_answered() -> None:
    with connection() as (here, there):
        there.sendall(b"an answer from before")
        close_gently(here.close, quiet_s=0.2)
        there.settimeout(0.8)
        with pytest.raises(TimeoutError):
            there.recv(100)
        there.settimeout(10.0)
        there.sendall(b"the last one")
        assert there.recv(100) == b""


@pytest.mark.slow
def test_a_peer_whose_answers_are_still_under_way_finds_no_end_because_another_has_woken() -> None:
    """As after a partition: TCP tries again sooner on one connection than on the other."""

    def destroy() -> None:
        here.close()
        late.close()

    with connection() as (here, there), connection() as (late, there_too):
        close_gently(destroy, quiet_s=0.1)
        time.sleep(0.3)  # for longer than `quiet_s`: both peers are asleep
        there.sendall(b"the last one")
        assert there.recv(100) == b""
        there_too.settimeout(0.5)
        with pytest.raises(TimeoutError):
            there_too.recv(100)


def test_nothing_is_left_once_the_peer_has_closed_its_side() -> None:
    with connection() as (here, there):
        inode = inode_of(here)
        close_gently(here.close)
        wait_until_held_once(inode)
        there.close()
        wait_until(lambda: num_holders(inode) == 0)


def test_connections_of_others_are_left_alone() -> None:
    with connection() as (here, there), connection() as (mine, theirs):
        close_gently(here.close)
        wait_until_held_once(inode_of(mine))
        mine.sendall(b"on and on")
        assert theirs.recv(100) == b"on and on"
        there.close()


def test_what_cannot_be_destroyed_leaves_no_copies_behind() -> None:
    def fail() -> None:
        raise OSError("no")

    with connection() as (here, _):
        with pytest.raises(OSError, match="no"):
            close_gently(fail)
        wait_until_held_once(inode_of(here))


def test_an_owner_is_destroyed_though_no_descriptor_is_left_to_look_for_its_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    destroyed: list[bool] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        close_gently(lambda: destroyed.append(True))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert destroyed == [True]
