"""Makes grammars for answers with tool calls, in the model's own format.

The same parser reads forced and chosen calls. The text is llguidance's (Lark with token ids and
inline JSON schemas), and depends only on request and model, because every engine of a request
compiles it. Knows no request.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.http.tools import INPUT
from pdserve.text.lark import embedded
from pdserve.text.schemas import (
    branches_of,
    is_text,
    type_of,
    values_of,
    with_bounded_spaces,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve.text.answer.formats import CallFormat, ReasoningFormat, Writing
    from pdserve.text.answer.pieces import Tools, ToolUse

_ANY = r"(.|\n)*"
_BLANK = r"/[ \n]{1,4}/"
_NAME = re.compile(r"[\w.-]+")
_KEY = re.compile(r'[^<>"{}\x00-\x1f]+')
_DEFINITIONS = ("$defs", "definitions")
_LAST_ANCHOR = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")
_ESCAPE_OR_CLASS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]")
_GROUP = re.compile(r"\([^()]*\)")
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)
_DAY = "0[1-9]|1[0-9]|2[0-9]"
_DATE = f"[0-9]{{4}}-((0[1-9]|1[0-2])-({_DAY})|(0[13-9]|1[0-2])-30|(0[13578]|1[02])-31)"
_MINUTE = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_MINUTE}:[0-5][0-9](\.[0-9]{{1,9}})?([Zz]|[+\-]{_MINUTE})"
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"({_OCTET}\.){{3}}{_OCTET}"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"  # RFC 1123, section 2.1
_HEX = "[0-9A-Fa-f]{1,4}"
_IPV6_END = f"({_HEX}:{_HEX}|{_IPV4})"
_IPV6_ENDS = *(f"({_HEX}:){{{num}}}{_IPV6_END}" for num in (4, 3, 2, 1, 0)), _HEX, ""
# RFC 3986, section 3.2.2: one alternative for each number of groups that `::` may follow.
_IPV6 = "|".join(
    (
        f"({_HEX}:){{6}}{_IPV6_END}",
        f"::({_HEX}:){{5}}{_IPV6_END}",
        *(f"(({_HEX}:){{0,{num}}}{_HEX})?::{end}" for num, end in enumerate(_IPV6_ENDS)),
    )
)
# RFC 3339, appendix A.
_HOURS = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DAYS = "([0-9]+D|[0-9]+M([0-9]+D)?|[0-9]+Y([0-9]+M([0-9]+D)?)?)"
_FORMATS = {
    "date": _DATE,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": f"P({_DAYS}({_HOURS})?|{_HOURS}|[0-9]+W)",
    "email": r"[A-Za-z0-9._%+\-]+@([A-Za-z0-9\-]+\.)+[A-Za-z]{2,}",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "time": _TIME,
    "uri": r"[A-Za-z][A-Za-z0-9+.\-]*:[A-Za-z0-9\-._~:\/?#@!$&'()*+,;=%]+",
    "uuid": r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
}
"""Expressions of the formats that a text without quotes can be limited to."""


@dataclass(slots=True)
class GrammarWriter:
    """Writes one grammar.

    Args:
        tokens: Ids of tokens that no text is cut within, by their texts.
    """

    tokens: Mapping[str, int]
    _rules: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the rules so far."""
        return "\n".join(self._rules) + "\n"

    def rule(self, name: str, *alternatives: str) -> str:
        """Add a rule; return its name."""
        self._rules.append(f"{name}: " + " | ".join(alternatives))
        return name

    def literal(self, text: str) -> str:
        """Return the grammar of a text: tokens by their ids, and quoted strings."""
        return " ".join(self._literals(text))

    def _literals(self, text: str) -> list[str]:
        texts = sorted((each for each in self.tokens if each in text), key=len, reverse=True)
        if not texts:
            return [json.dumps(text)] if text else []
        parts = re.split("(" + "|".join(map(re.escape, texts)) + ")", text)
        return [
            f"<[{self.tokens[part]}]>" if position % 2 else json.dumps(part)
            for position, part in enumerate(parts)
            if part
        ]

    def free(
        self, name: str, excluded: Iterable[str], limits: Iterable[str] = (), *, end: str = ""
    ) -> str:
        """Add a terminal for any text that contains none of some texts; return a reference to it.

        Args:
            limits: Terminals that the text must match, too.
            end: What stands behind it. Its letters are in the terminal: llguidance never takes back
                what a terminal has read, and a text may contain the beginning of its end.
        """
        without = [f"~/{_ANY}{_regex(each)}{_ANY}/" for each in excluded]
        text, rest = " & ".join((f"/{_ANY}/", *limits, *without)), self._literals(end)
        if rest and rest[0].startswith('"'):
            text = f"({text}) {rest.pop(0)}"
        return " ".join((self.rule(name, text), *rest))

    def calls(self, writing: Writing, use: ToolUse, *, prefix: str = "call") -> str:
        """Add rules for one call or, in parallel, some of them; return the name of the first.

        Args:
            prefix: Prefix of the rules' names.
        """
        for index, name in enumerate(use.tools):
            self._call(f"{prefix}_{index}", writing, use, name)
        call = self.rule(prefix, *(f"{prefix}_{index}" for index in range(len(use.tools))))
        more = ""
        if use.is_parallel and writing.between is not None:
            more = f"({self.literal(writing.between)} {call})*"
        parts = self.literal(writing.opening), call, more, self.literal(writing.closing)
        return self.rule(f"{prefix}s", " ".join(part for part in parts if part))

    def _call(self, rule: str, writing: Writing, use: ToolUse, name: str) -> None:
        schema, is_loose = use.tools[name], name in use.loose
        begin, number, rest = writing.begin.replace("{name}", name).partition("{index}")
        head = f"{self.literal(begin)} /[0-9]{{1,4}}/ {self.literal(rest)}" if number else ""
        if name in use.inputs:
            try:
                arguments = self._input(rule, writing, use.inputs[name])
            except ValueError as error:
                raise ValueError(f"the format of {name!r}: {error}") from error
        elif writing.parameter is None:
            arguments = f"%json {_json(with_bounded_spaces(_object({} if is_loose else schema)))}"
        else:
            arguments = self._parameters(rule, writing, schema, is_loose=is_loose)
        parts = head or self.literal(begin), arguments, self.literal(writing.end)
        self.rule(rule, " ".join(part for part in parts if part))

    def _input(self, rule: str, writing: Writing, lark: str) -> str:
        """Add rules for arguments that are one text; return a reference to them.

        Raises:
            ValueError: Its grammar cannot stand in this format.
        """
        if writing.parameter is None:
            text = embedded(lark, rule.upper(), is_quoted=True)
            self._rules += text.rules
            begin = json.dumps(f'{{"{INPUT}": "')
            return f'{begin} {text.reference} "\\"}}"'
        begin, end = writing.parameter
        after, *_ = self._literals(end)
        letters = json.loads(after) if after.startswith('"') else ""
        text = embedded(lark, rule.upper(), is_quoted=False, end=letters)
        self._rules += text.rules
        content = f"{text.reference} {self.literal(end)}"
        if text.is_terminal:
            limits = [text.reference]
            content = self.free(f"TEXT_{rule}".upper(), writing.excluded, limits, end=end)
        return f"{self.literal(_opening(begin, INPUT, {'type': 'string'}))} {content}"

    def _parameters(
        self, rule: str, writing: Writing, schema: Mapping[str, Any], *, is_loose: bool
    ) -> str:
        """Add rules for the parameters of a tool, in order; return a reference to them.

        Raises:
            ValueError: Strings are limited in a way that a text without quotes cannot follow.
        """
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
        found = []
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        for index, (key, value) in enumerate(properties.items()):
            described = value if isinstance(value, dict) else {}
            is_split = is_text(described) and not is_loose
            try:
                branches = branches_of(described) if is_split else [described]
                parameters = [
                    self._parameter(
                        f"{rule}_{index}_{position}",
                        writing,
                        key,
                        branch,
                        shared,
                        is_loose=is_loose,
                    )
                    for position, branch in enumerate(branches)
                ]
            except ValueError as error:
                raise ValueError(f"parameter {key!r}: {error}") from error
            name = self.rule(f"{rule}_{index}", *parameters)
            found.append(name if key in required else f"{name}?")
        return " ".join(found)

    def _parameter(
        self,
        rule: str,
        writing: Writing,
        key: str,
        schema: Mapping[str, Any],
        shared: Mapping[str, Any],
        *,
        is_loose: bool,
    ) -> str:
        """Return the grammar of a parameter with a value of one type.

        Raises:
            ValueError: See `_parameters`.
        """
        assert writing.parameter is not None
        begin, end = writing.parameter
        is_string = is_text(schema)
        content = (
            self._texts(f"TEXT_{rule}".upper(), writing, {} if is_loose else schema, end)
            if is_string
            else f"%json {_json(with_bounded_spaces({**shared, **schema}))} {self.literal(end)}"
        )
        return f"{self.literal(_opening(begin, key, schema))} {content}"

    def _texts(self, name: str, writing: Writing, schema: Mapping[str, Any], end: str) -> str:
        """Return the grammar of a string without quotes, and of what stands behind it."""
        values = values_of(schema)
        if values:
            return "(" + " | ".join(map(json.dumps, values)) + f") {self.literal(end)}"
        limits = []
        if schema.keys() & {"minLength", "maxLength"}:
            least, most = schema.get("minLength", 0), schema.get("maxLength", "")
            if type(least) is not int or (type(most) is not int and most != ""):
                raise ValueError("minLength and maxLength must be whole numbers")
            limits.append(f"/(.|\\n){{{least},{most}}}/")
        if "pattern" in schema:
            limits.append(f"/{_containing(schema['pattern'])}/")
        if "format" in schema:
            name_of_format = str(schema["format"])
            if name_of_format not in _FORMATS:
                raise ValueError(f"the format {name_of_format!r} is not {', '.join(_FORMATS)}")
            limits.append(f"/{_FORMATS[name_of_format]}/")
        return self.free(name, writing.excluded, limits, end=end)

    def thought(self, reasoning: ReasoningFormat, *, is_open: bool) -> str:
        """Add rules for reasoning; return a reference to it.

        Args:
            is_open: Whether the prompt has opened it; otherwise it is optional.
        """
        opening, closing = reasoning.pairs[0]
        if closing in self.tokens:
            end = f"{self.free('THOUGHT', [closing])} {self.literal(closing)}"
        else:
            end = self.lazy("thought", closing)
        end += f" {self.rule('BLANK', _BLANK)}?"
        return end if is_open else f"({self.literal(opening)} {end})?"

    def lazy(self, name: str, closing: str) -> str:
        """Add a rule for text up to the first occurrence of another text."""
        self._rules.append(f"{name}[lazy]: /{_ANY}/ {json.dumps(closing)}")
        return name

    def among_text(self, calls: CallFormat, writing: Writing, use: ToolUse) -> str:
        """Add rules for text with calls, each of which starts at its trigger."""
        trigger = writing.trigger
        openings = (*dict(calls.sections), *calls.openings)
        marker = next((each for each in openings if trigger.startswith(each)), "")
        if not marker:  # an answer is either calls or text, as its first letter says
            free = self.rule("PLAIN", rf"/[^{{\[]{_ANY}/")
            return f"({self.calls(writing, use)} | {free}?)"
        tokens = [each for each in self.tokens if each in trigger]
        if tokens:
            token = min(tokens, key=trigger.index)
            before = trigger[: trigger.index(token)]
            text = f"/{_ANY}{_regex(before)}/ & ~/{_ANY}{_regex(token)}{_ANY}/"
            head, rest = self.rule("HEAD", text), writing.after(before + token)
            head += f" {self.literal(token)}"
            tail = self.free("TAIL", [token])
        else:
            head, rest = self.lazy("head", marker), writing.after(marker)
            tail = self.free("TAIL", [marker])
        found = self.calls(rest, use)
        if calls.has_closings:
            return f"({head} {found}){'*' if use.is_parallel else '?'} {tail}"
        if use.is_parallel and not rest.opening:
            found += f" {self.calls(writing, use, prefix='next')}?"
        return f"({head} {found} | {tail})"


def calls_grammar(
    calls: CallFormat,
    reasoning: ReasoningFormat | None,
    tokens: Mapping[str, int],
    use: ToolUse,
    *,
    prompt: str,
) -> str:
    """Return the grammar of an answer to `prompt` that calls tools as their schemas say.

    Args:
        tokens: Ids of tokens that no text is cut within, by their texts.

    Raises:
        ValueError: The format has no grammar for that, or cannot express a tool.
    """
    writing = calls.writing
    if writing is None:
        raise ValueError("this model's calls can only be constrained when one is required")
    check_tools(use.tools, with_keys=writing.parameter is not None)
    writer = GrammarWriter(tokens)
    thought = ""
    if reasoning is not None and not reasoning.is_closed_after(prompt):
        thought = writer.thought(reasoning, is_open=reasoning.is_open_after(prompt))
    answer = writer.calls(writing, use) if use.is_forced else writer.among_text(calls, writing, use)
    return f"start: {thought} {answer}\n{writer.text()}"


def check_tools(tools: Tools, *, with_keys: bool) -> None:
    """Refuse tools that could not be distinguished from the format around them.

    Raises:
        ValueError: A name or a schema cannot be used.
    """
    for name, schema in tools.items():
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"the tool {name!r} has a name with characters other than letters, digits, _, . "
                "and -: rename it"
            )
        if schema.get("type", "object") != "object":
            raise ValueError(f"the parameters of {name!r} must be the schema of an object")
        properties = schema.get("properties")
        for key in properties if with_keys and isinstance(properties, dict) else ():
            if not _KEY.fullmatch(key):
                raise ValueError(f"the tool {name!r} has a parameter {key!r}: rename it")


def _opening(begin: str, key: str, schema: Mapping[str, Any]) -> str:
    """Return the text before the value of a parameter."""
    is_string = is_text(schema)
    begin = begin.replace("{key}", key).replace("{is_string}", _json(is_string))
    return begin.replace("{type}", "string" if is_string else type_of(schema))


def _containing(pattern: object) -> str:
    """Return an expression, for between slashes, of whole texts in which `pattern` is found.

    Raises:
        ValueError: It is no text, or has anchors in only some of its alternatives.
    """
    if not isinstance(pattern, str):
        raise ValueError("pattern is not a text")
    inner = pattern.removeprefix("^")
    before = "" if inner != pattern else _ANY
    found = _LAST_ANCHOR.search(inner)
    inner, after = (inner[: found.end() - 1], "") if found else (inner, _ANY)
    bare = _ESCAPE_OR_CLASS.sub("", inner)
    while _GROUP.search(bare):
        bare = _GROUP.sub("", bare)
    if "|" in bare and not (before and after):
        raise ValueError(f"pattern {pattern!r}: put its alternatives into a group, as in ^(a|b)$")
    inner = _SLASH.sub(lambda each: each[1] or r"\/", inner).replace("\n", r"\n")
    return f"{before}({inner}){after}"


def _regex(text: str) -> str:
    """Return a text for a regular expression between slashes."""
    return "".join(each if each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", **schema}
