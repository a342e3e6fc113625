"""What clients are told of engines that fail: what happened, never where or in which words."""

from __future__ import annotations

import pytest
from aiohttp import web

from tests.proxy.conftest import until
from tests.proxy.hooks import DONE, drops
from tests.proxy.scripted import ScriptedEngine, sse

SECRET = "http://10.1.2.3:8200 failed at /srv/engine.py"


ERROR_EVENT = {"error": {"message": SECRET, "type": "server_error", "param": None, "code": "x"}}


def answers(status: int, body: bytes, content_type: str = "text/plain"):
    async def hook(call, request) -> web.Response:
        return web.Response(status=status, body=body, content_type=content_type)

    return hook


HOOKS = {
    "500": answers(500, SECRET.encode()),
    "500 in shape": answers(500, b'{"error":{"message":"' + SECRET.encode() + b'"}}'),
    "503": answers(503, SECRET.encode()),
    "404 of another server": answers(404, b"<html>" + SECRET.encode()),
    "504": answers(504, b'{"error":{"code":"deadline_exceeded","message":"%b"}}' % SECRET.encode()),
    "kv": answers(503, b'{"error":{"code":"kv_transfer_failed","message":"%b"}}' % SECRET.encode()),
    "garbled": answers(200, b"garbage " + SECRET.encode(), "application/json"),
    "another type": answers(200, SECRET.encode(), "text/html"),
    "breaks off": drops(after=b"data: "),
    "error event": drops(after=sse(ERROR_EVENT) + DONE),
}


@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS.keys())
async def test_no_error_names_an_engine_or_repeats_its_words(make_stack, hook, stream):
    engines = [ScriptedEngine("prefill"), ScriptedEngine("decode")]
    for engine in engines:
        engine.hook = hook
    stack = await make_stack(engines[:1], engines[1:], retry_max_retries=1)
    async with stack.post({"prompt": "hi", "max_tokens": 4, "stream": stream}) as response:
        told = await response.text()
        headers = str(response.headers)
    assert '"error"' in told
    for word in ("10.1.2.3", "/srv", *(engine.url for engine in engines)):
        assert word not in told
        assert word not in headers


async def test_an_operator_finds_in_the_log_what_a_client_is_not_told(make_stack, logged):
    engine = ScriptedEngine("decode")
    engine.hook = answers(500, SECRET.encode())
    stack = await make_stack([], [engine], retry_max_retries=0)
    assert (await stack.refused(headers={"X-Request-Id": "mine"}))[0] == 502
    (line,) = (line for line in logged if line.startswith("leg failed"))
    assert engine.url in line
    assert SECRET in line
    assert "mine" in line


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/readyz"])
async def test_engines_that_are_away_are_told_by_number(make_stack, path):
    engines = [ScriptedEngine("prefill"), ScriptedEngine("decode")]
    stack = await make_stack(engines[:1], engines[1:], queue_timeout_s=0.1)
    for engine in engines:
        await engine.stop()
        backend = stack.proxy.backends.get(engine.url)
        await until(lambda backend=backend: not backend.available)
    method = "GET" if path == "/readyz" else "POST"
    async with stack.client.request(method, stack.url + path, json={"prompt": "x"}) as response:
        told = await response.text()
    assert response.status == 503
    assert "127.0.0.1" not in told
    assert "(1 known)" in told
