"""Finds stop strings in text that arrives in pieces, and never releases part of one.

The result does not depend on how the text is cut into pieces. Does not know tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Released(NamedTuple):
    """Text that can be shown, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Holds back text that may be the beginning of a stop string.

    The match that ends first wins, and among those the longest.

    Args:
        stops: Non-empty strings.
        include_stop: Whether the stop string itself is part of the text.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> Released:
        """Add `text`; with `may_stop` false, no stop string may end inside it."""
        if not self._stops:
            return Released(text)
        buffer = self._held + text
        if may_stop and (match := self._find(buffer)) is not None:
            start, end = match
            self._held = ""
            return Released(buffer[: end if self._include_stop else start], buffer[start:end])
        keep = overlap(buffer, self._stops)
        self._held = buffer[len(buffer) - keep :]
        return Released(buffer[: len(buffer) - keep])

    def flush(self) -> str:
        """End the text; return what was held back."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str) -> tuple[int, int] | None:
        """The first match that ends in the text that was just added."""
        matches = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := buffer.find(stop, max(0, len(self._held) - len(stop) + 1))) >= 0
        ]
        if not matches:
            return None
        end, start = min(matches)
        return start, end


def overlap(text: str, wanted: Sequence[str]) -> int:
    """Return the length of the longest end of a text that is a proper beginning of one wanted."""
    return max((_overlap(text, each) for each in wanted), default=0)


def _overlap(text: str, wanted: str) -> int:
    for length in range(min(len(wanted) - 1, len(text)), 0, -1):
        if text.endswith(wanted[:length]):
            return length
    return 0
