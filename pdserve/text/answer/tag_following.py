"""Follows calls whose arguments stand between tags, as they are generated.

A value that is a text is reported as it comes, up to a possible closing tag: only the text after a
tag shows whether it ends the value. Other values are reported when they have ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.text.answer.following import MAX_HELD_CHARS
from pdserve.text.answer.pieces import CallArguments, CallBegins, CallPiece, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """What stands around the values of one format.

    Attributes:
        head: Before the first of them; its first group is the tool's name.
        opening: Before each; its first group is the parameter's name.
        closing: What may stand behind each.
        partial: What may be the beginning of `closing`, at the end of a text.
        is_text: Whether the value behind an opening of a tool, whatever it is, is a text.
        typed: The JSON text of such a value, where it is none.
    """

    head: re.Pattern[str]
    opening: re.Pattern[str]
    closing: re.Pattern[str]
    partial: re.Pattern[str]
    is_text: Callable[[str, re.Match[str]], bool]
    typed: Callable[[str, re.Match[str], str], str]


def beginnings_of(*tags: str) -> str:
    """Return a regular expression of what some tags can begin with."""
    found = {tag[:length] for tag in tags for length in range(1, len(tag) + 1)}
    return "|".join(map(re.escape, sorted(found, key=len, reverse=True)))


def after_space(text: str, at: int) -> int:
    """Return the place of the first character from `at` on that is not white space."""
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()


class TagFollower:
    """Follows one call. See the module, and `CallFollower`."""

    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self._name = ""
        self._held = ""
        self._opening: re.Match[str] | None = None
        self._num_read = 0
        self._num_values = 0
        self._is_lost = False

    def push(self, text: str) -> Sequence[CallPiece]:
        """See `CallFollower`."""
        if self._is_lost:
            return []
        self._held += text
        pieces: list[CallPiece] = []
        while self._step(pieces):
            pass
        return pieces

    def _step(self, pieces: list[CallPiece]) -> bool:
        """Read what comes next; tell whether more may be read."""
        if not self._name:
            head = self._tags.head.match(self._held, 0, MAX_HELD_CHARS)
            if head is None:
                self._is_lost = len(self._held) > MAX_HELD_CHARS
                return False
            self._name = head[1].strip()
            self._held = self._held[head.end() :]
            pieces += [CallBegins(self._name)] if self._name else []
            self._is_lost = not self._name
            return bool(self._name)
        if self._opening is None:
            return self._open(pieces)
        return self._read_value(self._opening, pieces)

    def _open(self, pieces: list[CallPiece]) -> bool:
        self._held = self._held.lstrip()
        opening = self._tags.opening.match(self._held, 0, MAX_HELD_CHARS)
        # A tag may take what comes behind it, too.
        if opening is None or opening.end() == len(self._held):
            self._is_lost = len(self._held) > MAX_HELD_CHARS
            return False
        self._opening, self._num_read = opening, 0
        self._held = self._held[opening.end() :]
        begin = ", " if self._num_values else "{"
        self._num_values += 1
        begin += f"{quoted(opening[1].strip())}: "
        is_text = self._tags.is_text(self._name, opening)
        pieces.append(CallArguments(begin + '"' if is_text else begin))
        return True

    def _read_value(self, opening: re.Match[str], pieces: list[CallPiece]) -> bool:
        """Tell what is certain of a value; return whether it has ended."""
        is_text = self._tags.is_text(self._name, opening)
        closing = self._tags.closing.search(self._held, self._num_read)
        while closing is not None and (is_end := self._is_end(closing)) is False:
            self._num_read = closing.end()
            closing = self._tags.closing.search(self._held, self._num_read)
        if closing is not None and is_end:
            text = self._held[: closing.start()]
            piece = quoted(text)[1:] if is_text else self._tags.typed(self._name, opening, text)
            pieces.append(CallArguments(piece))
            self._held, self._opening = self._held[closing.end() :], None
            return True
        end = len(self._held) if closing is None else closing.start()
        if closing is None:
            near = self._tags.partial.search(self._held, max(self._num_read, end - MAX_HELD_CHARS))
            end = end if near is None else near.start()
        elif len(self._held) - end > MAX_HELD_CHARS:
            self._is_lost = True
        if is_text:
            if end:
                pieces.append(CallArguments(quoted(self._held[:end])[1:-1]))
            self._held, self._num_read = self._held[end:], max(0, self._num_read - end)
        else:
            self._num_read = max(self._num_read, end)
        return False

    def _is_end(self, closing: re.Match[str]) -> bool | None:
        """Whether a value ends at a closing tag; None while that is not certain."""
        at = after_space(self._held, closing.end())
        if self._tags.opening.match(self._held, at):
            return True
        # Behind the last value stands the end of the call, which is not seen here. Only what
        # begins with no tag belongs to the value for certain.
        return False if at < len(self._held) and self._held[at] != "<" else None
