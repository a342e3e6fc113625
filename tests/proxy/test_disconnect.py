"""A client may leave at any moment: both legs end, every lease is given back, at once."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest
from aiohttp import web

from pdserve.config.http import HttpLimits
from pdserve.proxy.client import EngineHttp
from pdserve.proxy.leg import ABANDON_TIMEOUT_S, HANG_UP_TIMEOUT_S
from pdserve.proxy.legs import Legs
from tests.proxy.conftest import until
from tests.proxy.hooks import ask, first_chunk, hangs, legs, streaming
from tests.proxy.scripted import LEASES, ScriptedEngine, sse, text_in, text_of, word


@pytest.fixture(params=[False, True], ids=["pull", "push"])
def can_push(request) -> bool:
    return request.param


@pytest.fixture
def prefill(can_push) -> ScriptedEngine:
    return ScriptedEngine("prefill", engine_id="p", can_push=can_push)


@pytest.fixture
def decode(can_push) -> ScriptedEngine:
    return ScriptedEngine("decode", engine_id="d", can_push=can_push)


async def leave(request: asyncio.Task) -> None:
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


async def assert_nothing_held(stack) -> None:
    await until(
        lambda: (
            stack.proxy.admission.num_running == 0
            and stack.proxy.num_background_tasks == 0
            and all(backend.in_flight == 0 for backend in stack.proxy.backends)
            and not any(engine.leased for engine in stack.engines)
        ),
    )
    assert (await stack.get("/debug/requests"))["running"] == []


async def disconnects(stack, stage: str) -> float:
    return (await stack.metrics())[f'pdserve_client_disconnects_total{{stage="{stage}"}}']


async def test_while_it_waits_for_a_place(make_stack, prefill, decode):
    prefill.gate.clear()
    stack = await make_stack([prefill], [decode], max_concurrent_requests=1)
    running = asyncio.create_task(stack.stream())
    await until(lambda: stack.proxy.admission.num_running == 1)
    queued = asyncio.create_task(stack.stream())
    await until(lambda: stack.proxy.admission.num_waiting == 1)
    await leave(queued)
    await until(lambda: stack.proxy.admission.num_waiting == 0)
    prefill.gate.set()
    await running
    assert len(prefill.calls) == 1
    assert await disconnects(stack, "queued") == 1
    await assert_nothing_held(stack)


@pytest.mark.parametrize("stream", [True, False])
async def test_while_the_prefill_engine_works(make_stack, prefill, decode, stream):
    prefill.hook = hangs()
    stack = await make_stack([prefill], [decode])

    request = asyncio.create_task(ask(stack, stream=stream))
    await until(lambda: len(prefill.calls) == 1)
    await leave(request)
    await until(lambda: prefill.ended["cancelled"] == 1, ABANDON_TIMEOUT_S / 2)
    await until(lambda: decode.ended["cancelled"] == len(decode.calls))
    assert await disconnects(stack, "prefill") == 1
    await assert_nothing_held(stack)


@pytest.mark.parametrize("stream", [True, False])
async def test_while_a_handoff_is_on_its_way(make_stack, prefill, decode, stream):
    """The prefill engine hands over before it learns that nobody wants it any more."""
    left = asyncio.Event()

    async def deaf(call, request):
        request.transport.pause_reading()  # the end of the connection goes unseen
        await left.wait()
        params = prefill.handoff(call)
        if not stream:
            request.transport.resume_reading()
            return web.json_response({"choices": [], "kv_transfer_params": params})
        response = await streaming(request)
        await response.write(sse({"pdserve_handoff": params}) + b"data: [DONE]\n\n")
        request.transport.resume_reading()
        return response

    prefill.hook = deaf
    stack = await make_stack([prefill], [decode])

    request = asyncio.create_task(ask(stack, stream=stream))
    await until(lambda: len(prefill.calls) == 1)
    await leave(request)
    await until(lambda: stack.proxy.admission.num_running == 0)
    left.set()
    await until(lambda: len(prefill.released) == 1)
    await assert_nothing_held(stack)


async def test_between_the_first_token_and_its_handoff(make_stack, prefill, decode):
    left = asyncio.Event()

    async def slow(call, request):
        response = await streaming(request)
        await response.write(prefill.chunk(call, word(3, 0)))
        request.transport.pause_reading()
        await left.wait()
        await response.write(sse({"pdserve_handoff": prefill.handoff(call)}))
        request.transport.resume_reading()
        return response

    prefill.hook = slow
    stack = await make_stack([prefill], [decode])
    async with stack.post({"prompt": "hi", "stream": True}) as response:
        await response.content.readany()
    await until(lambda: stack.proxy.admission.num_running == 0)
    left.set()
    await until(lambda: len(prefill.released) == 1)
    await assert_nothing_held(stack)


@pytest.mark.slow
async def test_while_the_first_token_is_still_being_written(make_stack, prefill, decode):
    """A client that does not read: its first token waits, and so does the handoff in hand."""

    async def verbose(call, request):
        response = await streaming(request)
        handoff = sse({"pdserve_handoff": prefill.handoff(call)})
        await response.write(prefill.chunk(call, "x" * (12 << 20)) + handoff)
        return response

    prefill.hook = verbose
    stack = await make_stack([prefill], [decode])
    async with stack.post({"prompt": "hi", "stream": True}) as response:
        assert response.status == 200
        await asyncio.sleep(0.1)
        assert "decode" not in legs([decode])
    await until(lambda: len(prefill.released) == 1)
    await assert_nothing_held(stack)


@pytest.mark.slow
async def test_a_client_that_reads_too_slowly_is_cut_before_its_engine_hangs_up(make_stack, decode):
    """It always reads something, so that the kernel does not end its connection."""

    async def endless(call, request):
        response = await streaming(request)
        while True:
            await response.write(decode.chunk(call, "x" * (1 << 16)))

    decode.hook = endless
    stack = await make_stack([], [decode], limits=HttpLimits(send_timeout_s=0.5))
    host, port = stack.url.removeprefix("http://").split(":")
    loop, asked = asyncio.get_running_loop(), b'{"prompt": "hi", "stream": true}'
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(sock, (host, int(port)))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        await loop.sock_sendall(sock, head + b"Content-Length: %d\r\n\r\n" % len(asked) + asked)

        async def drip() -> None:
            while await loop.sock_recv(sock, 1024):
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        await until(lambda: len(decode.calls) == 1)
        await until(lambda: stack.proxy.admission.num_running == 0)
        assert not dripping.done()
        await leave(dripping)
    assert await disconnects(stack, "local") == 1
    await assert_nothing_held(stack)


async def test_while_the_decode_engine_reads_the_kv(make_stack, prefill, decode):
    decode.hook = hangs()
    stack = await make_stack([prefill], [decode])
    async with stack.post({"prompt": "hi", "stream": True}) as response:
        await response.content.readany()
        await until(lambda: len(decode.calls) == 1)
        await stack.until_stages("transfer")
    await until(lambda: decode.ended["cancelled"] == 1 and len(prefill.released) == 1)
    assert await disconnects(stack, "transfer") == 1
    await assert_nothing_held(stack)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_lease_is_given_back_when_the_decode_engine_has_ended(
    make_stack, prefill, decode, stream
):
    """Else it may see its KV vanish before it hears that nobody wants it."""
    slow = asyncio.Event()
    order = []

    async def hang(call, request):
        request.transport.pause_reading()  # the end of the connection goes unseen
        await slow.wait()
        request.transport.resume_reading()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            order.extend(["decode ended", *prefill.released])
            raise

    decode.hook = hang
    stack = await make_stack([prefill], [decode])

    request = asyncio.create_task(ask(stack, stream=stream))
    await until(lambda: len(decode.calls) == 1)
    await stack.until_stages("transfer")
    await leave(request)
    await until(lambda: stack.proxy.admission.num_running == 0)
    await asyncio.sleep(HANG_UP_TIMEOUT_S / 4)
    slow.set()
    await until(lambda: len(prefill.released) == 1)
    assert order == ["decode ended"]
    await assert_nothing_held(stack)


@pytest.mark.slow
async def test_a_decode_engine_that_does_not_end_keeps_no_lease(make_stack, prefill, decode):
    never = asyncio.Event()

    async def deaf(call, request):
        request.transport.pause_reading()
        await never.wait()

    decode.hook = deaf
    stack = await make_stack([prefill], [decode])
    async with stack.post({"prompt": "hi", "stream": True}) as response:
        await response.content.readany()
        await until(lambda: len(decode.calls) == 1)
    await assert_nothing_held(stack)
    assert len(prefill.released) == 1


@pytest.mark.slow
async def test_one_that_leaves_late_does_not_touch_a_connection_that_serves_another(
    make_stack, prefill, decode
):
    """Its answer is complete, so the connection it came over is already in use again."""
    prefill.finish_at_prefill = True
    first = True

    async def verbose(call, request):
        nonlocal first
        if not first:
            return None
        first = False
        response = await streaming(request)
        text = "x" * (12 << 20)
        await response.write(prefill.chunk(call, text, "length") + b"data: [DONE]\n\n")
        return response

    prefill.hook = verbose
    prefill.token_delay_s = 0.3
    # Health checks would use other connections.
    stack = await make_stack([prefill], [decode], health_check_interval_s=60.0)
    async with stack.post({"prompt": "hi", "stream": True}) as response:
        assert response.status == 200
        await asyncio.sleep(0.1)  # its one event does not fit into the socket
        other = asyncio.create_task(stack.stream())
        await until(lambda: len(prefill.calls) == 2)
    assert text_in(await other) == word(3, 0)
    assert prefill.ended["cancelled"] == 0
    assert len(prefill.peers) == 1, "the two did not share a connection"
    await assert_nothing_held(stack)


async def test_while_its_body_is_on_the_way(make_stack, prefill, decode, caplog):
    stack = await make_stack([prefill], [decode])
    host, port = stack.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    await stack.until_stages("queued")
    writer.close()
    await writer.wait_closed()
    await stack.until_stages()
    assert await disconnects(stack, "queued") == 1
    assert "Traceback" not in caplog.text
    await assert_nothing_held(stack)


async def test_in_the_middle_of_the_stream(make_stack, prefill, decode):
    decode.gate.clear()
    stack = await make_stack([prefill], [decode])
    async with stack.post({"prompt": "hi", "seed": 3, "stream": True}) as response:
        received = b""
        while word(3, 1).encode() not in received:
            received += await response.content.readany()
    await until(lambda: decode.ended["cancelled"] == 1)
    assert await disconnects(stack, "decode") == 1
    await assert_nothing_held(stack)


async def test_while_one_engine_does_everything(make_stack, decode):
    decode.gate.clear()
    stack = await make_stack([], [decode])
    async with stack.post({"prompt": "hi", "stream": True}) as response:
        await response.content.readany()
    await until(lambda: decode.ended["cancelled"] == 1)
    assert await disconnects(stack, "local") == 1
    await assert_nothing_held(stack)


@pytest.mark.slow
async def test_a_release_is_signed_and_tried_again(make_stack, prefill, decode):
    prefill.secret = "s3cret"
    prefill.failing_releases = 2

    decode.hook = hangs()
    stack = await make_stack([prefill], [decode], secret="s3cret")
    async with stack.post({"prompt": "hi", "stream": True}) as response:
        await response.content.readany()
        await until(lambda: len(decode.calls) == 1)
    await until(lambda: len(prefill.released) == 1)
    assert prefill.failing_releases == 0
    await assert_nothing_held(stack)


async def test_the_leases_of_many_choices_are_given_back_over_one_connection(started):
    nonces = tuple(f"lease-{index}" for index in range(1024))
    prefill = await started("prefill")
    prefill.leased.update(nonces)
    http = EngineHttp(secret="")
    http.release(prefill.url, nonces)
    await http.close(timeout_s=30.0)
    assert prefill.released == list(nonces)
    assert len(prefill.release_peers) == 1


@pytest.mark.slow
async def test_leases_are_given_back_before_the_proxy_ends(make_stack, prefill, decode):
    decode.hook = hangs()
    prefill.failing_releases = 1
    stack = await make_stack([prefill], [decode], shutdown_timeout_s=0.05)
    request = asyncio.create_task(stack.stream())
    await until(lambda: len(decode.calls) == 1)
    await stack.until_stages("transfer")
    await stack.proxy.stop()
    assert not prefill.leased
    await asyncio.gather(request, return_exceptions=True)


@pytest.mark.slow
async def test_a_hundred_streams_cut_at_random_moments_leave_nothing_behind(make_stack, can_push):
    rng = random.Random(7)
    prefills, decodes = (
        [ScriptedEngine(role, engine_id=f"{role}{i}", can_push=can_push) for i in range(2)]
        for role in ("prefill", "decode")
    )
    for engine in (*prefills, *decodes):
        engine.token_delay_s = 0.003
    stack = await make_stack(prefills, decodes)

    async def ask(cut_after_s: float | None) -> None:
        try:
            async with asyncio.timeout(cut_after_s):
                assert text_in(await stack.stream({"max_tokens": 20})) == text_of(3, 20)
        except TimeoutError:
            pass

    cuts = [rng.uniform(0, 0.12) if i % 3 == 0 else None for i in range(100)]
    await asyncio.gather(*(ask(cut) for cut in cuts))
    await assert_nothing_held(stack)
    assert {nonce for engine in prefills for nonce in engine.read + engine.released} == {
        nonce for nonce, engine in LEASES.items() if engine in prefills
    }


async def test_a_client_may_leave_in_the_moment_its_whole_answer_has_come(
    make_stack, prefill, decode, monkeypatch
):
    stack = await make_stack([prefill], [decode])
    places, leg_of, handlers = stack.proxy.admission.places, Legs.decode, []
    place = places.ask

    def note(claim):
        handlers.append(asyncio.current_task())
        place(claim)

    async def come_and_leave(*args):
        outcome = await leg_of(*args)
        handlers[0].cancel()
        return outcome

    places.ask = note
    monkeypatch.setattr(Legs, "decode", come_and_leave)
    await asyncio.gather(ask(stack, stream=False), return_exceptions=True)
    assert decode.calls
    await assert_nothing_held(stack)


async def test_a_client_has_left_though_the_handoff_of_its_stream_cannot_be_read(make_stack):
    engines = [ScriptedEngine("decode") for _ in range(2)]

    async def hook(call, request):
        response = await streaming(request)
        await response.write(first_chunk() + sse({"pdserve_handoff": {}}))
        await asyncio.Event().wait()

    for engine in engines:
        engine.hook = hook
    stack = await make_stack([], engines)
    client = asyncio.create_task(stack.stream())
    await until(lambda: any(leg.moved for each in stack.proxy.backends for leg in each.legs))
    await leave(client)
    await until(lambda: not stack.proxy.live.stories)
    assert await disconnects(stack, "local") == 1
    assert len(legs(engines)) == 1
    await assert_nothing_held(stack)
