"""Regular expressions for texts as expressions for the same texts within JSON strings.

Characters that JSON writes with a backslash become their escapes; classes that contain some become
alternatives. Expressions are in the syntax of Rust's `regex`. Knows no grammar.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_PLAIN: Final = r'[^"\\\x00-\x1f]'
"""Characters that a JSON string has as they are."""
_SHORT: Final = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_SPECIAL: Final = (*map(chr, range(32)), '"', "\\")
_ESCAPE: Final = re.compile(
    r"\\(?:x\{[0-9A-Fa-f]+\}|x[0-9A-Fa-f]{2}|u\{[0-9A-Fa-f]+\}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}"
    r"|[pP](?:\{[^}]*\}|[A-Z])|.)",
    re.DOTALL,
)
_LETTERS: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_POSIX: Final = re.compile(r"\[:(\^?)(\w+):\]")
_GROUP: Final = re.compile(r"\(\?(?:P?<[^>]*>|([a-zA-Z]*)(?:-[a-zA-Z]*)?[:)])")
_POSIX_SPECIAL: Final = {
    "blank": "\t",
    "cntrl": "".join(map(chr, range(32))),
    "graph": '"\\',
    "print": '"\\',
    "punct": '"\\',
    "space": "\t\n\v\f\r",
    "ascii": "".join(_SPECIAL),
}
"""Of `_SPECIAL`, what those classes contain that contain any."""


def literal(character: str) -> str:
    """Return the expression of a character, without slashes."""
    return character if character.isalnum() else f"\\x{{{ord(character):x}}}"


def quoted_regex(regex: str, flags: str = "") -> str:
    """Return an expression for the texts that `regex` matches, within a JSON string.

    Args:
        regex: In the syntax of Rust's `regex`, as between slashes.
        flags: Those behind the slash.

    Raises:
        ValueError: It has a flag or a class that cannot be rewritten.
    """
    if set(flags) - set("isu"):
        raise ValueError(f"the flags {flags!r} of /{regex}/: only i, s and u can be used")
    out, at = [], 0
    while at < len(regex):
        character = regex[at]
        end = at + 1
        if character == "\\":
            end = _escape_end(regex, at)
            out.append(_quoted_escape(regex[at:end]))
        elif character == "[":
            end = _class_end(regex, at)
            out.append(_quoted_class(regex[at:end], _members(regex[at + 1 : end - 1])))
        elif character == ".":
            out.append(_quoted_class(".", set(_SPECIAL) - (set() if "s" in flags else {"\n"})))
        elif character == "(" and regex.startswith("(?", at):
            group = _GROUP.match(regex, at)
            if group is None or set(group[1] or "") - {"i"}:
                raise ValueError(f"the group {regex[at : at + 8]!r} of /{regex}/ cannot be used")
            end = group.end()
            out.append(group[0])
        else:
            out.append(_quoted_character(character) if character in _SPECIAL else character)
        at = end
    return ("(?i)" if "i" in flags else "") + "".join(out)


def _escape_end(regex: str, at: int) -> int:
    found = _ESCAPE.match(regex, at)
    if found is None:
        raise ValueError(f"/{regex}/ ends within an escape")
    return found.end()


def _class_end(regex: str, at: int) -> int:
    """Return the end of the class that begins at a bracket."""
    end = at + 1 + regex.startswith("[^", at)
    end += regex.startswith("]", end)
    while end < len(regex) and regex[end] != "]":
        posix = _POSIX.match(regex, end)
        if posix is not None:
            end = posix.end()
        elif regex[end] == "[" or regex[end : end + 2] in ("&&", "--", "~~"):
            raise ValueError(f"the class {regex[at : end + 2]!r} of /{regex}/ is one of classes")
        else:
            end = _escape_end(regex, end) if regex[end] == "\\" else end + 1
    if end == len(regex):
        raise ValueError(f"/{regex}/ has a class without an end")
    return end + 1


def _members(inner: str) -> set[str]:
    """Return which of `_SPECIAL` a class contains, by what stands between its brackets."""
    is_negated = inner.startswith("^")
    at = int(is_negated)
    found: set[str] = set()
    before = ""
    while at < len(inner):
        posix = _POSIX.match(inner, at)
        if posix is not None:
            at, before = posix.end(), ""
            named = set(_POSIX_SPECIAL.get(posix[2], ""))
            found |= set(_SPECIAL) - named if posix[1] else named
            continue
        end = _escape_end(inner, at) if inner[at] == "\\" else at + 1
        item = inner[at:end]
        if item == "-" and before and end < len(inner):
            last_end = _escape_end(inner, end) if inner[end] == "\\" else end + 1
            last = _character(inner[end:last_end]) or ""
            found |= {each for each in _SPECIAL if before <= each <= last}
            at, before = last_end, ""
            continue
        character = _character(item) if item.startswith("\\") else item
        found |= _of_escape(item) if character is None else {character} & set(_SPECIAL)
        at, before = end, character or ""
    return set(_SPECIAL) - found if is_negated else found


def _character(escape: str) -> str | None:
    """Return the character that an escape, or a character, stands for; None for a class."""
    if not escape.startswith("\\"):
        return escape
    name, rest = escape[1], escape[2:].strip("{}")
    if name in "xuU" and rest:
        return chr(int(rest, 16))
    return None if name in "dDwWsSpPbB" else _LETTERS.get(name, name)


def _of_escape(escape: str) -> set[str]:
    """Return which of `_SPECIAL` a class of one escape contains."""
    name, rest = escape[1], escape[2:].strip("{}")
    match name.lower():
        case "d" | "w":
            found = set()
        case "s":
            found = set("\t\n\v\f\r")
        case "p":
            is_category = len(rest) <= 2
            found = {
                each
                for each in _SPECIAL
                if is_category and unicodedata.category(each).startswith(rest)
            }
            if not is_category and not rest.isalpha():
                raise ValueError(f"the class {escape} cannot be used")
        case _:
            raise ValueError(f"{escape} cannot be used")
    return set(_SPECIAL) - found if name.isupper() else found


def _quoted_escape(escape: str) -> str:
    character = _character(escape)
    if character is None:
        return _quoted_class(escape, _of_escape(escape))
    return _quoted_character(character) if character in _SPECIAL else escape


def _quoted_class(source: str, special: set[str]) -> str:
    """Return the expression of one character of a class.

    Args:
        special: Which of `_SPECIAL` it contains.
    """
    plain = _PLAIN if source == "." else f"[{source}&&{_PLAIN}]"
    alternatives = [plain, *map(_quoted_character, sorted(special))]
    return f"(?:{'|'.join(alternatives)})"


def _quoted_character(character: str) -> str:
    """Return the expression of a character that a JSON string has only with a backslash."""
    short = _SHORT.get(character)
    if short is None:
        return rf"(?-i:\\u{ord(character):04x})"
    return rf"(?-i:\\{re.escape(short)})"
