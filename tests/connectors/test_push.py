"""Pushes between engines of all shapes, over real NIXL; who may write what until when."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.connectors.conformance.values import make_shape
from pdserve.connectors.digests import BlockDigests
from pdserve.connectors.handover.instructions import Registered, Withdrawn
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


@pytest.mark.parametrize(
    ("shapes", "layerwise"),
    [
        pytest.param(
            shapes,
            bool(number % 2),
            id=name,
            marks=[pytest.mark.matrix] * (name in {"TP 1 to 2", "PP 2 to 1"}),
        )
        for number, (name, shapes) in enumerate(SHAPES.items(), start=1)
    ],
)
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


def flip(kv: Any, block: int) -> None:
    """Another value in one place of a block's last layer."""
    kv[block, -1, 0, 0, 3, 1] += 1.0


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
    take, numbers = BlockDigests.found, itertools.count(1)
    checked: list[tuple[int, int]] = []

    def spoiled(*args: Any, **kwargs: Any) -> bytes:
        before(next(numbers))
        found = take(*args, **kwargs)
        checked.append((kwargs["first_token"], kwargs["num_tokens"]))
        return found

    monkeypatch.setattr(BlockDigests, "found", spoiled)
    return checked


def test_nobody_listens_fails_at_once(make: Callable[..., PushEngine]) -> None:
    p, d = make("P"), make("D")
    p.close()
    d.reserve("n", p.ref, D_BLOCKS, N)
    (failed,) = d.until_said(Failed)
    assert failed.reason is LoadFailure.PEER_LOST
