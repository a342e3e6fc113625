"""Plans how experts' weights move from one placement to another, in rounds. Pure.

In a round each rank sends and receives at most one expert; everything sent is read before anything
is written. After every round each expert has a copy somewhere, and no rank has two of one: a layer
may serve with any of these placements in between.

No extra memory is needed. The slot of an expert is chosen when it arrives: one whose own expert is
not wanted there, and has been sent to all ranks that need it, perhaps in the same round. If there
is no such slot, ranks wait for one another in cycles, and a cycle moves in one round.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from pdserve.errors import InternalError
from pdserve.parallel.experts import ExpertPlacement

if TYPE_CHECKING:
    from collections.abc import Sequence


class ExpertSlot(NamedTuple):
    """Room for one expert on a rank."""

    rank: int
    local: int


class Move(NamedTuple):
    """A copy of one expert's weights from slot to slot."""

    source: ExpertSlot
    target: ExpertSlot


class _Arrival(NamedTuple):
    """An expert that a rank lacks, and the copy from which it gets it."""

    rank: int
    source: ExpertSlot


def rounds(current: ExpertPlacement, wanted: ExpertPlacement) -> list[list[Move]]:
    """Return the copies to make, round by round.

    Args:
        wanted: As many copies on each rank as in `current`; their order does not matter.
    """
    plan = _Plan(current, wanted)
    found: list[list[Move]] = []
    while plan.arrivals:
        found.append(plan.next_round())
    return found


def after(placement: ExpertPlacement, moved: Sequence[Move]) -> ExpertPlacement:
    """Return the placement after the moves of a round."""
    ranks = [list(experts) for experts in placement.ranks]
    for source, target in moved:
        ranks[target.rank][target.local] = placement.ranks[source.rank][source.local]
    return ExpertPlacement(tuple(map(tuple, ranks)))


class _Plan:
    """The moves that are still to be made."""

    def __init__(self, current: ExpertPlacement, wanted: ExpertPlacement) -> None:
        if list(map(len, current.ranks)) != list(map(len, wanted.ranks)):
            raise InternalError(f"ranks hold other numbers of experts: {current} and {wanted}")
        self.arrivals = _arrivals(current, wanted)
        self._num_reads = Counter(arrival.source for arrival in self.arrivals)
        self._unwanted = {
            ExpertSlot(rank, local)
            for rank, experts in enumerate(current.ranks)
            for local, expert in enumerate(experts)
            if expert not in wanted.ranks[rank]
        }
        self._free: list[list[ExpertSlot]] = [[] for _ in current.ranks]
        for slot in sorted(self._unwanted - set(self._num_reads)):
            self._free[slot.rank].append(slot)
        self._senders: set[int] = set()
        self._receivers: set[int] = set()

    def next_round(self) -> list[Move]:
        """Remove and return as many moves as fit into one round, at least one."""
        found: list[Move] = []
        self._senders, self._receivers = set(), set()
        num_before = -1
        while len(found) > num_before:
            num_before = len(found)
            for arrival in list(self.arrivals):
                if self._fits(arrival) and self._free[arrival.rank]:
                    found += self._take([arrival])
        for rank in range(len(self._free)):
            found += self._take(self._cycle(rank))
        return found

    def _fits(self, arrival: _Arrival) -> bool:
        return arrival.rank not in self._receivers and arrival.source.rank not in self._senders

    def _take(self, arrivals: Sequence[_Arrival]) -> list[Move]:
        for _, source in arrivals:
            self._senders.add(source.rank)
            self._num_reads[source] -= 1
            if not self._num_reads[source] and source in self._unwanted:
                self._free[source.rank].append(source)
        found: list[Move] = []
        for arrival in arrivals:
            self._receivers.add(arrival.rank)
            self.arrivals.remove(arrival)
            found.append(Move(arrival.source, self._free[arrival.rank].pop()))
        return found

    def _cycle(self, start: int) -> list[_Arrival]:
        """Return arrivals that free slots for one another; none if `start` leads to no cycle."""
        path: list[_Arrival] = []
        seen: dict[int, int] = {}
        rank = start
        while rank not in seen:
            seen[rank] = len(path)
            for arrival in self.arrivals:
                source = arrival.source
                is_last_read = source in self._unwanted and self._num_reads[source] == 1
                if arrival.rank == rank and is_last_read and self._fits(arrival):
                    break
            else:
                return []
            path.append(arrival)
            rank = arrival.source.rank
        return path[seen[rank] :]


def _arrivals(current: ExpertPlacement, wanted: ExpertPlacement) -> list[_Arrival]:
    """Return what each rank lacks; the copies of an expert share the sending."""
    at: dict[int, list[ExpertSlot]] = {}
    for rank, experts in enumerate(current.ranks):
        for local, expert in enumerate(experts):
            at.setdefault(expert, []).append(ExpertSlot(rank, local))
    num_sent: Counter[int] = Counter()
    found: list[_Arrival] = []
    for rank, (held, experts) in enumerate(zip(current.ranks, wanted.ranks, strict=True)):
        for expert in sorted(set(experts) - set(held)):
            source = min(at[expert], key=lambda slot: (num_sent[slot.rank], slot))
            num_sent[source.rank] += 1
            found.append(_Arrival(rank, source))
    return found
