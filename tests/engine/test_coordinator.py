"""The coordinator: its decisions, and its process with scripted cores at real sockets."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest
import zmq

from pdserve.engine.coordinator import (
    Addresses,
    Coordinator,
    CoordinatorLaunch,
    CoordinatorLink,
    Counts,
    Drained,
    EndCores,
    StartWave,
    ToCores,
    Wish,
)
from pdserve.engine.local_socket import LocalKeys, connect_local, local_name
from pdserve.wire.request import EngineStats

if TYPE_CHECKING:
    from collections.abc import Iterator


def listening(num_cores: int) -> Coordinator:
    """A coordinator that all cores hear."""
    coordinator = Coordinator(num_cores)
    for _ in range(num_cores):
        coordinator.listening()
    return coordinator


def test_a_wave_is_started_once_however_many_cores_wish_for_it() -> None:
    coordinator = listening(3)
    for core in (2, 0, 1):
        coordinator.take(Wish(core, 1))
    assert coordinator.drain_orders() == [StartWave(1)]
    coordinator.take(Wish(1, 2))
    coordinator.take(Wish(0, 1))
    assert coordinator.drain_orders() == [StartWave(2)]


def test_orders_wait_until_every_core_listens() -> None:
    coordinator = Coordinator(2)
    coordinator.listening()
    coordinator.take(Wish(0, 1))
    assert coordinator.drain_orders() == []
    coordinator.listening()
    assert coordinator.drain_orders() == [StartWave(1)]


def test_the_end_comes_when_all_have_drained_and_after_the_waves() -> None:
    coordinator = listening(2)
    coordinator.take(Drained(0))
    coordinator.take(Drained(0))
    coordinator.take(Wish(1, 1))
    assert coordinator.drain_orders() == [StartWave(1)]
    coordinator.take(Drained(1))
    assert coordinator.drain_orders() == [EndCores()]


class Rig:
    """The coordinator's process, and sockets to it."""

    def __init__(self, num_cores: int) -> None:
        keys = LocalKeys.make()
        self.addresses = Addresses.beginning_with(local_name(), keys.public)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdserve.engine.coordinator"], stdin=subprocess.PIPE
        )
        assert self.process.stdin is not None
        launch = CoordinatorLaunch(
            parent_pid=os.getpid(), num_cores=num_cores, addresses=self.addresses, keys=keys
        )
        self.process.stdin.write(msgspec.msgpack.encode(launch))
        self.process.stdin.close()
        self.context = zmq.Context()
        self.links: list[CoordinatorLink] = []
        self.counts = self.context.socket(zmq.SUB)
        connect_local(self.counts, self.addresses.counts, self.addresses.server_key)
        self.counts.subscribe(b"")

    def join(self) -> CoordinatorLink:
        """One more core."""
        self.links.append(CoordinatorLink(self.context, self.addresses, len(self.links)))
        return self.links[-1]

    def next_counts(self, timeout_ms: int = 30_000) -> list[Counts]:
        """What it publishes next."""
        assert self.counts.poll(timeout_ms), "it publishes nothing"
        return msgspec.msgpack.decode(self.counts.recv(), type=list[Counts])

    def close(self) -> None:
        """End everything."""
        self.process.kill()
        self.process.wait()
        for link in self.links:
            link.close()
        self.counts.close(linger=0)
        self.context.term()


@contextmanager
def running(num_cores: int) -> Iterator[Rig]:
    """A coordinator, ended afterwards."""
    rig = Rig(num_cores)
    try:
        yield rig
    finally:
        rig.close()


def stats(**counts: object) -> EngineStats:
    """A snapshot with these counts."""
    zero = {field.name: 0 for field in msgspec.structs.fields(EngineStats) if field.required}
    by_name = ("blocks", "kv_load_failures", "lease_ends")
    none: dict[str, dict[str, int]] = {name: {} for name in by_name}
    return msgspec.convert({**zero, **none, **counts}, EngineStats)


def next_orders(link: CoordinatorLink) -> list[ToCores]:
    """Orders as soon as there are some."""
    assert link.socket.poll(30_000), "no order came"
    return link.orders()


def test_no_core_misses_a_wave_that_was_wished_for_before_it_listened() -> None:
    with running(2) as rig:
        early = rig.join()
        early.wish(1)
        assert rig.next_counts() == [Counts(0), Counts(1)]  # it runs
        assert not early.socket.poll(100)
        late = rig.join()
        assert next_orders(late) == [StartWave(1)]
        assert next_orders(early) == [StartWave(1)]


def test_counts_reach_the_server_as_they_change() -> None:
    with running(2) as rig:
        link = rig.join()
        assert rig.next_counts() == [Counts(0), Counts(1)]
        link.tell(stats(num_waiting=3, num_running=1, num_receiving=2), num_taken=6)
        assert rig.next_counts() == [Counts(0, 3, 3, 6), Counts(1)]
        link.tell(stats(num_waiting=3, num_running=2, num_receiving=1), num_taken=6)
        assert not rig.counts.poll(100), "nothing has changed"


def test_many_changes_are_published_as_few() -> None:
    with running(1) as rig:
        link = rig.join()
        rig.next_counts()
        began_s = time.monotonic()
        for num in range(1, 1001):
            link.tell(stats(num_running=num), num_taken=num)
        num_messages = 1
        while rig.next_counts()[0].num_running < 1000:
            num_messages += 1
        assert num_messages <= 2 + (time.monotonic() - began_s) / 0.01


@pytest.mark.slow
def test_an_idle_coordinator_uses_no_processor_time() -> None:
    with running(2) as rig:
        rig.join().tell(stats(num_running=1), num_taken=1)
        while rig.next_counts()[0].num_running == 0:
            pass
        process = psutil.Process(rig.process.pid)
        before = sum(process.cpu_times()[:2])
        time.sleep(1.0)  # in which it has nothing to do
        assert sum(process.cpu_times()[:2]) - before <= 0.05


@pytest.mark.slow
def test_it_ends_with_the_process_that_started_it() -> None:
    script = (
        "import os, subprocess, sys, msgspec\n"
        "from pdserve.engine.coordinator import Addresses, CoordinatorLaunch\n"
        "from pdserve.engine.local_socket import LocalKeys, local_name\n"
        "keys = LocalKeys.make()\n"
        "child = subprocess.Popen([sys.executable, '-m', 'pdserve.engine.coordinator'],"
        " stdin=subprocess.PIPE)\n"
        "launch = CoordinatorLaunch(parent_pid=os.getpid(), num_cores=1,"
        " addresses=Addresses.beginning_with(local_name(), keys.public), keys=keys)\n"
        "child.stdin.write(msgspec.msgpack.encode(launch)); child.stdin.close()\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    _, alive = psutil.wait_procs([child], timeout=30)
    assert not alive
