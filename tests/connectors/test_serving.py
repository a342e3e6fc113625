"""P's answers to reads: what is confirmed, what has to wait, what is refused."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.connectors.handover.instructions import Chunk, Grant
from pdserve.wire.ids import BlockId, RequestId
from pdserve.wire.transfer import (
    ConnectorMetadata,
    Failed,
    LeaseEnd,
    LoadFailure,
    Received,
    Settled,
)
from tests.connectors.making import making
from tests.connectors.push_engines import PushEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

N = 40
P_BLOCKS = (7, 2, 3)
D_BLOCKS = (4, 5, 6)


@pytest.fixture
def make() -> Iterator[Callable[..., PushEngine]]:
    """Makes engines, and closes them."""
    with making(PushEngine) as make:
        yield make


def lease(p: PushEngine, nonce: str, *, generation: int = 1) -> None:
    p.write_kv(P_BLOCKS, 1, 0, N)
    blocks = [BlockId(block) for block in P_BLOCKS]
    p.post(grants=[Grant(nonce, RequestId(f"p-{nonce}"), blocks, [generation] * 3, N)])


def held_back(p: PushEngine) -> threading.Event:
    """Let P take digests only once the event is set."""
    digests, may_go = p.server._seams.digests, threading.Event()
    take = digests.take

    def later(*args: Any, **kwargs: Any) -> Any:
        assert may_go.wait(10.0)
        return take(*args, **kwargs)

    digests.take = later
    return may_go


def test_a_read_that_ends_before_the_digests_are_taken_waits_for_them(
    make: Callable[..., PushEngine],
) -> None:
    p, d = make("P"), make("D")
    may_go = held_back(p)
    lease(p, "n")
    d.pull("n", p.ref, P_BLOCKS, D_BLOCKS, N, load_id=1)
    d.until(lambda: d.holds(D_BLOCKS, 1, 0, N))
    assert not d.outcomes()
    may_go.set()
    d.until_said(Received)


def compute_ahead(p: PushEngine, end: int, *, generation: int = 1) -> None:
    """A step of a prompt that will be pulled, but not its last."""
    blocks = [BlockId(block) for block in P_BLOCKS]
    request_id = RequestId("p-n")
    chunk = Chunk("", request_id, blocks, [generation] * 3, 0, end, N, end)
    for worker in p.workers:
        worker.start_load_kv(ConnectorMetadata(msgspec.msgpack.encode([chunk])))
        worker.wait_for_save()


def test_at_the_grant_only_the_digests_of_the_last_chunk_are_left(
    make: Callable[..., PushEngine],
) -> None:
    p, d = make("P"), make("D")
    digests, taken = p.server._seams.digests, list[int]()
    read = digests._sums

    def counted(spans: Any, *, num_rows: int, **kwargs: Any) -> Any:
        taken.append(num_rows)
        return read(spans, num_rows=num_rows, **kwargs)

    digests._sums = counted
    p.write_kv(P_BLOCKS, 1, 0, N)
    compute_ahead(p, 20)
    p.until(lambda: taken == [1])
    compute_ahead(p, 36)
    p.until(lambda: taken == [1, 1])
    lease(p, "n")
    d.pull("n", p.ref, P_BLOCKS, D_BLOCKS, N, load_id=1)
    d.until_said(Received)
    assert taken == [1, 1, 1]
    assert d.holds(D_BLOCKS, 1, 0, N)


def test_a_digest_of_a_request_that_is_gone_is_not_taken_for_the_next_ones(
    make: Callable[..., PushEngine],
) -> None:
    """It is taken so late that the blocks have another owner, who is half through."""
    p, d = make("P"), make("D")
    may_go = held_back(p)
    p.write_kv(P_BLOCKS, 5, 0, N)
    compute_ahead(p, 36)
    p.write_kv(P_BLOCKS, 1, 0, 20)
    may_go.set()
    p.until(lambda: p.server._seams.digests._generations[P_BLOCKS[0], 0] == 1)
    lease(p, "n", generation=2)
    d.pull("n", p.ref, P_BLOCKS, D_BLOCKS, N, load_id=1)
    d.until_said(Received)
    assert d.holds(D_BLOCKS, 1, 0, N)
    assert not d.faults_now()["digest_mismatch"]


def test_digests_that_never_come_refuse_the_read_in_time(make: Callable[..., PushEngine]) -> None:
    p, d = make("P", transfer_timeout_s=0.5), make("D")
    may_go = threading.Event()
    p.server._seams.digests.take = lambda *_, **__: may_go.wait(10.0)
    lease(p, "n")
    d.pull("n", p.ref, P_BLOCKS, D_BLOCKS, N, load_id=1)
    (failed,) = d.until_said(Failed)
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
