"""What a rank tells the store of its locks; `test_lmcache` kills engines of a real server."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdserve.connectors.lmcache.held_locks import HeldLocks, HeldLocksModule
from tests.waiting import wait_until

NUM_SESSIONS = 2000


def test_a_server_that_is_stopped_delays_nobody_and_hears_all_of_it_later(tmp_path: Path) -> None:
    segment = tmp_path / "pool"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{segment}.locks")
        listener.listen()
        held = HeldLocks(7)
        held.connect(segment)
        for number in range(NUM_SESSIONS):
            held.opened(str(number))
        server, _ = listener.accept()
        heard: list[bytes] = []
        with server:
            while len(heard) <= NUM_SESSIONS:
                held.over("none")
                heard.append(server.recv(100))
            held.close()
    assert heard == [b"rank 7", *(b"+%d" % number for number in range(NUM_SESSIONS))]


def test_a_server_without_a_socket_is_told_nothing(tmp_path: Path) -> None:
    held = HeldLocks(7)
    held.connect(tmp_path / "pool")
    held.opened("1")
    held.close()


def test_a_rank_sees_that_the_servers_process_has_ended_and_connects_to_the_next(
    tmp_path: Path,
) -> None:
    segment, held = tmp_path / "pool", HeldLocks(7)
    for _ in range(2):
        assert not held.is_cut()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"{segment}.locks")
            listener.listen()
            held.connect(segment)
            server, _ = listener.accept()
            with server:
                assert server.recv(100) == b"rank 7"
                assert not held.is_cut()
            assert held.is_cut()
        Path(f"{segment}.locks").unlink()
    held.close()


@dataclass
class Key:
    """A lookup's, as far as it matters here."""

    start: int = 0


class Server:
    """What is called of LMCache's parts; `found` is the lookups that it has taken up."""

    chunk_size = 16

    def __init__(self) -> None:
        self.found: dict[str, SimpleNamespace] = {}
        self.done: list[str] = []
        self.session_manager = self.found

    def wait_prefetch_status(self, name: str, _timeout_s: float) -> None:
        self.found[name].prefetch_hit_chunks = 3

    def free_lookup_locks(self, key: Key, _ranks: int) -> None:
        self.done.append(f"free from token {key.start}")

    def end_session(self, name: str) -> None:
        self.done.append(f"end {name}")

    def unregister_kv_cache(self, instance_id: int) -> None:
        self.done.append(f"unregister {instance_id}")


@pytest.mark.slow
def test_a_lookup_that_the_server_takes_up_after_its_engine_was_killed_is_given_back(
    tmp_path: Path,
) -> None:
    server, segment = Server(), tmp_path / "pool"
    module = HeldLocksModule(server, server, server, segment)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
        rank.connect(f"{segment}.locks")
        for message in (b"rank 7", b"+over", b"+late", b"<2 late", b"-over"):
            rank.send(message)
    wait_until(lambda: server.done == ["unregister 7"])
    server.found["late"] = SimpleNamespace(lookup_ipc_key=Key(), prefetch_hit_chunks=-1)
    wait_until(lambda: server.done == ["unregister 7", "free from token 32", "end late"])
    module.close()


@pytest.mark.slow
def test_locks_that_a_load_has_taken_over_are_not_given_back_as_those_of_its_lookup(
    tmp_path: Path,
) -> None:
    """The release of chunks that are not loaded is another thread's, and may come behind it."""
    server, segment = Server(), tmp_path / "pool"
    server.found["loads"] = SimpleNamespace(lookup_ipc_key=Key(), prefetch_hit_chunks=3)
    server.found["waits"] = SimpleNamespace(lookup_ipc_key=Key(), prefetch_hit_chunks=3)
    module = HeldLocksModule(server, server, server, segment)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
        rank.connect(f"{segment}.locks")
        for message in (b"rank 7", b"+loads", b"-loads", b"<1 loads", b"+waits"):
            rank.send(message)
    wait_until(lambda: "end waits" in server.done)
    assert server.done == ["unregister 7", "free from token 0", "end waits"]
    module.close()


@pytest.mark.slow
def test_an_engine_that_ends_in_order_has_given_back_all_itself(tmp_path: Path) -> None:
    server, segment = Server(), tmp_path / "pool"
    module = HeldLocksModule(server, server, server, segment)
    held = HeldLocks(7)
    held.connect(segment)
    held.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.connect(f"{segment}.locks")
        killed.send(b"rank 8")
    wait_until(lambda: server.done == ["unregister 8"])
    module.close()
