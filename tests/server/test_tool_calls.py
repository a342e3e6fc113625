"""Tool calls and reasoning in chats, whole and streamed, at one engine and over two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import tokenizers

from pdserve.config.schema import ModelConfig
from pdserve.text.answer.parsers import REASONING_PARSERS, TOOL_PARSERS
from pdserve.text.answer.style import AnswerStyle, style_of
from pdserve.text.chat import ChatTemplate
from pdserve.text.tokenizer import Tokenizer
from tests.server.conftest import events, script, scripted, serving
from tests.server.test_constraints import takes
from tests.server.test_hop import pair
from tests.server.test_status import scrape

PATH = "/v1/chat/completions"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("see", "hear")
]
BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
ANSWER = (
    "<think>a dog?</think>\n\nthe fox<tool_call>\n"
    '{"name": "see", "arguments": {"x": 1.0}}\n</tool_call>\n<tool_call>\n'
    '{"name": "hear", "arguments": {}}\n</tool_call>'
)


@pytest.fixture
def calling(text):
    """A model that writes calls as Hermes and reasoning as Qwen3."""
    added = {content: token_id for token_id, content in text.tokenizer.added_tokens.items()}
    style = AnswerStyle(
        calls=TOOL_PARSERS["hermes"],
        reasoning=REASONING_PARSERS["qwen3"],
        vocabulary={added["<think>"]: "<think>"},
        tokens={"<think>": added["<think>"]},
    )
    return replace(text, answers=style)


def joined(chunks: list[Any]) -> dict[str, Any]:
    """The message that a client makes of a stream's chunks, and how it ended."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for chunk in chunks:
        [choice] = chunk["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["calls"])
                message["calls"].append({key: call[key] for key in call if key != "index"})
            else:
                assert call == {"index": len(message["calls"]) - 1, "function": call["function"]}
                [(name, text)] = call["function"].items()
                message["calls"][-1]["function"][name] += text
        message["finish"] = choice["finish_reason"]
    return message


async def test_an_answer_has_content_reasoning_and_calls_apart(calling):
    async with serving(calling, scripted(calling, ANSWER)) as server:
        answer = await server.ok(PATH, BODY, X_Request_Id="one")
    [choice] = answer["choices"]
    first, second = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "the fox", "reasoning": "a dog?"}
    assert choice["finish_reason"] == "tool_calls"
    assert first["function"] == {"name": "see", "arguments": '{"x": 1.0}'}
    assert second["function"] == {"name": "hear", "arguments": "{}"}
    assert first["id"] != second["id"]
    assert all(call["id"].startswith("call_") for call in (first, second))
    thought = len(calling.tokenizer.encode("a dog?", add_special_tokens=False))
    details = answer["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] >= thought
    assert details["reasoning_tokens"] < answer["usage"]["completion_tokens"]


async def test_a_stream_has_what_the_whole_answer_has(calling):
    async with serving(calling, scripted(calling, ANSWER)) as server:
        answer = await server.ok(PATH, BODY, X_Request_Id="one")
        chunks = events(await server.stream(PATH, BODY, X_Request_Id="one"))
    message = answer["choices"][0]["message"]
    assert joined(chunks) == {
        "content": message["content"],
        "reasoning": message["reasoning"],
        "calls": message["tool_calls"],
        "finish": "tool_calls",
    }


async def test_arguments_are_streamed_as_they_come(calling):
    text = ANSWER.replace("1.0", "[" + ", ".join(map(str, range(40))) + "]")
    async with serving(calling, scripted(calling, text)) as server:
        chunks = events(await server.stream(PATH, BODY))
    calls = [chunk["choices"][0]["delta"].get("tool_calls", []) for chunk in chunks]
    first, *others = [call for group in calls for call in group if call["index"] == 0]
    assert first["function"]["name"] == "see"
    assert len(others) > 20
    assert all(call.keys() == {"index", "function"} for call in others)
    assert all(call["function"].keys() == {"arguments"} for call in others)


async def test_what_was_streamed_of_a_call_that_the_limit_cuts_off_is_not_complete(calling):
    async with serving(calling, scripted(calling, ANSWER)) as server:
        limit = (await server.ok(PATH, BODY))["usage"]["completion_tokens"] - 3
        chunks = events(await server.stream(PATH, BODY | {"max_tokens": limit}))
    message = joined(chunks)
    assert message["finish"] == "length"
    assert message["calls"][0]["function"]["arguments"] == '{"x": 1.0}'
    assert message["calls"][1]["function"] == {"name": "hear", "arguments": "{"}


async def test_two_engines_stream_the_calls_that_one_streams(calling):
    body = BODY | {"seed": 1}
    async with pair(calling, next_token=script(calling, ANSWER)) as both:
        disaggregated = await both.stream(PATH, body)
        alone = events(await both.decode.stream(PATH, body, X_Request_Id="one"))
    assert joined(disaggregated) == joined(alone)
    assert len(joined(alone)["calls"]) == 2


async def test_without_parallel_calls_the_first_call_ends_the_answer(calling):
    engine = scripted(calling, ANSWER)
    async with serving(calling, engine) as server:
        answer = await server.ok(PATH, BODY | {"parallel_tool_calls": False})
    [choice] = answer["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["see"]
    assert choice["finish_reason"] == "tool_calls"
    assert len(engine.aborted) == 1


async def test_a_stop_token_that_comes_at_once_with_the_last_call_did_not_end_the_answer(
    calling, monkeypatch
):
    engine = scripted(calling, '<tool_call>{"name": "see", "arguments": {}}</tool_call>!')
    one_by_one = engine.generate

    async def at_once(request, siblings=()):
        """As with a draft that is right."""
        outputs = [output async for output in one_by_one(request, siblings)]
        token_ids = [token_id for output in outputs for token_id in output.new_token_ids]
        yield msgspec.structs.replace(outputs[-1], new_token_ids=token_ids)

    monkeypatch.setattr(engine, "generate", at_once)
    body = BODY | {"stop_token_ids": calling.tokenizer.encode("!")}
    async with serving(calling, engine) as server:
        [parallel] = (await server.ok(PATH, body))["choices"]
        [single] = (await server.ok(PATH, body | {"parallel_tool_calls": False}))["choices"]
    assert (parallel["finish_reason"], single["finish_reason"]) == ("tool_calls", "tool_calls")
    assert ([parallel["stop_reason"]], single["stop_reason"]) == (body["stop_token_ids"], None)


async def test_a_call_that_the_limit_cuts_off_is_none(calling):
    async with serving(calling, scripted(calling, ANSWER)) as server:
        whole = await server.ok(PATH, BODY)
        limit = whole["usage"]["completion_tokens"] - 3
        answer = await server.ok(PATH, BODY | {"max_tokens": limit})
    [choice] = answer["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["see"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == "the fox"


async def test_an_answer_of_calls_alone_has_no_content(calling):
    only = ANSWER[ANSWER.index("<tool_call>") :]
    async with serving(calling, scripted(calling, only)) as server:
        answer = await server.ok(PATH, BODY)
    assert answer["choices"][0]["message"]["content"] is None


async def test_what_the_parser_is_given_is_counted_as_vllm_does(calling):
    async with serving(calling, scripted(calling, ANSWER)) as server:
        await server.ok(PATH, BODY | {"n": 2})
        await server.ok(PATH, BODY | {"tool_choice": "none"})
        chunks = events(await server.stream(PATH, BODY))
        found = {
            (dict(labels)["mode"], dict(labels)["outcome"]): value
            for (name, labels), value in (await scrape(server)).items()
            if name == "vllm:tool_call_parser_invocations_total"
            and ("request_type", "chat_completions") in labels
        }
    assert found["non_streaming", "tool_call"] == 2
    assert found["non_streaming", "no_tool_call"] == 0
    num_with = sum("tool_calls" in chunk["choices"][0]["delta"] for chunk in chunks)
    assert found["streaming", "tool_call"] >= num_with > 0
    assert sum(found.values()) == 2 + len(chunks)


async def test_without_tools_or_with_none_of_them_calls_are_text(calling):
    only = ANSWER[ANSWER.index("<tool_call>") :]
    async with serving(calling, scripted(calling, only)) as server:
        plain = await server.ok(PATH, BODY | {"tools": None})
        none = await server.ok(PATH, BODY | {"tool_choice": "none"})
    for answer in (plain, none):
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": only}
        assert answer["choices"][0]["finish_reason"] == "stop"


async def test_reasoning_is_left_out_where_it_is_not_wanted_and_named_as_the_server_is_told(
    calling,
):
    async with serving(calling, scripted(calling, ANSWER)) as server:
        answer = await server.ok(PATH, BODY | {"include_reasoning": False})
    assert "reasoning" not in answer["choices"][0]["message"]
    engine = scripted(calling, ANSWER)
    async with serving(calling, engine, reasoning_field="reasoning_content") as server:
        answer = await server.ok(PATH, BODY)
    assert answer["choices"][0]["message"]["reasoning_content"] == "a dog?"


async def test_reasoning_that_is_left_out_leaves_no_log_probabilities(calling):
    scored = BODY | {"logprobs": True}
    hidden = scored | {"include_reasoning": False}
    async with serving(calling, scripted(calling, ANSWER)) as server:
        told, whole = await server.ok(PATH, scored), await server.ok(PATH, hidden)
        chunks = events(await server.stream(PATH, hidden))
        joined = events(await server.stream(PATH, hidden | {"stream_interval": 3}))
    every, rows = (each["choices"][0]["logprobs"]["content"] for each in (told, whole))
    for parts in (chunks, joined):
        choices = [chunk["choices"][0] for chunk in parts]
        assert [row for each in choices for row in each["logprobs"]["content"]] == rows
    assert every[-len(rows) :] == rows
    tokens = "".join(row["token"] for row in rows)
    assert "dog" not in tokens
    assert ANSWER.endswith(tokens.lstrip(">").removesuffix("</s>"))
    assert "the fox<tool_call>" in tokens


SEE = '<tool_call>\n{"name": "see", "arguments": {"x": 1}}\n</tool_call>'
HEAR = '<tool_call>\n{"name": "hear", "arguments": {}}\n</tool_call>'
X = {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}
STRICT = [
    {"type": "function", "function": {"name": name, "parameters": X, "strict": True}}
    for name in ("see", "hear")
]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("fields", "taken", "refused"),
    [
        (
            {"tool_choice": "required"},
            [SEE, f"{SEE}\n{HEAR}"],
            ["a dog", SEE[:-1], SEE.replace('"x": 1', '"x":' + "\n" * 50 + "1")],
        ),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [SEE], [f"{SEE}\n{HEAR}"]),
        ({"tool_choice": named("see")}, [SEE], [HEAR, f"{SEE}\n{SEE}"]),
        ({"tools": STRICT}, ["a dog", SEE, f"a {SEE} dog {HEAR}"], [SEE.replace("1", '"1"')]),
        ({"tools": STRICT, "tool_choice": "required"}, [SEE], [SEE.replace("1", "true")]),
    ],
)
async def test_what_has_to_be_called_is_a_grammar_in_the_models_own_format(
    calling, fields, taken, refused
):
    engine = scripted(calling, f"</think>{SEE}")
    source = "{{ messages[0].content }}<think></think>"
    thoughtless = replace(calling, chat_template=ChatTemplate(source, {}))
    async with serving(thoughtless, engine) as server:
        answer = await server.ok(PATH, BODY | fields)
        grammar = engine.requests[0].sampling.grammar
        assert grammar.starts_after is None
        for output in taken:
            assert takes(server, grammar.text, output), output
        for output in refused:
            assert not takes(server, grammar.text, output), output
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


async def test_reasoning_goes_before_what_has_to_be_called(calling):
    thinking = replace(calling, chat_template=ChatTemplate("{{ messages[0].content }}<think>", {}))
    for text, thought in ((calling, "<think>a dog?</think>\n"), (thinking, "a dog?</think>\n")):
        engine = scripted(text, thought + SEE)
        async with serving(text, engine) as server:
            answer = await server.ok(PATH, BODY | {"tool_choice": "required"})
            assert takes(server, engine.requests[0].sampling.grammar.text, thought + SEE)
        message = answer["choices"][0]["message"]
        assert message["reasoning"] == "a dog?"
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["see"]


async def test_a_model_of_no_known_format_is_made_to_call_in_plain_json(text):
    output = '[{"name": "see", "arguments": {"x": 1}}, {"name": "hear", "arguments": {}}]'
    engine = scripted(text, output)
    async with serving(text, engine) as server:
        answer = await server.ok(PATH, BODY | {"tool_choice": "required"})
        assert takes(server, engine.requests[0].sampling.grammar.text, output)
        chunks = events(await server.stream(PATH, BODY | {"tool_choice": "required"}))
    [choice] = answer["choices"]
    assert choice["message"]["content"] is None
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["see", "hear"]
    assert [call["function"]["name"] for call in joined(chunks)["calls"]] == ["see", "hear"]


async def test_what_an_answer_has_to_be_begins_behind_the_reasoning(calling):
    source = "{{ messages[0].content }}<think>"
    added = {**calling.answers.tokens, "</think>": 77}
    style = replace(calling.answers, tokens=added)
    thinking = replace(calling, answers=style, chat_template=ChatTemplate(source, {}))
    engine = scripted(thinking, "a</think>{}")
    async with serving(thinking, engine) as server:
        body = {"messages": BODY["messages"], "response_format": {"type": "json_object"}}
        await server.ok(PATH, body)
    assert engine.requests[0].sampling.grammar.starts_after == (77,)


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}'),
        ({"guided_regex": "[a-c]+"}, "abc"),
        ({"guided_choice": ["yes", "no"]}, "no"),
        ({"guided_grammar": 'start: "yes" NUMBER\nNUMBER: /[0-9]+/\n'}, "yes12"),
    ],
)
async def test_a_model_that_may_think_first_may_do_so_before_what_its_answer_has_to_be(
    text, fields, answer
):
    backend = tokenizers.Tokenizer.from_str(text.tokenizer.as_json())
    backend.add_tokens(["</think>"])
    tokenizer = Tokenizer(backend, {"eos_token": "</s>"})
    style = style_of(ModelConfig(model="m", reasoning_parser="qwen3"), tokenizer, "")
    size = tokenizer.vocab_size
    thinking = replace(text, tokenizer=tokenizer, vocab_size=size, answers=style)
    output = f"<think>hm</think>\n{answer}"
    engine = scripted(thinking, output)
    async with serving(thinking, engine) as server:
        said = await server.ok(PATH, {"messages": BODY["messages"]} | fields)
        grammar = engine.requests[0].sampling.grammar.text
        assert takes(server, grammar, output)
        assert takes(server, grammar, answer)
        assert not takes(server, grammar, f"hm {answer}")
    message = said["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (answer, "hm")


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
        {"tools": [{"function": {"name": "a b"}}], "tool_choice": "required"},
        {"tools": [{"function": {"name": "a", "parameters": {"type": "nothing"}}}]}
        | {"tool_choice": "required"},
        {
            "tools": [
                {"function": {"name": "a", "parameters": {"properties": {"x": {"$ref": "u:"}}}}}
            ]
        }
        | {"tool_choice": "required"},
    ],
)
async def test_tools_that_cannot_be_forced_are_named(calling, fields):
    async with serving(calling, scripted(calling, "a dog")) as server:
        status, error = await server.refused(PATH, BODY | fields)
    assert (status, error["param"]) == (400, "tools")


async def test_a_server_may_leave_the_choice_to_its_clients(calling):
    strict = replace(calling, answers=replace(calling.answers, may_choose=False))
    async with serving(strict, scripted(strict, "a dog")) as server:
        status, error = await server.refused(PATH, BODY)
        assert (status, error["param"]) == (400, "tool_choice")
        await server.ok(PATH, BODY | {"tool_choice": "none"})


async def test_templates_get_tools_calls_as_objects_and_reasoning_by_both_names(calling):
    source = (
        "{{ tools | map(attribute='function.name') | join('+') }}|{{ reasoning_effort }}|"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.reasoning_content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}={{ c.function.arguments.x }}"
        "{% endfor %}{{ m.tool_call_id }};{% endfor %}"
    )
    templated = replace(calling, chat_template=ChatTemplate(source, {}))
    call = {"id": "c1", "type": "function", "function": {"name": "see", "arguments": '{"x": 7}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a fox"},
    ]
    engine = scripted(calling, "a dog")
    async with serving(templated, engine) as server:
        body = BODY | {"messages": messages, "reasoning_effort": "low"}
        await server.ok(PATH, body)
        counted = await server.ok("/tokenize", {"messages": messages, "tools": TOOLS})
    shown = calling.tokenizer.decode(engine.requests[0].prompt_token_ids)
    assert shown == "see+hear|low|user:hi;assistant:hmsee=7;tool:a foxc1;"
    effort = len(calling.tokenizer.encode("low", add_special_tokens=False))
    assert abs(counted["count"] + effort - len(engine.requests[0].prompt_token_ids)) <= 2


@pytest.mark.parametrize(
    "calls",
    [
        "see",
        ["see"],
        [{"function": {"name": 1}}],
    ],
)
async def test_malformed_calls_in_messages_are_named(calling, calls):
    messages = [*BODY["messages"], {"role": "assistant", "tool_calls": calls}]
    async with serving(calling, scripted(calling, "a dog")) as server:
        status, error = await server.refused(PATH, BODY | {"messages": messages})
    assert (status, error["param"]) == (400, "messages")
    assert "messages[1].tool_calls" in error["message"]


async def test_a_call_can_be_forced_of_a_tool_whose_schema_zod_has_written(calling):
    record = {"type": "object", "propertyNames": {"type": "string"}}
    schema = {"type": "object", "properties": {"x": record}}
    tools = [{"type": "function", "function": {"name": "see", "parameters": schema}}]
    async with serving(calling, scripted(calling, "a dog")) as server:
        for wrong, status in ((None, 200), ({"pattern": "^a"}, 400)):
            record["propertyNames"] = wrong or record["propertyNames"]
            body = BODY | {"tools": tools, "tool_choice": "required", "max_tokens": 2}
            assert (await server.post(PATH, body))[0] == status


async def test_a_template_for_tools_is_taken_where_some_are_offered(calling):
    templates = {
        "chat_template": ChatTemplate("plain", {}),
        "tool_template": ChatTemplate("with {{ tools | length }}", {}),
    }
    engine = scripted(calling, "a dog")
    async with serving(replace(calling, **templates), engine) as server:
        for tools in (TOOLS, None, []):
            await server.ok(PATH, BODY | {"tools": tools})
    shown = [calling.tokenizer.decode(request.prompt_token_ids) for request in engine.requests]
    assert shown == ["with 2", "plain", "plain"]


async def test_an_effort_asks_the_template_to_think_and_none_not_to(calling):
    source = "{{ enable_thinking }}{{ thinking }}"
    templated = replace(calling, chat_template=ChatTemplate(source, {}))
    engine = scripted(calling, "a dog")
    said = {"chat_template_kwargs": {"enable_thinking": 1}}
    async with serving(templated, engine) as server:
        await server.ok(PATH, BODY | {"reasoning_effort": "none"})
        await server.ok(PATH, BODY | {"reasoning_effort": "none"} | said)
        await server.ok(PATH, BODY | {"reasoning_effort": "low"})
    shown = [calling.tokenizer.decode(request.prompt_token_ids) for request in engine.requests]
    assert shown == ["FalseFalse", "1False", "True"]


async def test_an_answer_that_begins_in_the_reasoning_needs_no_opening(calling):
    thinking = replace(
        calling, chat_template=ChatTemplate("{{ messages[0].content }}<think>\n", {})
    )
    async with serving(thinking, scripted(thinking, "a dog?</think>the fox")) as server:
        answer = await server.ok(PATH, BODY)
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "the fox",
        "reasoning": "a dog?",
    }
