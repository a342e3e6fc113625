"""Pushes between engines of all shapes, over real NIXL; who may write what until when."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any, Self

import pytest

from pdserve.connectors import digests
from pdserve.connectors.conformance.values import make_shape
from pdserve.connectors.handover.instructions import End
from pdserve.connectors.handover.news import Registered, Withdrawn
from pdserve.wire.transfer import (
    Failed,
    KVMode,
    LeaseEnd,
    LoadFailure,
    Received,
    Settled,
)
from tests.connectors.making import making
from tests.connectors.push_engines import PushEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow


N = 90  # tokens: no multiple of a block
P_BLOCKS = (7, 2, 3, 11, 12, 9)
D_BLOCKS = (4, 5, 6, 20, 1, 15)


@pytest.fixture
def make() -> Iterator[Callable[..., PushEngine]]:
    """Makes engines, and closes them."""
    with making(PushEngine) as make:
        yield make


def begin(
    p: PushEngine, d: PushEngine, *, first: int = 0, nonce: str = "n", load_id: int = 1
) -> None:
    """Get a push to where P may compute."""
    before = len(p.said(Registered))
    p.expect(nonce, d.ref)
    d.reserve(nonce, p.ref, blocks_of(d, D_BLOCKS), N, first=first, load_id=load_id)
    p.until_said(Registered, before + len(p.workers))


def blocks_of(engine: PushEngine, blocks: tuple[int, ...]) -> tuple[int, ...]:
    return blocks[: -(-N // engine.shape.block_size)]


def finish(
    p: PushEngine, nonce: str = "n", *, edges: tuple[int, ...] = (0, N), seed: int = 1
) -> None:
    """Compute the prompt in so many steps, and grant the lease."""
    blocks = blocks_of(p, P_BLOCKS)
    for start, end in itertools.pairwise(edges):
        p.run(nonce, blocks, start, end, N, seed=seed)
    p.grant(nonce, blocks, N)


SHAPES = {
    "equal": ({}, {}),
    "TP 2 to 1": ({"tp": 2}, {}),
    "TP 1 to 2": ({}, {"tp": 2}),
    "PP 2 to 1": ({"pp": 2}, {}),
    "TP 1 to PP 2": ({}, {"pp": 2}),
    "blocks of 16 to 64": ({}, {"block_size": 64}),
    "blocks of 64 to 16": ({"block_size": 64}, {}),
    "MLA, TP 2 to 1": (
        {"tp": 2, "num_planes": 1, "num_kv_heads": 1, "head_dim": 24},
        {"num_planes": 1, "num_kv_heads": 1, "head_dim": 24},
    ),
}


@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_what_p_computes_is_byte_for_byte_at_every_rank_of_d(
    make: Callable[..., PushEngine], shapes: tuple[dict[str, int], dict[str, int]], layerwise: bool
) -> None:
    p = make("P", make_shape(**shapes[0]), layerwise=layerwise)
    d = make("D", make_shape(**shapes[1]))
    begin(p, d)
    finish(p, edges=(0, 20, 64, N))
    received = d.until_said(Received)
    assert d.holds(blocks_of(d, D_BLOCKS), 1, 0, N)
    assert {r.handoff.first_token_ids[0] for r in received} == {7}
    assert {r.mode for r in received} == {KVMode.PUSH}
    assert sum(r.num_bytes for r in received) > 0
    d.release("n", p.ref)
    assert {s.end for s in p.until_said(Settled)} == {LeaseEnd.READ}
    assert not p.said(Withdrawn)
    assert not p.faults | d.faults


class Held:
    """P's transfers do not end as far as P knows: their end is told only when let go."""

    def __init__(self, engine: PushEngine) -> None:
        self._threads = [worker._runner for worker in engine.workers]

    def __enter__(self) -> Self:
        for thread in self._threads:
            assert thread is not None
            thread._mover.deliver = lambda: False  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            assert thread is not None
            del thread._mover.deliver  # type: ignore[method-assign]
            thread._reactor.wake()


def stay(engine: PushEngine, condition: Callable[[], object], for_s: float = 0.3) -> None:
    """`condition` holds, and goes on to."""
    ends_s = time.monotonic() + for_s
    while time.monotonic() < ends_s:
        engine.step()
        assert condition(), engine.facts
        time.sleep(0.005)


def test_what_d_has_already_is_not_written(make: Callable[..., PushEngine]) -> None:
    p, d = make("P"), make("D")
    begin(p, d, first=32)
    finish(p, edges=(0, 20, N))
    (received,) = d.until_said(Received)
    assert d.untouched(D_BLOCKS[:2])
    assert d.holds(D_BLOCKS, 1, 32, N)
    assert received.num_bytes == 4 * d.kvs[0][0].nbytes


def test_a_d_that_has_all_blocks_gets_the_handoff_alone(make: Callable[..., PushEngine]) -> None:
    p, d = make("P"), make("D")
    begin(p, d, first=N - N % 16)
    p.expect("all", d.ref)
    d.reserve("all", p.ref, D_BLOCKS[:4], 64, first=64, load_id=2)
    p.until_said(Registered, 2)
    p.run("all", P_BLOCKS[:4], 0, 64, 64)
    p.grant("all", P_BLOCKS[:4], 64)
    (received,) = d.until_said(Received)
    assert (received.load_id, received.num_bytes) == (2, 0)
    assert d.untouched(range(32))


def test_an_abort_is_reported_only_once_p_has_said_that_nothing_is_written(
    make: Callable[..., PushEngine],
) -> None:
    p, d = make("P"), make("D")
    begin(p, d)
    with Held(p):
        p.run("n", P_BLOCKS, 0, 64, N)
        d.until(lambda: not d.untouched(D_BLOCKS))
        d.abort("n")
        stay(d, lambda: not d.outcomes())
        assert not p.said(Withdrawn)
    (failed,) = d.until_said(Failed)
    assert failed.reason is LoadFailure.ABORTED
    (withdrawn,) = p.until_said(Withdrawn)
    assert withdrawn.nonce == "n"
    d.fill_kv(9.0)
    finish(p, edges=(64, N))  # the engine had staged it before it heard
    stay(d, lambda: d.is_filled(9.0))
    assert len(d.outcomes()) == 1


def test_blocks_that_are_written_from_are_not_settled_by_any_end_of_their_lease(
    make: Callable[..., PushEngine],
) -> None:
    p, d = make("P"), make("D")
    begin(p, d)
    with Held(p):
        finish(p)
        p.post(ends=[End("n", LeaseEnd.ABORTED)])
        stay(p, lambda: not p.said(Settled))
    d.until_said(Received)
    (settled,) = p.until_said(Settled)
    assert settled.end is LeaseEnd.ABORTED


def test_a_stop_settles_once_and_only_when_nothing_is_in_flight(
    make: Callable[..., PushEngine],
) -> None:
    p, d = make("P", make_shape(tp=2)), make("D")
    begin(p, d)
    with Held(p):
        p.run("n", P_BLOCKS, 0, 64, N)
        d.until(lambda: d.holds(D_BLOCKS, 1, 0, 64))
        p.stop("n")
        stay(p, lambda: not p.said(Settled))
        assert not d.outcomes()
    settled = p.until_said(Settled)
    assert [(s.nonce, s.end) for s in settled] == [("n", LeaseEnd.ABORTED)] * 2
    (failed,) = d.until_said(Failed)
    assert failed.reason is LoadFailure.WITHDRAWN
    p.stop("n")
    stay(p, lambda: len(p.said(Settled)) == 2)
    assert not p.said(Withdrawn)


def test_a_stop_of_what_never_began_settles_too(make: Callable[..., PushEngine]) -> None:
    p, d = make("P"), make("D")
    p.expect("n", d.ref)
    p.stop("n")
    p.stop("unheard of")
    assert [s.nonce for s in p.until_said(Settled, 2)] == ["n", "unheard of"]
    d.reserve("n", p.ref, D_BLOCKS, N)
    (failed,) = d.until_said(Failed)
    assert failed.reason is LoadFailure.WITHDRAWN


def test_a_grant_under_another_nonce_ends_the_push(make: Callable[..., PushEngine]) -> None:
    p, d = make("P"), make("D")
    begin(p, d)
    p.run("n", P_BLOCKS, 0, N, N)
    p.grant("n", P_BLOCKS, N, lease_nonce="other")
    (failed,) = d.until_said(Failed)
    assert failed.reason is LoadFailure.WITHDRAWN
    d.pull("other", p.ref, P_BLOCKS, D_BLOCKS, N, load_id=2)
    d.until_said(Received)
    assert d.holds(D_BLOCKS, 1, 0, N)


def test_a_registration_may_come_before_its_request(make: Callable[..., PushEngine]) -> None:
    p, d = make("P", lease_s=4.0), make("D", lease_s=4.0)
    d.reserve("n", p.ref, D_BLOCKS, N)
    stay(d, lambda: not d.outcomes(), for_s=1.0)
    p.expect("n", d.ref)
    p.until_said(Registered)
    finish(p)
    d.until_said(Received)
    assert d.holds(D_BLOCKS, 1, 0, N)


def test_a_registration_without_a_request_fails_after_a_lease(
    make: Callable[..., PushEngine],
) -> None:
    p, d = make("P", lease_s=0.5), make("D", lease_s=0.5)
    d.reserve("n", p.ref, D_BLOCKS, N)
    (failed,) = d.until_said(Failed)
    assert failed.reason is LoadFailure.WITHDRAWN
    assert "no request" in failed.detail
    p.expect("n", d.ref)
    (withdrawn,) = p.until_said(Withdrawn)
    assert "no request" in withdrawn.reason


def test_p_waits_for_d_as_long_as_d_says_that_it_waits(make: Callable[..., PushEngine]) -> None:
    p, d = make("P", lease_s=1.2), make("D", lease_s=1.2)
    d.watch("n", p.ref)
    p.expect("n", d.ref)
    p.expect("silent", d.ref)
    (withdrawn,) = p.until_said(Withdrawn)
    assert withdrawn.nonce == "silent"
    stay(p, lambda: len(p.said(Withdrawn)) == 1, for_s=2.5)
    d.release("n", p.ref, LeaseEnd.RELEASED)
    assert len(p.until_said(Withdrawn, 2)) == 2


def test_d_waits_for_a_p_that_runs_other_requests_as_long_as_its_own_does(
    make: Callable[..., PushEngine],
) -> None:
    p, d = make("P", lease_s=1.0), make("D", lease_s=1.0)
    p.expect("n", d.ref)
    d.reserve("n", p.ref, D_BLOCKS, N)
    p.until_said(Registered)

    def is_waiting() -> bool:
        for worker in p.workers:
            worker.wait_for_save()  # a step of others
        return not d.outcomes()

    stay(d, is_waiting, for_s=2.5)
    finish(p)
    d.until_said(Received)


def test_a_p_that_runs_no_step_gives_ds_blocks_back_after_a_lease(
    make: Callable[..., PushEngine],
) -> None:
    p, d = make("P", lease_s=1.2), make("D", lease_s=1.2)
    p.expect("n", d.ref)
    d.reserve("n", p.ref, D_BLOCKS, N)
    p.until_said(Registered)
    (failed,) = d.until_said(Failed)
    assert failed.reason is LoadFailure.WITHDRAWN
    assert "no step has run" in failed.detail
    p.until_said(Withdrawn)


def test_a_push_that_a_rank_of_d_never_registers_is_withdrawn_after_a_lease(
    make: Callable[..., PushEngine],
) -> None:
    p, d = make("P", lease_s=1.2), make("D", make_shape(tp=2), lease_s=1.2)
    p.expect("n", d.ref)
    d.watch("n", p.ref)  # for as long as it takes, both ranks say that they wait
    d.reserve("n", p.ref, D_BLOCKS, N, only_rank=1)
    (withdrawn,) = p.until_said(Withdrawn)
    assert "only some" in withdrawn.reason
    (failed,) = d.until_said(Failed, 1)
    assert failed.reason is LoadFailure.WITHDRAWN


def test_another_d_is_refused(make: Callable[..., PushEngine]) -> None:
    p, d, other = make("P"), make("D"), make("D2")
    p.expect("n", d.ref)
    other.reserve("n", p.ref, D_BLOCKS, N)
    (failed,) = other.until_said(Failed)
    assert "the push is for D" in failed.detail
    d.reserve("n", p.ref, D_BLOCKS, N)
    p.until_said(Registered)
    finish(p)
    d.until_said(Received)
    assert other.untouched(range(32))


def test_a_d_that_came_first_but_is_not_the_one_makes_way(make: Callable[..., PushEngine]) -> None:
    p, d, other = make("P"), make("D"), make("D2")
    other.reserve("n", p.ref, D_BLOCKS, N)
    d.reserve("n", p.ref, D_BLOCKS, N)
    stay(d, lambda: not d.outcomes() + other.outcomes())
    p.expect("n", d.ref)
    (failed,) = other.until_said(Failed)
    assert failed.reason is LoadFailure.WITHDRAWN
    p.until_said(Registered)
    finish(p)
    d.until_said(Received)
    assert other.untouched(range(32))


def flip(kv: Any, block: int) -> None:
    """Another value in one place of a block's last layer."""
    kv[block, -1, 0, 0, 3, 1] += 1.0


def test_bytes_that_came_wrong_are_written_again(
    make: Callable[..., PushEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make("P"), make("D")
    spoil(monkeypatch, lambda number: number == 1 and flip(d.kvs[0], D_BLOCKS[2]))
    begin(p, d)
    finish(p)
    d.until_said(Received)
    assert d.holds(D_BLOCKS, 1, 0, N)
    assert d.faults["push_digest_mismatch"] == 1
    assert p.faults_now()["push_digest_mismatch"] == 1


def test_a_source_that_was_spoiled_after_its_digest_fails_the_push(
    make: Callable[..., PushEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make("P"), make("D")

    def both(number: int) -> None:
        while p.server.pushing._pushes["n"].digested < N:
            time.sleep(0.001)  # P may be later with its digests than D
        flip(p.kvs[0], P_BLOCKS[2])
        flip(d.kvs[0], D_BLOCKS[2])

    spoil(monkeypatch, lambda number: number == 1 and both(number))
    begin(p, d)
    finish(p)
    (failed,) = d.until_said(Failed)
    assert failed.reason is LoadFailure.DIGEST
    (withdrawn,) = p.until_said(Withdrawn)
    assert "digests" in withdrawn.reason
    assert not d.said(Received)


@pytest.mark.parametrize("bad", [1, 2], ids=["before its last chunk", "with its last chunk"])
def test_bytes_that_changed_before_d_has_checked_them_are_written_again(
    make: Callable[..., PushEngine], monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    p, d = make("P"), make("D")
    checked = spoil(monkeypatch, lambda number: number == bad and flip(d.kvs[0], D_BLOCKS[bad]))
    begin(p, d)
    p.run("n", P_BLOCKS, 0, 32, N)
    d.until(lambda: checked == [(0, 32)])
    p.run("n", P_BLOCKS, 32, N, N)
    d.until(lambda: checked == [(0, 32), (32, N)])
    p.grant("n", P_BLOCKS, N)
    d.until_said(Received)
    assert d.holds(D_BLOCKS, 1, 0, N)
    assert d.faults["push_digest_mismatch"] == 1
    assert checked[2:] == [(0, N)], "what is written once more is checked from its beginning"


def test_what_is_left_to_check_after_the_last_layer_is_that_layer(
    make: Callable[..., PushEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make("P", layerwise=True), make("D")
    checked = spoil(monkeypatch, lambda number: None)
    begin(p, d)
    p.run("n", P_BLOCKS, 0, N, N, per_layer_s=0.1)
    d.until(lambda: len(checked) == d.shape.num_layers)
    p.grant("n", P_BLOCKS, N)
    d.until_said(Received)
    assert checked == [(0, N)] * d.shape.num_layers
    assert d.holds(D_BLOCKS, 1, 0, N)


def spoil(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[int], object]
) -> list[tuple[int, int]]:
    """Call `before` with 1, 2, ... before D takes digests; return of which tokens it did."""
    take, numbers = digests.digests_of, itertools.count(1)
    checked: list[tuple[int, int]] = []

    def spoiled(*args: Any, **kwargs: Any) -> bytes:
        before(next(numbers))
        found = take(*args, **kwargs)
        checked.append((kwargs["first_token"], kwargs["num_tokens"]))
        return found

    monkeypatch.setattr(digests, "digests_of", spoiled)
    return checked


def test_nobody_listens_fails_at_once(make: Callable[..., PushEngine]) -> None:
    p, d = make("P"), make("D")
    p.close()
    d.reserve("n", p.ref, D_BLOCKS, N)
    (failed,) = d.until_said(Failed)
    assert failed.reason is LoadFailure.PEER_LOST


def test_a_p_that_closes_fails_what_it_had_accepted(make: Callable[..., PushEngine]) -> None:
    p, d = make("P"), make("D")
    begin(p, d)
    p.run("n", P_BLOCKS, 0, 64, N)
    p.close()
    (failed,) = d.until_said(Failed)
    assert failed.reason is LoadFailure.WITHDRAWN


def test_a_d_that_closes_takes_its_reservation_back(make: Callable[..., PushEngine]) -> None:
    p, d = make("P"), make("D")
    begin(p, d)
    p.run("n", P_BLOCKS, 0, 64, N)
    d.close()
    p.until_said(Withdrawn)
    p.run("n", P_BLOCKS, 64, N, N)
    p.grant("n", P_BLOCKS, N)
    other = make("D2")
    other.pull("n", p.ref, P_BLOCKS, D_BLOCKS, N, load_id=2)
    other.until_said(Received)
    assert other.holds(D_BLOCKS, 1, 0, N)
