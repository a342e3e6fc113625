"""Cuts a transfer between two ranks into pairs of equal units of their memories.

Pure, and so is all that it stands on: `slicing` says what a rank has, and what goes from one rank
to another. The pairs are made with numpy, whole tables at once.

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

from pdserve.connectors.slicing import Route, Shard, overlap, shard_of, token_step
from pdserve.errors import InternalError, PeerError
from pdserve.wire.transfer import BlockOrder, KVShape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from pdserve.wire.ids import BlockId

_MAX_UNITS = np.iinfo(np.int32).max
_NOTHING = np.zeros(0, dtype=np.int32)


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
    layers_here = route.layers if layers is None else overlap(route.layers, layers)
    if is_empty or not layers_here:
        return Pieces(1, _NOTHING, _NOTHING)
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
                f"{size} bytes, more than the {_MAX_UNITS} units that can be addressed"
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
        raise PeerError(
            f"{num_tokens} tokens need {num_blocks} blocks, but {whose} has {len(table)}"
        )
    if table.min() < 0 or table.max() >= shape.num_blocks:
        raise PeerError(f"{whose} names blocks outside its {shape.num_blocks}")
    return table


def _count(num: int) -> npt.NDArray[np.int32]:
    return np.arange(num, dtype=np.int32)


def token_ranges(
    source: KVShape, route: Route, tokens: tuple[int, int], piece_bytes: int
) -> Iterator[tuple[int, int]]:
    """Cut `[first, end)` tokens at edges of P's blocks into about `piece_bytes` each."""
    if not route:
        return
    token_bytes = (
        len(route.layers) * len(route.heads) * source.num_planes * source.head_dim
    ) * source.dtype_bytes
    num_blocks = max(1, piece_bytes // (token_bytes * source.block_size))
    step = num_blocks * source.block_size
    start, end_token = tokens
    while start < end_token:
        end = min(end_token, (start // step + 1) * step)
        yield start, end
        start = end
