"""Links over TCP: who gets through, and how an end is noticed."""

from __future__ import annotations

import select
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq

from pdserve.errors import ConfigError
from pdserve.executor.channel import ChannelClosedError, Waiter
from pdserve.executor.zmq_links import ZmqHub, ZmqLink
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.executor.zmq_links import ZmqEnds

HOST = "127.0.0.1"


@pytest.fixture
def hub() -> Iterator[ZmqHub]:
    """A hub for two ranks."""
    hub = ZmqHub(2, host=HOST)
    yield hub
    hub.close()


@contextmanager
def linked(hub: ZmqHub, rank: int) -> Iterator[ZmqLink]:
    link = ZmqLink(hub.ends(rank))
    try:
        yield link
    finally:
        link.close()


@contextmanager
def stranger(ends: ZmqEnds, server_key: bytes | None, token: bytes) -> Iterator[None]:
    """Somebody else, who sends what a rank might."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.routing_id = token
    if server_key is not None:
        socket.curve_serverkey = server_key
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(ends.address)
    socket.send(b"let me in")
    try:
        yield
    finally:
        socket.close(0)
        context.term()


def received(hub: ZmqHub, timeout_s: float) -> tuple[int, bytes] | None:
    """What the hub receives within the time."""
    waiter = Waiter(spin_s=0.0)
    hub.wake_on(waiter)
    deadline = time.monotonic() + timeout_s
    found = None
    while found is None and time.monotonic() < deadline:
        found = waiter.wait(hub.receive, max(0.0, deadline - time.monotonic()))
        hub.lost()
    waiter.close()
    return found


def test_every_rank_gets_a_broadcast_and_answers_under_its_own_number(hub: ZmqHub) -> None:
    with linked(hub, 0) as first, linked(hub, 1) as second:
        hub.broadcast(b"step", on_full=lambda: None)
        assert first.recv() == second.recv() == b"step"
        second.send(b"from 1")
        assert received(hub, 30) == (1, b"from 1")
        first.send(b"from 0")
        assert received(hub, 30) == (0, b"from 0")


@pytest.mark.parametrize("who", ["plain", "another key", "another token"])
def test_a_strangers_message_is_refused_and_the_ranks_go_on(hub: ZmqHub, who: str) -> None:
    ends = hub.ends(0)
    key = {"plain": None, "another key": zmq.curve_keypair()[0]}.get(who, ends.server_key)
    token = b"rank-guessed" if who == "another token" else ends.token
    with stranger(ends, key, token):
        assert received(hub, 0.2) is None
        with linked(hub, 0) as link:
            link.send(b"mine")
            assert received(hub, 30) == (0, b"mine")
            assert hub.lost() == {}


def test_a_connection_number_used_again_does_not_make_a_rank_seem_lost(hub: ZmqHub) -> None:
    with stranger(hub.ends(0), None, b"x"):
        assert received(hub, 0.1) is None
    with linked(hub, 0) as link:
        link.send(b"hello")
        assert received(hub, 30) == (0, b"hello")
        time.sleep(0.05)
        assert hub.lost() == {}


def test_the_end_of_a_link_is_noticed_after_its_last_words(hub: ZmqHub) -> None:
    with linked(hub, 1) as link:
        link.send(b"hello")
        assert received(hub, 30) == (1, b"hello")
        assert not hub.has_heard_out(1)
        link.send(b"last words")
    wait_until(lambda: hub.has_heard_out(1))
    assert hub.receive() == (1, b"last words")
    assert hub.lost() == {1: "lost its connection"}
    hub.broadcast(b"into the void", on_full=lambda: None)


def test_a_link_whose_core_has_ended_raises_instead_of_waiting_for_ever() -> None:
    hub = ZmqHub(1, host=HOST)
    with linked(hub, 0) as link:
        hub.close()
        with pytest.raises(ChannelClosedError, match="ended the connection"):
            link.recv()


def test_a_link_to_somebody_else_is_refused(hub: ZmqHub) -> None:
    ends = msgspec.structs.replace(hub.ends(0), server_key=zmq.curve_keypair()[0])
    with pytest.raises(ChannelClosedError):
        ZmqLink(ends)


def test_an_interrupt_comes_after_the_frames_that_are_there(hub: ZmqHub) -> None:
    with linked(hub, 0) as link:
        hub.broadcast(b"step", on_full=lambda: None)
        wait_until(lambda: link._socket.poll(0))
        link.interrupt()
        assert link.recv() == b"step"
        assert link.recv() is None
    link.interrupt()  # a transfer thread may be late


def test_an_answer_that_comes_while_a_step_is_sent_still_wakes_the_core(hub: ZmqHub) -> None:
    waiter = Waiter(spin_s=0.0)
    hub.wake_on(waiter)
    with linked(hub, 0) as link:
        link.send(b"one")
        assert received(hub, 30) == (0, b"one")
        waiter.poll()
        for _ in range(20):
            link.send(b"answer")
            time.sleep(0.002)
            hub.broadcast(b"step", on_full=lambda: None)
            assert select.select([waiter.fileno()], [], [], 5)[0]
            waiter.poll()
            assert waiter.wait(hub.receive, 5) == (0, b"answer")
    waiter.close()


def test_a_host_that_is_not_here_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        ZmqHub(1, host="192.0.2.1")
