"""Grammars of tool calls, by walks at random among the tokens that they allow."""

from __future__ import annotations

import functools
import json
import random
import re
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from pdserve.errors import BadRequestError
from pdserve.text.answer.harmony import HarmonyMachine
from pdserve.text.answer.json_calls import JSON_LIST, MISTRAL_V3
from pdserve.text.answer.parsers import REASONING_PARSERS, TOOL_PARSERS
from pdserve.text.answer.pieces import ToolUse
from pdserve.text.answer.style import AnswerStyle
from pdserve.text.answer.xtml import XtmlMachine
from pdserve.text.output import OutputProcessor, TextDelta
from pdserve.text.tokenizer import Tokenizer
from pdserve.wire.request import FinishReason
from tests.text.answer.told import in_one
from tests.text.tiny import byte_level_json

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKEN_MACHINES = {"openai": HarmonyMachine, "kimi_k3": XtmlMachine}
K3_PROMPT = '<|open|>message role="assistant"<|sep|>'
FORMATS = {
    name: style
    for name, style in {**TOOL_PARSERS, "mistral_v3": MISTRAL_V3, "list": JSON_LIST}.items()
    if style.writing is not None
}
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
        "s": {"type": "string", "maxLength": 6},
        "e": {"enum": ["a", "b"]},
        "l": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["n", "s"],
    "additionalProperties": False,
}
TOOLS = {"see": SCHEMA, "hear": {"type": "object", "additionalProperties": False}}
MAX_TOKENS = 160


@functools.cache
def tokenizer_of(*markers: str) -> tuple[Tokenizer, LLTokenizer]:
    """A tokenizer whose markers are tokens: special ones, but those of thoughts."""
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    backend.add_special_tokens([each for each in markers if "think" not in each])
    backend.add_tokens(list(markers))
    tokenizer = Tokenizer(backend, {"eos_token": "</s>"})
    eos = [tokenizer.eos_token_id]
    return tokenizer, LLTokenizer(backend.to_str(), n_vocab=tokenizer.vocab_size, eos_token=eos)


def style_with(name: str, *, has_tokens: bool) -> tuple[AnswerStyle, Tokenizer, LLTokenizer]:
    machine = TOKEN_MACHINES.get(name)
    if machine is not None:
        tokenizer, matching = tokenizer_of(*machine.markers)
    else:
        known = FORMATS[name]
        markers = [*known.markers, "[ARGS]", "<｜tool▁sep｜>", "</think>", *known.fragments]
        whole = [each for each in markers if "DSML｜" not in each[:-1] and each[-1] in ">]｜"]
        tokenizer, matching = tokenizer_of(*(whole if has_tokens else ()))
    tokens = {text: token_id for token_id, text in tokenizer.added_tokens.items()}
    for text in ("<s>", "</s>", "<|im_start|>", "<|im_end|>", " spaced out "):
        tokens.pop(text, None)
    style = AnswerStyle(
        calls=FORMATS.get(name),
        reasoning=None if machine is not None else REASONING_PARSERS["qwen3"],
        token_machine=machine,
        vocabulary={token_id: text for text, token_id in tokens.items()},
        tokens=tokens,
    )
    return style, tokenizer, matching


def walk(matcher: LLMatcher, tokenizer: Tokenizer, rng: random.Random, begun: str) -> list[int]:
    """Tokens at random, markers and the end rather than others; those of an answer that ended.

    Args:
        begun: What the answer begins with.
    """
    assert not matcher.get_error(), matcher.get_error()
    assert not matcher.get_grammar_warnings()
    output = tokenizer.encode(begun, add_special_tokens=False)
    assert all(matcher.consume_token(each) for each in output)
    while not matcher.is_stopped() and len(output) < MAX_TOKENS:
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(mask[: tokenizer.vocab_size]).tolist()
        assert allowed
        rather = [each for each in allowed if each in tokenizer.added_tokens]
        if rather and rng.random() < 0.5 + (len(output) > MAX_TOKENS // 2):
            allowed = rather
        output.append(rng.choice(allowed))
        assert matcher.consume_token(output[-1])
    return output if matcher.is_stopped() else []


def answers(
    name: str,
    *,
    is_forced: bool,
    num: int,
    has_tokens: bool = True,
    begun: str = "",
    prompt: str = "</think>",
    tools: Mapping[str, Any] = TOOLS,
    inputs: Mapping[str, str] | None = None,
) -> list[TextDelta]:
    """Some whole answers."""
    style, tokenizer, matching = style_with(name, has_tokens=has_tokens)
    use = ToolUse(tools, is_forced=is_forced, is_parallel=tools is TOOLS, inputs=inputs or {})
    grammar = style.grammar(prompt, use)
    found = []
    for seed in range(40):
        if len(found) == num:
            break
        output = walk(LLMatcher(matching, grammar), tokenizer, random.Random(seed), begun)
        if output:
            processor = OutputProcessor(tokenizer, machine=style.machine(prompt, use))
            ended = output if output[-1] == tokenizer.eos_token_id else [*output, 1]
            found.append(in_one(processor.push(ended, FinishReason.STOP)))
    assert found
    for delta in found:
        for call in delta.calls:
            assert call.begins is not None
            assert call.is_whole
            checker = jsonschema.FormatChecker()
            schema = tools[call.begins.name]
            jsonschema.validate(json.loads(call.arguments), schema, format_checker=checker)
    return found


@pytest.mark.parametrize("name", [*FORMATS, *TOKEN_MACHINES])
def test_a_forced_answer_is_calls_that_its_own_parser_reads(name):
    found = answers(name, is_forced=True, num=3)
    assert all(delta.calls and not delta.text.strip() for delta in found)


LARKS = {
    "terminals": 'start: WORD "\\n" WORD?\nWORD: /[a-z"<]{1,3}/',
    "recursion": 'start: "(" (start | WORD) ")"\nWORD: "a" | "\\n"',
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("lark", [*LARKS])
@pytest.mark.parametrize("name", [*FORMATS, *TOKEN_MACHINES])
def test_a_text_in_place_of_arguments_follows_its_grammar_in_every_format(name, lark):
    wanted = {"terminals": r"[a-z\"<]{1,3}\n([a-z\"<]{1,3})?", "recursion": r"\(+[a\n]\)+"}[lark]
    schema = {"properties": {"input": {"type": "string"}}, "required": ["input"]}
    tools, inputs = {"f": schema, "g": schema}, {"f": LARKS[lark]}
    found = answers(name, is_forced=True, num=3, tools=tools, inputs=inputs)
    calls = [call for delta in found for call in delta.calls]
    for call in calls:
        if call.begins is not None and call.begins.name == "f":
            assert re.fullmatch(wanted, json.loads(call.arguments)["input"])
    assert any(call.begins is not None and call.begins.name == "f" for call in calls)


LIMITED = [
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "maxLength": 2083, "pattern": "^b/[a-c]+$"},
    {"type": "string", "pattern": "(fox|dog)$", "maxLength": 9},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv6"},
    {"type": ["null", "string"], "maxLength": 2},
    {"anyOf": [{"type": "string", "enum": ["a b", "12"]}, {"type": "null"}], "default": None},
    {"allOf": [{"$ref": "#/$defs/colour"}], "description": "a colour"},
    {"anyOf": [{"$ref": "#/$defs/colour"}, {"type": "null"}]},
    {"enum": [1, "one", None]},
    {"type": ["string", "null", "number"], "enum": ["a b", None, 1]},
    {"const": 5},
]


@pytest.mark.parametrize(
    ("name", "limited"),
    [
        # Of each format a third, and of each schema; all of them at night.
        pytest.param(name, limited, marks=[pytest.mark.matrix] * ((row + column) % 3 != 0))
        for row, name in enumerate([*FORMATS, *TOKEN_MACHINES])
        for column, limited in enumerate(LIMITED)
    ],
)
@pytest.mark.slow
def test_a_string_is_limited_as_its_schema_says_in_every_format(name, limited):
    schema = {
        "type": "object",
        "properties": {"s": limited},
        "required": ["s"],
        "$defs": {"colour": {"type": "string", "enum": ["red", "blue"]}},
        "additionalProperties": False,
    }
    found = answers(name, is_forced=True, num=4, tools={"see": schema})
    assert all(delta.calls for delta in found)


@pytest.mark.parametrize(
    ("limited", "said"),
    [
        ({"type": "string", "format": "regex"}, "parameter 's': the format 'regex'"),
        ({"type": "string", "format": ["date"]}, "the format"),
        ({"type": "string", "pattern": 3}, "pattern is not a text"),
        ({"type": "string", "maxLength": "3"}, "must be whole numbers"),
        ({"type": "string", "allOf": 3}, "cannot be limited by allOf"),
        ({"type": "string", "pattern": "^a|b$"}, "put its alternatives into a group"),
        ({"type": "string", "not": {"const": "a"}}, "cannot be limited by not"),
        ({"allOf": [{"type": "string"}, {"maxLength": 2}]}, "cannot be limited by allOf"),
    ],
)
def test_what_a_string_without_quotes_cannot_be_limited_to_is_refused_if_it_must_be(limited, said):
    style, _, _ = style_with("qwen3_coder", has_tokens=True)
    tools = {"f": {"properties": {"s": limited}}, "g": {}}
    with pytest.raises(BadRequestError, match=said):
        style.grammar("", ToolUse(tools, is_forced=True))
    assert style.grammar("", ToolUse(tools, loose=frozenset({"f"})))


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("hostname", ["a", "a-b.Example.com", "x" * 63], ["-a", "a-", "a..b", "a_b", "x" * 64]),
        ("ipv6", ["::", "1::", "::ffff:1.2.3.4", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::"], [":"]),
        (
            "ipv6",
            ["1:2::7:8", "a::b:c:d:e:f:1"],
            ["1::2::3", "1:2:3:4:5:6:7", "12345::", "::1.2.3"],
        ),
        (
            "duration",
            ["P1D", "PT5M", "P3W", "P1Y2M3DT4H5M6S"],
            ["P", "PT", "P1H", "P1Y3D", "P1W2D"],
        ),
    ],
)
def test_a_format_takes_what_is_valid_and_nothing_else(
    name: str, valid: list[str], invalid: list[str]
) -> None:
    style, tokenizer, matching = style_with("qwen3_coder", has_tokens=True)
    tools = {"f": {"properties": {"s": {"type": "string", "format": name}}, "required": ["s"]}}
    grammar = style.grammar("", ToolUse(tools, is_forced=True))
    call = "<tool_call>\n<function=f>\n<parameter=s>\n{}\n</parameter>\n</function>\n</tool_call>"
    for text in (*valid, *invalid):
        token_ids = tokenizer.encode(call.format(text), add_special_tokens=False)
        num_taken = LLMatcher(matching, grammar).validate_tokens(token_ids)
        assert (num_taken == len(token_ids)) is (text in valid), text


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    "name", [name for name, each in FORMATS.items() if each.writing and each.writing.parameter]
)
def test_a_string_without_quotes_ends_wherever_its_end_is_written(name: str, has_tokens: bool):
    style, tokenizer, matching = style_with(name, has_tokens=has_tokens)
    writing = FORMATS[name].writing
    assert writing is not None
    assert writing.parameter is not None
    begin, end = (each.replace("{key}", "s") for each in writing.parameter)
    call = writing.begin.replace("{name}", "f") + begin.replace("{is_string}", "true") + "{}" + end
    call = writing.opening + call + writing.end + writing.closing
    tools = {"f": {"properties": {"s": {"type": "string"}}, "required": ["s"]}}
    grammar = style.grammar("", ToolUse(tools, is_forced=True, is_parallel=False))
    for text in ("Paris", "two\nlines", "a </b", end[:3]):
        token_ids = tokenizer.encode(call.format(text), add_special_tokens=False)
        matcher = LLMatcher(matching, grammar)
        assert matcher.consume_tokens(token_ids), text
        assert matcher.is_accepting()


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", [*FORMATS])
@pytest.mark.parametrize("has_tokens", [True, False])
def test_reasoning_may_come_before_what_is_forced(name, has_tokens):
    begun = {"begun": "a fox</think>\n", "prompt": "<think>"}
    found = answers(name, is_forced=True, num=2, has_tokens=has_tokens, **begun)
    assert all(delta.calls and not delta.text.strip() for delta in found)
    assert all(delta.reasoning == "a fox" for delta in found)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", [*FORMATS, "openai"])
@pytest.mark.parametrize("has_tokens", [True, False])
def test_calls_that_are_chosen_follow_their_schemas_and_other_text_is_free(name, has_tokens):
    if name != "openai":
        begins_so = name in ("list", "llama3_json", "llama4_json")
        begun = ("" if begins_so else "fox ") + FORMATS[name].writing.trigger
        [delta] = answers(name, is_forced=False, num=1, has_tokens=has_tokens, begun=begun)
        assert delta.calls
    begun = "<|channel|>final<|message|>a fox" if name == "openai" else "a fox"
    [delta] = answers(name, is_forced=False, num=1, begun=begun)
    assert delta.text.startswith("a fox")


THOUGHT = f"{K3_PROMPT}<|open|>think<|sep|>"
RESPONSE = f"{K3_PROMPT}<|open|>response<|sep|>"


@pytest.mark.parametrize("prompt", [K3_PROMPT, THOUGHT, RESPONSE])
def test_elements_go_on_from_those_that_the_prompt_has_opened(prompt):
    thought = "a fox<|close|>think<|sep|>" if prompt == THOUGHT else ""
    found = answers("kimi_k3", is_forced=True, num=2, prompt=prompt, begun=thought)
    assert all(delta.calls and not delta.text for delta in found)
    assert all((delta.reasoning == "a fox") == bool(thought) for delta in found)
    response = "" if prompt == RESPONSE else "<|open|>response<|sep|>"
    begun = f"{thought}{response}a fox<|close|>response<|sep|>"
    for more in ("", '<|open|>tools<|sep|><|open|>call tool="'):
        [delta] = answers("kimi_k3", is_forced=False, num=1, prompt=prompt, begun=begun + more)
        assert delta.text == "a fox"
        assert delta.calls or not more


K3_THOUGHT = "hm<|close|>think<|sep|><|open|>response<|sep|>"
GPT_FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
GPT_THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("name", "prompt", "thought"),
    [
        ("kimi_k3", K3_PROMPT, "<|open|>response<|sep|>"),
        ("kimi_k3", THOUGHT, K3_THOUGHT),
        ("kimi_k3", RESPONSE, ""),
        ("openai", "<|start|>assistant", f"{GPT_THOUGHT}<|channel|>final<|message|>"),
        ("openai", f"{GPT_THOUGHT}<|channel|>final<|message|>", ""),
        ("openai", "<|start|>assistant<|channel|>analysis<|message|>", f"hm{GPT_FINAL}"),
        ("hermes", "<think>\n", "hm</think>\n\n"),
    ],
)
def test_what_an_answer_has_to_be_stands_behind_its_reasoning(name, prompt, thought):
    style, tokenizer, matching = style_with(name, has_tokens=name in TOKEN_MACHINES)
    before = style.thought_before(prompt)
    answer = {"name": "answer", "lark_grammar": 'start: "yes"'}
    grammar = json.dumps({"grammars": [{"lark_grammar": before}, answer]})
    output = thought + "yes"
    matcher = LLMatcher(matching, grammar)
    assert not matcher.get_error()
    assert matcher.consume_tokens(tokenizer.encode(output, add_special_tokens=False))
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ({"a b": {}}, "'a b'"),
        ({"a": {"type": "array"}}, "object"),
        ({"a": {"properties": {"<x>": {}}}}, "'<x>'"),
    ],
)
def test_tools_that_cannot_stand_in_a_format_are_named(tools, said):
    style, _, _ = style_with("qwen3_coder", has_tokens=True)
    with pytest.raises(BadRequestError, match=said):
        style.grammar("", ToolUse(tools, is_forced=True))


def test_a_format_without_a_grammar_is_forced_in_plain_json():
    style = AnswerStyle(calls=TOOL_PARSERS["gemma4"])
    assert style.forcing.calls is JSON_LIST
    with pytest.raises(BadRequestError, match="only be constrained when one is required"):
        style.grammar("", ToolUse(TOOLS))
    assert AnswerStyle(calls=TOOL_PARSERS["hermes"]).forcing.calls is TOOL_PARSERS["hermes"]
