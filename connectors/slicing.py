"""Says which ranks of P have KV for which ranks of D, for any pair of KV shapes.

Pure. It knows shapes, and nothing of addresses, transports, leases or which of the two sides moves
the bytes. `pieces` cuts what goes over one route.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.wire.transfer import KVShape

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


def shard_of(shape: KVShape, rank: int) -> Shard:
    """What `rank` of an engine of this shape has. The engine's own rule, and no other.

    Raises:
        PeerError: There is no such rank.
    """
    if not 0 <= rank < shape.num_ranks:
        raise PeerError(f"there is no rank {rank} in an engine of {shape.num_ranks} ranks")
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


def mismatch(source: KVShape, dest: KVShape, names: tuple[str, str] = ("P", "D")) -> str | None:
    """Why KV of `source` cannot be that of `dest`, with both values; None = it can.

    How it is shared out does not matter: ranks, stages, block size, order.

    Args:
        names: Of the two engines.
    """
    for field in ("num_layers", "num_planes", "num_kv_heads", "head_dim", "dtype_bytes"):
        first, second = getattr(source, field), getattr(dest, field)
        if first != second:
            what = field.replace("_", " ")
            return f"{what} is {first} at {names[0]} and {second} at {names[1]}"
    for name, shape in zip(names, (source, dest), strict=True):
        why = _why_invalid(shape)
        if why is not None:
            return f"{name} cannot have its shape: {why}"
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
        raise PeerError(f"these KV shapes cannot be exchanged: {why}")
    found = []
    turns: dict[tuple[int, int], int] = {}
    for dest_rank in range(dest.num_ranks):
        wanted = shard_of(dest, dest_rank)
        for stage, stage_layers in enumerate(_stages(source)):
            layers = overlap(stage_layers, wanted.layers)
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
            heads = overlap(_heads(source, tp_rank), wanted)
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
        return f"{shape.num_kv_heads} KV heads cannot be divided among {shape.tp_size} ranks"
    ends = [0]
    for first, end in shape.stages or ((0, shape.num_layers),):
        if first != ends[-1] or end <= first:
            return f"the stages {shape.stages} skip layers, or one of them has none"
        ends.append(end)
    if ends[-1] != shape.num_layers:
        return f"the stages {shape.stages} do not end with layer {shape.num_layers}"
    return None


def overlap(first: range, second: range) -> range:
    """What two ranges have in common."""
    start = max(first.start, second.start)
    return range(start, max(start, min(first.stop, second.stop)))
