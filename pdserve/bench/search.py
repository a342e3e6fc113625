"""Chooses the next load to measure, to find the highest that meets the objectives.

Pure: the next load follows from the verdicts so far. First come the requested loads; then, if none
of them held or none failed, loads lower or higher by a factor; then the middle between the highest
that held and the lowest that failed, until they are close together.

More load should never be easier. If a measurement says otherwise, the lowest load that failed
counts, and the contradiction is reported: one lucky run must not become a capacity.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

import msgspec

_GROWTH: Final = 2.0
_SHRINK_LIMIT: Final = 1024.0
"""The search ends this factor below the start rate."""


class LoadAxis(enum.Enum):
    """The kind of a load."""

    RATE = "rate"
    CONCURRENCY = "concurrency"

    @property
    def unit(self) -> str:
        """The unit after a load, for people."""
        return "req/s" if self is LoadAxis.RATE else "at once"


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """How to search.

    Attributes:
        loads: Loads to measure in any case, ascending; empty starts at `start`.
        highest: The highest load that it tries.
        is_narrowing: Whether to search beyond `loads`.
        tolerance: See `SweepConfig`.
    """

    axis: LoadAxis
    loads: tuple[float, ...] = ()
    start: float = 1.0
    highest: float
    is_narrowing: bool
    tolerance: float

    def next_load(self, verdicts: Mapping[float, bool]) -> float | None:
        """Return the next load to measure, or None at the end.

        Args:
            verdicts: Whether each measured load held.
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
    """The result about the highest load that holds.

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
