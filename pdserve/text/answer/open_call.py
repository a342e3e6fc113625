"""The text of a tool call that has begun, and how much of it was searched for its end and followed.

Each character is searched and followed once, however the text is cut. Does not know what ends a
call: it returns the place of a closing marker, and is asked again if the call did not end there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.text.answer.formats import first_of
from pdserve.text.stops import overlap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.text.answer.formats import CallFormat
    from pdserve.text.answer.pieces import CallPiece, Tools


class OpenCall:
    """See the module.

    Args:
        calls: How the model writes calls.
        opening: The marker that opened it; empty if the format needs none.
        tools: The offered tools.

    Attributes:
        opening: As given.
        num_parts: Number of pieces in which its text came.
    """

    def __init__(self, calls: CallFormat, opening: str, tools: Tools) -> None:
        self.opening = opening
        self._closings = calls.closings
        self._follower = calls.follow(opening, tools)
        self._parts: list[str] = []
        self.num_parts = 0
        self._num_followed = 0
        self._unfollowed = ""
        self._num_searched = 0
        self._tail = ""
        self._may_close = False

    @property
    def text(self) -> str:
        """All of its text after the opening."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def add(self, text: str, written: Sequence[str]) -> None:
        """Add text.

        Args:
            written: Closing markers that are found in the text.
        """
        self._append(text)
        window = self._tail + text
        self._tail = window[-max(map(len, written), default=1) :]
        self._may_close = first_of(window, written) is not None

    def take(self, marker: str) -> None:
        """Add a marker that did not end the call, with all text before it."""
        self._append(marker)
        self._num_searched = len(self.text)

    def _append(self, text: str) -> None:
        self._parts.append(text)
        self.num_parts += 1
        self._unfollowed += text

    def next_closing(self, written: Sequence[str]) -> tuple[int, str] | None:
        """Return the place of the next closing marker in the text, and the marker."""
        if not self._may_close:
            return None
        found = first_of(self.text, written, self._num_searched)
        if found is None:
            self._may_close = False
        else:
            self._num_searched = found[0] + len(found[1])
        return found

    def num_certain(self, written: Sequence[str]) -> int:
        """Return the length of the text without an end that may begin a closing marker."""
        text = self._unfollowed
        for closing in self._closings:  # that was none may yet be one, at the end of all
            text = text.rstrip().removesuffix(closing) if text.rstrip().endswith(closing) else text
        return self._num_followed + len(text) - overlap(text, written)

    def follow(self, end: int) -> Sequence[CallPiece]:
        """Follow the text up to a place in it; return what became certain by that."""
        start = self._num_followed
        if end <= start:
            return ()
        text, self._unfollowed = self._unfollowed[: end - start], self._unfollowed[end - start :]
        self._num_followed = end
        return self._follower.push(text)
