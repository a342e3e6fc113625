"""Engines that say what makes no sense, and clients and engines that stop listening."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest
from aiohttp import web

from pdserve.proxy import delivery as proxy_delivery
from pdserve.proxy.errors import WorkerError
from tests.proxy.conftest import until
from tests.proxy.hooks import (
    DONE,
    decodes,
    drops,
    first_chunk,
    hangs,
    kv_failed,
    legs,
    prefills,
    streaming,
)
from tests.proxy.scripted import ScriptedEngine, events_of, sse, text_in, text_of, word
from tests.proxy.test_disconnect import assert_nothing_held

BIG = {"index": 0, "text": "x" * 600_000, "finish_reason": None}


def says(body: bytes, content_type: str, leg: str):
    """A hook that answers a leg with these bytes and 200."""

    async def hook(call, request):
        return web.Response(body=body, content_type=content_type) if call.leg == leg else None

    return hook


# --- a stream that begins with a long chunk


async def test_a_first_chunk_of_any_size_is_not_sent_twice(make_stack):
    """Such as the echo of a long prompt, with its log-probabilities."""
    bad, other = prefills(2)
    bad.hook = drops(after=sse({"choices": [BIG]}))
    other.hook = says(
        sse({"choices": [BIG]}) + first_chunk() + DONE, "text/event-stream", "prefill"
    )
    stack = await make_stack([bad, other], decodes(), prefill_policy="round_robin")
    first, second = events_of(await stack.stream())
    assert first["choices"] == [BIG]
    assert second["choices"][0]["text"] == word(3, 0)
    await assert_nothing_held(stack)


async def test_a_long_first_chunk_whose_kv_is_lost_is_not_sent_twice(make_stack):
    lost, other = prefills(2)
    (decode,) = decodes()
    decode.hook = kv_failed(times=1, leg="decode")

    async def verbose(call, request):
        response = await streaming(request)
        params = call_engine[call.headers["Host"]].handoff(call)
        await response.write(sse({"choices": [BIG]}) + sse({"pdserve_handoff": params}) + DONE)
        return response

    lost.hook = other.hook = verbose
    stack = await make_stack([lost, other], [decode], prefill_policy="round_robin")
    call_engine = {engine.url.removeprefix("http://"): engine for engine in (lost, other)}
    first, *rest = events_of(await stack.stream())
    assert first["choices"] == [BIG]
    assert [event["choices"][0]["text"] for event in rest] == [word(3, n) for n in range(1, 4)]
    assert len(lost.calls + other.calls) == 2
    await assert_nothing_held(stack)


# --- answers of another kind than was asked for


@pytest.mark.parametrize("leg", ["prefill", "decode", "local"])
async def test_an_answer_in_one_piece_to_a_stream_is_a_failure_of_its_engine(make_stack, leg):
    (prefill,), (bad, good) = prefills(), decodes(2)
    prefill.hook = bad.hook = says(b'{"choices": []}', "application/json", leg)
    first = [] if leg == "local" else [prefill]
    stack = await make_stack(first, [bad, good], decode_policy="round_robin")
    assert text_in(await stack.stream()) == text_of(3, 4)


async def test_a_stream_to_somebody_who_wants_one_piece_is_a_failure_of_its_engine(make_stack):
    (prefill,), (bad, good) = prefills(), decodes(2)
    bad.hook = says(first_chunk() + DONE, "text/event-stream", "decode")
    stack = await make_stack([prefill], [bad, good], decode_policy="round_robin")
    async with stack.post() as response:
        assert (await response.json())["choices"][0]["text"] == text_of(3, 4)


async def test_an_engine_whose_every_answer_is_garbled_is_left_alone(make_stack):
    (bad, good) = decodes(2)
    bad.hook = says(b"<html>welcome</html>", "text/html", "local")
    stack = await make_stack(
        [], [bad, good], decode_policy="round_robin", cb_failure_threshold=2, cb_timeout_s=600
    )
    for _ in range(8):
        async with stack.post() as response:
            assert (await response.json())["choices"][0]["text"] == text_of(3, 4)
    assert len(bad.calls) == 2


@pytest.mark.parametrize(
    "event", [{"choices": 5}, {"choices": [5]}, {"choices": [{"text": "x"}]}, {"choices": [{}]}]
)
async def test_an_event_that_makes_no_sense_ends_a_repeated_stream_with_an_error(make_stack, event):
    (bad, odd) = prefills(2)
    bad.hook = drops(after=first_chunk())
    odd.hook = says(sse(event) + DONE, "text/event-stream", "prefill")
    stack = await make_stack([bad, odd], decodes(), prefill_policy="round_robin")
    first, last = events_of(await stack.stream())
    assert first["choices"][0]["text"] == word(3, 0)
    assert last["error"]["code"] == "replay_diverged"
    await assert_nothing_held(stack)


# --- what is told


async def test_tokens_that_are_swallowed_are_not_counted(make_stack):
    (prefill,), (bad, good) = prefills(), decodes(2)
    second = {"index": 0, "text": word(3, 1), "logprobs": None, "finish_reason": None}
    bad.hook = drops(1, after=sse({"choices": [second]}), leg="decode")
    stack = await make_stack([prefill], [bad, good], decode_policy="round_robin")
    assert text_in(await stack.stream({"max_tokens": 8})) == text_of(3, 8)
    (told,) = (await stack.get("/debug/requests?finished=1"))["finished"]
    assert told["output_tokens"] == 8


async def test_each_token_of_a_prefill_engine_that_hands_nothing_over_is_counted(make_stack):
    (prefill,) = prefills()
    whole = [
        sse({"choices": [{"index": 0, "text": word(3, index), "finish_reason": end}]})
        for index, end in enumerate((None, None, "length"))
    ]

    async def hook(_, request):
        response = await streaming(request)
        for event in (*whole, DONE):
            await response.write(event)
            await asyncio.sleep(0.02)
        return response

    prefill.hook = hook
    stack = await make_stack([prefill], decodes())
    assert text_in(await stack.stream({"max_tokens": 3})) == text_of(3, 3)
    (told,) = (await stack.get("/debug/requests?finished=1"))["finished"]
    assert told["output_tokens"] == 3
    ((_, decode_s),) = (
        each for each in (await stack.metrics()).items() if "decode_time_seconds_sum" in each[0]
    )
    assert decode_s >= 0.03, "or each token behind the first would have taken no time"


# --- nobody waits without a limit


@pytest.mark.slow
async def test_a_client_that_does_not_read_is_cut_off_when_its_time_is_over(
    make_stack, monkeypatch
):
    monkeypatch.setattr(proxy_delivery, "LAST_WORDS_S", 0.2)
    (decode,) = decodes()

    async def verbose(call, request):
        response = await streaming(request)
        while True:
            await response.write(sse({"choices": [{**BIG, "text": "x" * 60_000}]}))

    decode.hook = verbose
    stack = await make_stack([], [decode], request_timeout_s=0.5)
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.setblocking(False)
    host, port = stack.url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    with deaf:
        await loop.sock_connect(deaf, (host, int(port)))
        asked = msgspec.json.encode({"prompt": "hi", "stream": True})
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        await loop.sock_sendall(deaf, head % len(asked) + asked)
        await until(lambda: len(decode.calls) == 1)
        await until(lambda: not stack.proxy.live.stories)
    await assert_nothing_held(stack)


async def test_a_body_that_never_ends_is_not_waited_for_longer_than_a_request_may_take(make_stack):
    stack = await make_stack(prefills(), decodes(), request_timeout_s=0.2)
    host, port = stack.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert b" 504 " in await asyncio.wait_for(reader.readline(), 30)
    writer.close()
    await writer.wait_closed()
    await assert_nothing_held(stack)


async def test_a_question_to_an_engine_that_hangs_ends_with_the_requests_time(make_stack):
    engine = ScriptedEngine("decode")
    stack = await make_stack([], [engine], request_timeout_s=0.2)
    async with stack.client.post(f"{stack.url}/detokenize", json={"tokens": [1]}) as response:
        assert response.status == 504
        assert (await response.json())["error"]["code"] == "deadline_exceeded"


async def test_an_engine_found_dead_in_the_moment_its_client_leaves_changes_nothing(make_stack):
    """Who is cancelled stays cancelled: otherwise its deadline would go unnoticed, too."""
    (decode,) = decodes()

    decode.hook = hangs()
    stack = await make_stack([], [decode])
    leg = stack.proxy._http.leg(f"{decode.url}/v1/completions", b"{}", {"X-Request-Id": "x"})
    opening = asyncio.create_task(leg.open())
    await until(lambda: len(decode.calls) == 1)
    leg.lose(WorkerError("it was found dead", reason="lost"))
    opening.cancel()
    await asyncio.wait({opening})
    assert opening.cancelled()
    assert legs([decode]) == ["local"]


@pytest.mark.parametrize("data", [[{}], [5], 5, [{"id": 7}]])
async def test_an_engine_with_odd_models_spoils_no_list_of_models(make_stack, data):
    odd, good = decodes(2)
    await odd.start()
    await good.start()
    odd.models = data
    stack = await make_stack([], [odd, good])
    async with stack.client.get(f"{stack.url}/v1/models") as response:
        assert response.status == 200
        assert [model["id"] for model in (await response.json())["data"]] == ["tiny"]
    for engine in (odd, good):
        await engine.stop()
