"""Other protocols through one engine's server, and through a proxy before two of them."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from pdserve.config.schema import ModelConfig
from pdserve.http.ignored import IGNORED_HEADER
from pdserve.text.answer.parsers import REASONING_PARSERS, TOOL_PARSERS
from pdserve.text.answer.style import AnswerStyle
from pdserve.text.load import load_text
from tests.dialects.chats import events_in
from tests.proxy.test_with_server import deployed
from tests.server.conftest import EOS, make_engine, scripted, serving
from tests.text.tiny import write_model_files

SAID = "a lazy dog"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    model = write_model_files(tmp_path_factory.mktemp("model"))
    return load_text(ModelConfig(model=str(model)))


@contextlib.asynccontextmanager
async def engine(text, said=SAID, max_model_len=2048, **settings):
    only = scripted(text, said, max_model_len=max_model_len)
    async with serving(text, only, **settings) as server:
        yield server.url


@contextlib.asynccontextmanager
async def pair(text, said=SAID, max_model_len=2048, **settings):
    token_ids = [*text.tokenizer.encode(said, add_special_tokens=False), EOS]
    script = {
        "next_token": lambda request, output: token_ids[len(output)],
        "max_model_len": max_model_len,
    }
    async with deployed(text, prefill=[script], decode=[script], **settings) as deployment:
        yield deployment.url


@pytest.fixture(params=[engine, pair])
async def url(text, request):
    async with request.param(text) as running:
        yield running


async def post(url: str, body: Any, **headers: str) -> tuple[int, bytes, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body, headers=named) as response,
    ):
        return response.status, await response.read(), response.headers


async def answer(url: str, body: Any, **headers: str) -> Any:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_openais_client_gets_a_response(url, openai):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        response = await client.responses.create(
            model="tiny", input="hi", instructions="Be brief.", extra_body={"stpo": "x"}
        )
        short = await client.responses.create(model="tiny", input=HI, max_output_tokens=2)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="tiny", input="hi", store=True)
        with pytest.raises(openai.BadRequestError) as empty:
            await client.responses.create(model="tiny", input=[])
    assert (response.output_text, response.status) == (SAID, "completed")
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens > 2
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (refused.value.param, empty.value.param) == ("store", "input")


async def test_openais_client_streams_a_response(url, openai):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        async with client.responses.stream(model="tiny", input="hi", temperature=0) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") > 2
    assert final.output_text == SAID
    assert final.usage.output_tokens == final.usage.total_tokens - final.usage.input_tokens


@pytest.mark.parametrize("deployment", [engine, pair])
async def test_a_limit_beyond_the_context_gives_way_and_a_prompt_beyond_it_does_not(
    text, deployment
):
    async with deployment(text, SAID * 99, max_model_len=256) as url:
        body = {"messages": HI, "max_tokens": 32_000}
        message = await answer(f"{url}/v1/messages", body)
        _, stream, _ = await post(f"{url}/v1/messages", body | {"stream": True})
        response = await answer(f"{url}/v1/responses", {"input": HI, "max_output_tokens": 32_000})
        long = [{"role": "user", "content": "hi " * 300}]
        status, refusal, _ = await post(f"{url}/v1/messages", body | {"messages": long})
    usage = message["usage"]
    assert (message["stop_reason"], sum(usage.values())) == ("max_tokens", 256)
    last = dict(events_in(stream))["message_delta"]
    assert (last["delta"]["stop_reason"], last["usage"]) == ("max_tokens", usage)
    cut = (response["status"], response["incomplete_details"], response["usage"]["total_tokens"])
    assert cut == ("incomplete", {"reason": "max_output_tokens"}, 256)
    assert (status, b"maximum context length is 256" in refusal) == (400, True)


async def test_a_message_is_answered_whole_and_as_a_stream(url):
    body = {"model": "tiny", "messages": HI, "max_tokens": 64, "system": "Be brief."}
    whole = await answer(f"{url}/v1/messages", body)
    assert whole["content"] == [{"type": "text", "text": SAID}]
    assert (whole["stop_reason"], whole["model"]) == ("end_turn", "tiny")
    status, data, headers = await post(f"{url}/v1/messages", body | {"stream": True})
    assert (status, headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
    events = events_in(data)
    assert events[0][1]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    pieces = [each["delta"]["text"] for name, each in events if name == "content_block_delta"]
    assert "".join(pieces) == SAID
    assert events[-2][1]["usage"] == whole["usage"]
    assert events[-1] == ("message_stop", {})


async def test_a_stop_sequence_is_told(url):
    body = {"messages": HI, "max_tokens": 64, "stop_sequences": ["zy"]}
    whole = await answer(f"{url}/v1/messages", body)
    assert whole["content"][0]["text"] == "a la"
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "zy")


async def test_tokens_are_counted_as_the_message_would_count_them(url):
    body = {"model": "tiny", "messages": HI, "system": "Be brief."}
    counted = await answer(f"{url}/v1/messages/count_tokens", body)
    whole = await answer(f"{url}/v1/messages", body | {"max_tokens": 4})
    assert counted == {"input_tokens": whole["usage"]["input_tokens"]}


async def test_what_is_wrong_is_said_in_anthropics_shape(url):
    for path, body in (
        ("/v1/messages", {"messages": HI}),
        ("/v1/messages", {"messages": [], "max_tokens": 4}),
        ("/v1/messages", {"messages": HI, "max_tokens": 4, "container": "c"}),
        ("/v1/messages/count_tokens", {"messages": 3}),
    ):
        status, data, _ = await post(url + path, body)
        assert status == 400, data
        assert data.startswith(b'{"type":"error","error":{"type":"invalid_request_error",'), data
    status, data, _ = await post(
        f"{url}/v1/messages", {"messages": HI, "max_tokens": 4, "model": "x"}
    )
    assert (status, b"not_found_error" in data) == (404, True)


async def test_fields_that_mean_nothing_are_named_in_a_header(url):
    thinking = {"type": "enabled", "budget_tokens": 9}
    body = {"messages": HI, "max_tokens": 4, "thinking": thinking, "context_management": {}}
    for stream in (False, True):
        _, _, headers = await post(f"{url}/v1/messages", body | {"stream": stream})
        assert headers[IGNORED_HEADER] == "context_management, thinking.budget_tokens"
    _, _, headers = await post(f"{url}/v1/responses", {"input": "hi", "modle": "tiny"})
    assert headers[IGNORED_HEADER] == "modle"
    _, _, headers = await post(f"{url}/v1/responses", {"input": "hi", "top_logprobs": 2})
    assert headers[IGNORED_HEADER] == "top_logprobs"
    reasoning = {"effort": "low", "summary": "auto", "generate_summary": None}
    _, _, headers = await post(f"{url}/v1/responses", {"input": "hi", "reasoning": reasoning})
    assert headers[IGNORED_HEADER] == "reasoning.summary"


@pytest.mark.parametrize("deployment", [engine, pair])
async def test_anthropics_clients_send_their_key_in_a_header_of_its_own(text, deployment):
    body = {"messages": HI, "max_tokens": 4}
    async with deployment(text, api_keys=("key",)) as url:
        right, _, _ = await post(f"{url}/v1/messages", body, X_Api_Key="key")
        wrong, data, _ = await post(f"{url}/v1/messages", body, X_Api_Key="other")
    assert (right, wrong) == (200, 401)
    assert b'"authentication_error"' in data


async def test_a_stream_of_a_dialect_survives_the_end_of_its_engine(text):
    """What the client has of it is swallowed where the chat is one, before it is translated."""
    plain = {"max_tokens": 24, "seed": 5}
    chat = {"messages": HI, "temperature": 0, **plain}
    async with deployed(text, prefill=[{}], decode=[{"die_after": 9}, {}]) as deployment:
        body = {"input": "hi", "max_output_tokens": 24, "seed": 5, "temperature": 0, "stream": True}
        _, data, _ = await post(f"{deployment.url}/v1/responses", body)
        expected = await answer(f"{deployment.url}/v1/chat/completions", chat)
    events = events_in(data)
    deltas = [each["delta"] for name, each in events if name == "response.output_text.delta"]
    assert "".join(deltas) == expected["choices"][0]["message"]["content"]
    assert events[-1][0] == "response.incomplete"
    assert [each["sequence_number"] for _, each in events] == list(range(len(events)))


async def test_a_stream_that_cannot_go_on_ends_with_an_error_of_its_dialect(text):
    async with serving(text, make_engine(text, die_after=4)) as server:
        messages = {"messages": HI, "max_tokens": 24, "stream": True}
        _, data, _ = await post(f"{server.url}/v1/messages", messages)
    assert events_in(data)[-1][0] == "error"
    async with serving(text, make_engine(text, die_after=4)) as server:
        _, data, _ = await post(f"{server.url}/v1/responses", {"input": "hi", "stream": True})
    assert events_in(data)[-1][0] == "response.failed"


@pytest.mark.parametrize("deployment", [engine, pair])
async def test_openais_client_is_called_with_a_text(text, deployment, openai):
    style = AnswerStyle(calls=TOOL_PARSERS["hermes"])
    said = '<tool_call>\n{"name": "run", "arguments": {"input": "a\\n\\"b\\""}}\n</tool_call>'
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: /[a-z"\\n]+/'}
    tools = [{"type": "custom", "name": "run", "format": form}]
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "custom", "name": "run"}],
    }
    asked = {"model": "tiny", "input": "hi", "tools": tools, "tool_choice": allowed}
    async with (
        deployment(replace(text, answers=style), said) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            last = await stream.get_final_response()
    for response in (whole, last):
        [call] = response.output
        assert (call.type, call.name, call.input) == ("custom_tool_call", "run", 'a\n"b"')
    deltas = [each.delta for each in events if each.type == "response.custom_tool_call_input.delta"]
    [done] = [each for each in events if each.type == "response.custom_tool_call_input.done"]
    assert done.input == "".join(deltas) == 'a\n"b"'
    assert len(deltas) > 1


@pytest.mark.parametrize("deployment", [engine, pair])
async def test_log_probabilities_of_a_response_are_its_texts_whole_and_streamed(text, deployment):
    style = AnswerStyle(
        calls=TOOL_PARSERS["hermes"],
        reasoning=REASONING_PARSERS["qwen3"],
        vocabulary={text.tokenizer.encode("<think>", add_special_tokens=False)[-1]: "<think>"},
    )
    body = {
        "input": "hi",
        "tools": [{"type": "function", "name": "see", "parameters": {"type": "object"}}],
        "include": ["message.output_text.logprobs"],
    }
    said = f"<think>a fox</think>the dog{CALLED} jumps"
    async with deployment(replace(text, answers=style), said) as url:
        whole = (await answer(f"{url}/v1/responses", body))["output"]
        _, stream, _ = await post(f"{url}/v1/responses", body | {"stream": True})
    streamed = events_in(stream)[-1][1]["response"]["output"]
    rows = [
        [item["content"][0]["logprobs"] for item in items if item["type"] == "message"]
        for items in (whole, streamed)
    ]
    assert rows[0] == rows[1]
    texts = ["".join(row["token"] for row in each) for each in rows[0]]
    assert texts[0].startswith("the dog")
    assert texts[1] == " jumps</s>"


CALLED = '<tool_call>\n{"name": "see", "arguments": {}}\n</tool_call>'
MIXED = f"the fox{CALLED} jumps {CALLED}over <tool_call>no call</tool_call> the dog"
ORDERED = ["the fox", "see", " jumps", "see", " over <tool_call>no call</tool_call> the dog"]


@pytest.mark.parametrize("deployment", [engine, pair])
async def test_text_between_calls_and_behind_them_stands_there_whole_and_streamed(text, deployment):
    style = AnswerStyle(calls=TOOL_PARSERS["hermes"], reasoning=None, vocabulary={}, tokens={})
    schema = {"type": "object"}
    function = {"type": "function", "name": "see", "parameters": schema}
    response = {"input": "hi", "tools": [function]}
    tools = [{"name": "see", "input_schema": schema}]
    message = {"messages": HI, "max_tokens": 300, "tools": tools}
    async with deployment(replace(text, answers=style), MIXED) as url:
        whole = await answer(f"{url}/v1/responses", response)
        _, stream, _ = await post(f"{url}/v1/responses", response | {"stream": True})
        blocks = (await answer(f"{url}/v1/messages", message))["content"]
        _, events, _ = await post(f"{url}/v1/messages", message | {"stream": True})
    streamed = events_in(stream)[-1][1]["response"]
    for items in (whole["output"], streamed["output"]):
        said = [item.get("name") or item["content"][0]["text"] for item in items]
        assert said == ORDERED
    assert [block.get("name") or block["text"] for block in blocks] == ORDERED
    told = [""] * len(ORDERED)
    for name, data in events_in(events):
        if name == "content_block_start":
            told[data["index"]] = data["content_block"].get("name", "")
        elif name == "content_block_delta":
            told[data["index"]] += data["delta"].get("text", "")
    assert told == ORDERED
