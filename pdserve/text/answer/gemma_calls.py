"""Gemma 4's calls: `call:name{key:value}`, with a special token around strings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pdserve.text.answer.following import MAX_HELD_CHARS
from pdserve.text.answer.formats import CallFormat
from pdserve.text.answer.pieces import (
    CallArguments,
    CallBegins,
    CallPiece,
    MalformedCallError,
    ToolCall,
    UnfinishedCallError,
    quoted,
)
from pdserve.text.answer.tag_following import after_space, beginnings_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.text.answer.pieces import Tools

_QUOTE = '<|"|>'
_HEAD = re.compile(r"\s*call:\s*([^\s{}]+)\s*(?=\{)")
_KEY = re.compile(r"([^:{}\[\],]+):")
_BARE = re.compile(r"[^,{}\[\]]+")
_LITERAL = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_FOLLOWED_KEY = re.compile(rf"\s*+,?\s*+{_KEY.pattern}\s*+(?={re.escape(_QUOTE)}|[^<\s])")
_SIGN = re.compile(rf"{re.escape(_QUOTE)}|[{{}}\[\],]")
_PARTIAL_QUOTE = re.compile(rf"(?:{beginnings_of(_QUOTE)})\Z")


def _value(text: str, at: int) -> tuple[str, int]:
    """Return the JSON text of the value at a place, and its end."""
    at = after_space(text, at)
    if text.startswith(_QUOTE, at):
        end = text.find(_QUOTE, at + len(_QUOTE))
        if end < 0:
            raise UnfinishedCallError
        return quoted(text[at + len(_QUOTE) : end]), end + len(_QUOTE)
    if text[at : at + 1] in ("{", "["):
        return _members(text, at)
    bare = _BARE.match(text, at)
    if bare is None:
        raise MalformedCallError
    word = bare[0].strip()
    return word if _LITERAL.fullmatch(word) else quoted(word), bare.end()


def _members(text: str, at: int) -> tuple[str, int]:
    """Return the JSON text of the object or list at a place, and its end."""
    is_object = text[at] == "{"
    end = "}" if is_object else "]"
    members = []
    at = after_space(text, at + 1)
    while not text.startswith(end, at):
        name = ""
        if is_object:
            key = _KEY.match(text, at)
            if key is None:
                raise MalformedCallError
            name, at = f"{_name(key[1])}: ", key.end()
        member, at = _value(text, at)
        members.append(name + member)
        at = after_space(text, at)
        if text.startswith(",", at):
            at = after_space(text, at + 1)
        elif not text.startswith(end, at):
            raise MalformedCallError
    inner = ", ".join(members)
    return (f"{{{inner}}}" if is_object else f"[{inner}]"), at + 1


def _name(key: str) -> str:
    return quoted(key.strip().replace(_QUOTE, ""))


def _gemma(opening: str, body: str, tools: Tools, *, is_last: bool) -> list[ToolCall]:
    head = _HEAD.match(body)
    if head is None:
        raise MalformedCallError
    try:
        arguments, end = _members(body, head.end())
    except RecursionError as error:
        raise MalformedCallError from error
    if body[end:].strip():
        raise MalformedCallError
    return [ToolCall(head[1], arguments)]


class _Follower:
    """Follows a call member by member: strings as they come, other values when they have ended."""

    def __init__(self) -> None:
        self._has_begun = self._is_lost = self._is_in_value = self._is_text = False
        self._has_members = self._is_quoted = False
        self._held = ""
        self._num_read = 0
        self._depth = 0

    def push(self, text: str) -> Sequence[CallPiece]:
        """See `CallFollower`."""
        if self._is_lost:
            return []
        self._held += text
        pieces: list[CallPiece] = []
        while not self._is_lost and self._step(pieces):
            pass
        return pieces

    def _step(self, pieces: list[CallPiece]) -> bool:
        if not self._has_begun:
            return self._read_head(pieces)
        if not self._is_in_value:
            return self._read_key(pieces)
        return self._read_text(pieces) if self._is_text else self._read_other(pieces)

    def _read_head(self, pieces: list[CallPiece]) -> bool:
        head = _HEAD.match(self._held, 0, MAX_HELD_CHARS)
        if head is None:
            self._is_lost = len(self._held) > MAX_HELD_CHARS
            return False
        self._held, self._has_begun = self._held[head.end() + 1 :], True
        pieces.append(CallBegins(head[1]))
        return True

    def _read_key(self, pieces: list[CallPiece]) -> bool:
        key = _FOLLOWED_KEY.match(self._held, 0, MAX_HELD_CHARS)
        if key is None:
            self._is_lost = len(self._held) > MAX_HELD_CHARS
            return False
        self._is_in_value, self._is_text = True, self._held.startswith(_QUOTE, key.end())
        self._held = self._held[key.end() + self._is_text * len(_QUOTE) :]
        self._num_read = self._depth = 0
        begin = f"{', ' if self._has_members else '{'}{_name(key[1])}: "
        pieces.append(CallArguments(begin + '"' * self._is_text))
        self._has_members = True
        return True

    def _read_text(self, pieces: list[CallPiece]) -> bool:
        end = self._held.find(_QUOTE)
        partial = _PARTIAL_QUOTE.search(self._held, max(0, len(self._held) - len(_QUOTE)))
        until = end if end >= 0 else len(self._held) if partial is None else partial.start()
        piece = quoted(self._held[:until])[1:-1] + '"' * (end >= 0)
        pieces += [CallArguments(piece)] if piece else []
        self._held = self._held[until + (end >= 0) * len(_QUOTE) :]
        self._is_in_value = end < 0
        return end >= 0

    def _read_other(self, pieces: list[CallPiece]) -> bool:
        while sign := _SIGN.search(self._held, self._num_read):
            self._num_read = sign.end()
            if sign[0] == _QUOTE:
                self._is_quoted = not self._is_quoted
            elif self._is_quoted:
                continue
            elif sign[0] in "{[":
                self._depth += 1
            elif self._depth:
                self._depth -= sign[0] != ","
            else:
                return self._tell(sign.start(), pieces)
        self._num_read = max(self._num_read, len(self._held) - len(_QUOTE) + 1)
        return False

    def _tell(self, end: int, pieces: list[CallPiece]) -> bool:
        """Report a value that has ended; return whether it is valid."""
        try:
            piece, at = _value(self._held[:end], 0)
        except (ValueError, RecursionError):
            self._is_lost = True
            return False
        self._is_lost = bool(self._held[at:end].strip())
        if not self._is_lost:
            pieces.append(CallArguments(piece))
        self._held, self._is_in_value = self._held[end:], False
        return not self._is_lost


def _follow(opening: str, tools: Tools) -> _Follower:
    return _Follower()


GEMMA = CallFormat(
    openings=("<|tool_call>",), closings=("<tool_call|>",), parse=_gemma, follow=_follow
)
