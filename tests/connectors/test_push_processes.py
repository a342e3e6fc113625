"""Pushes between processes, and what happens when one of them ends or hangs in the middle."""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from pdserve.connectors.conformance.values import make_shape
from pdserve.connectors.handover.instructions import Registered, Withdrawn
from pdserve.wire.transfer import Failed, LoadFailure, Received
from tests.connectors.engines import until_still
from tests.connectors.making import making
from tests.connectors.push_engines import PushEngine, RemotePushEngine
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow

# 8 MiB per block: a WRITE of all of them takes long enough to be interrupted.
BIG = make_shape(num_layers=32, num_kv_heads=16, head_dim=128, num_blocks=16)
BLOCKS = tuple(range(16))
N = 16 * len(BLOCKS)
TCP = {"UCX_TLS": "tcp"}


@pytest.fixture
def remote() -> Iterator[Callable[..., RemotePushEngine]]:
    """Makes engines in child processes, and ends them."""
    with making(RemotePushEngine) as make:
        yield make


@pytest.fixture
def local() -> Iterator[Callable[..., PushEngine]]:
    """Makes engines here, and closes them."""
    with making(PushEngine) as make:
        yield make


def begin(p: RemotePushEngine, d: PushEngine, load_id: int) -> str:
    """Have D register with P for a push; return its nonce. What both have said is forgotten.

    P waits as long as a lease. That they meet for the first time may take longer: they try again.
    """
    for attempt in itertools.count():
        p.call("forget")
        d.forget()
        nonce = f"{load_id}-{attempt}"
        p.call("expect", nonce, d.ref)
        d.reserve(nonce, p.ref, BLOCKS, N, load_id=load_id)
        wait_until(lambda: p.call("said", Registered) or p.call("said", Withdrawn))
        if not p.call("said", Withdrawn):
            break
        d.until(lambda: d.said(Failed))
    return nonce


def push(p: RemotePushEngine, nonce: str, *, seed: int) -> None:
    p.call("fill_kv", float(seed))
    p.call("run", nonce, BLOCKS, 0, N, N, is_computed=True)


def stop_in_mid_push(p: RemotePushEngine, d: PushEngine, end: signal.Signals) -> int:
    """Push until P is stopped or killed with some bytes at D and some not; return the load id."""
    for attempt in range(1, 30):
        d.fill_kv(0.0)
        nonce = begin(p, d, attempt)
        # The answer to the call comes when the writes have begun: it must not be waited for.
        p.call("fill_kv", float(attempt))
        p._pipe.send(("run", (nonce, BLOCKS, 0, N, N), {"is_computed": True}))
        wait_until(lambda: d.kvs[0][:, 0, 0, 0, 0, 0].any())
        os.kill(p.process.pid or 0, end)
        until_still(d.kvs[0])  # what is in the sockets lands
        if not d.kvs[0][:, -1, -1, -1, -1, -1].all():
            return attempt
        assert end is signal.SIGSTOP, "it was all there before P was killed"
        os.kill(p.process.pid or 0, signal.SIGCONT)
        p._pipe.recv()
        p.call("grant", nonce, BLOCKS, N)
        d.until(lambda: d.said(Received))
    raise AssertionError("every write was over before P could be stopped")


@pytest.mark.parametrize("tls", [pytest.param("tcp", marks=pytest.mark.matrix), "all"])
def test_a_p_killed_in_mid_push_fails_it_within_a_bound_and_d_serves_on(
    remote: Callable[..., RemotePushEngine],
    local: Callable[..., PushEngine],
    monkeypatch: pytest.MonkeyPatch,
    tls: str,
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    p, d = remote("P", environment={"UCX_TLS": tls}, shape=BIG), local("D", shape=BIG)
    load_id = stop_in_mid_push(p, d, signal.SIGSTOP)
    p.kill()
    d.until(lambda: d.said(Failed))
    assert [(f.load_id, f.reason) for f in d.said(Failed)] == [(load_id, LoadFailure.PEER_LOST)]
    d.fill_kv(9.0)
    other = remote("P2", environment={"UCX_TLS": tls}, shape=BIG)
    assert d.is_filled(9.0)
    again = begin(other, d, 1000)
    push(other, again, seed=3)
    other.call("grant", again, BLOCKS, N)
    d.until_said(Received)
    assert d.is_filled(3.0)


def test_a_p_that_hangs_is_fenced_over_the_network(
    remote: Callable[..., RemotePushEngine],
    local: Callable[..., PushEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    p = remote("P", environment=TCP, shape=BIG, lease_s=1.0)
    d = local("D", shape=BIG, lease_s=1.0)
    stop_in_mid_push(p, d, signal.SIGSTOP)
    try:
        d.until(lambda: d.said(Failed))
        assert d.faults["push_fenced"] == 1
        d.fill_kv(9.0)
    finally:
        os.kill(p.process.pid or 0, signal.SIGCONT)
    p._pipe.recv()
    p.until_said(Withdrawn)
    time.sleep(0.3)
    assert d.is_filled(9.0)  # nothing of the old push lands any more


def test_a_p_that_hangs_on_this_host_holds_ds_blocks_until_it_has_said_fail(
    remote: Callable[..., RemotePushEngine],
    local: Callable[..., PushEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "all")
    p = remote("P", environment={"UCX_TLS": "all"}, shape=BIG, lease_s=1.0)
    d = local("D", shape=BIG, lease_s=1.0, handshake_timeout_s=1.0)
    stop_in_mid_push(p, d, signal.SIGSTOP)
    try:
        ends_s = time.monotonic() + 3.0
        while time.monotonic() < ends_s:
            assert not d.said(Failed)  # P may write by itself as soon as it goes on
            time.sleep(0.01)
    finally:
        os.kill(p.process.pid or 0, signal.SIGCONT)
    d.until(lambda: d.said(Failed))
    d.fill_kv(9.0)
    p._pipe.recv()
    p.until_said(Withdrawn)
    time.sleep(0.3)
    assert d.is_filled(9.0)


@pytest.mark.parametrize("tls", ["tcp", "all"])
def test_a_d_killed_in_mid_push_leaves_the_lease_to_another_d(
    remote: Callable[..., RemotePushEngine],
    local: Callable[..., PushEngine],
    monkeypatch: pytest.MonkeyPatch,
    tls: str,
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    p, d = local("P", shape=BIG), remote("D", environment={"UCX_TLS": tls}, shape=BIG)
    p.expect("n", d.ref)
    d.call("reserve", "n", p.ref, BLOCKS, N)
    p.until_said(Registered)
    p.fill_kv(5.0)
    p.run("n", BLOCKS, 0, 128, N, is_computed=True)
    d.kill()
    p.run("n", BLOCKS, 128, N, N, is_computed=True)
    (withdrawn,) = p.until_said(Withdrawn)
    assert withdrawn.nonce == "n"
    p.grant("n", BLOCKS, N, lease_nonce="other")
    second = local("D2", shape=BIG)
    second.pull("other", p.ref, BLOCKS, BLOCKS, N, load_id=1)
    second.until_said(Received)
    assert second.is_filled(5.0)
