"""Strangers that connect to UCX's ports, and the descriptors that they would take for ever."""

from __future__ import annotations

import contextlib
import functools
import resource
import shutil
import socket
import subprocess
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest

from pdserve.connectors.conformance.engines import prompt_of
from pdserve.connectors.nixl import NixlConnector
from pdserve.connectors.nixl.descriptors import (
    DescriptorWatch,
    num_open_descriptors,
    num_silent_connections,
)
from pdserve.connectors.transfer_thread.host import HostProcesses
from pdserve.observe.clock import ManualClock
from tests.connectors.engines import Engine, RemoteEngine
from tests.connectors.making import making
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT = 1000
PROMPT = prompt_of(40)


class Process:
    """Descriptors that a test opens: of this engine, and strangers' that have ended or have not."""

    def __init__(self) -> None:
        self.own, self.ended, self.silent = 20, 0, 0
        self.num_tidied = 0
        self.renewed: list[str] = []
        self.faults: Counter[str] = Counter()
        self.clock = ManualClock()
        self.watch = DescriptorWatch(
            tidy=self._tidy,
            renew=self._renew,
            faults=self.faults,
            clock=self.clock,
            num_open=lambda: self.own + self.ended + self.silent,
            num_silent=lambda: self.silent,
            limit=lambda: LIMIT,
        )

    def look(self) -> None:
        self.clock.advance(self.watch.due_s - self.clock.monotonic_s())
        self.watch.tick()

    def _tidy(self) -> None:
        self.num_tidied += 1
        self.ended = 0

    def _renew(self, reason: str) -> None:
        self.renewed.append(reason)
        self.ended = self.silent = 0


def test_agents_are_driven_only_when_descriptors_have_become_more() -> None:
    process = Process()
    for _ in range(3):
        process.look()
    assert process.num_tidied == 0
    process.ended = 5
    process.watch.tick()  # before its time
    assert process.ended == 5
    process.look()
    assert process.ended == 0
    process.look()
    assert (process.num_tidied, process.renewed) == (1, [])


@pytest.mark.parametrize("kind", ["ended", "silent"])
def test_strangers_over_half_the_limit_have_the_agents_made_again(kind: str) -> None:
    process = Process()
    setattr(process, kind, LIMIT // 2)  # UCX may have met the limit before they ended
    process.look()
    assert process.renewed == ["500 connections that say nothing"]
    assert process.faults == {"descriptors_over_budget": 1}
    process.look()
    assert len(process.renewed) == 1


def test_agents_are_not_made_again_more_often_than_twice_a_minute() -> None:
    process = Process()
    for _ in range(31):
        process.silent = LIMIT
        process.look()
    assert len(process.renewed) == 2


def test_descriptors_that_are_not_strangers_are_said_and_nothing_is_made_again() -> None:
    process = Process()
    process.own, process.silent = LIMIT // 2 + 1, 30
    process.look()
    assert process.renewed == []
    assert process.faults == {"descriptors_over_budget": 1}


def test_a_connection_is_silent_until_its_other_side_has_said_something() -> None:
    before, num_before = num_silent_connections(), num_open_descriptors()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as here:
            there, _ = listener.accept()
            with there:
                assert num_open_descriptors() - num_before == 3
                assert num_silent_connections() - before == 2
                here.sendall(b"four")
                assert there.recv(4) == b"four"
                assert num_silent_connections() - before == 1
                there.sendall(b"five")
                assert here.recv(4) == b"five"
                here.shutdown(socket.SHUT_WR)
                assert there.recv(4) == b""
                assert num_silent_connections() - before == 0


def test_a_writer_that_cannot_be_looked_at_is_not_taken_for_dead() -> None:
    # Its blocks would be free while it writes.
    processes = HostProcesses(is_direct=True)
    writer = processes.this
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        is_taken_for_alive = processes.is_alive(writer)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert is_taken_for_alive


def test_a_writer_is_looked_at_whatever_its_name_is(tmp_path: Path) -> None:
    # The kernel keeps 15 bytes of it, and so cuts a character in two.
    program = shutil.copy("/bin/sleep", tmp_path / "a_long_writer_é")
    processes = HostProcesses(is_direct=True)
    with subprocess.Popen([program, "60"]) as child:
        writer = msgspec.structs.replace(processes.this, pid=child.pid, started=0)
        try:
            assert not processes.is_alive(writer)  # it has begun at another time
        finally:
            child.kill()


# ---- real ports --------------------------------------------------------------------------------


@pytest.fixture
def remote() -> Iterator[Callable[..., RemoteEngine]]:
    with making(RemoteEngine) as make:
        yield make


@pytest.fixture
def local() -> Iterator[Callable[..., Engine]]:
    with making(functools.partial(Engine, NixlConnector())) as make:
        yield make


def load(p: RemoteEngine, d: Engine) -> None:
    """Move the KV of a prompt, or fail."""
    num = len(d.received) + 1
    d.load(d.queue(PROMPT, p.prefill(PROMPT, [7, 2, 3]), f"r{num}"), [4, 5, 6])
    d.until(lambda: len(d.received) == num or d.failed)
    assert not d.failed


def ports_of_ucx(p: RemoteEngine) -> list[tuple[str, int]]:
    listening = psutil.Process(p.process.pid).net_connections("tcp")
    return [
        (each.laddr.ip, each.laddr.port)
        for each in listening
        if each.status == psutil.CONN_LISTEN and each.laddr.port != p.endpoint.port
    ]


@pytest.mark.slow
def test_connections_that_say_nothing_and_end_leave_no_descriptor(
    remote: Callable[..., RemoteEngine], local: Callable[..., Engine]
) -> None:
    p, d = remote("P"), local("D")
    load(p, d)
    process = psutil.Process(p.process.pid)
    before = process.num_fds()
    for port in ports_of_ucx(p) * 100:
        socket.create_connection(port).close()
    wait_until(lambda: process.num_fds() <= before + 2)
    load(p, d)


@pytest.mark.slow
def test_an_engine_whose_descriptors_strangers_have_used_up_is_met_again(
    remote: Callable[..., RemoteEngine], local: Callable[..., Engine]
) -> None:
    p, d = remote("P"), local("D")
    load(p, d)
    process = psutil.Process(p.process.pid)
    ports = ports_of_ucx(p)
    limit = 8 * process.num_fds()
    process.rlimit(psutil.RLIMIT_NOFILE, (limit, limit))
    with contextlib.ExitStack() as strangers:
        for port in ports:
            for _ in range(limit):
                with contextlib.suppress(OSError):  # it listens no more
                    strangers.enter_context(socket.create_connection(port, timeout=5.0))
        wait_until(lambda: not {*ports} & {*ports_of_ucx(p)} and len(ports_of_ucx(p)) == len(ports))
        assert process.num_fds() < limit // 2
        load(p, local("another D"))
