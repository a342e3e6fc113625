"""Whole answers against streams in each protocol, whatever a model writes."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from pdserve.config.schema import ModelConfig
from pdserve.text.answer.parsers import REASONING_PARSERS, TOOL_PARSERS
from pdserve.text.answer.style import AnswerStyle
from pdserve.text.load import load_text
from tests.dialects.chats import events_in
from tests.server.conftest import EOS, events, make_engine, serving
from tests.text.answer.test_machine import WRITTEN
from tests.text.answer.told import is_json
from tests.text.tiny import write_model_files

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "number"}, "s": {"type": "string"}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": HI,
        "tools": [{"type": "function", "function": FUNCTION}],
        "logprobs": True,
    },
    "/v1/responses": {
        "input": "hi",
        "tools": [{"type": "function", **FUNCTION}],
        "include": ["message.output_text.logprobs"],
    },
    "/v1/responses without its reasoning": {
        "input": "hi",
        "tools": [{"type": "function", **FUNCTION}],
        "include": ["message.output_text.logprobs"],
        "include_reasoning": False,
    },
    "/v1/messages": {"messages": HI, "tools": [{"name": "f", "input_schema": SCHEMA}]},
}
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
NUM_ANSWERS = 2

Said = list[tuple[Any, ...]]
"""Parts of an answer: what each is, and its text; a call's name before its arguments."""


def written(rng: random.Random, parser: str) -> str:
    """An answer, some of whose calls are none or cut off."""
    parts = ["the fox ", "🙂", "\n", "<think>a dog?</think>\n\n", "<", "{", *[WRITTEN[parser]] * 3]
    text = "".join(rng.choices(parts, k=rng.randint(1, 4)))
    at = rng.randrange(len(text))
    return rng.choice([text, text[: at + 1], text[:at] + "}" + text[at:]])


def joined(said: Said) -> Said:
    """The same parts, with those of one kind side by side as one: there was no call between."""
    found: Said = []
    for kind, of_kind in itertools.groupby(said, key=lambda part: part[0]):
        parts = list(of_kind)
        if kind == "call":
            found += parts
        else:
            found.append((kind, "".join(text for _, text in parts)))
    return found


def said_in_chat(choice: dict[str, Any]) -> Said:
    """What a whole chat says, of which only the order within each kind is known."""
    message = choice["message"]
    calls = [each["function"] for each in message.get("tool_calls", ())]
    return [
        ("reasoning", message.get("reasoning", "")),
        ("text", message["content"] or ""),
        *(("call", call["name"], call["arguments"]) for call in calls),
        ("rows", *(row["token"] for row in choice["logprobs"]["content"])),
        (choice["finish_reason"],),
    ]


def said_in_chunks(chunks: list[dict[str, Any]]) -> Said:
    choices = [chunk["choices"][0] for chunk in chunks]
    deltas = [choice["delta"] for choice in choices]
    calls: dict[int, list[Any]] = {}
    for call in (each for delta in deltas for each in delta.get("tool_calls", ())):
        function = call["function"]
        calls.setdefault(call["index"], [function.get("name"), ""])[1] += function["arguments"]
    return [
        ("reasoning", "".join(delta.get("reasoning", "") for delta in deltas)),
        ("text", "".join(delta.get("content") or "" for delta in deltas)),
        *(("call", *call) for call in calls.values() if is_json(call[1])),
        ("rows", *(row["token"] for each in choices for row in each["logprobs"]["content"])),
        (choices[-1]["finish_reason"],),
    ]


def said_in_response(response: dict[str, Any]) -> Said:
    said: Said = []
    for item in response["output"]:
        if item["type"] == "function_call":
            said.append(("call", item["name"], item["arguments"]))
        else:
            said.append((item["type"], item["content"][0]["text"]))
    texts = [item["content"][0] for item in response["output"] if item["type"] == "message"]
    tokens = [row["token"] for text in texts for row in text["logprobs"]]
    return [*joined(said), ("rows", *tokens), (response["status"],)]


def said_in_message(message: dict[str, Any]) -> Said:
    said = [
        ("call", block["name"], block["input"])
        if block["type"] == "tool_use"
        else (block["type"], block[block["type"]])
        for block in message["content"]
    ]
    return [*joined(said), (message["stop_reason"],)]


def said_in_events(told: list[tuple[str, dict[str, Any]]]) -> Said:
    blocks, texts, stop = [], [], ""
    for name, data in told:
        if name == "content_block_start":
            blocks.append(data["content_block"])
            texts.append("")
        elif name == "content_block_delta":
            delta = data["delta"]
            texts[data["index"]] += delta.get("text", delta.get("thinking", ""))
            texts[data["index"]] += delta.get("partial_json", "")
        elif name == "message_delta":
            stop = data["delta"]["stop_reason"]
    said: Said = []
    for block, text in zip(blocks, texts, strict=True):
        if block["type"] != "tool_use":
            said.append((block["type"], text))
        elif is_json(text):
            said.append(("call", block["name"], json.loads(text)))
    return [*joined(said), (stop,)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    model = write_model_files(tmp_path_factory.mktemp("model"))
    return load_text(ModelConfig(model=str(model)))


@pytest.mark.parametrize("parser", WRITTEN)
async def test_a_stream_has_what_the_whole_answer_has(text, parser):
    style = AnswerStyle(calls=TOOL_PARSERS[parser], reasoning=REASONING_PARSERS["qwen3"])
    rng = random.Random(parser)
    token_ids: list[int] = []
    engine = make_engine(
        text, next_token=lambda request, output: token_ids[len(output)], step_s=0.0
    )
    async with serving(replace(text, answers=style), engine) as server:
        for _ in range(NUM_ANSWERS):
            answer = written(rng, parser)
            token_ids = [*text.tokenizer.encode(answer, add_special_tokens=False), EOS]
            num_tokens = len(token_ids) - rng.randrange(2)  # with the end of the text, or cut off
            whole, streams = {}, {}
            for name, body in BODIES.items():
                path = name.partition(" ")[0]
                limited = body | {LIMITS[path]: num_tokens}
                whole[name] = await server.ok(path, limited)
                streams[name] = await server.stream(path, limited)
            chat, response, thoughtless, message = whole.values()
            chunks, told, told_thoughtless, blocks = streams.values()
            assert said_in_chunks(events(chunks)) == said_in_chat(chat["choices"][0]), answer
            for stream, object_ in ((told, response), (told_thoughtless, thoughtless)):
                last = events_in(stream)[-1][1]["response"]
                assert said_in_response(last) == said_in_response(object_), answer
            assert said_in_events(events_in(blocks)) == said_in_message(message), answer
