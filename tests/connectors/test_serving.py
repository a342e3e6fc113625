"""P's answers to reads: what is confirmed, what has to wait, what is refused."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.connectors.handover.instructions import Grant
from pdserve.wire.ids import BlockId, RequestId
from pdserve.wire.transfer import Failed, LeaseEnd, LoadFailure, Received, Settled
from tests.connectors.push_engines import PushEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

N = 40
P_BLOCKS = (7, 2, 3)
D_BLOCKS = (4, 5, 6)


@pytest.fixture
def make() -> Iterator[Callable[..., PushEngine]]:
    """Makes engines, and closes them."""
    engines: list[PushEngine] = []

    def make(engine_id: str, **fields: Any) -> PushEngine:
        engine = PushEngine(engine_id, **fields)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def lease(p: PushEngine, nonce: str, *, generation: int = 1) -> None:
    p.write_kv(P_BLOCKS, 1, 0, N)
    blocks = [BlockId(block) for block in P_BLOCKS]
    p.post(grants=[Grant(nonce, RequestId(f"p-{nonce}"), blocks, [generation] * 3, N)])


def server_of(p: PushEngine) -> Any:
    thread = p.workers[0]._thread
    assert thread is not None
    return thread._server


def test_a_read_that_ends_before_the_digests_are_taken_waits_for_them(
    make: Callable[..., PushEngine],
) -> None:
    p, d = make("P"), make("D")
    digests, may_go = server_of(p)._digests, threading.Event()
    take = digests.take

    def later(*args: Any, **kwargs: Any) -> None:
        assert may_go.wait(10.0)
        take(*args, **kwargs)

    digests.take = later
    lease(p, "n")
    d.pull("n", p.ref, P_BLOCKS, D_BLOCKS, N, load_id=1)
    d.until(lambda: d.holds(D_BLOCKS, 1, 0, N))
    assert not d.outcomes()
    may_go.set()
    d.until_said(Received)


def test_digests_that_never_come_refuse_the_read_in_time(make: Callable[..., PushEngine]) -> None:
    p, d = make("P", transfer_timeout_s=0.5), make("D")
    may_go = threading.Event()
    server_of(p)._digests.take = lambda *_, **__: may_go.wait(10.0)
    lease(p, "n")
    d.pull("n", p.ref, P_BLOCKS, D_BLOCKS, N, load_id=1)
    (failed,) = d.until_said(Failed, timeout_s=3.0)
    may_go.set()
    assert failed.reason is LoadFailure.LEASE_LOST


def test_a_block_under_another_generation_makes_the_older_lease_lost(
    make: Callable[..., PushEngine],
) -> None:
    p, d = make("P"), make("D")
    lease(p, "older")
    lease(p, "newer", generation=2)
    d.pull("older", p.ref, P_BLOCKS, D_BLOCKS, N, load_id=1)
    (failed,) = d.until_said(Failed)
    assert failed.reason is LoadFailure.LEASE_LOST
    assert p.faults_now()["block_reused"] == 1
    d.pull("newer", p.ref, P_BLOCKS, D_BLOCKS, N, load_id=2)
    d.until_said(Received)
    (settled,) = p.said(Settled)
    assert (settled.nonce, settled.end) == ("older", LeaseEnd.ABORTED)


def test_a_repeated_grant_is_counted_and_changes_nothing(make: Callable[..., PushEngine]) -> None:
    p, d = make("P"), make("D")
    lease(p, "n")
    lease(p, "n", generation=2)
    d.pull("n", p.ref, P_BLOCKS, D_BLOCKS, N, load_id=1)
    d.until_said(Received)
    d.release("n", p.ref)
    (settled,) = p.until_said(Settled)
    lease(p, "n")
    p.until(lambda: p.faults["grant_repeated"] == 2)
    assert p.said(Settled) == [settled]
    d.pull("n", p.ref, P_BLOCKS, D_BLOCKS, N, load_id=2)
    (failed,) = d.until_said(Failed)
    assert failed.reason is LoadFailure.LEASE_LOST


def test_a_confirmed_lease_goes_on_until_it_is_released(make: Callable[..., PushEngine]) -> None:
    p, d = make("P"), make("D")
    lease(p, "n")
    for load_id in (1, 2):
        d.pull("n", p.ref, P_BLOCKS, D_BLOCKS, N, load_id=load_id)
        d.until_said(Received, load_id)
    assert not p.said(Settled)
    d.release("n", p.ref)
    (settled,) = p.until_said(Settled)
    assert settled.end is LeaseEnd.READ
