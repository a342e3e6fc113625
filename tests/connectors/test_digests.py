"""Digests agree across every pair of shapes, and nothing that is wrong has the right one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.connectors import digests
from pdserve.connectors.digests import BlockDigests, num_valid_tokens
from pdserve.connectors.pieces import pieces
from pdserve.connectors.slicing import routes, routes_to, shard_of
from pdserve.errors import ConfigError, InternalError, PeerError
from pdserve.kernels.backend import REFERENCE
from pdserve.kvcache.block_pool import BlockPool
from pdserve.wire.ids import BlockHash, BlockId
from pdserve.wire.transfer import BlockOrder, KVShape

if TYPE_CHECKING:
    from torch import Tensor

BASE = KVShape(
    num_blocks=12,
    num_layers=4,
    num_planes=2,
    num_kv_heads=4,
    head_dim=4,
    dtype_bytes=2,
    block_size=4,
    stages=((0, 4),),
)
NUM_TOKENS = 11
P_TABLE = [BlockId(block) for block in (7, 2, 3, 9, 1, 4)]
D_TABLE = [BlockId(block) for block in (5, 6, 0, 8, 10, 11)]
GENERATIONS = [3, 1, 4, 1, 5, 9]


def on(shape: KVShape, **changes: object) -> KVShape:
    return msgspec.structs.replace(shape, **changes)


def memory_of(shape: KVShape, *, seed: int) -> list[Tensor]:
    """The KV memory of each rank: random bytes, `[num_blocks, bytes]`."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for rank in range(shape.num_ranks):
        shard = shard_of(shape, rank)
        block = len(shard.layers) * len(shard.heads) * shape.num_planes * shape.block_size
        size = (shape.num_blocks, block * shape.head_dim * shape.dtype_bytes)
        found.append(torch.randint(0, 256, size, dtype=torch.uint8, generator=generator))
    return found


class Pair:
    """P with random KV, and D with the same for the first tokens, by the planner's routes."""

    def __init__(self, p: KVShape, d: KVShape, *, num_tokens: int = NUM_TOKENS) -> None:
        self.p, self.d, self.num_tokens = p, d, num_tokens
        whole = on(p, tp_size=1, stages=((0, p.num_layers),))
        truth = memory_of(whole, seed=1)
        self.p_memory, self.d_memory = memory_of(p, seed=2), memory_of(d, seed=3)
        # P's replicas of a head are equal because both come from one truth.
        self._move(whole, p, P_TABLE, P_TABLE, truth, self.p_memory)
        self._move(p, d, P_TABLE, D_TABLE, self.p_memory, self.d_memory)
        self.digests = [BlockDigests(kv, p, rank) for rank, kv in enumerate(self.p_memory)]

    def _move(
        self,
        source: KVShape,
        dest: KVShape,
        source_table: list[BlockId],
        dest_table: list[BlockId],
        source_memory: list[Tensor],
        dest_memory: list[Tensor],
    ) -> None:
        for route in routes(source, dest):
            plan = pieces(
                source,
                dest,
                route,
                source_table,
                dest_table,
                first_token=0,
                num_tokens=self.num_tokens,
            )
            units = source_memory[route.source_rank].view(-1, plan.unit_bytes)
            into = dest_memory[route.dest_rank].view(-1, plan.unit_bytes)
            into[torch.from_numpy(plan.dest_units).long()] = units[
                torch.from_numpy(plan.source_units).long()
            ]

    def expected(self, first_token: int = 0) -> list[bytes]:
        """What P says on each route."""
        return [
            self.digests[route.source_rank].of(
                P_TABLE, GENERATIONS, self.num_tokens, route, first_token=first_token
            )
            for route in routes(self.p, self.d)
        ]

    def found(self, first_token: int = 0) -> list[bytes]:
        """What D finds on each route."""
        return [
            BlockDigests(self.d_memory[route.dest_rank], self.d, route.dest_rank).found(
                self.p, route, D_TABLE, first_token=first_token, num_tokens=self.num_tokens
            )
            for route in routes(self.p, self.d)
        ]

    def d_tokens(self, rank: int) -> Tensor:
        """A view of D's memory, `[num_blocks, layers, planes, heads, block_size, bytes]`."""
        shard, shape = shard_of(self.d, rank), self.d
        inner = (len(shard.heads), shape.block_size)
        is_hnd = shape.order is BlockOrder.HND
        inner = inner if is_hnd else inner[::-1]
        dims = (shape.num_blocks, len(shard.layers), shape.num_planes, *inner, -1)
        grid = self.d_memory[rank].view(dims)
        return grid if is_hnd else grid.transpose(3, 4)


SHARES = [
    (1, ((0, 4),)),
    (2, ((0, 4),)),
    (8, ((0, 4),)),
    (2, ((0, 1), (1, 4))),
]


@st.composite
def shapes(draw: st.DrawFn) -> KVShape:
    tp_size, stages = draw(st.sampled_from(SHARES))
    return on(
        BASE,
        tp_size=tp_size,
        stages=stages,
        order=draw(st.sampled_from(list(BlockOrder))),
        block_size=draw(st.sampled_from([2, 4, 6, 16])),
    )


@given(shapes(), shapes(), st.integers(1, NUM_TOKENS), st.data())
def test_both_sides_find_the_same_whatever_their_shapes(
    p: KVShape, d: KVShape, num_tokens: int, data: st.DataObject
) -> None:
    pair = Pair(p, d, num_tokens=num_tokens)
    first_token = data.draw(st.integers(0, num_tokens - 1))
    expected = pair.expected(first_token)
    assert pair.found(first_token) == expected
    num_blocks = -(-num_tokens // p.block_size) - first_token // p.block_size
    for route, digest in zip(routes(p, d), expected, strict=True):
        assert len(digest) == (8 * num_blocks if route else 0)


@given(shapes(), shapes(), st.data())
def test_what_d_has_computed_itself_does_not_count_and_what_it_got_does(
    p: KVShape, d: KVShape, data: st.DataObject
) -> None:
    pair = Pair(p, d)
    num_blocks = data.draw(st.integers(0, (NUM_TOKENS - 1) // d.block_size))
    first_token = num_blocks * d.block_size
    for rank in range(d.num_ranks):
        pair.d_tokens(rank)[D_TABLE[:num_blocks]] ^= 1  # as after other sums in another order
    expected = pair.expected(first_token)
    assert pair.found(first_token) == expected
    rank = data.draw(st.integers(0, d.num_ranks - 1))
    token = data.draw(st.integers(first_token, NUM_TOKENS - 1))
    pair.d_tokens(rank)[D_TABLE[token // d.block_size], ..., token % d.block_size, 0] ^= 1
    bad = [
        (ours, theirs)
        for ours, theirs in zip(expected, pair.found(first_token), strict=True)
        if ours != theirs
    ]
    assert bad
    for ours, theirs in bad:
        good = num_valid_tokens(p, ours, theirs, first_token=first_token, num_tokens=NUM_TOKENS)
        assert good == max(first_token, token - token % p.block_size)


def test_the_part_of_a_block_that_was_moved_has_the_digest_of_when_it_was_taken() -> None:
    pair = Pair(BASE, on(BASE, block_size=2))
    pair.digests[0].take(P_TABLE, GENERATIONS, NUM_TOKENS)
    expected = pair.found(6)
    assert pair.expected(6) == expected
    pair.p_memory[0].view(BASE.num_blocks, 4, 2, 4, 4, -1)[P_TABLE[1], ..., 2:, :] = 0
    assert pair.expected(6) == expected


@given(shapes(), shapes(), st.data())
def test_any_flipped_bit_is_found_in_its_block(p: KVShape, d: KVShape, data: st.DataObject) -> None:
    pair = Pair(p, d)
    expected = pair.expected()
    rank = data.draw(st.integers(0, d.num_ranks - 1))
    token = data.draw(st.integers(0, NUM_TOKENS - 1))
    grid = pair.d_tokens(rank)
    place = [data.draw(st.integers(0, size - 1)) for size in grid.shape[1:4]]
    byte = data.draw(st.integers(0, grid.shape[5] - 1))
    block, offset = D_TABLE[token // d.block_size], token % d.block_size
    grid[block, place[0], place[1], place[2], offset, byte] ^= 1 << data.draw(st.integers(0, 7))
    block_of_p = token // p.block_size
    bad = [
        (ours, theirs)
        for ours, theirs in zip(expected, pair.found(), strict=True)
        if ours != theirs
    ]
    assert len(bad) == 1
    ((ours, theirs),) = bad
    assert (
        num_valid_tokens(p, ours, theirs, first_token=0, num_tokens=NUM_TOKENS)
        == block_of_p * p.block_size
    )
    assert pair.found((block_of_p + 1) * p.block_size) == pair.expected(
        (block_of_p + 1) * p.block_size
    )


@pytest.mark.parametrize("order", list(BlockOrder), ids=str)
@pytest.mark.parametrize("axis", ["blocks", "layers", "planes", "heads", "tokens", "elements"])
def test_what_changed_places_is_found(order: BlockOrder, axis: str) -> None:
    pair = Pair(BASE, on(BASE, order=order))
    grid = pair.d_tokens(0)[D_TABLE[:2]]
    dim = ["blocks", "layers", "planes", "heads", "tokens", "elements"].index(axis)
    pair.d_tokens(0)[D_TABLE[:2]] = grid.roll(4 if axis == "elements" else 1, dim)
    assert all(
        num_valid_tokens(BASE, ours, theirs, first_token=0, num_tokens=NUM_TOKENS) == 0
        for ours, theirs in zip(pair.expected(), pair.found(), strict=True)
    )


def test_a_block_that_was_not_written_is_found() -> None:
    pair = Pair(BASE, BASE)
    stale = pair.d_memory[0].clone()
    stale[D_TABLE[1]] = memory_of(BASE, seed=3)[0][D_TABLE[1]]
    pair.d_memory[0].copy_(stale)
    ours, theirs = pair.expected()[0], pair.found()[0]
    assert num_valid_tokens(BASE, ours, theirs, first_token=0, num_tokens=NUM_TOKENS) == 4


def test_what_lies_behind_the_last_token_does_not_count() -> None:
    pair = Pair(BASE, BASE)
    expected = pair.expected()
    pair.d_tokens(0)[D_TABLE[2], :, :, :, 3] = 0
    assert pair.found() == expected


def test_torch_finds_what_the_native_kernels_find(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(on(BASE, tp_size=2), on(BASE, block_size=6, order=BlockOrder.NHD))
    native = pair.expected(4), pair.found(4)
    monkeypatch.setattr(digests, "kernels_on", lambda _: REFERENCE)
    torch_pair = Pair(pair.p, pair.d)
    assert (torch_pair.expected(4), torch_pair.found(4)) == native


def test_digests_are_those_of_the_time_they_were_taken() -> None:
    pair = Pair(BASE, BASE)
    pair.digests[0].take(P_TABLE, GENERATIONS, NUM_TOKENS)
    expected = pair.found()
    pair.p_memory[0].zero_()
    assert pair.expected() == expected


@pytest.mark.parametrize("change", ["generation", "tokens"])
def test_a_block_that_has_changed_since_is_taken_again(change: str) -> None:
    pair = Pair(BASE, BASE)
    (route,) = routes(BASE, BASE)
    of = pair.digests[0].of
    before = of(P_TABLE, GENERATIONS, NUM_TOKENS, route)
    pair.p_memory[0].zero_()
    zeros = bytes(8)
    if change == "generation":
        after = of(P_TABLE, [3, 2, 4, 1, 5, 9], NUM_TOKENS, route)
        assert after == before[:8] + zeros + before[16:]
    else:
        after = of(P_TABLE, GENERATIONS, NUM_TOKENS + 1, route)
        assert after == before[:16] + zeros


def test_an_earlier_generation_does_not_take_the_place_of_the_newest() -> None:
    pair = Pair(BASE, BASE)
    (route,) = routes(BASE, BASE)
    of = pair.digests[0].of
    newest = of(P_TABLE, GENERATIONS, NUM_TOKENS, route)
    pair.p_memory[0].zero_()
    assert of(P_TABLE, [0] * 6, NUM_TOKENS, route) == bytes(24)
    assert of(P_TABLE, GENERATIONS, NUM_TOKENS, route) == newest


def test_only_the_blocks_from_the_first_token_on_are_taken() -> None:
    pair = Pair(BASE, BASE)
    before = pair.found()[0]
    pair.digests[0].take(P_TABLE, GENERATIONS, NUM_TOKENS, first_token=4)
    pair.p_memory[0].zero_()
    assert pair.expected()[0] == bytes(8) + before[8:]


def test_threads_take_and_ask_at_once() -> None:
    pair = Pair(BASE, BASE)
    (expected,) = pair.found()
    (route,) = routes(BASE, BASE)
    wrong: list[bytes] = []

    def ask(thread: int) -> None:
        for round_ in range(50):
            generations = [round_ * 4 + thread + g for g in GENERATIONS]
            pair.digests[0].take(P_TABLE, generations, NUM_TOKENS)
            got = pair.digests[0].of(P_TABLE, generations, NUM_TOKENS, route)
            if got != expected:
                wrong.append(got)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_digests_of_stages_and_shares_add_up_to_that_of_the_whole() -> None:
    one = Pair(BASE, BASE).expected()[0]
    p = on(BASE, tp_size=2, stages=((0, 1), (1, 4)))
    parts = [int.from_bytes(part[:8], "little") for part in Pair(p, BASE).expected()]
    assert len(parts) == len(routes_to(p, BASE, 0)) == 4
    assert sum(parts) % (1 << 64) == int.from_bytes(one[:8], "little")


def test_tokens_are_valid_up_to_the_first_block_that_differs() -> None:
    good = bytes(range(24))
    for first_bad in range(3):
        bad = bytearray(good)
        bad[8 * first_bad] ^= 1
        assert num_valid_tokens(BASE, bytes(bad), good, first_token=2, num_tokens=11) == (
            max(2, first_bad * 4)
        )
    assert num_valid_tokens(BASE, good, good, first_token=2, num_tokens=11) == 11


@pytest.mark.parametrize("wrong", [b"", bytes(range(16)), bytes(range(32)), bytes(range(20))])
def test_an_answer_of_another_length_makes_nothing_valid(wrong: bytes) -> None:
    good = bytes(range(24))
    assert num_valid_tokens(BASE, wrong, good, first_token=2, num_tokens=11) == 2


def test_vectors_of_an_odd_number_of_bytes_are_refused() -> None:
    shape = on(BASE, head_dim=3)
    (kv,) = memory_of(shape, seed=1)
    with pytest.raises(ConfigError, match="multiple of 4"):
        BlockDigests(kv, shape, 0)


def test_a_table_that_is_short_or_names_what_is_not_there_is_refused() -> None:
    pair = Pair(BASE, BASE)
    (route,) = routes(BASE, BASE)
    for table in (P_TABLE[:2], [BlockId(99)] * 3):
        with pytest.raises(PeerError):
            pair.digests[0].take(table, GENERATIONS, NUM_TOKENS)
        with pytest.raises(PeerError):
            pair.digests[0].found(BASE, route, table, first_token=0, num_tokens=NUM_TOKENS)
    with pytest.raises(InternalError, match="generations"):
        pair.digests[0].take(P_TABLE, GENERATIONS[:2], NUM_TOKENS)


def test_layers_that_are_taken_one_after_the_other_are_the_digests_of_all() -> None:
    pair = Pair(BASE, BASE)
    wanted = pair.expected()
    again = BlockDigests(pair.p_memory[0], BASE, 0)
    for num_layers in (1, 3, None):
        again.take(P_TABLE, GENERATIONS, NUM_TOKENS, num_layers=num_layers)
    pair.p_memory[0].zero_()
    (route,) = routes(BASE, BASE)
    assert [again.of(P_TABLE, GENERATIONS, NUM_TOKENS, route)] == wanted


def test_what_was_read_while_a_block_was_handed_out_anew_is_never_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request was preempted, or its client left, while its digests were still to be taken."""
    memory = memory_of(BASE, seed=1)[0]
    digests, (route,) = BlockDigests(memory, BASE, 0), routes(BASE, BASE)
    pool = BlockPool(BASE.num_blocks)
    ours = pool.take(3)
    before = pool.generations_of(ours)
    pool.publish(ours[0], BlockHash(b"a prefix"))
    pool.release(ours)
    read = digests._sums

    def read_late(*args: Any, **kwargs: Any) -> Any:
        """All but the first block have another owner, who has written a part of his KV."""
        pool.hold(pool.find([BlockHash(b"a prefix")]))
        theirs.extend(pool.take(BASE.num_blocks - 1))
        memory[theirs, :5] += 1
        return read(*args, **kwargs)

    theirs: list[BlockId] = []
    monkeypatch.setattr(digests, "_sums", read_late)
    digests.take(ours, before, 3 * BASE.block_size)
    monkeypatch.undo()
    memory[theirs, 5:] += 1
    # The prefix keeps its generation and its KV; whatever else is leased now is taken anew.
    for table in ([ours[0], *theirs[:2]], theirs):
        generations, num_tokens = pool.generations_of(table), len(table) * BASE.block_size
        found = digests.of(table, generations, num_tokens, route)
        fresh = BlockDigests(memory, BASE, 0)
        assert found == fresh.of(table, generations, num_tokens, route)
