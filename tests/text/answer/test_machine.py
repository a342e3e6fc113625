from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.answer.machine import AnswerMachine
from pdserve.text.answer.parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    reasoning_parser_of,
    tool_parser_of,
)
from pdserve.text.answer.pieces import Content, Reasoning, ToolCall, ToolUse

TOOLS = {"f": {"properties": {"x": {"type": "integer"}, "s": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1.50}}\n</tool_call>'


def make_machine(
    parser: str | None = "hermes",
    *,
    reasoning: str | None = "qwen3",
    tokens: tuple[str, ...] = (),
    in_reasoning: bool = False,
    is_parallel: bool = True,
) -> AnswerMachine:
    return AnswerMachine(
        calls=TOOL_PARSERS[parser] if parser else None,
        reasoning=REASONING_PARSERS[reasoning] if reasoning else None,
        use=ToolUse(TOOLS, is_parallel=is_parallel),
        vocabulary=dict(enumerate(tokens)),
        in_reasoning=in_reasoning,
    )


def read(machine: AnswerMachine, *texts: str, is_cut: bool = False):
    """Return content, reasoning and calls of an answer that comes in these pieces."""
    pieces = [piece for text in texts for piece in machine.push(text)]
    pieces += machine.finish(is_cut=is_cut)
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return content, reasoning, [piece for piece in pieces if isinstance(piece, ToolCall)]


FRAGMENTS = [
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        CALL,
        '{"name": "f"',
        ', "arguments": {',
    ),
    *(
        '"x": 1',
        "}}",
        "}",
        '"',
        "\n",
        " ",
        "word",
        "<function=f>",
        "<parameter=x>\n1\n</parameter>",
    ),
    *("</function>", "[TOOL_CALLS]", "f[ARGS]{}", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}"),
    *(
        "<｜tool▁call▁end｜>",
        '<｜DSML｜invoke name="f',
        '"/>',
        "<|python_tag|>",
        "[f(x=1)]",
        "[THINK]",
    ),
    *("<arg_key>x</arg_key>", "<arg_value>1</arg_value>", "<|tool_calls_section_begin|>"),
    *("<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}", "<|tool_call_end|>"),
]


@given(
    parser=st.sampled_from([None, *TOOL_PARSERS]),
    reasoning=st.sampled_from([None, *REASONING_PARSERS]),
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_whatever_a_model_writes_how_it_is_cut_does_not_matter(
    parser, reasoning, parts, cuts, flags
):
    in_reasoning, is_cut = flags[0] and reasoning is not None, flags[1]
    text = "".join(parts)
    pieces, at = [], 0
    while at < len(text):
        length = cuts[len(pieces) % len(cuts)]
        pieces.append(text[at : at + length])
        at += length
    whole = make_machine(parser, reasoning=reasoning, in_reasoning=in_reasoning)
    split = make_machine(parser, reasoning=reasoning, in_reasoning=in_reasoning)
    assert read(whole, text, is_cut=is_cut) == read(split, *pieces, is_cut=is_cut)


@given(text=st.text(alphabet="ab \n<{[", max_size=30), parser=st.sampled_from([*TOOL_PARSERS]))
def test_an_answer_without_calls_and_reasoning_is_given_out_as_it_is(text, parser):
    machine = make_machine(parser, reasoning=None)
    assert read(machine, *text) == (text, "", [])


def test_arguments_keep_the_models_own_spelling():
    _, _, [call] = read(make_machine(), CALL)
    assert call == ToolCall("f", '{"x": 1.50}')


def test_markers_that_are_tokens_are_text_where_they_are_spelled_in_letters():
    machine = make_machine(tokens=("<tool_call>", "</tool_call>"))
    assert read(machine, "Write <tool_call> first") == ("Write <tool_call> first", "", [])
    machine = make_machine(tokens=("<tool_call>", "</tool_call>"))
    pieces = machine.push("<tool_call>", is_marker=True)
    pieces += machine.push('{"name": "f", "arguments": {"s": "a </tool_call> in letters, ')
    pieces += machine.push("</tool_call>", is_marker=True)
    pieces += machine.push(' as a token"}}')
    assert not pieces
    [call] = machine.push("</tool_call>", is_marker=True)
    assert call.arguments == '{"s": "a </tool_call> in letters, </tool_call> as a token"}'


def test_what_is_no_call_is_shown_as_it_was_written():
    text = "Look: <tool_call>not JSON</tool_call> done"
    assert read(make_machine(), text) == (text, "", [])


def test_a_call_without_its_end_counts_unless_the_token_limit_cut_it_off():
    open_call = CALL.removesuffix("</tool_call>")
    assert len(read(make_machine(), open_call)[2]) == 1
    assert read(make_machine(), "Hm. " + open_call, is_cut=True) == ("Hm. ", "", [])


def test_without_parallel_calls_the_first_one_is_the_last():
    machine = make_machine(is_parallel=False)
    [call] = machine.push(CALL)
    assert (call.name, machine.is_over) == ("f", True)
    several = make_machine("llama3_json", reasoning=None, is_parallel=False)
    texts = '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}'
    assert len(read(several, texts)[2]) == 1


def test_white_space_between_calls_is_nothing_and_around_text_is_kept():
    assert read(make_machine(), f" a {CALL}\n{CALL}\n")[0] == " a"
    assert read(make_machine(), f"a {CALL} b \n")[0] == "a  b"
    assert read(make_machine(), "a b \n")[0] == "a b \n"


def test_json_that_is_no_call_streams_as_soon_as_that_is_clear():
    machine = make_machine("llama3_json", reasoning=None)
    assert not machine.push('{"na')
    assert machine.push('tion": 1') == [Content('{"nation": 1')]


HEADS = [
    *("", '{"name": "f", "arguments": {"x": "', "\n<function=f>\n<parameter=x>", "call:f{x:"),
    *("f<arg_key>x</arg_key><arg_value>", "function<｜tool▁sep｜>f\n```json\n", "f[ARGS]"),
    *("functions.f:0", 'f">\n<｜DSML｜parameter name="x" string="true">'),
]


@pytest.mark.parametrize("parser", TOOL_PARSERS)
@pytest.mark.parametrize("filling", [" ", "\n", "{", '\\"', "<parameter=x>", "</arg_value> "])
def test_a_call_of_any_length_is_read_in_little_time(parser, filling):
    calls = TOOL_PARSERS[parser]
    start_s = time.monotonic()
    for head in HEADS:
        end = "".join(calls.closings[:1])
        text = "".join(calls.openings[:1]) + head + filling * (60_000 // len(filling)) + "x" + end
        read(make_machine(parser), text)
    assert time.monotonic() - start_s < 5.0


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("<think> said the user", False)],
)
def test_the_prompts_end_says_whether_an_answer_begins_in_the_reasoning(prompt, is_open):
    assert REASONING_PARSERS["qwen3"].is_open_after(prompt) is is_open


def test_a_template_names_the_parser_only_where_that_is_sure():
    assert tool_parser_of("... <tool_call>\n{name, arguments} ...") == "hermes"
    assert tool_parser_of("<tool_call>\n<function=example>") == "qwen3_coder"
    assert tool_parser_of("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert tool_parser_of("{{ message.content }}") == ""
    assert reasoning_parser_of("{{ '<think>\\n\\n</think>\\n\\n' }}") == "deepseek_r1"
    assert reasoning_parser_of("{{ message.content }}") == ""
