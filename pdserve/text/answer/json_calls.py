"""Formats whose arguments are a JSON object: Hermes, Llama 3, Mistral, DeepSeek V3, Kimi K2.

Arguments keep the model's own spelling, so that no number loses a digit.
"""

from __future__ import annotations

import re
from dataclasses import replace
from json import JSONDecodeError, JSONDecoder
from typing import TYPE_CHECKING

import msgspec

from pdserve.text.answer.following import ObjectFollower
from pdserve.text.answer.formats import CallFormat, Writing
from pdserve.text.answer.pieces import (
    MalformedCallError,
    ToolCall,
    UnfinishedCallError,
    value_in,
)

if TYPE_CHECKING:
    from pdserve.text.answer.pieces import Tools

_ESCAPED = re.compile(r"\\.", re.DOTALL)
_V11 = re.compile(r"\s*+([^\s\[\]{}]+)\s*+(?:\[CALL_ID\][^\[]*+)?(?:\[ARGS\])?\s*+(?=\{)")
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_KIMI = re.compile(r"\s*((?:functions\.)?([^\s:]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>")
_KIMI_ID = re.compile(r"functions\.[^\s:]+:\d+")
_NAMED = (
    r'\{\s*+(?:"(?:type|id)"\s*+:\s*+"[^"\\]*+"\s*+,\s*+)?"name"\s*+:\s*+(?P<quoted>"(?:[^"\\]|\\.)*")'
    r'\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
)
_NAMED_HEAD = re.compile(rf"\s*+{_NAMED}")
_LIST_HEAD = re.compile(rf"\s*+\[\s*+{_NAMED}")
_NEXT_HEAD = re.compile(rf"\}}\s*+\}}[\s,;]*{_NAMED}")
_V11_HEAD = re.compile(
    r"\s*+(?P<name>[^\s\[\]{}]++)\s*+(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*+(?=\{)"
)
_V3_HEAD = re.compile(
    r"\s*+function\s*+<｜tool▁sep｜>(?P<name>[^\n{]++)\n\s*+(?:```(?:json)?)?\s*+(?=\{)"
)
_V31_HEAD = re.compile(r"(?!\s*+function\s*+<)(?P<name>[^<{]++)<｜tool▁sep｜>\s*+(?=\{)")
_KIMI_ARGUMENTS = r"\s*+<\|tool_call_argument_begin\|>\s*+(?=\{)"
_KIMI_HEADS = (
    re.compile(rf"\s*+(?P<id>functions\.(?P<name>[^\s:<]++):\d+){_KIMI_ARGUMENTS}"),
    re.compile(rf"\s*+(?:functions\.)?(?P<name>[^\s:<]++)(?::\d+)?{_KIMI_ARGUMENTS}"),
)
_KEYS = ("name", "parameters", "arguments", "type", "function", "id")


class _Call(msgspec.Struct):
    """A call as JSON; the name for the arguments depends on the model."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


_call_in = msgspec.json.Decoder(_Call).decode
_calls_in = msgspec.json.Decoder(list[_Call]).decode
_skip_value = JSONDecoder(strict=False).raw_decode

_BAD_JSON = (msgspec.MsgspecError, RecursionError, UnicodeEncodeError)


def _is_in_string(text: str) -> bool:
    """Whether JSON text ends inside a string."""
    return _ESCAPED.sub("", text).count('"') % 2 == 1


def _refusal_of(text: str) -> MalformedCallError | UnfinishedCallError:
    """Return why text that is not JSON is not a call: it is incomplete, or malformed."""
    if _is_in_string(text):
        return UnfinishedCallError()
    return MalformedCallError()


def _object(raw: msgspec.Raw) -> str:
    """Return the text of a JSON object, which may be inside a string.

    Raises:
        MalformedCallError: It is something else.
    """
    text = bytes(raw).decode() or "{}"
    if text.startswith('"'):
        text = value_in(text)
    try:
        value = value_in(text)
    except _BAD_JSON as error:
        raise MalformedCallError from error
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise MalformedCallError
    return text.strip()


def object_text(text: str) -> str:
    """Return arguments as they are, if they are a JSON object.

    Raises:
        UnfinishedCallError: They end inside a string.
        MalformedCallError: They are something else.
    """
    try:
        return _object(msgspec.Raw(text.strip().encode()))
    except MalformedCallError as error:
        raise _refusal_of(text) from error
    except _BAD_JSON as error:
        raise MalformedCallError from error


def _tool_call(call: _Call) -> ToolCall:
    if not call.name.strip():
        raise MalformedCallError
    return ToolCall(call.name.strip(), _object(call.arguments or call.parameters))


def _named_call(text: str) -> ToolCall:
    try:
        return _tool_call(_call_in(text.strip()))
    except _BAD_JSON as error:
        raise _refusal_of(text) from error


def _follow_hermes(opening: str, tools: Tools) -> ObjectFollower:
    return ObjectFollower([_NAMED_HEAD])


def _follow_llama(opening: str, tools: Tools) -> ObjectFollower:
    names = None if opening else frozenset(tools)
    return ObjectFollower([_NAMED_HEAD], _NEXT_HEAD, names=names)


def _follow_mistral(opening: str, tools: Tools) -> ObjectFollower:
    return ObjectFollower([_V11_HEAD, _LIST_HEAD], _NEXT_HEAD)


def _follow_deepseek(opening: str, tools: Tools) -> ObjectFollower:
    return ObjectFollower([_V3_HEAD, _V31_HEAD])


def _follow_kimi(opening: str, tools: Tools) -> ObjectFollower:
    return ObjectFollower(_KIMI_HEADS)


def _hermes(opening: str, body: str, tools: Tools, *, is_last: bool) -> list[ToolCall]:
    return [_named_call(body)]


def _llama(opening: str, body: str, tools: Tools, *, is_last: bool) -> list[ToolCall]:
    """One object, or several with semicolons between; without the opening only of known tools."""
    calls = []
    rest = body.strip()
    while rest:
        try:
            _, end = _skip_value(rest)
        except (JSONDecodeError, RecursionError) as error:
            raise MalformedCallError from error
        calls.append(_named_call(rest[:end]))
        rest = rest[end:].lstrip("; \n\t")
    if not opening and not {call.name for call in calls} <= tools.keys():
        raise MalformedCallError
    return calls


def _may_begin_llama(text: str) -> bool:
    """Whether a text may be a Llama call: an object whose first key can be a call's."""
    squeezed = "".join(text.split())
    return any(
        squeezed.startswith('{"' + key + '"') or ('{"' + key + '"').startswith(squeezed)
        for key in _KEYS
    )


def _may_begin_list(text: str) -> bool:
    """Whether a text may be a list of calls."""
    return text.startswith("[")


def _mistral(opening: str, body: str, tools: Tools, *, is_last: bool) -> list[ToolCall]:
    """`name[ARGS]{...}`, with an id between if the model gives one; in V3 a list of objects."""
    if named := _V11.match(body):
        return [ToolCall(named[1], object_text(body[named.end() :]))]
    text = body.strip()
    try:
        return [_tool_call(call) for call in _calls_in(text)]
    except _BAD_JSON as error:
        raise _refusal_of(text) from error


def _deepseek(opening: str, body: str, tools: Tools, *, is_last: bool) -> list[ToolCall]:
    """V3 writes the arguments into a block of code, V3.1 as they are."""
    name, separator, arguments = body.partition(_DEEPSEEK_SEPARATOR)
    if not separator:
        raise _refusal_of(body)
    if name.strip() == "function":
        name, _, arguments = arguments.partition("\n")
        arguments = (
            arguments.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
        )
    if not name.strip():
        raise MalformedCallError
    return [ToolCall(name.strip(), object_text(arguments))]


def _kimi(opening: str, body: str, tools: Tools, *, is_last: bool) -> list[ToolCall]:
    head = _KIMI.match(body)
    if head is None:
        raise _refusal_of(body)
    call_id = head[1] if _KIMI_ID.fullmatch(head[1]) else None
    return [ToolCall(head[2], object_text(body[head.end() :]), call_id)]


HERMES = CallFormat(
    openings=("<tool_call>",),
    closings=("</tool_call>",),
    parse=_hermes,
    follow=_follow_hermes,
    writing=Writing(
        begin='<tool_call>\n{"name": "{name}", "arguments": ', end="}\n</tool_call>", between="\n"
    ),
)
LLAMA_JSON = CallFormat(
    openings=("<|python_tag|>",),
    closings=(),
    parse=_llama,
    follow=_follow_llama,
    may_begin=_may_begin_llama,
    writing=Writing(begin='{"name": "{name}", "parameters": ', end="}", between="; "),
)
MISTRAL = CallFormat(
    openings=("[TOOL_CALLS]",),
    closings=("[TOOL_CALLS]",),
    parse=_mistral,
    follow=_follow_mistral,
    writing=Writing(begin="[TOOL_CALLS]{name}[ARGS]", end=""),
)
MISTRAL_V3 = replace(
    MISTRAL,
    writing=Writing(
        opening="[TOOL_CALLS] [",
        begin='{"name": "{name}", "arguments": ',
        end="}",
        between=", ",
        closing="]",
    ),
)
DEEPSEEK_V3 = CallFormat(
    openings=("<｜tool▁call▁begin｜>",),
    closings=("<｜tool▁call▁end｜>",),
    sections=(("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),),
    parse=_deepseek,
    follow=_follow_deepseek,
    writing=Writing(
        opening="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        between="\n",
        closing="<｜tool▁calls▁end｜>",
    ),
)
DEEPSEEK_V31 = replace(
    DEEPSEEK_V3,
    writing=Writing(
        opening="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
    ),
)
KIMI = CallFormat(
    openings=("<|tool_call_begin|>",),
    closings=("<|tool_call_end|>",),
    sections=(("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
    parse=_kimi,
    follow=_follow_kimi,
    writing=Writing(
        opening="<|tool_calls_section_begin|>",
        begin="<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        closing="<|tool_calls_section_end|>",
    ),
)
JSON_LIST = CallFormat(
    openings=(),
    closings=(),
    parse=_mistral,
    follow=_follow_mistral,
    may_begin=_may_begin_list,
    writing=Writing(
        opening="[", begin='{"name": "{name}", "arguments": ', end="}", between=", ", closing="]"
    ),
)
"""For models whose own format is unknown or has no grammar; only for forced calls."""
