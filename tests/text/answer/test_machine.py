from __future__ import annotations

import json
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
from pdserve.text.answer.pieces import CallBegins, CallEnds, Content, Reasoning, ToolCall, ToolUse
from tests.text.answer.told import told_calls, whole_calls

TOOLS = {"f": {"properties": {"x": {"type": "integer"}, "s": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1.50}}\n</tool_call>'


def make_machine(
    parser: str | None = "hermes",
    *,
    reasoning: str | None = "qwen3",
    tokens: tuple[str, ...] = (),
    in_reasoning: bool = False,
    is_parallel: bool = True,
    is_forced: bool = False,
) -> AnswerMachine:
    return AnswerMachine(
        calls=TOOL_PARSERS[parser] if parser else None,
        reasoning=REASONING_PARSERS[reasoning] if reasoning else None,
        use=ToolUse(TOOLS, is_parallel=is_parallel, is_forced=is_forced),
        vocabulary=dict(enumerate(tokens)),
        in_reasoning=in_reasoning,
    )


def read(machine: AnswerMachine, *texts: str, is_cut: bool = False):
    """Return content, reasoning and calls of an answer that comes in these pieces."""
    pieces = [piece for text in texts for piece in machine.push(text)]
    pieces += machine.finish(is_cut=is_cut)
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return content, reasoning, whole_calls(pieces)


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


@pytest.mark.parametrize("in_reasoning", [True, False])
@pytest.mark.parametrize("tokens", [(), ("<think>", "</think>")])
def test_a_reasoning_that_ends_again_ends_once(tokens, in_reasoning):
    machine = make_machine(tokens=tokens, in_reasoning=in_reasoning)
    pieces = [] if in_reasoning else machine.push("<think>", is_marker=True)
    for text in ("hm", "</think>", "\n\n", "</think>", "\n", "So.", "</think>"):
        pieces += machine.push(text, is_marker=text == "</think>")
    assert pieces == [Reasoning("hm"), Content("So."), Content("</think>")]


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
def test_a_reasoning_that_the_prompt_has_ended_does_not_end_in_the_content(parser):
    call = CALL if parser == "hermes" else '{"name": "f", "parameters": {"x": 1.50}}'
    assert read(make_machine(parser), "</th", "ink>\n\nSo.") == ("So.", "", [])
    content, _, calls = read(make_machine(parser), "</think>" + call)
    assert (content, [each.arguments for each in calls]) == ("", ['{"x": 1.50}'])


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
    assert not whole_calls(pieces)
    pieces += machine.push("</tool_call>", is_marker=True)
    [call] = whole_calls(pieces)
    assert call.arguments == '{"s": "a </tool_call> in letters, </tool_call> as a token"}'


def test_what_is_no_call_is_shown_as_it_was_written():
    text = "Look: <tool_call>not JSON</tool_call> done"
    assert read(make_machine(), text) == (text, "", [])


def test_a_call_without_its_end_counts_unless_the_token_limit_cut_it_off():
    open_call = CALL.removesuffix("</tool_call>")
    assert len(read(make_machine(), open_call)[2]) == 1
    assert read(make_machine(), "Hm. " + open_call, is_cut=True) == ("Hm. ", "", [])


@pytest.mark.parametrize(
    ("parser", "text"),
    [("llama3_json", '{"name": "f", "parameters": {"x": 1'), ("pythonic", "[f(x=1, s='a")],
)
def test_a_cut_call_without_markers_that_streams_have_begun_is_not_content(parser, text):
    machine = make_machine(parser, reasoning=None)
    pieces = machine.push(text) + machine.finish(is_cut=True)
    assert isinstance(pieces[0], CallBegins)
    assert pieces[-1] == CallEnds(num_lost=1)


@pytest.mark.parametrize(
    ("parser", "first", "cut", "malformed"),
    [
        (
            "llama3_json",
            '{"name": "f", "parameters": {"x": 1}}; {"name": "f", "parameters": {',
            '"x',
            "x}}",
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {',
            "",
            "x}}]",
        ),
        ("pythonic", "[f(x=1), f(x=2, ", "", "s=]"),
    ],
)
@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_later_call_of_a_list_that_is_cut_or_none_leaves_those_that_streams_have_sent(
    parser, first, cut, malformed, is_cut, is_parallel
):
    machine = make_machine(parser, reasoning=None, is_parallel=is_parallel)
    text = first + (cut if is_cut else malformed)
    pieces = machine.push(text) + machine.finish(is_cut=is_cut)
    told = told_calls(pieces)
    assert [call.is_whole for call in told] == ([True, False] if is_parallel else [True])
    assert json.loads(told[0].call.arguments) == {"x": 1}
    assert is_cut or pieces[-1] == Content(text)
    assert machine.is_over is not is_parallel


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("gemma4", "<|tool_call>call:f{"),
        ("glm45", "<tool_call>f\n<arg_key>"),
        ("pythonic", "[f("),
        ("qwen3_coder", "<tool_call>\n<function=f>\n"),
    ],
)
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_call_is_told_of_with_the_first_of_its_arguments(parser, text, is_cut):
    """Without any it would look like one that needs none."""
    machine = make_machine(parser, reasoning=None)
    assert not told_calls(machine.push(text) + machine.finish(is_cut=is_cut))


def test_without_parallel_calls_a_cut_in_the_third_of_a_list_leaves_the_first():
    machine = make_machine("llama3_json", reasoning=None, is_parallel=False)
    call = '{"name": "f", "parameters": {"x": 1}}; '
    pieces = machine.push(2 * call + call[:30]) + machine.finish(is_cut=True)
    assert pieces[-1] == CallEnds()
    assert machine.is_over


def test_arguments_that_are_too_deep_for_a_reader_make_no_call_where_a_later_one_is_cut_off():
    machine = make_machine("llama3_json", reasoning=None)
    deep = 3000 * "[" + 3000 * "]"
    text = f'{{"name": "f", "parameters": {{"x": {deep}}}}}; {{"name": "f", "parameters": {{"x'
    pieces = machine.push(text) + machine.finish(is_cut=True)
    assert pieces[-1] == CallEnds(num_lost=1)


@pytest.mark.parametrize("value", ["1e999", "-1e999", "[{'y': 1e999}]"])
def test_a_number_that_json_has_no_value_for_makes_no_call(value):
    machine = make_machine("pythonic", reasoning=None)
    text = f"[f(x={value})]"
    pieces = machine.push(text) + machine.finish(is_cut=False)
    assert not [told for told in told_calls(pieces) if told.is_whole]
    assert pieces[-1] == Content(text)
    assert "null" not in str(pieces)


def test_a_pattern_in_a_pythonic_call_makes_python_warn_of_nothing():
    machine = make_machine("pythonic", reasoning=None)
    pieces = machine.push(r"[f(x='\d+'), f(x=2)]") + machine.finish(is_cut=False)
    told = [json.loads(each.call.arguments) for each in told_calls(pieces) if each.is_whole]
    assert told == [{"x": r"\d+"}, {"x": 2}]


@pytest.mark.parametrize("is_cut", [True, False])
def test_behind_arguments_that_are_no_json_a_stream_tells_of_no_call_of_the_list(is_cut):
    call = '{"name": "f", "parameters": {"x": 1}}'
    text = f"{call}; {call.replace('1', 'x')}; {call}; {call[:-5]}"
    machine = make_machine("llama3_json", reasoning=None)
    pieces = machine.push(text) + machine.finish(is_cut=is_cut)
    assert [told.is_whole for told in told_calls(pieces)] == [True, False]


@pytest.mark.parametrize("is_forced", [False, True])
def test_the_cut_beginning_of_a_call_is_content_unless_the_answer_must_be_a_call(is_forced):
    text = '{"name": "f", "par'
    machine = make_machine("llama3_json", reasoning=None, is_forced=is_forced)
    assert read(machine, text, is_cut=True) == ("" if is_forced else text, "", [])


def test_without_parallel_calls_the_first_one_is_the_last():
    machine = make_machine(is_parallel=False)
    [call] = whole_calls(machine.push(CALL))
    assert (call.name, machine.is_over) == ("f", True)
    several = make_machine("llama3_json", reasoning=None, is_parallel=False)
    texts = '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}'
    assert len(read(several, texts)[2]) == 1


WRITTEN = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"x": 1.50, "s": "a \\"b\\" <i>"}}\n'
    "</tool_call>",
    "llama3_json": '{"name": "f", "parameters": {"x": 1.50, "s": "a \\"b\\" <i>"}}',
    "mistral": '[TOOL_CALLS]f[ARGS]{"x": 1.50, "s": "a \\"b\\" <i>"}',
    "pythonic": "[f(x=1.50, s='a \"b\" <i>')]",
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"x": 1.50, "s": "a \\"b\\" <i>"}\n```<｜tool▁call▁end｜>',
    "deepseek_v31": '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1.50, "s": "a \\"b\\" <i>"}'
    "<｜tool▁call▁end｜>",
    "deepseek_v32": '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="x" string="false">1.50'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="s" string="true">a "b" <i>'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n1.50\n</parameter>\n<parameter=s>\n"
    'a "b" <i>\n</parameter>\n</function>\n</tool_call>',
    "glm45": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1.50</arg_value>\n"
    '<arg_key>s</arg_key>\n<arg_value>a "b" <i></arg_value>\n</tool_call>',
    "kimi_k2": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"x": 1.50, "s": "a \\"b\\" <i>"}<|tool_call_end|>',
    "gemma4": '<|tool_call>call:f{x:1.50,s:<|"|>a "b" <i><|"|>}<tool_call|>',
}
"""The same call in each format."""


@pytest.mark.parametrize("parser", WRITTEN)
def test_a_call_is_told_while_it_is_written(parser):
    tools = {"f": {"properties": {"x": {"type": "number"}, "s": {"type": "string"}}}}
    machine = AnswerMachine(
        calls=TOOL_PARSERS[parser],
        reasoning=None,
        use=ToolUse(tools),
        vocabulary={},
        in_reasoning=False,
    )
    pieces = []
    for letter in WRITTEN[parser]:
        pieces += machine.push(letter)
        [told] = told_calls(pieces) or [None]
        if told is not None and told.is_whole is None:
            assert told.begins.name == "f"
    told_before_the_end = "".join(told.parts)
    pieces += machine.finish(is_cut=False)
    [told] = told_calls(pieces)
    assert told.is_whole
    assert json.loads(told.call.arguments) == {"x": 1.5, "s": 'a "b" <i>'}
    assert len(told.parts) >= (3 if parser == "pythonic" else 10)
    assert told.call.arguments.startswith(told_before_the_end)


CALLED = [*WRITTEN.values(), *(text.replace("f", "g") for text in WRITTEN.values()), "{", "}", "ok"]


@given(
    parser=st.sampled_from([*TOOL_PARSERS]),
    parts=st.lists(st.sampled_from(CALLED), max_size=4),
    cut=st.integers(0, 200),
    is_cut=st.booleans(),
)
def test_what_was_told_of_a_call_is_what_the_whole_call_has(parser, parts, cut, is_cut):
    text = "".join(parts)[: -cut or None]
    letters, whole = make_machine(parser), make_machine(parser)
    pieces = [piece for letter in text for piece in letters.push(letter)]
    pieces += letters.finish(is_cut=is_cut)
    at_once = whole.push(text) + whole.finish(is_cut=is_cut)
    assert whole_calls(pieces) == whole_calls(at_once)


def test_a_key_that_stands_there_twice_makes_it_no_call():
    text = '<tool_call>{"name": "f", "arguments": {"x": 1}, "arguments": {"x": 2}}</tool_call>'
    machine = make_machine()
    pieces = machine.push(text) + machine.finish(is_cut=False)
    assert pieces[-2:] == [CallEnds(num_lost=1), Content(text)]
    assert not whole_calls(pieces)


def test_the_arguments_of_a_call_that_was_cut_off_are_never_complete():
    machine = make_machine()
    pieces = machine.push(CALL.removesuffix("\n</tool_call>")) + machine.finish(is_cut=True)
    [told] = told_calls(pieces)
    assert not told.is_whole
    assert "".join(told.parts) == '{"x": 1.50'


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


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": -9e999}}\n</tool_call>'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": -9e999}'),
        ("qwen3_coder", "<function=f>\n<parameter=x>\n-9e999\n</parameter>\n</function>\n"),
        (
            "glm45",
            "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>-9e999</arg_value>\n</tool_call>",
        ),
        (
            "deepseek_v32",
            (
                '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="x" string="false">-9e999'
                "</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
            ),
        ),
    ],
)
def test_a_number_that_no_float_can_hold_makes_a_call_none_the_less(parser, text):
    for texts in ([text], list(text)):
        content, _, calls = read(make_machine(parser, reasoning=None), *texts)
        assert not content.strip()
        assert calls == [ToolCall("f", '{"x": -9e999}')]
