"""Calls as Python writes them: a list of calls with keyword arguments (Llama 4 and others)."""

from __future__ import annotations

import ast
import math
import re
import warnings
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.text.answer.following import MAX_HELD_CHARS
from pdserve.text.answer.formats import CallFormat
from pdserve.text.answer.pieces import (
    CallArguments,
    CallBegins,
    CallPiece,
    MalformedCallError,
    ToolCall,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.text.answer.pieces import Tools

_MAX_CHARS = 1 << 18
_HEADS = (
    re.compile(r"\s*+\[\s*+([A-Za-z_][\w.]*+)\("),
    re.compile(r"\s*+,\s*+([A-Za-z_][\w.]*+)\("),
)
_STRUCTURE = re.compile(r"""["'()\[\]{},]""")
_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_BEGINNING = re.compile(r"\[\s*([A-Za-z_][\w.]*\s*(\(.*)?)?", re.DOTALL)


def _may_begin_pythonic(text: str) -> bool:
    """Whether a text may be a list of calls: a bracket, and a name with a parenthesis."""
    return _BEGINNING.fullmatch(text) is not None


def _pythonic(opening: str, body: str, tools: Tools, *, is_last: bool) -> list[ToolCall]:
    if len(body) > _MAX_CHARS:
        raise MalformedCallError
    try:
        tree = _parsed(body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedCallError from error
    if not isinstance(tree, ast.List) or not tree.elts:
        raise MalformedCallError
    calls = [_call(element) for element in tree.elts]
    if not opening and not {call.name for call in calls} <= tools.keys():
        raise MalformedCallError
    return calls


def _parsed(text: str) -> ast.expr:
    # Models write patterns such as "\d"; Python would warn of them on the server's stderr.
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(text.strip(), mode="eval").body


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise MalformedCallError
    values = _values(node)
    try:
        return ToolCall(ast.unparse(node.func), msgspec.json.encode(values).decode())
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise MalformedCallError from error


def _values(node: ast.Call) -> dict[str, Any]:
    if node.args:
        raise MalformedCallError
    values: dict[str, Any] = {}
    try:
        for keyword in node.keywords:
            if keyword.arg is None:
                raise MalformedCallError
            if any(_is_infinite(each) for each in ast.walk(keyword.value)):
                raise MalformedCallError
            values[keyword.arg] = ast.literal_eval(keyword.value)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise MalformedCallError from error
    return values


def _is_infinite(node: ast.AST) -> bool:
    """Whether it is a number, such as 1e999, for which JSON has no value."""
    return isinstance(node, ast.Constant) and node.value == math.inf


class _Follower:
    """Follows calls argument by argument: each is reported when it has ended.

    Args:
        names: Only calls of these are followed; None follows all.
    """

    def __init__(self, names: frozenset[str] | None) -> None:
        self._names = names
        self._is_lost = False
        self._num_calls = 0
        self._is_in_call = False
        self._has_arguments = False
        self._held = ""
        self._num_read = 0
        self._depth = 0
        self._quote = ""

    def push(self, text: str) -> Sequence[CallPiece]:
        """See `CallFollower`."""
        if self._is_lost:
            return []
        self._held += text
        pieces: list[CallPiece] = []
        while self._read_arguments(pieces) if self._is_in_call else self._read_head(pieces):
            pass
        return pieces

    def _read_head(self, pieces: list[CallPiece]) -> bool:
        head = _HEADS[self._num_calls > 0].match(self._held, 0, MAX_HELD_CHARS)
        if head is None or not (self._names is None or head[1] in self._names):
            self._is_lost = head is not None or len(self._held) > MAX_HELD_CHARS
            return False
        if self._num_calls:
            pieces.append(CallArguments("}" if self._has_arguments else "{}"))
        pieces.append(CallBegins(head[1]))
        self._held, self._num_read = self._held[head.end() :], 0
        self._num_calls += 1
        self._is_in_call, self._has_arguments = True, False
        return True

    def _read_arguments(self, pieces: list[CallPiece]) -> bool:
        """Look for the end of an argument; return whether there is one."""
        while found := self._structure.search(self._held, self._num_read):
            sign, self._num_read = found[0], found.end()
            if self._quote:
                self._num_read += sign == "\\"  # and what it escapes
                self._quote = "" if sign == self._quote else self._quote
            elif sign in "\"'":
                self._quote = sign
            elif sign in "([{":
                self._depth += 1
            elif self._depth:
                self._depth -= sign != ","
            else:
                return self._tell(self._held[: found.start()], sign, pieces)
        self._num_read = max(self._num_read, len(self._held))
        return False

    @property
    def _structure(self) -> re.Pattern[str]:
        return _IN_STRING[self._quote] if self._quote else _STRUCTURE

    def _tell(self, text: str, sign: str, pieces: list[CallPiece]) -> bool:
        """Report an argument that has ended; return whether to follow the next one too."""
        self._held, self._num_read = self._held[self._num_read :], 0
        self._is_in_call = sign == ","
        try:
            node = _parsed(f"f({text.strip()})")
            values = _values(node) if isinstance(node, ast.Call) else {}
            piece = msgspec.json.encode(values).decode()[1:-1]
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            values, piece = {}, ""
        if len(values) == 1:
            pieces.append(CallArguments(("," if self._has_arguments else "{") + piece))
            self._has_arguments = True
        self._is_lost = sign not in ",)" or len(values) != (1 if text.strip() else 0)
        return not self._is_lost


def _follow(opening: str, tools: Tools) -> _Follower:
    return _Follower(None if opening else frozenset(tools))


PYTHONIC = CallFormat(
    openings=("<|python_start|>",),
    closings=("<|python_end|>",),
    parse=_pythonic,
    follow=_follow,
    may_begin=_may_begin_pythonic,
)
