"""Official clients against a proxy before two engines: tools, reasoning and formats."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pydantic
import pytest

from pdserve.config.schema import ModelConfig
from pdserve.text.answer.parsers import REASONING_PARSERS, TOOL_PARSERS
from pdserve.text.answer.style import AnswerStyle
from pdserve.text.load import load_text
from tests.proxy.test_with_server import deployed
from tests.server.conftest import script
from tests.text.tiny import write_model_files

pytestmark = pytest.mark.slow

SAID = (
    "<think>a dog?</think>\n\nthe fox<tool_call>\n"
    '{"name": "see", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>\n'
    '{"name": "hear", "arguments": {}}\n</tool_call>'
)
NAMES = ("see", "hear")
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
HI = [{"role": "user", "content": "hi"}]


class Found(pydantic.BaseModel):
    x: int


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A model that writes calls as Hermes and reasoning as Qwen3."""
    plain = load_text(ModelConfig(model=str(write_model_files(tmp_path_factory.mktemp("model")))))
    added = {content: token_id for token_id, content in plain.tokenizer.added_tokens.items()}
    style = AnswerStyle(
        calls=TOOL_PARSERS["hermes"],
        reasoning=REASONING_PARSERS["qwen3"],
        vocabulary={added["<think>"]: "<think>"},
    )
    return replace(plain, answers=style)


@contextlib.asynccontextmanager
async def saying(text, said: str):
    script_of = {"next_token": script(text, said)}
    async with deployed(text, prefill=[script_of], decode=[script_of]) as deployment:
        yield deployment


@contextlib.asynccontextmanager
async def anthropics(anthropic, text, said: str = SAID):
    async with (
        saying(text, said) as deployment,
        anthropic.AsyncAnthropic(base_url=deployment.url, api_key="key", max_retries=0) as client,
    ):
        yield client, deployment


@contextlib.asynccontextmanager
async def openais(openai, text, said: str = SAID):
    async with (
        saying(text, said) as deployment,
        openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="key", max_retries=0) as client,
    ):
        yield client, deployment


ANTHROPIC_TOOLS = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
OPENAI_TOOLS = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]


def assert_is_the_message(message) -> None:
    thinking, said, *calls = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "a dog?")
    assert (said.type, said.text) == ("text", "the fox")
    assert [(call.name, call.input) for call in calls] == [("see", {"x": 1}), ("hear", {})]
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens > 10


async def test_anthropics_client_gets_thoughts_and_calls(text, anthropic):
    body = {"model": "tiny", "max_tokens": 512, "messages": HI, "tools": ANTHROPIC_TOOLS}
    async with anthropics(anthropic, text) as (client, deployment):
        whole = await client.messages.create(**body)
        assert_is_the_message(whole)
        async with client.messages.stream(**body) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_message()
        assert_is_the_message(final)
        assert {"thinking", "text", "input_json", "message_stop"} <= kinds
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "1"}
            for block in whole.content
            if block.type == "tool_use"
        ]
        further = [
            *HI,
            {"role": "assistant", "content": whole.content},
            {"role": "user", "content": results},
        ]
        with pytest.raises(anthropic.BadRequestError, match="the role tool is not known"):
            await client.messages.create(**body | {"messages": further})
        counted = await client.messages.count_tokens(
            model="tiny", messages=HI, tools=ANTHROPIC_TOOLS
        )
    assert counted.input_tokens == whole.usage.input_tokens
    assert {r.remote_decode for r in deployment.servers[0].engine.requests} == {True}


async def test_anthropics_client_raises_its_own_errors(text, anthropic):
    async with anthropics(anthropic, text) as (client, _):
        body = {"model": "tiny", "max_tokens": 9, "messages": HI}
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**body | {"model": "other"})
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await client.messages.create(**body | {"max_tokens": 0})


async def test_openais_client_gets_reasoning_and_calls(text, openai):
    body = {"model": "tiny", "input": "hi", "tools": OPENAI_TOOLS}
    async with openais(openai, text) as (client, _):
        whole = await client.responses.create(**body)
        async with client.responses.stream(**body) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_response()
    assert "response.function_call_arguments.done" in kinds
    assert "response.reasoning_text.delta" in kinds
    for response in (whole, final):
        reasoning, message, *calls = response.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "a dog?")
        assert message.content[0].text == response.output_text == "the fox"
        told = [(call.name, json.loads(call.arguments)) for call in calls]
        assert told == [("see", {"x": 1}), ("hear", {})]
        assert all(call.call_id.startswith("call_") for call in calls)
        assert response.usage.output_tokens_details.reasoning_tokens > 0


async def test_openais_client_parses_what_it_asked_for(text, openai):
    async with openais(openai, text, '{"x": 3}') as (client, deployment):
        answer = await client.responses.parse(model="tiny", input="hi", text_format=Found)
    assert answer.output_parsed == Found(x=3)
    grammars = [r.sampling.grammar for server in deployment.servers for r in server.engine.requests]
    assert all(grammar is not None for grammar in grammars)
