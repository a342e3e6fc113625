"""Custom tools, whose input is a text, and choices among the tools that are offered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdserve.text.answer.parsers import TOOL_PARSERS
from pdserve.text.answer.style import AnswerStyle
from pdserve.text.chat import ChatTemplate
from tests.server.conftest import events, script, scripted, serving
from tests.server.test_constraints import takes
from tests.server.test_hop import pair

PATH = "/v1/chat/completions"
LARK = 'start: "+" NAME "\\n"\nNAME: /[a-z"]+/\n'


def custom(name: str, syntax: str = "", definition: str = "") -> dict[str, Any]:
    form: dict[str, Any] = {"type": "text"}
    if syntax:
        form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": name, "description": "does", "format": form}}


def chosen(name: str) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


SEE = {"type": "function", "function": {"name": "see", "parameters": {"type": "object"}}}
HEAR = {"type": "function", "function": {"name": "hear", "parameters": {"type": "object"}}}
RUN, PATCH, DATE = custom("run"), custom("patch", "lark", LARK), custom("date", "regex", "[0-9]{4}")
BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": [RUN, SEE]}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


TEXT = 'say "a\n😀b"'
ANSWER = (
    "well"
    + call("run", '{"input": "say \\"a\\n\\ud83d\\ude00b\\""}')
    + "\n"
    + call("see", '{"x": 1}')
    + call("run", '{"code": 1}')
)


@pytest.fixture
def calling(text):
    """A model that writes calls as Hermes."""
    return replace(text, answers=AnswerStyle(calls=TOOL_PARSERS["hermes"]))


def joined(chunks: list[Any]) -> list[dict[str, Any]]:
    """The calls that a client makes of a stream's chunks."""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for part in chunk["choices"][0]["delta"].get("tool_calls", ()):
            if part["index"] == len(calls):
                calls.append({key: part[key] for key in part if key != "index"})
                continue
            [(kind, gained)] = ((key, part[key]) for key in part if key != "index")
            [(field, more)] = gained.items()
            calls[part["index"]][kind][field] += more
    return calls


async def test_a_call_of_a_custom_tool_has_its_text_whole_and_streamed(calling):
    async with serving(calling, scripted(calling, ANSWER)) as server:
        answer = await server.ok(PATH, BODY, X_Request_Id="one")
        chunks = events(await server.stream(PATH, BODY, X_Request_Id="one"))
    calls = answer["choices"][0]["message"]["tool_calls"]
    assert [each["type"] for each in calls] == ["custom", "function", "custom"]
    assert calls[0]["custom"] == {"name": "run", "input": TEXT}
    assert calls[1]["function"] == {"name": "see", "arguments": '{"x": 1}'}
    assert calls[2]["custom"] == {"name": "run", "input": '{"code": 1}'}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert joined(chunks) == calls
    assert sum("tool_calls" in each["choices"][0]["delta"] for each in chunks) > 8


async def test_two_engines_stream_the_text_that_one_streams(calling):
    body = BODY | {"seed": 1}
    async with pair(calling, next_token=script(calling, ANSWER)) as both:
        disaggregated = joined(await both.stream(PATH, body))
        alone = joined(events(await both.decode.stream(PATH, body, X_Request_Id="one")))
    assert disaggregated == alone
    assert alone[0]["custom"]["input"] == TEXT


async def test_nobody_has_the_whole_text_of_a_call_that_the_limit_cuts_off(calling):
    text = call("run", '{"input": "abc"}')
    async with serving(calling, scripted(calling, text)) as server:
        limit = (await server.ok(PATH, BODY))["usage"]["completion_tokens"] - 3
        [choice] = (await server.ok(PATH, BODY | {"max_tokens": limit}))["choices"]
        chunks = events(await server.stream(PATH, BODY | {"max_tokens": limit}))
    assert "tool_calls" not in choice["message"]
    assert joined(chunks)[0]["custom"]["input"] == "ab"


async def test_templates_know_custom_tools_as_functions_and_their_calls_as_well(calling):
    source = (
        "{% for t in tools %}{{ t.type }} {{ t.function.name }} "
        "{{ t.function.parameters.required }} "
        "{{ t.function.parameters.properties.input.description }};{% endfor %}"
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.type }} {{ c.function.name }}"
        " {{ c.function.arguments.input }}{% endfor %}{% endfor %}"
    )
    templated = replace(calling, chat_template=ChatTemplate(source, {}))
    said = {"id": "c", "type": "custom", "custom": {"name": "run", "input": "a b"}}
    messages = [*BODY["messages"], {"role": "assistant", "tool_calls": [said]}]
    engine = scripted(calling, "a dog")
    async with serving(templated, engine) as server:
        await server.ok(PATH, {"messages": messages, "tools": [RUN, DATE]})
        del said["custom"]["input"]
        status, error = await server.refused(PATH, BODY | {"messages": messages})
    shown = calling.tokenizer.decode(engine.requests[0].prompt_token_ids)
    assert shown == (
        "function run ['input'] ;function date ['input'] Text that matches the regular expression "
        "[0-9]{4};function run a b"
    )
    assert (status, error["param"]) == (400, "messages")
    assert "messages[1].tool_calls[0].custom" in error["message"]


PATCHED, UNPATCHED = call("patch", '{"input": "+a\\"b\\n"}'), call("patch", '{"input": "+ab"}')
RAN, SEEN, HEARD = call("run", '{"input": "!"}'), call("see", "{}"), call("hear", "{}")


@pytest.mark.parametrize(
    ("fields", "taken", "refused"),
    [
        ({"tools": [PATCH, SEE]}, ["hi", PATCHED, f"a {SEEN} {PATCHED}"], [UNPATCHED]),
        (
            {"tools": [DATE]},
            [call("date", '{"input": "2026"}')],
            [call("date", '{"input": "26"}'), call("date", '{"date": "2026"}')],
        ),
        ({"tools": [RUN, PATCH], "tool_choice": "required"}, [RAN, PATCHED], ["hi", UNPATCHED]),
        ({"tools": [RUN, PATCH], "tool_choice": chosen("patch")}, [PATCHED], [RAN, UNPATCHED]),
        ({"tools": [SEE, HEAR], "tool_choice": allowed("auto", "see")}, ["hi", SEEN], [HEARD]),
        (
            {"tools": [SEE, HEAR, RUN], "tool_choice": allowed("required", "see", "run")},
            [SEEN, f"{RAN}\n{SEEN}"],
            ["hi", HEARD],
        ),
    ],
)
async def test_formats_and_choices_are_grammars_in_the_models_own_format(
    calling, fields, taken, refused
):
    engine = scripted(calling, "a dog")
    async with serving(calling, engine) as server:
        await server.ok(PATH, BODY | fields)
        for output in taken:
            assert takes(server, engine.requests[0].sampling.grammar.text, output), output
        for output in refused:
            assert not takes(server, engine.requests[0].sampling.grammar.text, output), output


async def test_tools_that_are_free_need_no_grammar(calling):
    engine = scripted(calling, "a dog")
    async with serving(calling, engine) as server:
        await server.ok(PATH, BODY | {"tool_choice": allowed("auto", "see", "run")})
    assert engine.requests[0].sampling.grammar is None


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": [{"type": "mcp"}]}, "tools", "function or custom"),
        ({"tools": [{"type": "custom"}]}, "tools", "tools[0].custom"),
        ({"tools": [custom("a", "ebnf", "x")]}, "tools", "tools[0].custom.format"),
        ({"tools": [custom("a"), custom("a")]}, "tools", "another tool"),
        ({"tools": [custom("a", "lark", "x: y")]}, "tools", "the format of 'a'"),
        ({"tools": [custom("a", "regex", "(?=x)")]}, "tools", ""),
        ({"tool_choice": allowed("auto", "see", "hear")}, "tool_choice", "'hear'"),
        ({"tool_choice": allowed("any", "see")}, "tool_choice", "allowed_tools"),
        ({"tool_choice": allowed("auto")}, "tool_choice", "at least one"),
        ({"tool_choice": {"type": "custom", "custom": {}}}, "tool_choice", "must be"),
    ],
)
async def test_what_is_no_tool_or_choice_is_named(calling, fields, param, said):
    async with serving(calling, scripted(calling, "a dog")) as server:
        status, error = await server.refused(PATH, BODY | fields)
    assert (status, error["param"]) == (400, param)
    assert said in error["message"]
