"""Which bytes of whose memory belong where: the planner for any pair of KV shapes.

Pure. `routes` says which rank of P has something for which rank of D, and `pieces` which units
of memory to move on one route for a range of tokens. It knows shapes and block tables, and
nothing of addresses, transports, leases or which of the two sides moves the bytes.

A *unit* is what a transfer addresses: `unit_bytes` bytes at an address that is a multiple of
them from the start of a rank's KV memory, on both sides. It depends on the shapes and the route
alone, so that a peer's memory is described once, as one strided row. Neighbouring units that are
contiguous on both sides are one descriptor.

    equal shares, equal blocks      a unit is a block, all layers     1 unit  per block
    equal heads, one layer or PP    a unit is one layer of a block    L units per block
    else                            heads and tokens of one layer     L x planes x ... per block
                                    and plane that are contiguous
                                    on both sides
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pdserve.errors import InternalError, PeerError
from pdserve.wire.transfer import BlockOrder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from pdserve.wire.ids import BlockId
    from pdserve.wire.transfer import KVShape

_MAX_UNITS = np.iinfo(np.int32).max
# Of a peer: work is done for each of its ranks, and constants are kept for each of its tokens.
_MAX_RANKS = 1 << 12
_MAX_BLOCK_TOKENS = 1 << 12


@dataclass(frozen=True, slots=True)
class Shard:
    """What a rank has of the model's KV: absolute layers and heads."""

    layers: range
    heads: range


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank of P has for one rank of D: absolute layers and heads.

    Both empty if nothing: D's rank then talks to P's all the same, so that P's learns when the
    lease is over.
    """

    source_rank: int
    dest_rank: int
    layers: range
    heads: range

    def __bool__(self) -> bool:
        return bool(self.layers and self.heads)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Units to move: `source_units[i]` goes to `dest_units[i]`, in the order of the source.

    Attributes:
        unit_bytes: Of each of them; unit u is the u-th of the rank's KV memory.
        source_units, dest_units: int32, of equal length; none of them twice.
    """

    unit_bytes: int
    source_units: npt.NDArray[np.int32]
    dest_units: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.source_units)

    @property
    def num_bytes(self) -> int:
        """What is moved."""
        return self.unit_bytes * len(self.source_units)

    @property
    def num_descriptors(self) -> int:
        """Runs that are contiguous on both sides."""
        return count_runs(self.source_units, self.dest_units)

    def parts(self, max_bytes: int) -> Iterator[Pieces]:
        """Yield it in order, in parts of at most `max_bytes` (one unit at least)."""
        step = max(1, max_bytes // self.unit_bytes)
        for start in range(0, len(self), step):
            part = slice(start, start + step)
            yield Pieces(self.unit_bytes, self.source_units[part], self.dest_units[part])


def count_runs(source: npt.NDArray[np.int32], dest: npt.NDArray[np.int32]) -> int:
    """Descriptors that are left of these pairs when neighbours on both sides are merged."""
    if not len(source):
        return 0
    return 1 + int(np.count_nonzero((np.diff(source) != 1) | (np.diff(dest) != 1)))


def shard_of(shape: KVShape, rank: int) -> Shard:
    """What `rank` of an engine of this shape has. The engine's own rule, and no other.

    Raises:
        PeerError: There is no such rank.
    """
    if not 0 <= rank < shape.num_ranks:
        raise PeerError(f"rank {rank} of an engine of {shape.num_ranks} ranks")
    stage, tp_rank = divmod(rank, shape.tp_size)
    return Shard(_stages(shape)[stage], _heads(shape, tp_rank))


def block_bytes(shape: KVShape, rank: int) -> int:
    """Bytes of one block of `rank`, all of its layers.

    Raises:
        PeerError: There is no such rank.
    """
    shard = shard_of(shape, rank)
    num_vectors = len(shard.layers) * shape.num_planes * len(shard.heads) * shape.block_size
    return num_vectors * shape.head_dim * shape.dtype_bytes


def mismatch(source: KVShape, dest: KVShape) -> str | None:
    """Why KV of `source` cannot be that of `dest`, with both values; None = it can.

    How it is shared out does not matter: ranks, stages, block size, order.
    """
    for field in ("num_layers", "num_planes", "num_kv_heads", "head_dim", "dtype_bytes"):
        ours, theirs = getattr(source, field), getattr(dest, field)
        if ours != theirs:
            return f"{field} is {ours} at the one and {theirs} at the other"
    for shape in (source, dest):
        why = _why_invalid(shape)
        if why is not None:
            return why
    return None


@functools.lru_cache(maxsize=1024)
def routes(source: KVShape, dest: KVShape) -> tuple[Route, ...]:
    """Who has what for whom, by rank of D and then of P; at most one route for a pair.

    Every layer and head of every rank of D comes exactly once. Heads that lie on several ranks
    of P are taken from these in turn. Every rank of P appears: with an empty route, to rank
    `r % D's ranks`, if nothing is taken from it.

    Raises:
        PeerError: The shapes are not of the same KV (`mismatch` says why).
    """
    why = mismatch(source, dest)
    if why is not None:
        raise PeerError(f"KV of these shapes cannot be exchanged: {why}")
    found = []
    turns: dict[tuple[int, int], int] = {}
    for dest_rank in range(dest.num_ranks):
        wanted = shard_of(dest, dest_rank)
        for stage, stage_layers in enumerate(_stages(source)):
            layers = _overlap(stage_layers, wanted.layers)
            if layers:
                found += [
                    Route(stage * source.tp_size + tp_rank, dest_rank, layers, heads)
                    for tp_rank, heads in _holders(source, stage, wanted.heads, turns)
                ]
    named = {route.source_rank for route in found}
    found += [
        Route(rank, rank % dest.num_ranks, range(0), range(0))
        for rank in range(source.num_ranks)
        if rank not in named
    ]
    return tuple(sorted(found, key=lambda route: (route.dest_rank, route.source_rank)))


@functools.lru_cache(maxsize=1024)
def routes_to(source: KVShape, dest: KVShape, dest_rank: int) -> tuple[Route, ...]:
    """The routes that end at this rank of D; at least one."""
    return tuple(route for route in routes(source, dest) if route.dest_rank == dest_rank)


@functools.lru_cache(maxsize=1024)
def routes_from(source: KVShape, dest: KVShape, source_rank: int) -> tuple[Route, ...]:
    """The routes that begin at this rank of P; at least one."""
    return tuple(route for route in routes(source, dest) if route.source_rank == source_rank)


def route_between(source: KVShape, dest: KVShape, source_rank: int, dest_rank: int) -> Route:
    """The route of this pair of ranks.

    Raises:
        PeerError: They have nothing to do with one another.
    """
    for route in routes_to(source, dest, dest_rank):
        if route.source_rank == source_rank:
            return route
    raise PeerError(f"rank {source_rank} of P has no route to rank {dest_rank} of D")


def token_step(source: KVShape, dest: KVShape) -> int:
    """What the first token of a range is a multiple of; block edges of either side are."""
    return math.gcd(source.block_size, dest.block_size)


def unit_bytes(source: KVShape, dest: KVShape, route: Route, *, one_layer: bool) -> int:
    """Bytes of a unit on this route; 0 if it is empty.

    Args:
        one_layer: For `pieces` with `layers`.
    """
    return _cut(source, dest, route, one_layer=one_layer).unit_bytes if route else 0


def pieces(
    source: KVShape,
    dest: KVShape,
    route: Route,
    source_blocks: Sequence[BlockId] | npt.NDArray[np.int32],
    dest_blocks: Sequence[BlockId] | npt.NDArray[np.int32],
    *,
    first_token: int,
    num_tokens: int,
    layers: range | None = None,
) -> Pieces:
    """Units that hold the tokens `[first_token, num_tokens)` on this route.

    The last unit may hold tokens past the end, which lie in the same block on both sides; no
    other byte of D's is written.

    Args:
        source_blocks, dest_blocks: Whole block tables: they begin with token 0.
        first_token: A multiple of `token_step`, as block edges of both sides are.
        num_tokens: The end of the range, not its length.
        layers: Only these (absolute) of the route's; the units are then those of `one_layer`.

    Raises:
        PeerError: A table is too short, or names a block outside of its pool.
        InternalError: `first_token` is not at an edge.
    """
    is_empty = not route or first_token >= num_tokens
    layers_here = route.layers if layers is None else _overlap(route.layers, layers)
    if is_empty or not layers_here:
        size = unit_bytes(source, dest, route, one_layer=layers is not None)
        return Pieces(max(1, size), _NOTHING, _NOTHING)
    if first_token % token_step(source, dest):
        raise InternalError(
            f"a transfer begins at token {first_token}, not at a multiple of "
            f"{token_step(source, dest)} (blocks of {source.block_size} and {dest.block_size})"
        )
    cut = _cut(source, dest, route, one_layer=layers is not None)
    first_block = first_token // source.block_size
    source_ids = block_table(source, source_blocks, num_tokens, "P")[first_block:]
    dest_ids = block_table(dest, dest_blocks, num_tokens, "D")
    order = np.argsort(source_ids, kind="stable").astype(np.int32)

    # Of each of P's blocks, as they lie there: its runs of tokens, counted from token 0.
    runs = ((order + first_block) * cut.source.runs)[:, None] + _count(cut.source.runs)
    is_wanted = (runs >= first_token // cut.tokens) & (runs < -(-num_tokens // cut.tokens))
    dest_blocks_of_runs = dest_ids[np.minimum(runs // cut.dest.runs, len(dest_ids) - 1)]
    route_layers = _count(len(layers_here)) + (layers_here.start - route.layers.start)
    grid = (route_layers if cut.has_layers else _count(1), _count(cut.planes), _count(cut.heads))
    source_units = cut.source.units(
        source_ids[order][:, None], runs % cut.source.runs, grid, along=cut.source
    )
    dest_units = cut.dest.units(dest_blocks_of_runs, runs % cut.dest.runs, grid, along=cut.source)
    if is_wanted.all():
        return Pieces(cut.unit_bytes, source_units.ravel(), dest_units.ravel())
    mask = np.broadcast_to(cut.source.spread(is_wanted), source_units.shape)
    return Pieces(cut.unit_bytes, source_units[mask], dest_units[mask])


@dataclass(frozen=True, slots=True)
class _Side:
    """A block of one rank, in units: how many along each axis, and where the route begins."""

    layers: int
    planes: int
    heads: int
    runs: int
    order: BlockOrder
    first_layer: int
    first_head: int

    @property
    def per_block(self) -> int:
        return self.layers * self.planes * self.heads * self.runs

    def spread(self, of_runs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """`[blocks, runs]` over the axes of a grid: layer, plane, head and run as they lie."""
        if self.order is BlockOrder.HND:
            return of_runs[:, None, None, None, :]
        return of_runs[:, None, None, :, None]

    def units(
        self,
        blocks: npt.NDArray[np.int32],
        runs: npt.NDArray[np.int32],
        grid: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]],
        *,
        along: _Side,
    ) -> npt.NDArray[np.int32]:
        """Where the units of a grid lie: `[blocks, layer, plane, head, run]`.

        The last two change places if `along`, whose order the answer is in, has NHD.

        Args:
            blocks, runs: `[blocks, runs]`: whose block, which run in it.
            grid: Layers, planes and heads, counted from where the route begins.
        """
        is_hnd = self.order is BlockOrder.HND
        per_head, per_run = (self.runs, 1) if is_hnd else (1, self.heads)
        per_plane = self.heads * self.runs
        layers, planes, heads = grid
        inside = (
            ((layers + self.first_layer) * (self.planes * per_plane))[:, None, None]
            + (planes * per_plane)[:, None]
            + (heads + self.first_head) * per_head
        )
        tail = (slice(None), None) if along.order is BlockOrder.HND else (None, slice(None))
        outside = along.spread(blocks * self.per_block + runs * per_run)
        units: npt.NDArray[np.int32] = outside + inside[(None, slice(None), slice(None), *tail)]
        return units


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a route is cut into units.

    Attributes:
        tokens: Of a unit.
        has_layers: Whether a layer is a unit of its own (if not, a unit has all of them).
        planes, heads: Units of the route along these axes.
    """

    unit_bytes: int
    tokens: int
    has_layers: bool
    planes: int
    heads: int
    source: _Side
    dest: _Side


@functools.lru_cache(maxsize=4096)
def _cut(source: KVShape, dest: KVShape, route: Route, *, one_layer: bool) -> _Cut:
    """Choose the largest unit that tiles both ranks' memory and the route."""
    sides = (source, shard_of(source, route.source_rank)), (dest, shard_of(dest, route.dest_rank))
    orders = _orders(*sides)
    tokens = token_step(source, dest)
    is_whole_share = all(len(shard.heads) == len(route.heads) for _, shard in sides)
    has_layers, planes = True, source.num_planes
    # Heads of a unit; they lie side by side only within a unit's tokens.
    # The route begins at a multiple of them, because ranks have equal shares, one after another.
    heads = math.gcd(len(route.heads), *(len(shard.heads) for _, shard in sides))
    if orders[0] is not orders[1]:
        tokens = heads = 1
    elif orders[0] is BlockOrder.NHD:
        tokens = tokens if is_whole_share else 1
    elif source.block_size != dest.block_size:
        heads = 1
    vector_bytes = source.head_dim * source.dtype_bytes
    size = heads * tokens * vector_bytes
    is_whole_block = source.block_size == dest.block_size == tokens and is_whole_share
    if is_whole_block and orders[0] is orders[1]:
        size, planes, heads = size * planes, 1, len(route.heads)
        is_whole_stage = all(len(shard.layers) == len(route.layers) for _, shard in sides)
        if is_whole_stage and not one_layer:
            size, has_layers = size * len(route.layers), False

    def side(shape: KVShape, shard: Shard, order: BlockOrder) -> _Side:
        made = _Side(
            layers=len(shard.layers) if has_layers else 1,
            planes=planes,
            heads=len(shard.heads) // heads,
            runs=shape.block_size // tokens,
            order=order,
            first_layer=route.layers.start - shard.layers.start,
            first_head=(route.heads.start - shard.heads.start) // heads,
        )
        if made.per_block * shape.num_blocks > _MAX_UNITS:
            raise PeerError(
                f"{shape.num_blocks} blocks are {made.per_block * shape.num_blocks} units of "
                f"{size} bytes, more than the {_MAX_UNITS} that can be addressed"
            )
        return made

    return _Cut(
        unit_bytes=size,
        tokens=tokens,
        has_layers=has_layers,
        planes=planes,
        heads=len(route.heads) // heads,
        source=side(*sides[0], orders[0]),
        dest=side(*sides[1], orders[1]),
    )


def _orders(
    source: tuple[KVShape, Shard], dest: tuple[KVShape, Shard]
) -> tuple[BlockOrder, BlockOrder]:
    """The orders of both sides; one that has no second head or token may be taken for either."""
    first, second = source[0].order, dest[0].order
    for (shape, shard), other in ((source, second), (dest, first)):
        if len(shard.heads) == 1 or shape.block_size == 1:
            return other, other
    return first, second


def _stages(shape: KVShape) -> tuple[range, ...]:
    """Layers of each stage."""
    stages = shape.stages or ((0, shape.num_layers),)
    return tuple(range(first, end) for first, end in stages)


def _heads(shape: KVShape, tp_rank: int) -> range:
    each = max(1, shape.num_kv_heads // shape.tp_size)
    first = tp_rank * shape.num_kv_heads // shape.tp_size
    return range(first, first + each)


def _holders(
    source: KVShape, stage: int, wanted: range, turns: dict[tuple[int, int], int]
) -> Iterator[tuple[int, range]]:
    """TP ranks of P that have the heads `wanted`, each head once; replicas take turns."""
    if source.tp_size <= source.num_kv_heads:
        for tp_rank in range(source.tp_size):
            heads = _overlap(_heads(source, tp_rank), wanted)
            if heads:
                yield tp_rank, heads
        return
    num_replicas = source.tp_size // source.num_kv_heads
    for head in wanted:
        turn = turns.get((stage, head), 0)
        turns[stage, head] = turn + 1
        yield head * num_replicas + turn % num_replicas, range(head, head + 1)


def _why_invalid(shape: KVShape) -> str | None:
    """Why no engine has this shape: it came over the wire and may be anything."""
    numbers = (
        *(shape.num_blocks, shape.num_layers, shape.num_planes, shape.num_kv_heads),
        *(shape.head_dim, shape.dtype_bytes, shape.block_size, shape.tp_size),
    )
    if min(numbers) < 1:
        return f"a size below 1 in {shape}"
    if shape.num_ranks > _MAX_RANKS or shape.block_size > _MAX_BLOCK_TOKENS:
        return (
            f"{shape.num_ranks} ranks with blocks of {shape.block_size} tokens; there can be "
            f"{_MAX_RANKS}, with {_MAX_BLOCK_TOKENS}"
        )
    if shape.num_kv_heads % shape.tp_size and shape.tp_size % shape.num_kv_heads:
        return f"{shape.num_kv_heads} KV heads are not shared out over {shape.tp_size} ranks"
    ends = [0]
    for first, end in shape.stages or ((0, shape.num_layers),):
        if first != ends[-1] or end <= first:
            return f"the stages {shape.stages} leave layers out, or none to one of them"
        ends.append(end)
    if ends[-1] != shape.num_layers:
        return f"the stages {shape.stages} do not end with layer {shape.num_layers}"
    return None


def block_table(
    shape: KVShape,
    blocks: Sequence[BlockId] | npt.NDArray[np.int32],
    num_tokens: int,
    whose: str,
) -> npt.NDArray[np.int32]:
    """Return the ids of the blocks that hold the first `num_tokens`, which are at least one.

    Args:
        blocks: A whole block table.
        whose: For the error.

    Raises:
        PeerError: They are not enough, or one is not in the pool.
    """
    num_blocks = -(-num_tokens // shape.block_size)
    table = np.asarray(blocks, dtype=np.int32)[:num_blocks]
    if len(table) < num_blocks:
        raise PeerError(f"{num_tokens} tokens take {num_blocks} blocks, {whose} has {len(table)}")
    if table.min() < 0 or table.max() >= shape.num_blocks:
        raise PeerError(f"{whose} names blocks outside of its {shape.num_blocks}")
    return table


def _overlap(first: range, second: range) -> range:
    start = max(first.start, second.start)
    return range(start, max(start, min(first.stop, second.stop)))


def _count(num: int) -> npt.NDArray[np.int32]:
    return np.arange(num, dtype=np.int32)


_NOTHING = np.zeros(0, dtype=np.int32)
