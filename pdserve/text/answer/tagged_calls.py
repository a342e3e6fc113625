"""Formats that write each argument between tags: DeepSeek V3.2 and V4, Qwen3-Coder, GLM.

Values are unquoted, so the tag or the tool's schema gives their type, and a closing tag ends a
value only if the text after it can follow a value.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.text.answer.formats import CallFormat, Writing
from pdserve.text.answer.pieces import (
    MalformedCallError,
    ToolCall,
    UnfinishedCallError,
    object_of,
    quoted,
    value_in,
)
from pdserve.text.answer.tag_following import TagFollower, Tags, after_space, beginnings_of
from pdserve.text.schemas import is_text, types_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pdserve.text.answer.pieces import Tools

_NAME = re.compile(r'[^"<>\s]+')
_DSML_HEAD = re.compile(r'([^"<>\s]+)"\s*>')
_DSML_OPENING = re.compile(r'<｜DSML｜ ?parameter name="([^"]+)" string="(true|false)">')
_DSML_CLOSING = re.compile(r"</｜DSML｜ ?parameter>")
_QWEN = re.compile(r"(?:<function=)?([^>\n]++)>(.*)</function>", re.DOTALL)
_QWEN_OPENING = re.compile(r"<parameter=([^>\n]+)>\n?")
_QWEN_CLOSING = re.compile(r"\n?</parameter>|\n(?=<parameter=[^>\n]+>\n)")
_GLM_HEAD = re.compile(r"\s*([^\s<]+)\s*(?=<arg_key>|$)")
_GLM_OPENING = re.compile(r"<arg_key>([^<]+)</arg_key>\s*<arg_value>")
_GLM_CLOSING = re.compile(r"</arg_value>")
_DSML_PARTIAL = re.compile(
    rf"\n?(?:{beginnings_of('</｜DSML｜parameter>', '</｜DSML｜ parameter>')})?\Z"
)
_QWEN_FOLLOWED_HEAD = re.compile(r"\s*+(?:<function=)?([^>\n]++)>")
_QWEN_PARTIAL = re.compile(
    rf"\n?(?:{beginnings_of('</parameter>', '<parameter=')}|<parameter=[^>\n]*>?)?\Z"
)
_GLM_FOLLOWED_HEAD = re.compile(r"\s*+([^\s<]++)\s*+(?=<arg_key>)")
_GLM_PARTIAL = re.compile(rf"\n?(?:{beginnings_of('</arg_value>')})?\Z")
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
_NAMES = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}


def _values(
    text: str, opening: re.Pattern[str], closing: re.Pattern[str], *, is_last: bool
) -> Iterator[tuple[re.Match[str], str]]:
    """Yield each argument's opening tag and its value.

    Raises:
        UnfinishedCallError: The last value has no end.
        MalformedCallError: There is other text between the arguments.
    """
    at = after_space(text, 0)
    while at < len(text):
        tag = opening.match(text, at)
        if tag is None:
            raise MalformedCallError
        for end in closing.finditer(text, tag.end()):
            at = after_space(text, end.end())
            if at == len(text) or opening.match(text, at):
                yield tag, text[tag.end() : end.start()]
                break
        else:
            if not is_last:
                raise UnfinishedCallError
            yield tag, text[tag.end() :].removesuffix("\n")
            return


def _is_only_text(schema: object) -> bool:
    """Whether values are strings and nothing else."""
    return is_text(schema) and types_of(schema) <= {"string"}


def _typed(text: str, schema: object) -> str:
    """Return a value's JSON text by the types that its schema names; without one, a string."""
    types = types_of(schema)
    if _is_only_text(schema):
        return quoted(text)
    literal = _PYTHON_LITERALS.get(text.strip(), text.strip())
    try:
        value = value_in(literal)
    except (msgspec.MsgspecError, RecursionError):
        return quoted(text)
    name = "number" if type(value) in (int, float) else _NAMES[type(value)]
    fits = not types or name in types or (name == "number" and "integer" in types)
    return literal if fits or "string" not in types else quoted(text)


def _properties(tools: Tools, name: str) -> Mapping[str, Any]:
    properties = tools.get(name, {}).get("properties")
    return properties if isinstance(properties, dict) else {}


def _dsml(opening: str, body: str, tools: Tools, *, is_last: bool) -> list[ToolCall]:
    if _NAME.fullmatch(body):  # closed in the tag that began it
        return [ToolCall(body, "{}")]
    head = _DSML_HEAD.match(body)
    if head is None:
        raise MalformedCallError
    found = _values(body[head.end() :], _DSML_OPENING, _DSML_CLOSING, is_last=is_last)
    values = {}
    for tag, text in found:
        values[tag[1]] = quoted(text) if tag[2] == "true" else _checked(text.strip())
    return [ToolCall(head[1], object_of(values))]


def _checked(text: str) -> str:
    try:
        value_in(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MalformedCallError from error
    return text


def _qwen(opening: str, body: str, tools: Tools, *, is_last: bool) -> list[ToolCall]:
    whole = _QWEN.fullmatch(body.strip())
    if whole is None:
        raise UnfinishedCallError
    name = whole[1].strip()
    if not name:
        raise MalformedCallError
    properties = _properties(tools, name)
    found = _values(whole[2], _QWEN_OPENING, _QWEN_CLOSING, is_last=is_last)
    values = {tag[1].strip(): _typed(text, properties.get(tag[1].strip())) for tag, text in found}
    return [ToolCall(name, object_of(values))]


def _glm(opening: str, body: str, tools: Tools, *, is_last: bool) -> list[ToolCall]:
    head = _GLM_HEAD.match(body)
    if head is None:
        raise MalformedCallError
    name = head[1]
    properties = _properties(tools, name)
    found = _values(body[head.end() :], _GLM_OPENING, _GLM_CLOSING, is_last=is_last)
    values = {tag[1].strip(): _typed(text, properties.get(tag[1].strip())) for tag, text in found}
    return [ToolCall(name, object_of(values))]


def _follow_dsml(opening: str, tools: Tools) -> TagFollower:
    return TagFollower(
        Tags(
            head=_DSML_HEAD,
            opening=_DSML_OPENING,
            closing=_DSML_CLOSING,
            partial=_DSML_PARTIAL,
            is_text=lambda _, tag: tag[2] == "true",
            typed=lambda _, tag, text: text.strip(),
        )
    )


def _follow_typed(
    tools: Tools,
    head: re.Pattern[str],
    opening: re.Pattern[str],
    closing: re.Pattern[str],
    partial: re.Pattern[str],
) -> TagFollower:
    """Return a follower of values whose types the tool's schema gives."""

    def schema_of(name: str, tag: re.Match[str]) -> object:
        return _properties(tools, name).get(tag[1].strip())

    return TagFollower(
        Tags(
            head=head,
            opening=opening,
            closing=closing,
            partial=partial,
            is_text=lambda name, tag: _is_only_text(schema_of(name, tag)),
            typed=lambda name, tag, text: _typed(text, schema_of(name, tag)),
        )
    )


def _follow_qwen(opening: str, tools: Tools) -> TagFollower:
    return _follow_typed(tools, _QWEN_FOLLOWED_HEAD, _QWEN_OPENING, _QWEN_CLOSING, _QWEN_PARTIAL)


def _follow_glm(opening: str, tools: Tools) -> TagFollower:
    return _follow_typed(tools, _GLM_FOLLOWED_HEAD, _GLM_OPENING, _GLM_CLOSING, _GLM_PARTIAL)


def _dsml_format(space: str, section: str) -> CallFormat:
    return CallFormat(
        openings=(f'<｜DSML｜{space}invoke name="',),
        closings=(f"</｜DSML｜{space}invoke>", '"/>'),
        sections=((f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"),),
        fragments=("｜DSML｜",),
        parse=_dsml,
        follow=_follow_dsml,
        writing=Writing(
            opening=f"<｜DSML｜{section}>\n",
            begin=f'<｜DSML｜{space}invoke name="{{name}}">\n',
            parameter=(
                f'<｜DSML｜{space}parameter name="{{key}}" string="{{is_string}}">',
                f"</｜DSML｜{space}parameter>\n",
            ),
            excluded=("｜DSML｜",),
            end=f"</｜DSML｜{space}invoke>\n",
            closing=f"</｜DSML｜{section}>",
        ),
    )


DEEPSEEK_V32 = _dsml_format("", "function_calls")
DEEPSEEK_V4 = _dsml_format("", "tool_calls")
DEEPSEEK_V41 = _dsml_format(" ", " calls")
QWEN_XML = CallFormat(
    openings=("<tool_call>", "<function="),
    closings=("</tool_call>",),
    parse=_qwen,
    follow=_follow_qwen,
    ends_reasoning=True,
    writing=Writing(
        begin="<tool_call>\n<function={name}>\n",
        parameter=("<parameter={key}>\n", "\n</parameter>\n"),
        excluded=("</parameter>", "<parameter=", "</function>"),
        end="</function>\n</tool_call>",
        between="\n",
    ),
)
GLM = CallFormat(
    openings=("<tool_call>",),
    closings=("</tool_call>",),
    parse=_glm,
    follow=_follow_glm,
    writing=Writing(
        begin="<tool_call>{name}\n",
        parameter=("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
        excluded=("</arg_value>",),
        end="</tool_call>",
        between="\n",
    ),
)
