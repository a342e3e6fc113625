"""Pulls over real NIXL: between any two shapes, and when P's memory is not what it was."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.connectors.conformance.engines import Engine, prompt_of
from pdserve.connectors.conformance.values import make_shape
from pdserve.connectors.handover.instructions import Instructions
from pdserve.connectors.memory import MemoryConnector
from pdserve.connectors.memory.exchange import Exchange
from pdserve.connectors.nixl import NixlConnector, NixlSettings
from pdserve.wire.transfer import BlockOrder, LeaseEnd, LoadFailure
from tests.connectors.making import making

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.wire.transfer import KVShape

pytestmark = pytest.mark.slow

BLOCK = 16
NUM_TOKENS = 3 * BLOCK + 5
PROMPT = prompt_of(NUM_TOKENS)
SOURCE, TARGET = [7, 2, 3, 9], [4, 5, 6, 20]


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    """Makes engines here, and closes them."""

    exchange = Exchange()

    def new(name: str, *, lanes: int = 2, in_memory: bool = False, **fields: Any) -> Engine:
        nixl = NixlConnector(settings=NixlSettings(lanes=lanes))
        return Engine(MemoryConnector(exchange=exchange) if in_memory else nixl, name, **fields)

    with making(new) as make:
        yield make


def table(shape: KVShape, num_tokens: int) -> list[int]:
    """Blocks for so many tokens, in no order."""
    return [(7 * i + 3) % 16 for i in range(-(-num_tokens // shape.block_size))]


SHAPES = {
    "one rank": {},
    "tp 2": {"tp": 2},
    "tp 4": {"tp": 4},
    "heads on two ranks each": {"tp": 8},
    "pp 3": {"pp": 3},
    "tp 2, pp 2": {"tp": 2, "pp": 2},
    "blocks of 64": {"block_size": 64},
    "tp 2, blocks of 64": {"tp": 2, "block_size": 64},
}


PAIRS = [
    ("one rank", "one rank"),
    ("one rank", "tp 2"),
    ("tp 2", "one rank"),
    ("tp 2", "tp 4"),
    ("tp 4", "tp 2, blocks of 64"),
    ("heads on two ranks each", "tp 2"),
    ("tp 2", "heads on two ranks each"),
    ("pp 3", "tp 2, pp 2"),
    ("tp 2, pp 2", "pp 3"),
    ("blocks of 64", "one rank"),
    ("one rank", "blocks of 64"),
    ("tp 2, blocks of 64", "tp 4"),
]


# What goes where does not depend on who carries it: see `pieces`.
OVER_NIXL = PAIRS[0], PAIRS[3], PAIRS[5], PAIRS[7], PAIRS[10]


@pytest.mark.parametrize(
    ("source", "dest", "in_memory"),
    [(*pair, True) for pair in PAIRS] + [(*pair, False) for pair in OVER_NIXL],
)
def test_every_byte_lands_where_it_belongs(
    make: Callable[..., Engine], source: str, dest: str, in_memory: bool
) -> None:
    p_shape, d_shape = make_shape(**SHAPES[source]), make_shape(**SHAPES[dest])
    p, d = (
        make(name, shape=shape, lanes=1, in_memory=in_memory)
        for name, shape in (("P", p_shape), ("D", d_shape))
    )
    prompt = prompt_of(150)
    mine, theirs = table(d_shape, 150), table(p_shape, 150)
    d.fill(range(16), seed=9)
    untouched = [block for block in range(16) if block not in mine]
    before = d.snapshot(untouched)
    d.load(d.queue(prompt, p.prefill(prompt, theirs)), mine)
    d.until(lambda: d.received or d.failed, others=[p])
    assert not d.failed
    assert d.holds(mine, 1, 0, 150)
    assert all(map(lambda old, new: old.equal(new), before, d.snapshot(untouched)))
    d.until(lambda: p.settled, others=[p])
    assert [settled.end for settled in p.settled] == [LeaseEnd.READ]


def test_between_orders_of_heads_and_tokens_every_byte_lands_where_it_belongs(
    make: Callable[..., Engine],
) -> None:
    nhd = msgspec.structs.replace(make_shape(tp=2), order=BlockOrder.NHD)
    p, d = make("P", shape=nhd), make("D")
    d.load(d.queue(PROMPT, p.prefill(PROMPT, SOURCE)), TARGET)
    d.until(lambda: d.received, others=[p])
    assert d.holds(TARGET, 1, 0, NUM_TOKENS)


def test_a_rank_that_no_rank_of_d_reads_from_learns_that_the_lease_is_over(
    make: Callable[..., Engine],
) -> None:
    p, d = make("P", shape=make_shape(tp=8)), make("D")  # each head lies on two ranks of P
    d.load(d.queue(PROMPT, p.prefill(PROMPT, SOURCE)), TARGET)
    d.until(lambda: p.settled, others=[p])
    assert [settled.end for settled in p.settled] == [LeaseEnd.READ]
    assert {rank for rank, report in p.said if report.settled} == set(range(8))


def test_only_the_suffix_is_moved(make: Callable[..., Engine]) -> None:
    p, d = make("P", shape=make_shape(tp=2)), make("D", shape=make_shape(block_size=64))
    prompt = prompt_of(128)
    d.write([1, 2], 1, 0, 64)
    handoff = p.prefill(prompt, range(8))
    d.load(d.queue(prompt, handoff), [1, 2], num_computed=64)
    d.until(lambda: d.received, others=[p])
    assert d.received[0].num_bytes == d.num_bytes(64)
    assert d.holds([1, 2], 1, 0, 128)


def test_a_bit_that_flips_at_p_after_its_digests_is_never_taken_for_kv(
    make: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    p, d = make("P", shape=make_shape(tp=2)), make("D")
    with caplog.at_level(logging.ERROR, logger="pdserve.connectors"):
        handoff = p.prefill(PROMPT, SOURCE)
        request = d.queue(PROMPT, handoff)
        p.until(lambda: has_digests(p, SOURCE))
        p.ranks[1].kv[SOURCE[2], 3, 1, 0, 5, 7] += 1
        d.load(request, TARGET)
        d.until(lambda: d.failed, others=[p])
    assert not d.received
    assert [(f.reason, f.num_valid_tokens) for f in d.failed] == [(LoadFailure.DIGEST, 2 * BLOCK)]
    assert f"from its block {SOURCE[2]} (token {2 * BLOCK}) on" in d.failed[0].detail
    assert "rank 1 of P" in d.failed[0].detail
    assert d.faults["digest_mismatch"] == 2  # it was tried twice
    assert [failed.reason for failed in d.retried] == [LoadFailure.DIGEST]
    assert any(
        record.levelno == logging.ERROR and "kv digest mismatch" in record.message
        for record in caplog.records
    )


def has_digests(p: Engine, blocks: list[int]) -> bool:
    """Whether every rank of P has taken them."""
    workers: list[Any] = [rank.worker for rank in p.ranks]
    return all(
        (worker._runner._machine.server._seams.digests._generations[block] >= 0).all()
        for worker in workers
        for block in blocks
    )


@pytest.mark.parametrize("what", [b"", b"\0" * 7, b"\0" * 24, b"\0" * 32, b"\0" * 40])
def test_digests_that_are_missing_short_long_or_wrong_count_as_a_mismatch(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, what: bytes
) -> None:
    p, d = make("P"), make("D")
    monkeypatch.setattr("pdserve.connectors.digests.BlockDigests.of", lambda *_, **__: what)
    d.load(d.queue(PROMPT, p.prefill(PROMPT, SOURCE)), TARGET)
    d.until(lambda: d.failed, others=[p])
    assert [(f.reason, f.num_valid_tokens) for f in d.failed] == [(LoadFailure.DIGEST, 0)]
    assert not d.received


def test_blocks_that_p_leased_again_in_between_are_not_taken_for_the_first_leases(
    make: Callable[..., Engine],
) -> None:
    p, d = make("P"), make("D")
    stale = p.prefill(PROMPT, SOURCE, seed=1)
    p.give_up(stale.nonce)
    p.until(lambda: p.settled)
    p.prefill(PROMPT, SOURCE, seed=2, generations=[2] * len(SOURCE))
    d.load(d.queue(PROMPT, stale), TARGET)
    d.until(lambda: d.failed, others=[p])
    assert [f.reason for f in d.failed] == [LoadFailure.LEASE_LOST]
    assert not d.received


def test_blocks_that_p_writes_again_while_they_are_leased_are_not_taken_for_kv(
    make: Callable[..., Engine],
) -> None:
    p, d = make("P"), make("D")
    handoff = p.prefill(PROMPT, SOURCE, seed=1)
    p.until(lambda: has_digests(p, SOURCE))
    p.fill(SOURCE[1:2], seed=2)  # as a P would that has lost count of its blocks
    d.load(d.queue(PROMPT, handoff), TARGET)
    d.until(lambda: d.failed, others=[p])
    assert [(f.reason, f.num_valid_tokens) for f in d.failed] == [(LoadFailure.DIGEST, BLOCK)]


def test_a_part_whose_lease_is_lost_leaves_no_token_beyond_what_d_had(
    make: Callable[..., Engine],
) -> None:
    p, d = make("P", shape=make_shape(tp=2)), make("D")
    handoff = p.prefill(PROMPT, SOURCE)
    ends = Instructions(ends=[handoff.nonce])
    p.ranks[1].worker.post(ends.to_metadata())
    d.write(TARGET, 1, 0, BLOCK)
    d.load(d.queue(PROMPT, handoff), TARGET, num_computed=BLOCK)
    d.until(lambda: d.failed, others=[p])
    assert [(f.reason, f.num_valid_tokens) for f in d.failed] == [(LoadFailure.LEASE_LOST, BLOCK)]


def test_two_lanes_move_many_loads_in_many_pieces_and_mix_none_of_them_up(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = make_shape(num_blocks=256)
    layout_bytes = 16 * shape.head_dim * shape.dtype_bytes * 2 * shape.num_layers * 4
    monkeypatch.setattr("pdserve.connectors.transfer_thread.thread.PIECE_BYTES", 2 * layout_bytes)
    p, q = make("P", shape=shape), make("Q", shape=msgspec.structs.replace(shape, tp_size=2))
    d = make("D", shape=shape, lanes=2)
    prompt = prompt_of(7 * BLOCK)
    wanted = []
    for number in range(32):
        blocks = [(number * 7 + i) for i in range(7)]
        owner = (p, q)[number % 2]
        handoff = owner.prefill(prompt, blocks, seed=number)
        mine = [255 - block for block in blocks]
        d.load(d.queue(prompt, handoff), mine)
        wanted.append((mine, number))
    d.until(lambda: len(d.received) == 32, others=[p, q])
    assert all(d.holds(mine, seed, 0, 7 * BLOCK) for mine, seed in wanted)
    d.until(lambda: len(p.settled) + len(q.settled) == 32, others=[p, q])
