"""The planner against a model of both engines' memory, byte for byte."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.connectors.pieces import count_runs, pieces
from pdserve.connectors.slicing import (
    Route,
    Shard,
    mismatch,
    route_between,
    routes,
    routes_from,
    routes_to,
    shard_of,
    token_step,
)
from pdserve.errors import InternalError, PeerError
from pdserve.kernels.backend import REFERENCE
from pdserve.models.layers.linear import kv_heads_of
from pdserve.models.layers.parameter import Placement
from pdserve.parallel.group import Group, World
from pdserve.parallel.mesh import Axis, Mesh, MeshShape
from pdserve.wire.ids import BlockId
from pdserve.wire.transfer import BlockOrder, KVShape

EIGHT_B = KVShape(
    num_blocks=4096,
    num_layers=32,
    num_planes=2,
    num_kv_heads=8,
    head_dim=128,
    dtype_bytes=2,
    block_size=16,
    stages=((0, 32),),
)
IN_ORDER = [BlockId(block) for block in range(4096)]


def on(shape: KVShape, **changes: object) -> KVShape:
    return msgspec.structs.replace(shape, **changes)


@dataclass(repr=False)
class Engine:
    """What the ranks of an engine have in memory, as numbers that tell each element from all.

    Attributes:
        memory: Of each rank, `[num_blocks, layers, planes, heads, block_size, head_dim]` int64
            in the shape's order.
        writes: How often each element was written.
    """

    shape: KVShape
    table: list[BlockId]
    memory: list[npt.NDArray[np.int64]]
    writes: list[npt.NDArray[np.int64]]

    @classmethod
    def empty(cls, shape: KVShape, table: list[BlockId]) -> Engine:
        memory, first = [], -1
        for rank in range(shape.num_ranks):
            shard = shard_of(shape, rank)
            inner = (len(shard.heads), shape.block_size)
            if shape.order is BlockOrder.NHD:
                inner = inner[::-1]
            dims = (shape.num_blocks, len(shard.layers), shape.num_planes, *inner, shape.head_dim)
            memory.append(first - np.arange(np.prod(dims), dtype=np.int64).reshape(dims))
            first -= memory[-1].size
        return cls(shape, table, memory, [np.zeros_like(one) for one in memory])

    def by_token(self, rank: int, of: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        """`[tokens of the table, layers, planes, heads, head_dim]`: a copy."""
        blocks = of[rank][np.array(self.table)]
        if self.shape.order is BlockOrder.HND:
            blocks = blocks.swapaxes(3, 4)
        blocks = np.moveaxis(blocks, 3, 1)
        tokens: npt.NDArray[np.int64] = blocks.reshape(-1, *blocks.shape[2:])
        return tokens

    def fill(self, truth: npt.NDArray[np.int64]) -> None:
        """Write the KV of all tokens; `[tokens, layers, planes, heads, head_dim]`."""
        for rank, memory in enumerate(self.memory):
            shard = shard_of(self.shape, rank)
            mine = truth[:, shard.layers.start : shard.layers.stop]
            mine = mine[..., shard.heads.start : shard.heads.stop, :]
            for token, vectors in enumerate(mine):
                block, offset = divmod(token, self.shape.block_size)
                slot = memory[self.table[block]]
                if self.shape.order is BlockOrder.HND:
                    slot[:, :, :, offset] = vectors
                else:
                    slot[:, :, offset] = vectors


def truth_of(shape: KVShape, num_tokens: int) -> npt.NDArray[np.int64]:
    dims = (num_tokens, shape.num_layers, shape.num_planes, shape.num_kv_heads, shape.head_dim)
    return 1 + np.arange(np.prod(dims), dtype=np.int64).reshape(dims)


def move(p: Engine, d: Engine, route: Route, **what: object) -> None:
    """Carry out what is planned for one route, and check that no larger plan exists."""
    plan = pieces(p.shape, d.shape, route, p.table, d.table, **what)  # type: ignore[arg-type]
    assert plan.source_units.dtype == plan.dest_units.dtype == np.int32
    if not len(plan):
        return
    assert plan.unit_bytes % 8 == 0
    width = plan.unit_bytes // 8
    source = p.memory[route.source_rank].reshape(-1, width)
    dest = d.memory[route.dest_rank].reshape(-1, width)
    dest[plan.dest_units] = source[plan.source_units]
    np.add.at(d.writes[route.dest_rank].reshape(-1, width), plan.dest_units, 1)
    inside = np.arange(width)
    from_ = (plan.source_units.astype(np.int64)[:, None] * width + inside).ravel()
    to = (plan.dest_units.astype(np.int64)[:, None] * width + inside).ravel()
    order = np.argsort(from_)
    breaks = np.count_nonzero((np.diff(from_[order]) != 1) | (np.diff(to[order]) != 1))
    assert count_runs(plan.source_units, plan.dest_units) == breaks + 1


@st.composite
def stages(draw: st.DrawFn, num_layers: int) -> tuple[tuple[int, int], ...]:
    cuts = draw(st.sets(st.integers(1, num_layers - 1), max_size=2)) if num_layers > 1 else set()
    edges = [0, *sorted(cuts), num_layers]
    return tuple(itertools.pairwise(edges))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[KVShape, KVShape]:
    num_heads, num_layers = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.integers(1, 5))
    num_planes = draw(st.sampled_from([1, 2]))
    head_dim = draw(st.sampled_from([1, 2]))

    def shape() -> KVShape:
        sizes = [tp for tp in (1, 2, 3, 4, 6) if num_heads % tp == 0 or tp % num_heads == 0]
        return KVShape(
            num_blocks=12,
            num_layers=num_layers,
            num_planes=num_planes,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            dtype_bytes=8,
            block_size=draw(st.sampled_from([1, 2, 4, 6, 8])),
            tp_size=draw(st.sampled_from(sizes)),
            stages=draw(stages(num_layers)),
            order=draw(st.sampled_from(list(BlockOrder))),
        )

    p = shape()
    return p, p if draw(st.integers(0, 4)) == 0 else shape()


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Engine, Engine, int, int]:
    """Both engines, P's full of KV, and the range of tokens to move."""
    p, d = draw(pairs())
    most = 6 * min(p.block_size, d.block_size)
    num_tokens = draw(st.integers(1, most))
    first_token = draw(st.integers(0, (num_tokens - 1) // d.block_size)) * d.block_size

    def engine(shape: KVShape) -> Engine:
        blocks = draw(st.permutations(range(shape.num_blocks)))
        if draw(st.booleans()):
            blocks = sorted(blocks)
        return Engine.empty(shape, [BlockId(b) for b in blocks[: -(-most // shape.block_size)]])

    source, dest = engine(p), engine(d)
    source.fill(truth_of(p, most))
    return source, dest, first_token, num_tokens


def assert_arrived(d: Engine, before: Engine, first_token: int, num_tokens: int) -> None:
    """Every byte wanted was written once and is right; no other byte has changed."""
    truth = truth_of(d.shape, num_tokens)
    tail_end = -(-num_tokens // d.shape.block_size) * d.shape.block_size
    for rank in range(d.shape.num_ranks):
        shard = shard_of(d.shape, rank)
        wanted = truth[:, shard.layers.start : shard.layers.stop]
        wanted = wanted[..., shard.heads.start : shard.heads.stop, :]
        found, writes = d.by_token(rank, d.memory), d.by_token(rank, d.writes)
        assert np.array_equal(found[first_token:num_tokens], wanted[first_token:])
        assert np.all(writes[first_token:num_tokens] == 1)
        assert np.all(writes[num_tokens:tail_end] <= 1)
        assert d.writes[rank].sum() == writes[first_token:tail_end].sum()
        was = before.memory[rank]
        assert np.array_equal(d.memory[rank][d.writes[rank] == 0], was[d.writes[rank] == 0])


def copy_of(engine: Engine) -> Engine:
    return replace(engine, memory=[one.copy() for one in engine.memory])


@given(transfers())
def test_every_byte_of_d_is_written_once_and_no_other_changes(
    transfer: tuple[Engine, Engine, int, int],
) -> None:
    p, d, first_token, num_tokens = transfer
    before = copy_of(d)
    for route in routes(p.shape, d.shape):
        move(p, d, route, first_token=first_token, num_tokens=num_tokens)
    assert_arrived(d, before, first_token, num_tokens)


@given(transfers(), st.data())
def test_chunks_of_whole_blocks_and_single_layers_add_up_to_the_whole(
    transfer: tuple[Engine, Engine, int, int], data: st.DataObject
) -> None:
    p, d, first_token, num_tokens = transfer
    before = copy_of(d)
    step = p.shape.block_size
    edges = st.integers(0, num_tokens // step).map(lambda block: block * step)
    middle = max(first_token, data.draw(edges))
    ranges = [(first_token, middle), (middle, num_tokens)]
    for route in routes(p.shape, d.shape):
        for first, end in ranges:
            if data.draw(st.booleans()):
                move(p, d, route, first_token=first, num_tokens=end)
                continue
            cut = data.draw(st.integers(0, p.shape.num_layers))
            for layers in (range(cut), range(cut, p.shape.num_layers)):
                move(p, d, route, first_token=first, num_tokens=end, layers=layers)
    assert_arrived(d, before, first_token, num_tokens)


@given(pairs())
def test_routes_bring_every_layer_and_head_once_and_leave_no_rank_alone(
    pair: tuple[KVShape, KVShape],
) -> None:
    p, d = pair
    found = routes(p, d)
    named = [(route.source_rank, route.dest_rank) for route in found]
    assert len(set(named)) == len(named)
    assert {source for source, _ in named} == set(range(p.num_ranks))
    assert {dest for _, dest in named} == set(range(d.num_ranks))
    for rank in range(d.num_ranks):
        shard = shard_of(d, rank)
        brought = [
            (layer, head)
            for route in routes_to(p, d, rank)
            for layer in route.layers
            for head in route.heads
        ]
        assert sorted(brought) == [(la, h) for la in shard.layers for h in shard.heads]
    for route in found:
        has = shard_of(p, route.source_rank)
        assert set(route.layers) <= set(has.layers)
        assert set(route.heads) <= set(has.heads)
        assert route in routes_from(p, d, route.source_rank)
        assert route_between(p, d, route.source_rank, route.dest_rank) == route
        if not route:
            assert route.dest_rank == route.source_rank % d.num_ranks


def test_replicas_of_a_head_at_p_share_its_readers() -> None:
    p = on(EIGHT_B, num_kv_heads=2, tp_size=8)
    d = on(EIGHT_B, num_kv_heads=2, tp_size=4)
    readers = [sum(map(bool, routes_from(p, d, rank))) for rank in range(8)]
    assert readers == [1, 1, 0, 0, 1, 1, 0, 0]
    p, d = d, p
    assert [sum(map(bool, routes_from(p, d, rank))) for rank in range(4)] == [2, 2, 2, 2]


def test_a_latent_is_on_every_rank_and_read_from_one() -> None:
    latent = on(EIGHT_B, num_kv_heads=1, num_planes=1, head_dim=576, tp_size=2)
    assert [shard_of(latent, rank).heads for rank in range(2)] == [range(1), range(1)]
    found = [(r.source_rank, r.dest_rank, bool(r)) for r in routes(latent, latent)]
    assert found == [(0, 0, True), (1, 1, True)]
    whole = on(latent, tp_size=1)
    found = [(r.source_rank, r.dest_rank, bool(r)) for r in routes(latent, whole)]
    assert found == [(0, 0, True), (1, 0, False)]


def test_shares_are_those_of_stages_and_tp_ranks() -> None:
    shape = on(EIGHT_B, tp_size=2, stages=((0, 20), (20, 32)))
    assert shard_of(shape, 0) == Shard(range(20), range(4))
    assert shard_of(shape, 3) == Shard(range(20, 32), range(4, 8))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8, 16])
def test_the_heads_of_a_rank_are_those_that_the_engine_gives_it(
    num_kv_heads: int, tp_size: int
) -> None:
    shape = on(EIGHT_B, num_kv_heads=num_kv_heads, tp_size=tp_size)
    ranks = tuple(range(tp_size))
    for rank in ranks:
        groups = {axis: Group((rank,), rank) for axis in Axis} | {Axis.TP: Group(ranks, rank)}
        world = World(Mesh(MeshShape(tp=tp_size), rank), groups)
        placement = Placement(torch.device("cpu"), torch.float32, REFERENCE, world)
        assert shard_of(shape, rank).heads == kv_heads_of(num_kv_heads, placement)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_layers": 31, "stages": ((0, 31),)}, "num layers"),
        ({"num_planes": 1}, "num planes"),
        ({"num_kv_heads": 4}, "num kv heads"),
        ({"head_dim": 64}, "head dim"),
        ({"dtype_bytes": 4}, "dtype bytes"),
        ({"stages": ((0, 16),)}, "do not end"),
        ({"stages": ((0, 16), (17, 32))}, "skip layers"),
        ({"tp_size": 3}, "cannot be divided among"),
        ({"tp_size": 0}, "below 1"),
        ({"tp_size": 1 << 40}, "there can be"),
        ({"block_size": 1 << 40}, "there can be"),
    ],
)
def test_shapes_of_other_kv_and_shapes_that_cannot_be_are_refused(
    changes: dict[str, object], name: str
) -> None:
    other = on(EIGHT_B, **changes)
    assert name in (mismatch(EIGHT_B, other) or "")
    with pytest.raises(PeerError, match=name):
        routes(EIGHT_B, other)


def test_a_table_that_is_short_or_names_what_is_not_there_is_refused() -> None:
    (route,) = routes(EIGHT_B, EIGHT_B)
    for blocks in ([], [BlockId(4096)], [BlockId(-1)]):
        with pytest.raises(PeerError, match="P "):
            pieces(EIGHT_B, EIGHT_B, route, blocks, IN_ORDER, first_token=0, num_tokens=5)
        with pytest.raises(PeerError, match="D "):
            pieces(EIGHT_B, EIGHT_B, route, IN_ORDER, blocks, first_token=0, num_tokens=5)


def test_a_range_that_begins_inside_a_block_is_refused() -> None:
    (route,) = routes(EIGHT_B, EIGHT_B)
    with pytest.raises(InternalError, match="token 8"):
        pieces(EIGHT_B, EIGHT_B, route, IN_ORDER, IN_ORDER, first_token=8, num_tokens=20)


def test_a_rank_that_does_not_exist_has_no_share() -> None:
    with pytest.raises(PeerError):
        shard_of(EIGHT_B, 1)
    with pytest.raises(PeerError):
        route_between(EIGHT_B, EIGHT_B, 1, 0)


def test_equal_shapes_with_contiguous_blocks_are_one_descriptor() -> None:
    (route,) = routes(EIGHT_B, EIGHT_B)
    plan = pieces(EIGHT_B, EIGHT_B, route, IN_ORDER, IN_ORDER, first_token=0, num_tokens=8192)
    assert plan.num_bytes == 1 << 30
    assert count_runs(plan.source_units, plan.dest_units) == 1
    assert plan.unit_bytes == 2 << 20


def test_the_order_of_a_single_head_and_its_tokens_makes_no_difference() -> None:
    latent = on(EIGHT_B, num_kv_heads=1, num_planes=1)
    other = on(latent, order=BlockOrder.NHD)
    (route,) = routes(latent, other)
    plan = pieces(latent, other, route, IN_ORDER, IN_ORDER, first_token=0, num_tokens=16)
    assert plan.unit_bytes == 32 * 16 * 256


def test_an_empty_route_moves_nothing() -> None:
    latent = on(EIGHT_B, num_kv_heads=1, num_planes=1, tp_size=2)
    whole = on(latent, tp_size=1)
    route = route_between(latent, whole, 1, 0)
    plan = pieces(latent, whole, route, IN_ORDER, IN_ORDER, first_token=0, num_tokens=99)
    assert (len(plan), plan.num_bytes, count_runs(plan.source_units, plan.dest_units)) == (0, 0, 0)


def test_parts_are_the_whole_in_order_and_within_their_size() -> None:
    (route,) = routes(EIGHT_B, EIGHT_B)
    plan = pieces(EIGHT_B, EIGHT_B, route, IN_ORDER, IN_ORDER, first_token=0, num_tokens=200)
    parts = list(plan.parts(5 << 20))
    assert [part.num_bytes >> 20 for part in parts] == [4] * 6 + [2]
    assert np.array_equal(np.concatenate([p.dest_units for p in parts]), plan.dest_units)
    assert len(list(plan.parts(1))) == len(plan)


def test_a_range_begins_at_block_edges_of_either_side() -> None:
    assert token_step(EIGHT_B, on(EIGHT_B, block_size=24)) == 8
    assert token_step(EIGHT_B, on(EIGHT_B, block_size=64)) == 16


@pytest.mark.parametrize(
    ("source", "limit_ms"),
    [(EIGHT_B, 5), (on(EIGHT_B, tp_size=2), 30), (on(EIGHT_B, block_size=64), 30)],
    ids=["equal", "tp 2 to 1", "blocks of 64 to 16"],
)
def test_planning_32k_tokens_takes_milliseconds(source: KVShape, limit_ms: float) -> None:
    rng = np.random.default_rng(1)
    tables = [rng.permutation(4096)[:2048].tolist() for _ in range(2)]
    best_s = 1e9
    for _ in range(5):
        began_s = time.thread_time()
        for route in routes(source, EIGHT_B):
            pieces(source, EIGHT_B, route, *tables, first_token=0, num_tokens=32768)
        best_s = min(best_s, time.thread_time() - began_s)
    assert best_s * 1e3 < limit_ms
