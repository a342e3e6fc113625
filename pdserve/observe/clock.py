"""Clocks that are passed in, so that tests and simulations control time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock for decisions, and a wall clock for people to read."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def wall_s(self) -> float:
        """Seconds since the Unix epoch."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic_s(self) -> float:
        """See `Clock`."""
        return time.monotonic()

    def wall_s(self) -> float:
        """See `Clock`."""
        return time.time()


class ManualClock:
    """A clock that moves only on request.

    Args:
        ahead_s: Seconds by which its wall clock is ahead of its monotonic one.
    """

    def __init__(self, start_s: float = 1000.0, *, ahead_s: float = 0.0) -> None:
        self.now_s = start_s
        self._ahead_s = ahead_s

    def monotonic_s(self) -> float:
        """See `Clock`."""
        return self.now_s

    def wall_s(self) -> float:
        """See `Clock`."""
        return self.now_s + self._ahead_s

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now_s += seconds
