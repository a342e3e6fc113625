"""Calls as Python writes them: a list of calls with keyword arguments (Llama 4 and others)."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.text.answer.formats import CallFormat
from pdserve.text.answer.pieces import MalformedCallError, ToolCall

if TYPE_CHECKING:
    from pdserve.text.answer.pieces import Tools

_MAX_CHARS = 1 << 18
_BEGINNING = re.compile(r"\[\s*([A-Za-z_][\w.]*\s*(\(.*)?)?", re.DOTALL)


def may_begin_pythonic(text: str) -> bool:
    """Whether a text may be a list of calls: a bracket, and a name with a parenthesis."""
    return _BEGINNING.fullmatch(text) is not None


def _pythonic(opening: str, body: str, tools: Tools, *, is_last: bool) -> list[ToolCall]:
    if len(body) > _MAX_CHARS:
        raise MalformedCallError
    try:
        tree = ast.parse(body.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedCallError from error
    if not isinstance(tree, ast.List) or not tree.elts:
        raise MalformedCallError
    calls = [_call(element) for element in tree.elts]
    if not opening and not {call.name for call in calls} <= tools.keys():
        raise MalformedCallError
    return calls


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise MalformedCallError
    values: dict[str, Any] = {}
    try:
        for keyword in node.keywords:
            if keyword.arg is None:
                raise MalformedCallError
            values[keyword.arg] = ast.literal_eval(keyword.value)
        name, arguments = ast.unparse(node.func), msgspec.json.encode(values).decode()
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise MalformedCallError from error
    return ToolCall(name, arguments)


PYTHONIC = CallFormat(
    openings=("<|python_start|>",),
    closings=("<|python_end|>",),
    parse=_pythonic,
    may_begin=may_begin_pythonic,
)
