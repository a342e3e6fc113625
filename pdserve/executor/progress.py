"""Merges the progress messages of several ranks into few lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.observe.clock import Clock

_QUIET_S = 2.0


class StartProgress:
    """Passes a line on when every rank has said it, or when nothing was passed on for a while.

    So ranks that load at one speed read as one, and one that lags behind is seen.

    Args:
        tell: Gets the lines; those of one rank begin with "rank 1: ".
    """

    def __init__(self, num_ranks: int, *, clock: Clock, tell: Callable[[str], None]) -> None:
        self._num_ranks = num_ranks
        self._clock = clock
        self._tell = tell
        self._ranks_of: dict[str, set[int]] = {}
        self._held: dict[int, str] = {}
        self._told_at_s = clock.monotonic_s()
        self._last: dict[int, str] = {}

    def note(self, rank: int, text: str) -> None:
        """Take a message of a rank."""
        self._last[rank] = text
        if self._num_ranks == 1:
            self._tell(text)
            return
        ranks = self._ranks_of.setdefault(text, set())
        ranks.add(rank)
        if len(ranks) < self._num_ranks:
            self._held[rank] = text
            self.tick()
            return
        self._held = {other: held for other, held in self._held.items() if held != text}
        self._held.pop(rank, None)
        self._pass_on(f"all {self._num_ranks} ranks: {text}")

    def tick(self) -> None:
        """Pass on what has waited for too long."""
        if self._held and self._clock.monotonic_s() - self._told_at_s >= _QUIET_S:
            for rank in sorted(self._held):
                self._pass_on(f"rank {rank}: {self._held[rank]}")
            self._held.clear()

    def last(self, rank: int) -> str | None:
        """Return what a rank said last."""
        return self._last.get(rank)

    def _pass_on(self, line: str) -> None:
        self._told_at_s = self._clock.monotonic_s()
        self._tell(line)
