"""Requests that engines refuse: who asks for nonsense takes nothing from anybody else."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import web

from pdserve.config.http import KVTransfer
from tests.proxy.conftest import until
from tests.proxy.hooks import REFUSAL, answers, ask, drops, kv_failed, legs
from tests.proxy.scripted import ScriptedEngine, text_of
from tests.proxy.test_disconnect import assert_nothing_held

NEVER_AGAIN = {"health_check_interval_s": 600.0, "cb_failure_threshold": 1, "cb_timeout_s": 600.0}
"""No health check uses a connection, and the first failure opens a breaker."""


@pytest.fixture
def prefill() -> ScriptedEngine:
    return ScriptedEngine("prefill", engine_id="p", can_push=True)


@pytest.fixture
def decode() -> ScriptedEngine:
    return ScriptedEngine("decode", engine_id="d", can_push=True)


async def refused(stack, **more) -> None:
    async with stack.post({"prompt": "hi", "seed": 3, "temperature": -1, **more}) as response:
        assert response.status == 400, await response.text()
        assert await response.read() == REFUSAL


async def failures(stack) -> dict[str, float]:
    metrics = await stack.metrics()
    return {k: v for k, v in metrics.items() if k.startswith("pdserve_leg_failures_total") and v}


async def assert_nobody_is_blamed(stack) -> None:
    assert await failures(stack) == {}
    metrics = await stack.metrics()
    for role in ("prefill", "decode"):
        assert metrics[f'pdserve_backends{{role="{role}",state="breaker_open"}}'] == 0
    assert metrics["pdserve_open_edges"] == 0


def refuses_unseen(engine: ScriptedEngine, told: asyncio.Event):
    """A hook that refuses once `told` is set, and never sees that its peer has hung up."""

    async def hook(call, request):
        if "temperature" not in call.body:
            return None
        request.transport.pause_reading()
        await told.wait()
        return web.Response(status=400, body=REFUSAL, content_type="application/json")

    return hook


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_a_leg_that_was_given_up_leaves_its_connection_to_nobody(
    make_stack, prefill, decode, first
):
    """The slower engine's refusal comes over a connection that was half closed before."""
    quick, slow = (prefill, decode) if first == "prefill" else (decode, prefill)
    told = asyncio.Event()
    quick.hook = answers(400, REFUSAL, times=1)
    slow.hook = refuses_unseen(slow, told)
    stack = await make_stack([prefill], [decode], **NEVER_AGAIN)
    bad = asyncio.create_task(refused(stack))
    await until(lambda: len(slow.calls) == 1)
    await bad
    told.set()
    await assert_nothing_held(stack)
    assert await ask(stack, stream=True, max_tokens=4) == text_of(3, 4)
    await assert_nobody_is_blamed(stack)
    assert len(slow.peers) == 2, "a half closed connection carried a request"


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", [KVTransfer.PULL, KVTransfer.PUSH])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_opens_no_breaker_and_engines_keep_serving(
    make_stack, prefill, decode, mode, stream
):
    async def refuses(call, request):
        if "temperature" not in call.body:
            return None
        return web.Response(status=400, body=REFUSAL, content_type="application/json")

    prefill.hook = decode.hook = refuses
    stack = await make_stack([prefill], [decode], kv_mode=mode, **NEVER_AGAIN)
    for _ in range(3):
        refusals = [refused(stack, stream=stream) for _ in range(8)]
        *_, text = await asyncio.gather(*refusals, ask(stack, stream=stream, max_tokens=4))
        assert text == text_of(3, 4)
    await assert_nobody_is_blamed(stack)
    await assert_nothing_held(stack)


async def impatient(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An engine that refuses every generation and hangs up before it has read the body."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
        return
    status, body = (400, REFUSAL) if head.startswith(b"POST") else (200, b'{"data":[{"id":"m"}]}')
    writer.write(
        b"HTTP/1.1 %d -\r\nContent-Type: application/json\r\n" % status
        + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        + body
    )
    await writer.drain()
    writer.close()


async def test_an_engine_that_refuses_before_it_has_the_body_is_not_blamed(make_stack):
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    async with await asyncio.start_server(impatient, sock=listener):
        engine = ScriptedEngine("decode")
        engine.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        stack = await make_stack([], [engine], **NEVER_AGAIN)
        for _ in range(20):
            await refused(stack, prompt="x" * 1_000_000)
        await assert_nobody_is_blamed(stack)


async def test_what_is_held_against_an_engine_is_counted_though_nobody_waits_for_it(
    make_stack, prefill, decode, caplog
):
    """The receiver of a push breaks down, and the request is then refused."""
    broken = asyncio.Event()

    async def refuses_late(call, request):
        await broken.wait()
        return web.Response(status=400, body=REFUSAL, content_type="application/json")

    prefill.hook = refuses_late
    decode.hook = drops()
    stack = await make_stack([prefill], [decode], **NEVER_AGAIN)
    bad = asyncio.create_task(refused(stack))
    backend = stack.proxy.backends.get(decode.url)
    await until(lambda: len(decode.calls) == 1 and backend.in_flight == 0)
    broken.set()
    await bad
    assert await failures(stack) == {
        'pdserve_leg_failures_total{leg="decode",reason="dropped"}': 1.0
    }
    assert "leg failed leg=decode" in caplog.text


async def test_kv_that_did_not_come_because_the_request_was_refused_speaks_against_nobody(
    make_stack, prefill, decode
):
    prefill.hook = answers(400, REFUSAL)
    decode.hook = kv_failed()
    stack = await make_stack([prefill], [decode], **NEVER_AGAIN)
    for _ in range(5):
        await refused(stack)
    assert legs([prefill]) == ["prefill"] * 5
    await assert_nobody_is_blamed(stack)


async def test_legs_that_an_engine_took_along_in_its_death_do_not_speak_against_its_next_life(
    make_stack,
):
    engine = ScriptedEngine("decode")
    engine.gate.clear()
    stack = await make_stack(
        [], [engine], cb_failure_threshold=1, cb_timeout_s=600.0, retry_max_retries=1
    )
    streams = [asyncio.create_task(ask(stack, stream=True, max_tokens=4)) for _ in range(3)]
    await until(lambda: len(engine.calls) == 3)
    engine.incarnation = "life-2"
    await until(lambda: engine.ended["cancelled"] == 3)
    engine.gate.set()
    assert await asyncio.gather(*streams) == [text_of(3, 4)] * 3
    await stack.stream()
    assert sum((await failures(stack)).values()) == 3
    metrics = await stack.metrics()
    assert metrics['pdserve_backends{role="decode",state="breaker_open"}'] == 0
