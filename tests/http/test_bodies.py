"""The memory of request bodies: paid before it is used, paid back in every case."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import msgspec
import pytest
from aiohttp import web

from pdserve.config.http import HttpLimits
from pdserve.errors import ConfigError
from pdserve.http.bodies import COPIES
from pdserve.http.connection import ClientConnection
from pdserve.proxy import backends
from tests.http.conftest import connected
from tests.proxy.conftest import make_stack, until
from tests.proxy.scripted import ScriptedEngine

__all__ = ["make_stack"]

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LIMITS = HttpLimits(max_body_bytes=10_000, body_memory_bytes=60_000)


def completion(num_bytes: int) -> bytes:
    body = msgspec.json.encode({"max_tokens": 1, "seed": 3, "prompt": ""})
    return body[:-2] + b"x" * (num_bytes - len(body)) + body[-2:]


def post(num_bytes: int, sent: int | None = None) -> bytes:
    """A request with a body of that length, of which so many bytes come."""
    head = HEAD + f"Content-Length: {num_bytes}\r\n\r\n".encode()
    return head + completion(num_bytes)[:sent]


def held_engine() -> tuple[ScriptedEngine, asyncio.Event]:
    """An engine that answers nothing before the event is set."""
    engine, go_on = ScriptedEngine("decode"), asyncio.Event()

    async def hold(call, request) -> None:
        await go_on.wait()

    engine.hook = hold
    return engine, go_on


async def test_bodies_that_do_not_fit_are_a_429_at_once_and_small_ones_still_get_through(
    make_stack,
):
    engine, go_on = held_engine()
    stack = await make_stack([], [engine], limits=LIMITS)
    bodies = stack.proxy.bodies
    async with contextlib.AsyncExitStack() as clients:
        wires = []
        for _ in range(2):  # the budget has room for one of them, and as much beside it
            wires.append(await clients.enter_async_context(connected(stack.url)))
            wires[-1].send(post(7_000))
            if len(wires) == 1:
                await until(lambda: len(engine.calls) == 1)
        status, error = await wires[1].refusal()
        assert (status, error["code"]) == (429, "overloaded")
        assert bodies.num_held_bytes == COPIES * 7_000
        small = await clients.enter_async_context(connected(stack.url))
        small.send(post(200))
        await until(lambda: len(engine.calls) == 2)
        go_on.set()
        assert (await wires[0].answer())[0] == (await small.answer())[0] == 200
    await until(lambda: bodies.num_held_bytes == 0)


async def test_a_body_pays_before_it_comes(make_stack):
    """Else many that come slowly would all begin, and none would end."""
    stack = await make_stack([], [ScriptedEngine("decode")], limits=LIMITS)
    bodies = stack.proxy.bodies
    async with connected(stack.url) as slow, connected(stack.url) as late:
        slow.send(post(8_000, sent=10))
        await until(lambda: bodies.num_held_bytes == COPIES * 8_000)
        late.send(post(8_000, sent=0))
        status, headers, _ = await late.answer()
        assert status == 429
        assert int(headers["retry-after"]) >= 1
    await until(lambda: bodies.num_held_bytes == 0)


async def test_a_body_of_unknown_length_pays_as_it_grows(make_stack):
    stack = await make_stack([], [ScriptedEngine("decode")], limits=LIMITS)
    bodies = stack.proxy.bodies
    async with connected(stack.url) as wire:
        wire.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n3e8\r\n" + b" " * 1000 + b"\r\n")
        await until(lambda: bodies.num_held_bytes == COPIES * 1000)
    await until(lambda: bodies.num_held_bytes == 0)


@pytest.mark.parametrize("body", [b"no json", b"{}", b"[" * 2000])
async def test_a_refused_request_pays_back(make_stack, body, monkeypatch):
    monkeypatch.setattr(backends, "STARTUP_S", 0.0)
    stack = await make_stack([], [], limits=LIMITS)
    async with stack.client.post(f"{stack.url}/v1/completions", data=body) as response:
        assert response.status >= 400
    assert stack.proxy.bodies.num_held_bytes == 0


async def test_no_body_is_read_for_which_the_queue_has_no_place(make_stack):
    engine, go_on = held_engine()
    stack = await make_stack([], [engine], max_concurrent_requests=1, queue_size=0)
    async with connected(stack.url) as first, connected(stack.url) as second:
        first.send(post(100))
        await until(lambda: len(engine.calls) == 1)
        second.send(post(100, sent=0))
        assert (await second.refusal())[0] == 429
        go_on.set()
        assert (await first.answer())[0] == 200


async def test_the_body_of_a_request_that_is_over_is_not_kept_with_its_connection(make_stack):
    stack = await make_stack([], [ScriptedEngine("decode")])
    async with connected(stack.url) as wire:
        wire.send(post(1_000_000))
        assert (await wire.answer())[0] == 200
        assert stack.proxy.bodies.num_held_bytes == 0
        # By type: a class that is asked for may be another's lazy import.
        kept = [each for each in gc.get_objects() if issubclass(type(each), web.BaseRequest)]
        ours = [each for each in kept if isinstance(each.protocol, ClientConnection)]
        assert not any(each._read_bytes for each in ours)


def test_memory_for_less_than_two_bodies_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match="six times --max-body-bytes"):
        HttpLimits(max_body_bytes=100, body_memory_bytes=599)


def test_a_larger_limit_brings_the_memory_for_it():
    assert HttpLimits(max_body_bytes=1 << 30).body_memory == 8 << 30
