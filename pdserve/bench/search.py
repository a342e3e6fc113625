"""Chooses the next load to measure, to find the highest that meets the objectives.

Pure: from what is known of some loads follows the next one. First the loads that were asked for;
then, if none of them held or none failed, loads further down or up by a factor; then the middle
between the highest that held and the lowest that failed, until they are near one another.

More load should never be easier. Where a measurement says so all the same, the lowest load that
failed counts, and the contradiction is told: one lucky run must not become a capacity.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

import msgspec

_GROWTH: Final = 2.0
_SHRINK_LIMIT: Final = 1024.0
"""A rate is given up so many times below the start."""


class LoadAxis(enum.Enum):
    """What a load is."""

    RATE = "rate"
    CONCURRENCY = "concurrency"

    @property
    def unit(self) -> str:
        """Behind a load, for people."""
        return "req/s" if self is LoadAxis.RATE else "at once"


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """How to look.

    Attributes:
        loads: To measure in any case, ascending; empty begins at `start`.
        highest: Where it stops to grow.
        is_narrowing: Whether to look further than `loads`.
        tolerance: See `SweepConfig`.
    """

    axis: LoadAxis
    loads: tuple[float, ...] = ()
    start: float = 1.0
    highest: float
    is_narrowing: bool
    tolerance: float

    def next_load(self, verdicts: Mapping[float, bool]) -> float | None:
        """The load to measure now, or None if it is over.

        Args:
            verdicts: Of the loads that were measured: whether each held.
        """
        for load in self.loads:
            if load not in verdicts:
                return load
        if not self.is_narrowing:
            return None
        if not verdicts:
            return min(self.start, self.highest)
        found = bracket(verdicts)
        if found.failed is None:
            assert found.held is not None
            return None if found.held >= self.highest else self._up(found.held)
        if found.held is None:
            return self._down(found.failed)
        return self._middle(found.held, found.failed)

    def _up(self, load: float) -> float:
        return min(load * _GROWTH, self.highest)

    def _down(self, load: float) -> float | None:
        if self.axis is LoadAxis.CONCURRENCY:
            return None if load <= 1 else float(int(load / _GROWTH))
        lowest = (self.loads[0] if self.loads else self.start) / _SHRINK_LIMIT
        return None if load <= lowest else load / _GROWTH

    def _middle(self, held: float, failed: float) -> float | None:
        if failed <= held * (1 + self.tolerance):
            return None
        if self.axis is LoadAxis.CONCURRENCY:
            return None if failed - held <= 1 else float(int(held + failed) // 2)
        # Figures that a person can type again; never outside of what is between.
        middle = float(f"{(held + failed) / 2:.4g}")
        return middle if held < middle < failed else None


class Bracket(msgspec.Struct, frozen=True):
    """What is known of the highest load that holds.

    Attributes:
        held: The highest that held and has no failed load below it; None if there is none.
        failed: The lowest that failed; None if none did.
        contradictions: Loads that held above one that failed.
    """

    held: float | None
    failed: float | None
    contradictions: tuple[float, ...]


def bracket(verdicts: Mapping[float, bool]) -> Bracket:
    """Read the verdicts, whatever their order."""
    failed = min((load for load, held in verdicts.items() if not held), default=None)
    held = [load for load, is_held in verdicts.items() if is_held]
    below = [load for load in held if failed is None or load < failed]
    above = sorted(load for load in held if failed is not None and load > failed)
    return Bracket(max(below, default=None), failed, tuple(above))
