"""The grid of ranks, and every group as a slice of it. Pure arithmetic: no torch, no sockets.

Ranks are numbered row by row over [external DP, DP, PP, PCP, TP], the last axis fastest, so
that the ranks which talk most (TP) are neighbours. An *axis* is of the mesh; a *dim* is of a
tensor. A group of an axis holds the ranks that differ in that axis alone, in ascending order;
EP, which is no axis of its own, holds those that differ in DP, PCP and TP.
"""

from __future__ import annotations

import enum
import itertools

import msgspec

from pdserve.errors import InternalError


class Axis(enum.Enum):
    """What a group's ranks differ in."""

    EXTERNAL_DP = "external_dp"
    DP = "dp"
    PP = "pp"
    PCP = "pcp"
    TP = "tp"
    EP = "ep"
    WORLD = "world"


_GRID = (Axis.EXTERNAL_DP, Axis.DP, Axis.PP, Axis.PCP, Axis.TP)
_VARYING = {
    **{axis: frozenset({axis}) for axis in _GRID},
    Axis.EP: frozenset({Axis.DP, Axis.PCP, Axis.TP}),
    Axis.WORLD: frozenset(_GRID),
}


class MeshShape(msgspec.Struct, frozen=True, kw_only=True):
    """How many ranks there are along each axis."""

    external_dp: int = 1
    dp: int = 1
    pp: int = 1
    pcp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if min(self._sizes) < 1:
            raise InternalError(f"a mesh axis is empty: {self}")

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (self.external_dp, self.dp, self.pp, self.pcp, self.tp)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        size = 1
        for axis_size in self._sizes:
            size *= axis_size
        return size

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return the coordinate of `rank` along each axis of the grid.

        Raises:
            InternalError: There is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise InternalError(f"rank {rank} is not in a mesh of {self.world_size}")
        found: dict[Axis, int] = {}
        for axis, size in zip(reversed(_GRID), reversed(self._sizes), strict=True):
            rank, found[axis] = divmod(rank, size)
        return found

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Return every group of `axis`; each rank is in exactly one. O(world size)."""
        fixed = [other for other in _GRID if other not in _VARYING[axis]]
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            members.setdefault(tuple(at[other] for other in fixed), []).append(rank)
        return tuple(tuple(ranks) for ranks in members.values())


class Mesh(msgspec.Struct, frozen=True):
    """A grid seen from one of its ranks."""

    shape: MeshShape
    rank: int = 0

    def index(self, axis: Axis) -> int:
        """Return this rank's index in its group of `axis`."""
        return self.group(axis).index(self.rank)

    def group(self, axis: Axis) -> tuple[int, ...]:
        """Return the ranks of this rank's group of `axis`, ascending."""
        return next(ranks for ranks in self.shape.groups(axis) if self.rank in ranks)


def split_layers(num_layers: int, num_stages: int, explicit: tuple[int, ...] = ()) -> list[range]:
    """Return the layers that each pipeline stage runs.

    The numbers of layers are as even as possible. The middle stages take the remainder, because the
    first one also runs the embedding, and the last one the head and the sampler.

    Args:
        explicit: Number of layers of each stage, used if given; must sum to `num_layers`.
    """
    counts = list(explicit)
    if not counts:
        counts = [num_layers // num_stages] * num_stages
        inner = [*range(1, num_stages - 1), num_stages - 1, 0]
        for stage in itertools.islice(itertools.cycle(inner), num_layers % num_stages):
            counts[stage] += 1
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
        raise InternalError(f"{counts} do not split {num_layers} layers over {num_stages} stages")
    ends = list(itertools.accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
