"""Computes a placement of experts that balances their load. Pure.

Loads are counts of tokens, and everything is computed in integers, so that all ranks come to
the same placement whatever their processor. A token chooses among the copies of an expert
evenly, so each copy bears an equal share of the expert's load.

It knows nothing of weights or how they move, except that moving them costs: of two about equally
good placements, it takes the one nearer to the current one.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from pdserve.parallel.experts import Placing, placement_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from pdserve.parallel.experts import ExpertPlacement

TOLERATED = 1.05
"""Ratio up to which no weight is moved. Windows differ by noise: what was just balanced must
not move again."""

_GOOD_ENOUGH = 1.02
"""Ratio at which the search for a better placement ends."""

_WORTH_MOVING = 1.01
"""A placement that moves more must lower the ratio by this factor."""

_SHARE = 1 << 20
"""Shares are in units of a token / 2^20, so that they stay whole numbers."""

_MAX_SWAPS_PER_RANK = 64
"""Ends the search where loads are so close that swaps gain next to nothing."""


def balance_ratio(placement: ExpertPlacement, load: Sequence[int]) -> float:
    """Return the load of the busiest rank over the mean; 1 if it is even, or there is no load."""
    busiest, mean = busiest_and_mean(placement, load)
    return busiest / mean if mean else 1.0


def busiest_and_mean(placement: ExpertPlacement, load: Sequence[int]) -> tuple[float, float]:
    """Return the tokens on the busiest rank, and on a rank on average.

    Args:
        load: Tokens of each logical expert.
    """
    shares = _shares(load, placement.copies.counts)
    by_rank = [int(shares[list(experts)].sum()) for experts in placement.ranks]
    return max(by_rank) / _SHARE, sum(by_rank) / len(by_rank) / _SHARE


def rebalance(current: ExpertPlacement, load: Sequence[int]) -> ExpertPlacement:
    """Return a placement with as many copies on each rank as `current`, and an even load.

    Three ways are tried, the one that moves least first, until one is `_GOOD_ENOUGH`; otherwise the
    best is taken, but one that moves more only if it is clearly better. (1) Copies are swapped
    between ranks. (2) The most loaded experts get the redundant copies, then as (1). (3) All
    experts are packed anew, heaviest first, then as (1).

    Args:
        load: Tokens of each logical expert.

    Returns:
        `current` itself if its ratio is `TOLERATED`, or nothing clearly better was found.
    """
    best, best_ratio = current, balance_ratio(current, load)
    if best_ratio <= TOLERATED:
        return best
    for placement in _attempts(current, load):
        ratio = balance_ratio(placement, load)
        if ratio * _WORTH_MOVING < best_ratio:
            best, best_ratio = placement, ratio
        if best_ratio <= _GOOD_ENOUGH:
            break
    return best


def _attempts(current: ExpertPlacement, load: Sequence[int]) -> Iterator[ExpertPlacement]:
    yield placement_of(_swap(current.ranks, load))
    counts = replicate(load, sum(map(len, current.ranks)), current.num_ranks)
    yield placement_of(_swap(_fill(current.ranks, counts, load), load))
    yield _packed(current, counts, load)


def replicate(load: Sequence[int], num_copies: int, num_ranks: int) -> list[int]:
    """Return each expert's number of copies: one, and the rest one by one to the highest load.

    Args:
        num_copies: Copies of all experts.
        num_ranks: No expert has more copies than that.
    """
    counts = [1] * len(load)
    heap = [(-tokens * _SHARE, expert) for expert, tokens in enumerate(load)]
    heapq.heapify(heap)
    for _ in range(num_copies - len(load)):
        while counts[heap[0][1]] == num_ranks:
            heapq.heappop(heap)
        expert = heap[0][1]
        counts[expert] += 1
        # Experts without any load take turns, by the number of copies they have.
        share = load[expert] * _SHARE // counts[expert] or -counts[expert]
        heapq.heapreplace(heap, (-share, expert))
    return counts


def _shares(load: Sequence[int], counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    return np.asarray(load, dtype=np.int64) * _SHARE // np.asarray(counts, dtype=np.int64)


def _fill(
    ranks: Sequence[Sequence[int]], counts: Sequence[int], load: Sequence[int]
) -> list[set[int]]:
    """Take surplus copies from the busiest ranks, and add missing ones to the idlest.

    Args:
        ranks: Experts of each rank so far; may be empty.
        counts: Wanted copies of each expert.
    """
    shares = _shares(load, counts).tolist()
    placing = Placing(ranks, sum(counts))

    def busy(rank: int) -> int:
        return sum(shares[expert] for expert in placing.ranks[rank])

    heaviest_first = sorted(range(len(load)), key=lambda expert: (-shares[expert], expert))
    holders = {
        expert: [rank for rank, held in enumerate(placing.ranks) if expert in held]
        for expert in heaviest_first
    }
    for expert in heaviest_first:
        for rank in sorted(holders[expert], key=lambda rank: (-busy(rank), rank))[
            : max(0, len(holders[expert]) - counts[expert])
        ]:
            placing.remove(expert, rank)
    for expert in heaviest_first:
        for _ in range(counts[expert] - len(holders[expert])):
            placing.add_anywhere(expert, busy)
    return placing.ranks


def _packed(
    current: ExpertPlacement, counts: Sequence[int], load: Sequence[int]
) -> ExpertPlacement:
    """Pack from nothing, then give each rank the pack that has most of its present experts."""
    empty: list[tuple[int, ...]] = [()] * current.num_ranks
    packs = _swap(_fill(empty, counts, load), load)
    pairs = sorted(
        (-len(set(pack) & set(held)), index, rank)
        for index, pack in enumerate(packs)
        for rank, held in enumerate(current.ranks)
        if len(pack) == len(held)
    )
    given: dict[int, int] = {}
    taken: set[int] = set()
    for _, index, rank in pairs:
        if index not in taken and rank not in given:
            given[rank] = index
            taken.add(index)
    return placement_of([packs[given[rank]] for rank in range(current.num_ranks)])


def _swap(ranks: Sequence[Collection[int]], load: Sequence[int]) -> list[list[int]]:
    """Swap pairs of copies between the busiest rank and others while that helps.

    Each swap is the one after which the busier of its two ranks is least busy; it leaves both
    below what the busiest was, so the sorted loads fall and the search ends. O(copies) per
    swap, as arrays.
    """
    slots = [sorted(experts) for experts in ranks]
    num_ranks, width = len(slots), max(map(len, slots))
    held = np.zeros((num_ranks, len(load)), dtype=bool)
    # Ranks with one slot less have an empty last one, which is never swapped.
    table = np.full((num_ranks, width), -1, dtype=np.int64)
    for rank, experts in enumerate(slots):
        held[rank, experts] = True
        table[rank, : len(experts)] = experts
    weight = np.where(table < 0, 0, _shares(load, held.sum(axis=0))[table])
    total = weight.sum(axis=1)
    enough = int(total.sum() * _GOOD_ENOUGH) // num_ranks
    for _ in range(_MAX_SWAPS_PER_RANK * num_ranks):
        busiest = int(total.argmax())
        if total[busiest] <= enough:
            break
        # gain[i, r, j]: what the busiest rank sheds if its slot i is swapped with slot j of r.
        gain = weight[busiest][:, None, None] - weight[None]
        after = np.maximum(total[busiest] - gain, total[None, :, None] + gain)
        mine, theirs = table[busiest], table
        forbidden = (
            (mine < 0)[:, None, None]
            | (theirs < 0)[None]
            | held[:, mine].T[:, :, None]
            | held[busiest][theirs][None]
        )
        after[forbidden] = np.iinfo(np.int64).max
        best = int(after.argmin())
        if after.flat[best] >= total[busiest]:
            break
        i, rank, j = (int(index) for index in np.unravel_index(best, after.shape))
        out, into = int(table[busiest, i]), int(table[rank, j])
        held[busiest, [out, into]] = held[rank, [into, out]] = [False, True]
        table[busiest, i], table[rank, j] = into, out
        weight[busiest, i], weight[rank, j] = weight[rank, j], weight[busiest, i]
        total[busiest] -= gain.flat[best]
        total[rank] += gain.flat[best]
    return [[int(expert) for expert in row if expert >= 0] for row in table]
