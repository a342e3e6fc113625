"""Grammars in Lark within JSON strings and before the end of a text without quotes."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from pdserve.text.lark import embedded
from pdserve.text.quoted_regex import quoted_regex

END = "\n</p>"
PATCH = """
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?

hunk: "*** Add File: " /(.+)/ LF add_line+ // as Codex has it
    | "*** Update File: " /(.+)/ LF ("@@" LF (" " | "-" | "+") /(.*)/ LF)?
add_line: "+" /(.*)/ LF -> line
%import common.LF
"""
SUM = """
?start: sum
?sum: product | sum "+" product -> add
?product: NUMBER | "(" sum ")"
%import common (NUMBER, WS)
%ignore WS
"""
LIST = 'start: W ("," W)* "!"?\nW: "a".."f"~2..3 | "\\""i\n%ignore /\\s+/\n'


@functools.cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def is_text(grammar: str, text: str, *, is_quoted: bool) -> bool:
    part = embedded(grammar, "C0", is_quoted=is_quoted, end="" if is_quoted else END)
    if is_quoted:
        start, whole = f'"\\"" {part.reference} "\\""', json.dumps(text, ensure_ascii=False)
    elif part.is_terminal:
        start, whole = "T", text + END
        rest = f"T: {part.reference} {json.dumps(END)}"
    else:
        start, whole = f"{part.reference} {json.dumps(END)}", text + END
    rules = [f"start: {start}", *([rest] if start == "T" else []), *part.rules]
    matcher = LLMatcher(tokenizer(), "\n".join(rules), log_level=0)
    assert not matcher.get_error(), matcher.get_error()
    token_ids = list(whole.encode())
    if matcher.validate_tokens(token_ids) < len(token_ids):
        return False
    matcher.consume_tokens(token_ids)
    return bool(matcher.is_accepting())


@pytest.mark.parametrize("is_quoted", [True, False])
@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (
            PATCH,
            [
                '*** Begin Patch\n*** Add File: "a".py\n+x = "\\n"\t\n+\n*** End Patch\n',
                "*** Begin Patch\n*** Update File: z\n@@\n-é\x01\n*** End Patch",
            ],
            ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: \n+\n*** End Patch"],
        ),
        (SUM, ["1", "(1 + 2)\n+3"], ["(1", "1 +", ""]),
        (LIST, ["ab", ' ab,\ncde, "\t!'], ["a", "abcd", "ab!,ab"]),
    ],
)
def test_texts_of_a_grammar_stay_its_texts_within_another(grammar, texts, others, is_quoted):
    for text in (*texts, *others):
        assert is_text(grammar, text, is_quoted=is_quoted) is (text in texts), text


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("start: %json {}", "line 1: '%json'"),
        ("start: <tool>", "'<tool>'"),
        ("start: @other", "'@other'"),
        ("start: A\nA: ~/b/", "complements"),
        ("start: A\nA: /b/l", "flags"),
        ("start: A\nA: /[[a-c]&&b]/", "is one of classes"),
        ("start: A\nA: /(?s:.)/", "the group"),
        ("a: b", "no rule start"),
        ("start[lazy]: /a/", "must be a name, a colon"),
        ("%import other.A\nstart: A", "only terminals of common"),
        ("%import common.BOOL\nstart: BOOL", "no BOOL"),
        ('start: "ab".."c"', "ends must be characters"),
        ("start: " + '"a" ' * 10_000, "characters"),
        ('start: STRING | "[" start "]"\nSTRING: /"[^"]*"/\n%ignore /\\s+/', "backslash"),
    ],
)
def test_what_cannot_stand_in_a_string_is_named(grammar, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        embedded(grammar, "C0", is_quoted=True)


def test_a_recursive_grammar_may_not_read_the_end_of_its_text():
    with pytest.raises(ValueError, match="with which the end"):
        embedded('start: /[^>]+/ | "(" start ")"', "C0", is_quoted=False, end=END)


CLASSES = [r"[^a]", r"[\n-\r]", r'["\\x]', r"[]\]-]", ".", r"\s", r"\S", r"\W", r"\d", "[^\\s\"]",
           r"\x22", r"\\", r"\u{9}", "a", '"', r"[\x00-\x1f]"]  # fmt: skip


@given(st.sampled_from(CLASSES), st.sampled_from('ab"\\\n\t\x01\x0b -+]5é'))
def test_a_class_has_the_same_characters_with_and_without_quotes(regex: str, character: str):
    """By Python's own reading of the same classes."""
    plain = re.sub(r"\\u\{(\w+)\}", r"\\x0\1", regex)
    wanted = re.fullmatch(plain, character) is not None
    quoted = json.dumps(character, ensure_ascii=False)[1:-1]
    matcher = LLMatcher(tokenizer(), f"start: /{quoted_regex(regex)}/", log_level=0)
    num_taken = matcher.validate_tokens(list(quoted.encode()))
    assert (num_taken == len(quoted.encode())) is wanted, (regex, character)


def test_flags_go_with_an_expression():
    def takes(regex: str, flags: str, text: Any) -> bool:
        matcher = LLMatcher(tokenizer(), f"start: /{quoted_regex(regex, flags)}/", log_level=0)
        return bool(matcher.validate_tokens(list(text.encode())) == len(text))

    assert takes("a\\n", "i", "A\\n")
    assert not takes("a\\n", "i", "A\\N")
    assert takes("a.b", "s", "a\\nb")
    assert not takes("a.b", "", "a\\nb")
