"""Gemma 4's calls: `call:name{key:value}`, with a token of its own around strings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from pdserve.text.answer.formats import CallFormat
from pdserve.text.answer.pieces import MalformedCallError, ToolCall, UnfinishedCallError

if TYPE_CHECKING:
    from pdserve.text.answer.pieces import Tools

_QUOTE = '<|"|>'
_HEAD = re.compile(r"\s*call:\s*([^\s{}]+)\s*(?=\{)")
_SPACE = re.compile(r"\s*")
_KEY = re.compile(r"([^:{}\[\],]+):")
_BARE = re.compile(r"[^,{}\[\]]+")
_LITERAL = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")


def _value(text: str, at: int) -> tuple[str, int]:
    """Return the JSON text of the value at a place, and where it ends."""
    at = _after_space(text, at)
    if text.startswith(_QUOTE, at):
        end = text.find(_QUOTE, at + len(_QUOTE))
        if end < 0:
            raise UnfinishedCallError
        return _quoted(text[at + len(_QUOTE) : end]), end + len(_QUOTE)
    if text[at : at + 1] in ("{", "["):
        return _members(text, at)
    bare = _BARE.match(text, at)
    if bare is None:
        raise MalformedCallError
    word = bare[0].strip()
    return word if _LITERAL.fullmatch(word) else _quoted(word), bare.end()


def _members(text: str, at: int) -> tuple[str, int]:
    """Return the JSON text of the object or list at a place, and where it ends."""
    is_object = text[at] == "{"
    end = "}" if is_object else "]"
    members = []
    at = _after_space(text, at + 1)
    while not text.startswith(end, at):
        name = ""
        if is_object:
            key = _KEY.match(text, at)
            if key is None:
                raise MalformedCallError
            name, at = f"{_quoted(key[1].strip().replace(_QUOTE, ''))}: ", key.end()
        member, at = _value(text, at)
        members.append(name + member)
        at = _after_space(text, at)
        if text.startswith(",", at):
            at = _after_space(text, at + 1)
        elif not text.startswith(end, at):
            raise MalformedCallError
    inner = ", ".join(members)
    return (f"{{{inner}}}" if is_object else f"[{inner}]"), at + 1


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space is not None else at


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


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


GEMMA = CallFormat(openings=("<|tool_call>",), closings=("<tool_call|>",), parse=_gemma)
