"""Tokens that a grammar forces, as drafts that are always right.

Where ranks share a vocabulary only the first of them works grammars out, and what it knows at a
moment is a matter of time. So it tells the others, in steps that may draft for rows with a grammar
and in no others: all ranks of a step have the same drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.parallel.group import Group
    from pdserve.wire.step import NewRequest

Key = TypeVar("Key")


class ForcedTokens:
    """Forced tokens by row, on all ranks of a TP group.

    Args:
        known: Returns those of a row, as far as they are known now; on the first rank.
        tp: The group; all of it asks for the same rows.
    """

    def __init__(self, known: Callable[[int], list[int]], tp: Group) -> None:
        self._known = known
        self._tp = tp
        self._bound: set[int] = set()

    def add(self, row: int, request: NewRequest) -> None:
        """Take a request."""
        if request.sampling.grammar is not None:
            self._bound.add(row)

    def remove(self, row: int) -> None:
        """Free `row`: its request is gone."""
        self._bound.discard(row)

    def of(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """Return the tokens that must follow, of rows that have some.

        Args:
            wanted: Rows that may have a draft, and how long.
        """
        rows = [row for row in wanted if row in self._bound]
        if not rows:
            return {}
        found = {row: self._known(row)[: wanted[row]] for row in rows}
        if self._tp.size > 1:
            found = told_by(self._tp, 0, {row: wanted[row] for row in rows}, found)
        return {row: tokens for row, tokens in found.items() if tokens}


def told_by(
    group: Group, source: int, lengths: Mapping[Key, int], lists: Mapping[Key, list[int]]
) -> dict[Key, list[int]]:
    """Return one rank's lists of integers, on all of a group; those that are empty are left out.

    Args:
        source: The rank.
        lengths: How long each may be; the same on all.
        lists: Its own; of no account elsewhere.
    """
    width = 1 + max(lengths.values())
    mine: list[int] = []
    for key in lengths:
        each = lists.get(key, [])
        mine += [len(each), *each, *[0] * (width - 1 - len(each))]
    told = group.gather_ints(mine)[source]
    lines = ((key, told[at * width : (at + 1) * width]) for at, key in enumerate(lengths))
    return {key: line[1 : 1 + line[0]] for key, line in lines if line[0]}
