from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.dialects.tool_inputs import InputReader, arguments_of, input_in


def in_pieces(arguments: str, cuts: list[int]) -> str:
    reader = InputReader()
    places = sorted({cut % (len(arguments) + 1) for cut in cuts})
    bounds = [0, *places, len(arguments)]
    return "".join(reader.push(arguments[a:b]) for a, b in itertools.pairwise(bounds))


@given(st.text(), st.booleans(), st.lists(st.integers(min_value=0)))
def test_a_text_is_the_same_however_its_arguments_are_cut(text, ascii_only, cuts):
    assert in_pieces(json.dumps({"input": text}, ensure_ascii=ascii_only), cuts) == text
    assert input_in(arguments_of(text)) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (' {\n "input" :\t"a\nb" } ', "a\nb"),
        ('{"input": "a", "more": "b"}', "a"),
        ('{"input": "\\ud83d!\\ud83d\\ude00"}', "\ufffd!😀"),
        ('{"code": "a"}', '{"code": "a"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("{}", "{}"),
        ('{"input": "a\\', "a"),
    ],
)
def test_what_is_not_as_it_should_be_is_the_text(arguments, text):
    for cut in range(len(arguments)):
        assert in_pieces(arguments, [cut]) == text
