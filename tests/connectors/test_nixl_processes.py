"""The NIXL connector between processes, and what happens when one of them ends or hangs."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdserve.connectors.base import KVLayout
from pdserve.connectors.conformance.engines import prompt_of
from pdserve.connectors.nixl import NixlConnector
from pdserve.wire.transfer import LeaseEnd, LoadFailure
from tests.connectors.engines import Engine, FakeRequest, RemoteEngine, until_still
from tests.connectors.making import making
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow

PROMPT = prompt_of(40)
# 8 MiB per block: a READ over TCP, at about 1 GB/s, takes long enough to be interrupted.
BIG = KVLayout(
    num_blocks=12,
    num_layers=32,
    num_kv_heads=16,
    block_size=16,
    head_dim=128,
    dtype="float32",
    dtype_bytes=4,
)
BIG_PROMPT = prompt_of(16 * 12)
TCP = {"UCX_TLS": "tcp"}


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this process talk over TCP."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def remote() -> Iterator[Callable[..., RemoteEngine]]:
    """Makes engines in child processes, and ends them."""
    with making(RemoteEngine) as make:
        yield make


@pytest.fixture
def local() -> Iterator[Callable[..., Engine]]:
    """Makes engines here, and closes them."""
    with making(functools.partial(Engine, NixlConnector())) as make:
        yield make


def is_stopped(pid: int) -> bool:
    """Whether none of its threads runs any more: a signal takes its time on a busy machine."""
    states = [
        stat.read_text().rpartition(")")[2].split()[0]
        for stat in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return set(states) == {"T"}


def stop_in_mid_read(p: RemoteEngine, d: Engine) -> FakeRequest:
    """Load until P is stopped with some bytes here and some not; return D's request."""
    for attempt in range(20):
        d.kv.zero_()
        request = d.queue(BIG_PROMPT, p.prefill(BIG_PROMPT, range(12)), f"r{attempt}")
        d.load(request, range(12))
        wait_until(lambda: d.kv[:, 0, 0, 0, 0, 0].any())
        os.kill(p.process.pid or 0, signal.SIGSTOP)
        until_still(d.kv)  # what is in the sockets lands
        if not d.kv[:, -1, -1, -1, -1, -1].all():
            return request
        os.kill(p.process.pid or 0, signal.SIGCONT)
        d.until(lambda n=attempt + 1: len(d.received) == n)  # type: ignore[misc]
    raise AssertionError("every read was over before P could be stopped")


def test_kv_crosses_processes_and_a_killed_and_restarted_p_is_used_again_at_once(
    remote: Callable[..., RemoteEngine], local: Callable[..., Engine]
) -> None:
    p, d = remote("P"), local("D")
    d.load(d.queue(PROMPT, p.prefill(PROMPT, [7, 2, 3]), "r1"), [4, 5, 6])
    d.until(lambda: d.received)
    assert d.holds([4, 5, 6], [7, 2, 3])
    wait_until(lambda: [s.end for s in p.settled] == [LeaseEnd.READ])

    lost = p.prefill(PROMPT, [7, 2, 3])
    request = d.queue(PROMPT, lost, "r2")
    p.process.kill()
    p.process.join()
    d.load(request, [4, 5, 6])
    d.until(lambda: d.failed)
    assert [f.reason for f in d.failed] == [LoadFailure.PEER_LOST]

    restarted = remote("P")
    d.load(d.queue(PROMPT, restarted.prefill(PROMPT, [8, 9, 10], seed=2), "r3"), [1, 2, 3])
    d.until(lambda: len(d.received) == 2)
    assert d.holds([1, 2, 3], [8, 9, 10], seed=2)


def test_p_killed_in_mid_read_fails_the_load_within_a_bound(
    over_tcp: None, remote: Callable[..., RemoteEngine], local: Callable[..., Engine]
) -> None:
    p, d = remote("P", environment=TCP, shape=BIG), local("D", shape=BIG)
    request = stop_in_mid_read(p, d)
    p.process.kill()
    d.until(lambda: d.failed)
    assert [(f.request_id, f.reason) for f in d.failed] == [
        (request.request_id, LoadFailure.PEER_LOST)
    ]


def test_an_abort_in_mid_read_is_reported_once_nothing_can_land_any_more(
    over_tcp: None, remote: Callable[..., RemoteEngine], local: Callable[..., Engine]
) -> None:
    p, d = remote("P", environment=TCP, shape=BIG), local("D", shape=BIG)
    request = stop_in_mid_read(p, d)
    try:
        d.abort(request)
        for _ in range(10):
            d.step()
            time.sleep(0.01)
        assert not d.failed  # what is in flight may still land
    finally:
        os.kill(p.process.pid or 0, signal.SIGCONT)
    d.until(lambda: d.failed)
    d.kv.fill_(9.0)
    assert [f.reason for f in d.failed] == [LoadFailure.ABORTED]
    wait_until(lambda: [s.end for s in p.settled][-1:] == [LeaseEnd.RELEASED])
    assert bool((d.kv == 9.0).all())


def test_a_hung_p_is_fenced_by_a_new_agent_and_other_peers_serve_on(
    over_tcp: None, remote: Callable[..., RemoteEngine], local: Callable[..., Engine]
) -> None:
    p = remote("P", environment=TCP, shape=BIG)
    d = local("D", shape=BIG, quarantine_s=0.7, transfer_timeout_s=2.0)
    request = stop_in_mid_read(p, d)
    try:
        stopped_s = time.monotonic()
        d.until(lambda: d.failed)
        assert [f.reason for f in d.failed] == [LoadFailure.TIMEOUT]
        assert time.monotonic() - stopped_s >= 0.7  # not reported before it was fenced
        assert d.faults["agent_reset"] in (1, 2)  # of the lanes that were reading from it
        d.abort(request)  # it is being tried once more
        d.until(lambda: len(d.failed) == 2)
        assert d.failed[1].reason is LoadFailure.ABORTED
        d.kv.fill_(9.0)
    finally:
        os.kill(p.process.pid or 0, signal.SIGCONT)
    time.sleep(0.3)
    assert bool((d.kv == 9.0).all())  # nothing of the old read lands any more

    other = local("P2", shape=BIG)
    d.received.clear()
    d.load(d.queue(PROMPT, other.prefill(PROMPT, [1, 2, 3], seed=3), "again"), [4, 5, 6])
    d.until(lambda: d.received)
    assert d.holds([4, 5, 6], [1, 2, 3], seed=3)


def test_a_p_that_slept_while_its_reader_gave_up_serves_on(
    over_tcp: None, remote: Callable[..., RemoteEngine], local: Callable[..., Engine]
) -> None:
    p = remote("P", environment=TCP)
    d = local("D", quarantine_s=0.5, transfer_timeout_s=1.0)
    d.load(d.queue(PROMPT, p.prefill(PROMPT, [1, 2, 3]), "connects"), [1, 2, 3])
    d.until(lambda: d.received)
    prompt = prompt_of(16 * 24)
    # Against one another no two blocks can be read as one: P has many questions to answer.
    request = d.queue(prompt, p.prefill(prompt, range(24)), "gives up")
    os.kill(p.process.pid or 0, signal.SIGSTOP)
    wait_until(lambda: is_stopped(p.process.pid or 0))
    try:
        d.load(request, range(23, -1, -1))
        d.until(lambda: d.failed)
        assert d.faults["agent_reset"]
        d.abort(request)  # it is being tried once more, into blocks that are used again below
        d.until(lambda: len(d.failed) == 2)
    finally:
        os.kill(p.process.pid or 0, signal.SIGCONT)
    d.load(d.queue(PROMPT, p.prefill(PROMPT, [7, 2, 3], seed=3), "again"), [4, 5, 6])
    d.until(lambda: len(d.received) == 2)
    assert d.holds([4, 5, 6], [7, 2, 3], seed=3)


def test_a_load_through_tcp_arrives_and_p_is_idle_again_afterwards(
    over_tcp: None, remote: Callable[..., RemoteEngine], local: Callable[..., Engine]
) -> None:
    p, d = local("P", shape=BIG), remote("D", environment=TCP, shape=BIG)
    prompt = prompt_of(16 * 4)
    handoff = p.prefill(prompt, [3, 1, 2, 5])
    d.call("load", d.call("queue", prompt, handoff, "r"), [4, 5, 6, 7])
    p.until(lambda: p.settled)
    assert [s.end for s in p.settled] == [LeaseEnd.READ]
    assert d.call("holds", [4, 5, 6, 7], [3, 1, 2, 5])
    assert thread_cpu_share(p, 1.0) < 0.03


def test_d_killed_before_it_confirmed_leaves_the_lease_to_another_d(
    remote: Callable[..., RemoteEngine], local: Callable[..., Engine]
) -> None:
    p, d = local("P"), remote("D")
    handoff = p.prefill(PROMPT, [7, 2, 3])
    d.call("queue", PROMPT, handoff, "r")
    d.process.kill()
    d.process.join()
    second = local("D2")
    second.load(second.queue(PROMPT, handoff, "r"), [4, 5, 6])
    second.until(lambda: second.received)
    assert second.holds([4, 5, 6], [7, 2, 3])


def test_d_killed_in_mid_read_harms_neither_p_nor_another_d(
    over_tcp: None, remote: Callable[..., RemoteEngine], local: Callable[..., Engine]
) -> None:
    p = local("P", shape=BIG, transfer_timeout_s=1.0)
    d = remote("D", environment=TCP, shape=BIG)
    handoff = p.prefill(BIG_PROMPT, range(12))
    d.call("load", d.call("queue", BIG_PROMPT, handoff, "r"), range(12))
    time.sleep(0.03)
    d.process.kill()
    d.process.join()
    second = local("D2", shape=BIG)
    second.load(second.queue(PROMPT, p.prefill(PROMPT, [1, 2, 3], seed=3), "r"), [4, 5, 6])
    second.until(lambda: second.received)
    assert second.holds([4, 5, 6], [1, 2, 3], seed=3)
    p.give_up(handoff.nonce)
    p.until(lambda: len(p.settled) == 2)


def thread_cpu_share(engine: Engine, for_s: float) -> float:
    """Share of one core that the transfer thread and NIXL's own threads use."""
    main = os.getpid()

    def used_s() -> float:
        others = (t for t in Path("/proc/self/task").iterdir() if int(t.name) != main)
        return sum(int((task / "schedstat").read_text().split()[0]) for task in others) / 1e9

    before = used_s()
    time.sleep(for_s)
    return (used_s() - before) / for_s


def test_an_idle_connected_pair_uses_no_cpu(local: Callable[..., Engine]) -> None:
    p, d = local("P"), local("D")
    d.load(d.queue(PROMPT, p.prefill(PROMPT, [7, 2, 3]), "r"), [4, 5, 6])
    d.until(lambda: d.received)
    d.queue(PROMPT, p.prefill(PROMPT, [8, 9, 10]), "waits")  # its heartbeats go on
    assert thread_cpu_share(p, 2.0) < 0.03
