"""Follows tool calls as they are generated: what is certain before a call is complete.

A follower reads a call's text as it comes and reports the name and the beginning of the arguments.
The whole call contains everything reported, or the text is not a call; `CallTelling` ensures this.
The last brace of the arguments is reported with the call's end, so that no client ever has complete
arguments of a call that was cut off.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from pdserve.text.answer.pieces import (
    CallArguments,
    CallBegins,
    CallEnds,
    CallPiece,
    MalformedCallError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.text.answer.pieces import ToolCall, Tools

MAX_HELD_CHARS: Final = 1024
"""Maximum held text; a call whose next part needs more is no longer followed but comes whole."""
_QUOTES = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\]]')

_text_in = msgspec.json.Decoder(str).decode
_object_in = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class CallFollower(Protocol):
    """Follows the text between a call's opening and its end."""

    def push(self, text: str) -> Sequence[CallPiece]:
        """Add text; return what became certain by it, except for a call that it ends."""
        ...


class NewFollower(Protocol):
    """Makes the follower of a text."""

    def __call__(self, opening: str, tools: Tools) -> CallFollower:
        """Return one.

        Args:
            opening: The marker that opened the calls; empty if the format needs none.
            tools: The offered tools.
        """
        ...


class CallTelling:
    """Tracks what was reported of the calls in one text, and what remains to be reported.

    A call is reported with the first of its arguments: clients take one without any for a whole
    call with none.

    Args:
        is_parallel: Whether calls after the first are reported too.

    Attributes:
        has_calls: Whether a call has ended that counts.
    """

    def __init__(self, *, is_parallel: bool) -> None:
        self.has_calls = False
        self._is_parallel = is_parallel
        self._begun: list[tuple[CallBegins, list[str]]] = []
        self._is_astray = False

    @property
    def has_begun(self) -> bool:
        """Whether a call has begun that was not settled or dropped."""
        return bool(self._begun)

    def tell(self, pieces: Sequence[CallPiece]) -> list[CallPiece]:
        """Return the follower's pieces to report: none behind a call of a list that is none."""
        kept: list[CallPiece] = []
        for piece in pieces:
            match piece:
                case CallBegins():
                    self._is_astray = bool(self._begun) and not _are_object(self._begun[-1][1])
                    if not self._is_astray:
                        self._begun.append((piece, []))
                case CallArguments(text) if self._begun and not self._is_astray:
                    begins, parts = self._begun[-1]
                    if self._is_parallel or len(self._begun) == 1:
                        kept += [piece] if parts else [begins, piece]
                    parts.append(text)
        return kept

    def settle(self, calls: Sequence[ToolCall]) -> list[CallPiece]:
        """Return what remains to be reported of the calls in the text.

        Raises:
            MalformedCallError: What was reported does not match, as with objects that repeat a key.
        """
        if len(self._begun) > len(calls):
            raise MalformedCallError
        left: list[CallPiece] = []
        for index, call in enumerate(calls if self._is_parallel else calls[:1]):
            begins, sent = CallBegins(call.name, call.call_id), ""
            if index < len(self._begun):
                begun, parts = self._begun[index]
                sent = "".join(parts)
                if begun != begins or not call.arguments.startswith(sent):
                    raise MalformedCallError
            if not sent:
                left.append(begins)
            if rest := call.arguments[len(sent) :]:
                left.append(CallArguments(rest))
        self._begun, self._is_astray = [], False
        self.has_calls = self.has_calls or bool(calls)
        return [*left, CallEnds()] if calls else []

    def drop(self) -> list[CallEnds]:
        """Return the end of calls that were reported, if any.

        The last one begun is not a call. Those before it are.
        """
        num_told = sum(bool(parts) for _, parts in self._begun)
        num_told = num_told if self._is_parallel else min(num_told, 1)
        num_whole = min(len(self._begun[:-1]), num_told)
        self._begun, self._is_astray = [], False
        self.has_calls = self.has_calls or num_whole > 0
        return [CallEnds(num_lost=num_told - num_whole)] if num_told else []


class ObjectEnd:
    """Looks for the end of a JSON object in text that begins with it."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Return the place of the last brace in more text; None if it is not there."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_QUOTES if self._is_in_string else _STRUCTURE).search(text, at)
            if found is None:
                return None
            at = found.end()
            match found[0]:
                case "\\":
                    self._is_escaped = True
                case '"':
                    self._is_in_string = not self._is_in_string
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth == 0:
                        return found.start()
        return None


class ObjectFollower:
    """Follows calls whose arguments are a JSON object, keeping its spelling.

    Args:
        heads: Patterns for the text before the arguments' first brace, with the groups `name` (or
            `quoted`, in JSON) and, if the model names its calls, `id`.
        next_head: Pattern between the last brace of a call and the first one of the next.
        names: Only calls of these are followed; None follows all.
    """

    def __init__(
        self,
        heads: Sequence[re.Pattern[str]],
        next_head: re.Pattern[str] | None = None,
        *,
        names: frozenset[str] | None = None,
    ) -> None:
        self._heads = heads
        self._next_head = next_head
        self._names = names
        self._is_lost = False
        self._held = ""
        self._object: ObjectEnd | None = None

    def push(self, text: str) -> list[CallPiece]:
        """See `CallFollower`."""
        pieces: list[CallPiece] = []
        while text and not self._is_lost:
            if self._object is not None:
                text = self._read_object(self._object, text, pieces)
                continue
            self._held += text
            text = self._read_head(pieces)
        return pieces

    def _read_object(self, scanned: ObjectEnd, text: str, pieces: list[CallPiece]) -> str:
        end = scanned.find(text)
        if piece := text[:end]:
            pieces.append(CallArguments(piece))
        if end is None:
            return ""
        self._object = None
        if self._next_head is None:
            self._is_lost = True
            return ""
        self._heads = (self._next_head,)
        return text[end:]

    def _read_head(self, pieces: list[CallPiece]) -> str:
        """Look for the head in the held text; return the text after it."""
        found = (head.match(self._held, 0, MAX_HELD_CHARS) for head in self._heads)
        head = next(filter(None, found), None)
        if head is None:
            self._is_lost = len(self._held) > MAX_HELD_CHARS
            return ""
        name = _name_in(head)
        if not name or (self._names is not None and name not in self._names):
            self._is_lost = True
            return ""
        if self._next_head is not None and head.re is self._next_head:
            pieces.append(CallArguments("}"))
        pieces.append(CallBegins(name, head.groupdict().get("id")))
        text, self._held = self._held[head.end() :], ""
        self._object = ObjectEnd()
        return text


def _name_in(head: re.Match[str]) -> str:
    """The name of the called tool; empty if there is none."""
    groups = head.groupdict()
    if (quoted := groups.get("quoted")) is None:
        return (groups["name"] or "").strip()
    try:
        return _text_in(quoted).strip()
    except msgspec.MsgspecError:
        return ""


def _are_object(parts: Sequence[str]) -> bool:
    """Whether parts of a text are those of a JSON object."""
    try:
        _object_in("".join(parts))
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return False
    return True
