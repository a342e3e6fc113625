"""Which experts lie on which rank. Pure arithmetic: no torch, no load, no groups.

An expert is *logical* as the checkpoint numbers it; what lies on a rank is a *copy* of it,
found by its rank and its *local* index there. Experts may have several copies, each on a rank
of its own.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from pdserve.errors import ConfigError, InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray


class Copies(NamedTuple):
    """Where the copies of each expert are, in rank order.

    E experts, C copies of the expert with the most. Rows of experts with fewer copies repeat them
    from the start, so that every entry names a copy.

    Attributes:
        counts: `[E]` int64, copies of each expert.
        rank: `[E, C]` int64.
        local: `[E, C]` int64, index among the rank's own.
    """

    counts: NDArray[np.int64]
    rank: NDArray[np.int64]
    local: NDArray[np.int64]


class ExpertPlacement(msgspec.Struct, frozen=True, dict=True):
    """The experts of one layer on the ranks that share them.

    Attributes:
        ranks: Logical id of each copy on each rank, by local index.
    """

    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        counts = self._counts
        if set(counts) != set(range(len(counts))):
            raise InternalError(f"a placement lacks experts: it has {sorted(counts)}")
        for rank, experts in enumerate(self.ranks):
            if len(set(experts)) != len(experts):
                raise InternalError(f"rank {rank} holds an expert twice: {experts}")

    @cached_property
    def _counts(self) -> Counter[int]:
        return Counter(expert for experts in self.ranks for expert in experts)

    @property
    def num_experts(self) -> int:
        """Logical experts."""
        return len(self._counts)

    @property
    def num_ranks(self) -> int:
        """Ranks that hold them."""
        return len(self.ranks)

    @property
    def max_local(self) -> int:
        """Copies on the fullest rank."""
        return max(map(len, self.ranks))

    @cached_property
    def copies(self) -> Copies:
        """The copies of each expert, as arrays."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.num_experts)]
        for rank, experts in enumerate(self.ranks):
            for local, expert in enumerate(experts):
                found[expert].append((rank, local))
        most = max(map(len, found))
        cycled = np.array([[at[i % len(at)] for i in range(most)] for at in found], dtype=np.int64)
        counts = np.array([len(at) for at in found], dtype=np.int64)
        return Copies(counts, cycled[:, :, 0], cycled[:, :, 1])


def capacities(num_copies: int, num_ranks: int) -> list[int]:
    """Copies on each rank: equal, or one more on the first ranks where they do not divide."""
    each, rest = divmod(num_copies, num_ranks)
    return [each + (rank < rest) for rank in range(num_ranks)]


def place(
    num_experts: int, num_ranks: int, *, strategy: str = "linear", num_redundant: int = 0
) -> ExpertPlacement:
    """Place experts whose load is not known.

    Args:
        strategy: linear (runs of experts) or round_robin, for the first copy of each.
        num_redundant: Additional copies, which the first experts get evenly.

    Raises:
        ConfigError: A rank would hold no expert, or one twice.
    """
    if num_experts + num_redundant < num_ranks:
        raise ConfigError(
            f"{num_experts} experts and {num_redundant} redundant copies are too few for "
            f"{num_ranks} ranks: use fewer ranks, or --eplb-config.num-redundant-experts "
            f"{num_ranks - num_experts}",
            param="tensor-parallel-size",
        )
    most = num_experts * (num_ranks - 1)
    if num_redundant > most:
        raise ConfigError(
            f"--eplb-config.num-redundant-experts is {num_redundant}, but {num_experts} experts "
            f"on {num_ranks} ranks leave room for at most {most} copies, one per rank: lower it",
            param="eplb-config.num-redundant-experts",
        )
    placing = Placing([()] * num_ranks, num_experts + num_redundant)
    if strategy == "round_robin":
        ranks = [expert % num_ranks for expert in range(num_experts)]
    else:
        sizes = capacities(num_experts, num_ranks)
        ranks = [rank for rank, size in enumerate(sizes) for _ in range(size)]
    for expert, rank in enumerate(ranks):
        placing.add(expert, rank)
    for index in range(num_redundant):
        # Ranks fill evenly.
        placing.add_anywhere(index % num_experts, lambda rank: len(placing.ranks[rank]))
    return placing.done()


class Placing:
    """A placement under construction: copies are added and removed.

    Args:
        ranks: Experts that each rank holds at first.
        num_copies: Final number of copies of all experts.

    Attributes:
        ranks: The experts on each rank.
    """

    def __init__(self, ranks: Sequence[Collection[int]], num_copies: int) -> None:
        self.ranks = [set(experts) for experts in ranks]
        self._capacities = capacities(num_copies, len(ranks))

    def is_full(self, rank: int) -> bool:
        """Whether `rank` has no free slot."""
        return len(self.ranks[rank]) >= self._capacities[rank]

    def add(self, expert: int, rank: int) -> None:
        """Put a copy of `expert` into a free slot of `rank`, which has no copy of it."""
        if self.is_full(rank) or expert in self.ranks[rank]:
            raise InternalError(f"expert {expert} cannot be added to rank {rank}: {self.ranks}")
        self.ranks[rank].add(expert)

    def remove(self, expert: int, rank: int) -> None:
        """Take a copy of `expert` from `rank`."""
        self.ranks[rank].remove(expert)

    def add_anywhere(self, expert: int, cost: Callable[[int], int]) -> None:
        """Put a copy of `expert` on the cheapest rank that has a free slot and no copy of it.

        If all ranks with free slots have one already, a rank without it passes another expert
        on to a free slot. There is always one to pass on: otherwise the rank with the free slot
        would hold all experts of the full one and `expert`, and be full itself.

        Args:
            cost: Cost of a rank; ties go to the lower rank.
        """
        lacking = [rank for rank, held in enumerate(self.ranks) if expert not in held]
        roomy = [rank for rank in lacking if not self.is_full(rank)]
        if roomy:
            self.add(expert, min(roomy, key=lambda rank: (cost(rank), rank)))
            return
        rank = min(lacking, key=lambda rank: (cost(rank), rank))
        free = next(other for other in range(len(self.ranks)) if not self.is_full(other))
        passed = min(self.ranks[rank] - self.ranks[free])
        self.remove(passed, rank)
        self.add(passed, free)
        self.add(expert, rank)

    def done(self) -> ExpertPlacement:
        """Return the placement, each rank's experts in ascending order."""
        return placement_of(self.ranks)


def placement_of(ranks: Sequence[Collection[int]]) -> ExpertPlacement:
    """Return the placement with these experts on the ranks, in ascending order."""
    return ExpertPlacement(tuple(tuple(sorted(experts)) for experts in ranks))
