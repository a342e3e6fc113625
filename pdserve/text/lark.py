"""Grammars in Lark, as grammars of a text that stands within another one.

A tool's input can be described in Lark. Within a call it is a JSON string, with escapes, or it ends
where the call's format says. llguidance never takes back what a terminal has read, so a terminal
must not read the beginning of what stands behind it: a backslash, or the end of the text. Grammars
without recursion therefore become one terminal, of which nothing is read in vain. Others are only
possible if no terminal can read too much. Knows no tool.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from llguidance import LLMatcher, LLTokenizer

from pdserve.text.quoted_regex import literal, quoted_regex

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_TOKEN: Final = re.compile(
    r"""
    (?P<blank>(?:\#|//)[^\n]*|[ \t\r]+)
    |(?P<line>\n)
    |(?P<string>"(?:\\.|[^"\\\x00-\x1f])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    |(?P<import>%import\b[^\n]*)
    |(?P<ignore>%ignore\b)
    |(?P<name>[!?_]*[A-Za-z][A-Za-z0-9_-]*)
    |(?P<other>->|\.\.|[0-9]+|[:,.(){}\[\]|&=+*?~])
    """,
    re.VERBOSE,
)
MAX_CHARS: Final = 1 << 15
_ANY: Final = r"/(.|\n)*/"
_IMPORT: Final = re.compile(
    r"%import\s+common(?:\.(\w+)(?:\s*->\s*(\w+))?|\s*\(([\w\s,]+)\))\s*(?:(?:#|//).*)?"
)
# The terminals of Lark's `common`, as llguidance has them.
_REAL: Final = r"[0-9]+\.[0-9]*|\.[0-9]+"
_FLOAT: Final = rf"({_REAL})([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+"
_COMMON: Final = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"(\+|-)?[0-9]+",
    "DECIMAL": _REAL,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": rf"(\+|-)?({_FLOAT})",
    "NUMBER": f"[0-9]+|{_FLOAT}",
    "SIGNED_NUMBER": rf"(\+|-)?([0-9]+|{_FLOAT})",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*[^*]*\*+(?:[^\/*][^*]*\*+)*\/",
    "SQL_COMMENT": r"--[^\n]*",
}


class _Part(NamedTuple):
    """A part of a grammar: the name of a group of `_TOKEN`, and what it is."""

    kind: str
    text: str


_EMPTY: Final = _Part("string", '""')


@dataclass(frozen=True, slots=True)
class EmbeddedGrammar:
    """A grammar as a part of another one.

    Attributes:
        rules: What to add to the other one.
        reference: What stands there for a text of this grammar.
        is_terminal: Whether that may stand in a terminal.
    """

    rules: tuple[str, ...]
    reference: str
    is_terminal: bool


def embedded(text: str, prefix: str, *, is_quoted: bool, end: str = "") -> EmbeddedGrammar:
    """Return a grammar in Lark as a part of another one.

    Args:
        prefix: Of the names of its rules.
        is_quoted: Whether its texts stand in a JSON string.
        end: What stands behind its texts, if they do not.

    Raises:
        ValueError: It cannot be a part of another one.
    """
    grammar = _Grammar(text, is_quoted=is_quoted)
    if not grammar.is_recursive():
        rules = grammar.as_terminals(prefix)
        return EmbeddedGrammar(rules, f"{prefix}_R_START", is_terminal=True)
    if end and any(_may_be(f"{each} & ({_ANY} {json.dumps(end[:2])} {_ANY})") for each in grammar):
        raise ValueError(
            f"it is recursive, and one of its terminals may contain {end[:2]!r}, with which the "
            "end of a text begins in this model's format: exclude that"
        )
    if is_quoted and grammar.reads_escapes_in_vain():
        raise ValueError(
            "it is recursive, and its terminals share characters that JSON writes with a backslash "
            "(quotation marks, new lines): use others in one of them"
        )
    return EmbeddedGrammar((), f"%lark {{\n{grammar.text()}\n}}", is_terminal=False)


class _Grammar:
    """A grammar in Lark, read.

    Args:
        is_quoted: Whether to rewrite its texts for a JSON string.

    Raises:
        ValueError: It has what cannot be a part of another grammar.
    """

    def __init__(self, text: str, *, is_quoted: bool) -> None:
        self._is_quoted = is_quoted
        self._bodies: dict[str, list[_Part]] = {}
        self._ignored: list[list[_Part]] = []
        self._expressions: dict[str, bool] = {}
        if len(text) > MAX_CHARS:
            raise ValueError(f"it has {len(text)} characters, and at most {MAX_CHARS} are accepted")
        parts = list(_tokens(text))
        heads = [
            at
            for at, part in enumerate(parts)
            if part.kind in ("import", "ignore")
            or (part.kind == "name" and (at == 0 or parts[at - 1].kind == "line"))
        ]
        for at, end in pairwise([*heads, len(parts)]):
            self._define([part for part in parts[at:end] if part.kind != "line"])
        if "start" not in self._bodies:
            raise ValueError("it has no rule start")

    def __iter__(self) -> Iterator[str]:
        """Yield each text of its terminals as an expression."""
        return iter(self._expressions)

    def _define(self, parts: list[_Part]) -> None:
        head, rest = parts[0], parts[1:]
        if head.kind == "import":
            self._bodies |= {name: [self._regex(each)] for name, each in _imported(head.text)}
        elif head.kind == "ignore":
            self._ignored.append(self._body(rest))
        else:
            colon = next((at for at, part in enumerate(rest) if part.text == ":"), -1)
            if colon not in (0, 2) or (colon == 2 and rest[0].text != "."):
                raise ValueError(f"{head.text!r} must be a name, a colon and what it stands for")
            self._bodies[head.text.lstrip("!?")] = self._body(rest[colon + 1 :])

    def _body(self, parts: Sequence[_Part]) -> list[_Part]:
        """Return a body with its texts as expressions, and without names of alternatives."""
        found: list[_Part] = []
        at = 0
        while at < len(parts):
            part, behind = parts[at], [each.text for each in parts[at + 1 : at + 3]]
            at += 1
            if part.kind == "string" and behind[:1] == [".."]:
                first, last = _string(part.text)[0], _string(behind[-1])[0]
                if len(first) != 1 or len(last) != 1:
                    raise ValueError(f"the range {part.text}..: its ends must be characters")
                found.append(self._regex(f"[{literal(first)}-{literal(last)}]"))
                at += 2
            elif part.kind == "string":
                said, flags = _string(part.text)
                regex = "".join(map(literal, said))
                found.append(self._regex(regex, flags, is_fixed=True) if said else _EMPTY)
            elif part.kind == "regex":
                regex, _, flags = part.text[1:].rpartition("/")
                found.append(self._regex(regex, flags))
            elif part.text == "->":
                at += 1
            elif part.text == "~" and not behind[:1][0].isdigit():
                raise ValueError("complements (~) cannot be used in it")
            else:
                found.append(part)
        return found

    def _regex(self, regex: str, flags: str = "", *, is_fixed: bool = False) -> _Part:
        text = f"/{quoted_regex(regex, flags)}/" if self._is_quoted else f"/{regex}/{flags}"
        self._expressions[text] = is_fixed and self._expressions.get(text, True)
        return _Part("regex", text)

    def is_recursive(self) -> bool:
        """Whether a rule is a part of itself."""
        is_ended: dict[str, bool] = {}

        def recurs(name: str) -> bool:
            if name not in is_ended:
                is_ended[name] = False
                names = [part.text for part in self._bodies[name] if part.text in self._bodies]
                if any(recurs(each) for each in names):
                    return True
                is_ended[name] = True
            return not is_ended[name]

        return any(map(recurs, list(self._bodies)))

    def reads_escapes_in_vain(self) -> bool:
        """Whether a terminal may read the backslash of an escape that is the next one's."""
        begin = [each for each in self if _may_be(rf"{each} & /\\(.|\n)*/")]
        longer = [
            each
            for each, is_fixed in self._expressions.items()
            if not is_fixed and _may_be(rf"{each} & /(.|\n)+\\(.|\n)*/")
        ]
        return any(each != other for each in longer for other in begin)

    def as_terminals(self, prefix: str) -> tuple[str, ...]:
        """Return its rules as terminals, with what is ignored where it may stand."""
        ignored = f"{prefix}_IGNORED"
        rules = []
        for name, body in self._bodies.items():
            is_rule = name == name.lower()
            words = [
                f"({self._word(part, prefix)} {ignored})"
                if is_rule and self._ignored and self._is_terminal(part)
                else self._word(part, prefix)
                for part in body
            ]
            if name == "start" and self._ignored:
                words = [ignored, "(", *words, ")"]
            rules.append(f"{self._name(name, prefix)}: {' '.join(words)}")
        if self._ignored:
            each = " | ".join(
                " ".join(self._word(part, prefix) for part in body) for body in self._ignored
            )
            rules.append(f"{ignored}: ({each})*")
        return tuple(rules)

    def _is_terminal(self, part: _Part) -> bool:
        return part.kind == "regex" or (part.kind == "name" and part.text != part.text.lower())

    def _word(self, part: _Part, prefix: str) -> str:
        return self._name(part.text, prefix) if part.kind == "name" else part.text

    def _name(self, name: str, prefix: str) -> str:
        kind = "R" if name == name.lower() else "T"
        return f"{prefix}_{kind}_{name.upper()}"

    def text(self) -> str:
        """Return the whole grammar."""
        rules = [f"{name}: {_joined(body)}" for name, body in self._bodies.items()]
        return "\n".join([*rules, *(f"%ignore {_joined(body)}" for body in self._ignored)])


def _joined(body: Iterable[_Part]) -> str:
    return " ".join(part.text for part in body)


def _may_be(terminal: str) -> bool:
    """Whether any text matches a terminal."""
    matcher = LLMatcher(LLTokenizer("byte"), f"start: T\nT: {terminal}", log_level=0)
    return any(matcher.compute_bitmask()) and not matcher.is_error()


def _tokens(text: str) -> Iterator[_Part]:
    """Yield a grammar's parts, without comments and spaces."""
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            line = text.count("\n", 0, at) + 1
            raise ValueError(
                f"line {line}: {text[at:].split(maxsplit=1)[0][:40]!r} cannot be used in it"
            )
        at = found.end()
        if found.lastgroup not in (None, "blank"):
            yield _Part(str(found.lastgroup), found[0])


def _string(part: str) -> tuple[str, str]:
    """Return what a string says, and its flag."""
    if not part.startswith('"'):
        raise ValueError(f"{part!r} stands where a string must be")
    body, _, flags = part.rpartition('"')
    try:
        return json.loads(re.sub(r"(?<!\\)((?:\\\\)*)\\x", r"\1\\u00", body) + '"'), flags
    except ValueError as error:
        raise ValueError(f"the string {part} is none: {error}") from error


def _imported(part: str) -> Iterator[tuple[str, str]]:
    """Yield the names and expressions that a statement imports."""
    found = _IMPORT.fullmatch(part.strip())
    if found is None:
        raise ValueError(f"{part.strip()!r}: only terminals of common can be imported")
    one, alias, several = found.groups()
    for name in [one] if one else [each.strip() for each in several.split(",")]:
        if name not in _COMMON:
            raise ValueError(f"common has no {name}, but {', '.join(_COMMON)}")
        yield alias or name, _COMMON[name]
