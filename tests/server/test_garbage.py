"""Whatever a client sends, it gets an answer or a 4xx that says what is wrong; never a 500."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.http.dialect_bodies import ResponsesRequest
from pdserve.http.pooling_bodies import EmbeddingRequest, RerankRequest
from pdserve.http.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pdserve.text.tokenizer import Tokenizer
from pdserve.wire.core_messages import Add
from tests.server.conftest import make_engine, serving

PATHS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "The", "max_tokens": 2}),
    "/v1/chat/completions": (
        ChatRequest,
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    ),
    "/v1/responses": (ResponsesRequest, {"input": "hi", "max_output_tokens": 2}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "The"}),
    "/v1/rerank": (RerankRequest, {"query": "The", "documents": ["dog"]}),
    "/tokenize": (TokenizeRequest, {"prompt": "The"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [60]}),
}
numbers = (
    st.integers(-(2**70), 2**70)
    | st.sampled_from([0, 1, -1, 255, 256, 2**31, 2**63 - 1, 2**63, 2**64])
    | st.floats(allow_nan=False, allow_infinity=False)
)
texts = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(["", "12", "text", "a"])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(texts, inner, max_size=3)
        | st.fixed_dictionaries(
            {},
            optional={
                "role": inner,
                "content": inner,
                "type": inner,
                "text": inner,
                "include_usage": inner,
                "do_remote_decode": inner,
                "do_remote_prefill": inner,
                "pdserve": inner,
                "handoffs": inner,
                "seed": inner,
                "created": inner,
            },
        )
    ),
    max_leaves=8,
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(sorted(PATHS)))
    kind, body = PATHS[path]
    names = st.sampled_from(kind.__struct_fields__)
    return path, body | draw(st.dictionaries(names, values, min_size=1, max_size=2))


async def post(url: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=body, headers=headers) as response,
    ):
        return response.status, await response.read()


async def assert_answered_or_refused(url: str, body: bytes, **headers: str) -> dict[str, Any]:
    """Return the error object, or an empty one with a 200."""
    status, answer = await post(url, body, **headers)
    if status == 200:
        assert b'"error":{' not in answer, answer
        return {}
    error = json.loads(answer)["error"]
    assert 400 <= status < 500, (status, error)
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(request=bodies())
def test_any_value_of_any_field_is_answered_or_named(text, request):
    path, body = request

    async def ask() -> None:
        engine = make_engine(text)
        async with serving(text, engine) as server:
            error = await assert_answered_or_refused(server.url + path, json.dumps(body).encode())
        if error and error["code"] != "model_not_found":
            assert error["param"] in PATHS[path][0].__struct_fields__, error
        for submitted in engine.requests:  # what a real engine would have to be sent
            msgspec.msgpack.encode(Add(submitted))

    asyncio.run(ask())


@pytest.mark.parametrize("path", sorted(PATHS))
@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\xff", "messages": "\xff", "tokens": "\xff"}',
        b'{"model": "\xff"}',
        b'{"\xff": 1',
        b'{"unknown": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"chat_template_kwargs": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
        b'{"model": "\\ud800"}',
        b'{"\\ud800": "\\ud800"}',
        b"\x1f\x8b\x00",
        b"prompt=The",
        b"null",
    ],
    ids=range(10),
)
@pytest.mark.slow
@pytest.mark.covering(1)
async def test_a_body_that_is_garbage_is_refused(server, path, body):
    error = await assert_answered_or_refused(server.url + path, body)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_is_not_in_its_encoding_is_refused(server, encoding):
    url = server.url + "/v1/completions"
    error = await assert_answered_or_refused(url, b"no gzip", **{"Content-Encoding": encoding})
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"temperature": 1e39}, "temperature"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty"),
        ({"top_k": 2**64}, "top_k"),
        ({"priority": 2**64}, "priority"),
    ],
)
async def test_what_no_engine_can_be_sent_is_named(server, body, field):
    status, error = await server.refused("/v1/completions", {"prompt": "The"} | body)
    assert (status, error["param"]) == (400, field)


@pytest.mark.parametrize(
    ("body", "field"),
    [({"prompt": ["a"] * 1025}, "prompt"), ({"prompt": [[60]] * 600, "n": 2}, "n")],
)
async def test_too_many_choices_are_refused_before_any_is_tokenized(
    server, monkeypatch, body, field
):
    monkeypatch.setattr(Tokenizer, "encode", None)
    status, error = await server.refused("/v1/completions", body)
    assert (status, error["param"]) == (400, field)


async def test_many_prompts_that_are_long_together_do_not_hold_up_the_loop(server, monkeypatch):
    threads = set()
    encode = Tokenizer.encode

    def noting(*args: Any, **kwargs: Any) -> list[int]:
        threads.add(threading.current_thread())
        return encode(*args, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode", noting)
    await server.ok("/v1/completions", {"prompt": ["The dog " * 100] * 50, "max_tokens": 1})
    assert threading.current_thread() not in threads


async def test_a_client_that_leaves_while_it_sends_is_no_failure(server, caplog):
    host, port = server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await writer.wait_closed()
    await asyncio.sleep(0.05)
    assert "Traceback" not in caplog.text


async def test_an_api_key_that_is_not_utf8_is_refused(text):
    async with serving(text, make_engine(text), api_keys=("key",), secret="s") as server:
        host, port = server.url.removeprefix("http://").split(":")
        for line, header in (
            ("POST /v1/completions", "Authorization: Bearer "),
            ("POST /pdserve/release", "Content-Type: application/json\r\nX-Pdserve-Proof: "),
        ):
            head = (
                f"{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n{header}"
            )
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.encode() + b"\xff\r\n\r\n")
            assert b" 401 " in (await reader.read()).splitlines()[0]
            writer.close()
