"""One request from end to end, and every way it can go wrong."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from aiohttp import web

from pdserve.observe.clock import SystemClock
from tests.proxy.conftest import until
from tests.proxy.scripted import (
    ScriptedEngine,
    events_of,
    sse,
    text_in,
    text_of,
    word,
)

DONE = b"data: [DONE]\n\n"


def prefills(number: int = 1) -> list[ScriptedEngine]:
    return [ScriptedEngine("prefill", engine_id=f"p{i}") for i in range(number)]


def decodes(number: int = 1) -> list[ScriptedEngine]:
    return [ScriptedEngine("decode", engine_id=f"d{i}") for i in range(number)]


def legs(engines: list[ScriptedEngine]) -> list[str]:
    return [call.leg for engine in engines for call in engine.calls]


def answers(status: int, body: bytes, times: int = 10**9, leg: str | None = None):
    """A hook that answers the first `times` calls (of a leg) by itself."""
    left = times

    async def hook(call, request):
        nonlocal left
        if left == 0 or (leg is not None and call.leg != leg):
            return None
        left -= 1
        return web.Response(status=status, body=body, content_type="application/json")

    return hook


def drops(times: int = 10**9, *, after: bytes = b"", leg: str | None = None):
    """A hook that sends `after` as the start of a stream and then cuts the connection."""
    left = times

    async def hook(call, request):
        nonlocal left
        if left == 0 or (leg is not None and call.leg != leg):
            return None
        left -= 1
        if after:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(after)
            await asyncio.sleep(0.01)
        request.transport.abort()
        return web.Response()

    return hook


def first_chunk(seed: int = 3) -> bytes:
    choice = {"index": 0, "text": word(seed, 0), "logprobs": None, "finish_reason": None}
    return sse({"id": "x", "choices": [choice]})


# --- when all is well


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_runs_through_prefill_then_decode(make_stack, path):
    (prefill,), (decode,) = prefills(), decodes()
    stack = await make_stack([prefill], [decode])
    stream = await stack.stream(path=path)
    assert text_in(stream) == text_of(3, 4)
    assert [legs([prefill]), legs([decode])] == [["prefill"], ["decode"]]
    assert b"pdserve" not in stream
    assert events_of(stream)[-1]["choices"][0]["finish_reason"] == "length"
    assert prefill.released == []
    assert len(prefill.read) == 1
    assert not prefill.leased


async def test_an_answer_in_one_piece_runs_through_prefill_then_decode(make_stack):
    stack = await make_stack(prefills(), decodes())
    async with stack.post() as response:
        assert response.status == 200
        answer = await response.json()
    assert answer["choices"][0]["text"] == text_of(3, 4)
    assert answer.keys() == {"id", "created", "choices", "usage"}
    assert legs(stack.engines) == ["prefill", "decode"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_ends_at_prefill_never_reaches_decode(make_stack, stream):
    (prefill,) = prefills()
    prefill.finish_at_prefill = True
    stack = await make_stack([prefill], decodes())
    async with stack.post({"prompt": "hi", "seed": 3, "stream": stream}) as response:
        body = await response.read()
    text = text_in(body) if stream else msgspec.json.decode(body)["choices"][0]["text"]
    assert text == text_of(3, 1)
    assert b"pdserve" not in body
    assert legs(stack.engines) == ["prefill"]


async def test_both_legs_carry_the_users_body_one_seed_one_time_and_one_id(make_stack):
    stack = await make_stack(prefills(), decodes())
    body = {"prompt": [1, 2], "temperature": 0.5, "made_up": {"a": 1.50}, "stream": True}
    async with stack.post(body, headers={"X-Request-Id": "mine-1"}) as response:
        assert response.headers["X-Request-Id"] == "mine-1"
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        await response.read()
    (first,), (second,) = (engine.calls for engine in stack.engines)
    for call in (first, second):
        assert {k: v for k, v in call.body.items() if k != "kv_transfer_params"} == body
        assert call.headers["X-Request-Id"] == "mine-1"
        assert call.headers["X-Pdserve-Stages"] == "1"
    ours, theirs = first.params["pdserve"], second.params["pdserve"]
    assert ours.keys() == {"final_length", "created", "seed"}
    assert (ours["seed"], ours["created"]) == (theirs["seed"], theirs["created"])
    assert theirs["first_delivered"] is True


async def test_the_users_seed_is_the_pinned_one(make_stack):
    stack = await make_stack(prefills(), decodes())
    await stack.stream({"seed": 11})
    assert stack.engines[0].calls[0].params["pdserve"]["seed"] == 11


async def test_two_requests_without_a_seed_get_different_ones(make_stack):
    stack = await make_stack(prefills(), decodes())
    for _ in range(2):
        await stack.stream({"seed": None})
    seeds = {call.params["pdserve"]["seed"] for call in stack.engines[0].calls}
    assert len(seeds) == 2


async def test_kv_transfer_params_of_a_user_are_dropped_and_never_returned(make_stack):
    stack = await make_stack(prefills(), decodes())
    forged = {"do_remote_prefill": True, "pdserve": {"handoffs": ["forged"]}}
    async with stack.post({"prompt": "hi", "seed": 3, "kv_transfer_params": forged}) as response:
        assert "kv_transfer_params" not in await response.json()
    assert "forged" not in str(stack.engines[0].calls[0].body)


async def test_the_first_token_does_not_wait_for_the_decode_engine(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    decode.gate.clear()
    never = asyncio.Event()

    async def hang(call, request):
        await never.wait()

    decode.hook = hang
    stack = await make_stack([prefill], [decode])
    async with stack.post({"prompt": "hi", "seed": 3, "stream": True}) as response:
        chunk = await response.content.readany()
        assert word(3, 0).encode() in chunk


async def test_no_status_is_sent_before_an_engine_has_said_anything(make_stack):
    (prefill,) = prefills()
    prefill.gate.clear()
    stack = await make_stack([prefill], decodes())
    request = asyncio.create_task(stack.stream())
    await until(lambda: len(prefill.calls) == 1)
    await asyncio.sleep(0.05)
    assert not request.done()
    prefill.hook = answers(400, b'{"error":{"message":"late","type":"t"}}')
    request.cancel()


GOLDEN = (
    b'data: {"choices":[{"index":0,"text":"\xc3\xa9\\u2603 \\"pdserve_\\"","x":1.50}]}\n\n'
    b'data: { "choices" : [ ] , "usage" : {"prompt_tokens":1,"completion_tokens":2} }\n\n' + DONE
)


async def test_the_bytes_of_the_decode_stream_arrive_unchanged(make_stack):
    (decode,) = decodes()

    async def speak(call, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i in range(len(GOLDEN)):
            await response.write(GOLDEN[i : i + 1])
        return response

    decode.hook = speak
    stack = await make_stack(prefills(), [decode])
    stream = await stack.stream()
    first, _, rest = stream.partition(b"\n\n")
    assert word(3, 0).encode() in first
    assert rest == GOLDEN


async def test_choices_that_ended_at_prefill_are_joined_with_the_others(make_stack):
    (prefill,), (decode,) = prefills(), decodes()

    async def prefilled(call, request):
        params = prefill.handoff(call)
        params["pdserve"]["handoffs"].insert(0, None)
        choices = [
            {"index": 0, "text": "ended", "finish_reason": "stop"},
            {"index": 1, "text": "first", "finish_reason": None},
        ]
        return web.json_response({"id": "p", "choices": choices, "kv_transfer_params": params})

    async def decoded(call, request):
        choices = [{"index": 1, "text": "first and on", "finish_reason": "stop"}]
        return web.json_response({"id": "d", "choices": choices, "usage": {"total_tokens": 9}})

    prefill.hook, decode.hook = prefilled, decoded
    stack = await make_stack([prefill], [decode])
    async with stack.post({"prompt": "hi", "n": 2}) as response:
        answer = await response.json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "ended"),
        (1, "first and on"),
    ]
    assert answer["usage"] == {"total_tokens": 9}


# --- the client's own mistakes


REFUSAL = b'{"error": {"message": "max_tokens  is -1", "type": "invalid_request_error"}}'


@pytest.mark.parametrize("stream", [True, False])
async def test_a_4xx_is_passed_on_word_for_word_and_blames_no_engine(make_stack, stream):
    (prefill, other) = prefills(2)
    prefill.hook = other.hook = answers(400, REFUSAL)
    stack = await make_stack([prefill, other], decodes(), cb_failure_threshold=1)
    for _ in range(3):
        async with stack.post({"prompt": "hi", "stream": stream}) as response:
            assert response.status == 400
            assert await response.read() == REFUSAL
            assert "X-Request-Id" in response.headers
    assert len(legs(stack.engines)) == 3
    metrics = await stack.metrics()
    assert sum(v for k, v in metrics.items() if k.startswith("pdserve_leg_failures_total")) == 0
    assert metrics['pdserve_requests_total{outcome="client_error"}'] == 3


async def test_a_4xx_that_is_no_openai_error_is_wrapped_into_one(make_stack):
    (prefill,) = prefills()
    prefill.hook = answers(422, b"no such thing")
    stack = await make_stack([prefill], decodes())
    async with stack.post() as response:
        assert response.status == 422
        assert (await response.json())["error"]["message"] == "no such thing"


async def test_an_engine_without_room_is_passed_over_for_one_with_room(make_stack):
    busy, other = prefills(2)
    busy.hook = answers(429, b'{"error":{"message":"full"}}')
    stack = await make_stack([busy, other], decodes(), prefill_policy="round_robin")
    for _ in range(2):
        assert text_in(await stack.stream()) == text_of(3, 4)
    assert len(busy.calls) >= 1


async def test_when_no_engine_has_room_the_client_is_told_so(make_stack):
    engines = prefills(2)
    for engine in engines:
        engine.hook = answers(429, b'{"error":{"message":"full"}}')
    stack = await make_stack(engines, decodes())
    async with stack.post() as response:
        assert response.status == 429
        assert (await response.json())["error"]["message"] == "full"
    assert len(legs(stack.engines)) == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_engines_that_cannot_serve_now_are_a_503_with_retry_after(make_stack, stream):
    engines = [*prefills(), *decodes()]
    for engine in engines:
        engine.hook = answers(503, b'{"error":{"message":"the server is shutting down"}}')
    stack = await make_stack(engines[:1], engines[1:])
    async with stack.post({"prompt": "hi", "stream": stream}) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["code"] == "unavailable"
    assert (await stack.metrics())['pdserve_requests_total{outcome="shed"}'] == 1


# --- the prefill engine fails


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hook", [answers(500, b"boom"), drops()], ids=["500", "dropped"])
async def test_another_prefill_engine_takes_over_before_the_first_byte(make_stack, hook, stream):
    bad, good = prefills(2)
    bad.hook = hook
    stack = await make_stack([bad, good], decodes(), prefill_policy="round_robin")
    async with stack.post({"prompt": "hi", "seed": 3, "stream": stream}) as response:
        assert response.status == 200
        body = await response.read()
    text = text_in(body) if stream else msgspec.json.decode(body)["choices"][0]["text"]
    assert text == text_of(3, 4)
    assert [len(bad.calls), len(good.calls)] == [1, 1]


async def test_an_engine_that_is_gone_is_passed_over(make_stack):
    gone, good = prefills(2)
    stack = await make_stack([gone, good], decodes(), health_check_interval_s=60.0)
    await gone.stop()
    for _ in range(3):
        assert text_in(await stack.stream()) == text_of(3, 4)
    metrics = await stack.metrics()
    failures = [
        metrics[f'pdserve_leg_failures_total{{leg="prefill",reason="{reason}"}}']
        for reason in ("connect", "dropped")
    ]
    assert sum(failures) >= 1
    assert metrics['pdserve_retries_total{leg="prefill"}'] >= 1


async def test_a_first_token_without_a_handoff_is_not_sent_twice(make_stack):
    bad, good = prefills(2)
    bad.hook = drops(after=first_chunk())
    stack = await make_stack([bad, good], decodes(), prefill_policy="round_robin")
    stream = await stack.stream()
    assert text_in(stream) == text_of(3, 4)
    assert [len(bad.calls), len(good.calls)] == [1, 1]


async def test_a_first_token_that_does_not_repeat_ends_the_stream_with_an_error(make_stack):
    bad, other = prefills(2)
    bad.hook = drops(after=first_chunk())
    other.seed_offset = 1
    stack = await make_stack([bad, other], decodes(), prefill_policy="round_robin")
    events = events_of(await stack.stream())
    assert len(events) == 2
    assert events[1]["error"]["code"] == "replay_diverged"
    await until(lambda: not other.leased)


async def test_the_only_prefill_engine_failing_leaves_the_work_to_decode(make_stack):
    (bad,) = prefills()
    bad.hook = drops(after=first_chunk())
    (decode,) = decodes()
    stack = await make_stack([bad], [decode], retry_max_retries=1)
    assert text_in(await stack.stream()) == text_of(3, 4)
    assert legs([bad]) == ["prefill", "prefill"]
    assert legs([decode]) == ["local"]
    metrics = await stack.metrics()
    key = 'pdserve_disagg_decisions_total{decision="local",reason="prefill_failed"}'
    assert metrics[key] == 1


async def test_an_error_event_of_the_prefill_engine_is_a_failure_like_any(make_stack):
    bad, good = prefills(2)
    stream = sse({"error": {"message": "engine died", "type": "server_error"}}) + DONE
    bad.hook = drops(after=stream)
    stack = await make_stack([bad, good], decodes(), prefill_policy="round_robin")
    assert text_in(await stack.stream()) == text_of(3, 4)


async def test_an_answer_without_an_end_leaves_its_connection_fit_for_the_next(make_stack):
    (prefill,) = prefills()
    broken = True

    async def endless(call, request):
        nonlocal broken
        if broken:
            broken = False
            return web.Response(body=first_chunk(), content_type="text/event-stream")
        return None

    prefill.hook = endless
    stack = await make_stack([prefill], decodes())
    assert text_in(await stack.stream()) == text_of(3, 4)
    assert legs([prefill]) == ["prefill", "prefill"]
    metrics = await stack.metrics()
    failures = [v for k, v in metrics.items() if k.startswith("pdserve_leg_failures_total")]
    assert sum(failures) == 1


async def test_a_handoff_that_cannot_be_read_is_a_failure_of_its_engine(make_stack):
    bad, good = prefills(2)
    stream = first_chunk() + sse({"pdserve_handoff": {"pdserve": {"handoffs": ["!"]}}}) + DONE
    bad.hook = drops(after=stream)
    stack = await make_stack([bad, good], decodes(), prefill_policy="round_robin")
    assert text_in(await stack.stream()) == text_of(3, 4)
    metrics = await stack.metrics()
    assert metrics['pdserve_leg_failures_total{leg="prefill",reason="garbled"}'] == 1


# --- the decode engine fails


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hook", [answers(503, b"boom"), drops()], ids=["503", "dropped"])
async def test_another_decode_engine_takes_the_same_handoff(make_stack, hook, stream):
    (prefill,) = prefills()
    bad, good = decodes(2)
    bad.hook = hook
    stack = await make_stack([prefill], [bad, good], decode_policy="round_robin")
    async with stack.post({"prompt": "hi", "seed": 3, "stream": stream}) as response:
        body = await response.read()
    text = text_in(body) if stream else msgspec.json.decode(body)["choices"][0]["text"]
    assert text == text_of(3, 4)
    assert [len(engine.calls) for engine in (prefill, bad, good)] == [1, 1, 1]
    assert prefill.released == []
    assert len(prefill.read) == 1


async def test_when_no_decode_engine_takes_the_handoff_it_is_released_and_all_is_redone(
    make_stack,
):
    (prefill,), (decode,) = prefills(), decodes()
    decode.hook = answers(500, b"no", leg="decode")
    stack = await make_stack([prefill], [decode], retry_max_retries=1, cb_failure_threshold=10)
    assert text_in(await stack.stream()) == text_of(3, 4)
    assert legs([prefill, decode]) == ["prefill", "local", "decode", "decode"]
    assert len(prefill.released) == 1
    await until(lambda: not prefill.leased)
    metrics = await stack.metrics()
    key = 'pdserve_disagg_decisions_total{decision="local",reason="decode_failed"}'
    assert metrics[key] == 1
    assert metrics['pdserve_replays_total{result="resumed"}'] == 1


async def test_when_nothing_helps_the_stream_ends_with_an_error_and_the_end_mark(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    decode.hook = drops()
    prefill.hook = drops(leg="local")
    stack = await make_stack([prefill], [decode], retry_max_retries=1, cb_failure_threshold=10)
    first, last = events_of(await stack.stream())
    assert first["choices"][0]["text"] == word(3, 0)
    assert last["error"]["code"] == "bad_gateway"
    await until(lambda: not prefill.leased)


async def test_a_request_that_breaks_every_engine_breaks_few(make_stack):
    engines = [*prefills(5), *decodes(5)]
    for engine in engines:
        engine.hook = answers(500, b"boom")
    stack = await make_stack(engines[:5], engines[5:], retry_max_retries=2)
    async with stack.post() as response:
        assert response.status == 502
    assert legs(engines) == ["prefill", "prefill", "prefill", "local"]


async def test_when_nothing_helps_before_the_first_byte_the_status_says_so(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    prefill.hook = decode.hook = answers(500, b"boom")
    stack = await make_stack([prefill], [decode], retry_max_retries=1, cb_failure_threshold=9)
    async with stack.post({"prompt": "hi", "stream": True}) as response:
        assert response.status == 502
        assert (await response.json())["error"]["code"] == "bad_gateway"


@pytest.mark.parametrize("others", [0, 1])
async def test_a_stream_broken_in_the_middle_goes_on_with_the_same_text(make_stack, others):
    (prefill,) = prefills()
    bad, *rest = decodes(1 + others)
    second = {"index": 0, "text": word(3, 1) + word(3, 2), "logprobs": None, "finish_reason": None}
    bad.hook = drops(1, after=sse({"choices": [second]}), leg="decode")
    stack = await make_stack([prefill], [bad, *rest], decode_policy="round_robin")
    stream = await stack.stream({"max_tokens": 8})
    assert text_in(stream) == text_of(3, 8)
    assert "local" in legs([prefill, bad, *rest])
    await until(lambda: not prefill.leased)
    metrics = await stack.metrics()
    key = 'pdserve_disagg_decisions_total{decision="local",reason="stream_lost"}'
    assert metrics[key] == 1


async def test_half_an_event_of_a_broken_stream_never_reaches_the_client(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    decode.hook = drops(after=b'data: {"choices":[{"index":0,"te', leg="decode")
    stack = await make_stack([prefill], [decode], cb_failure_threshold=10)
    assert text_in(await stack.stream()) == text_of(3, 4)


async def test_an_error_that_blames_the_request_ends_the_stream(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    blame = {"error": {"message": "too long", "type": "invalid_request_error"}}
    decode.hook = drops(after=sse(blame) + DONE)
    stack = await make_stack([prefill], [decode])
    events = events_of(await stack.stream())
    assert events[-1] == blame
    assert len(decode.calls) == 1
    await until(lambda: not prefill.leased)


async def test_decode_engines_without_room_are_asked_once_each(make_stack):
    (prefill,), busy = prefills(), decodes(2)
    for engine in busy:
        engine.hook = answers(429, b'{"error":{"message":"full"}}')
    stack = await make_stack([prefill], busy)
    async with stack.post() as response:
        assert response.status == 429
    assert legs(busy) == ["decode", "decode"]
    await until(lambda: not prefill.leased)


async def test_a_4xx_of_the_decode_engine_ends_the_stream_and_frees_the_lease(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    decode.hook = answers(400, REFUSAL)
    stack = await make_stack([prefill], [decode])
    events = events_of(await stack.stream())
    assert events[-1] == msgspec.json.decode(REFUSAL)
    await until(lambda: not prefill.leased)


# --- who is there


async def test_without_prefill_the_decode_engine_does_everything(make_stack):
    stack = await make_stack([], decodes())
    assert text_in(await stack.stream()) == text_of(3, 4)
    assert legs(stack.engines) == ["local"]
    assert "do_remote_decode" not in str(stack.engines[0].calls[0].body)
    metrics = await stack.metrics()
    assert metrics['pdserve_disagg_decisions_total{decision="local",reason="no_prefill"}'] == 1
    assert metrics['pdserve_time_to_first_token_seconds_count{mode="local"}'] == 1


async def test_engines_of_both_roles_alone_serve_whole_requests(make_stack):
    engine = ScriptedEngine("both")
    await engine.start()
    try:
        stack = await make_stack([engine], [engine])
        assert text_in(await stack.stream()) == text_of(3, 4)
        assert legs([engine]) == ["local"]
    finally:
        await engine.stop()


async def test_without_decode_the_answer_is_503_with_its_own_code(make_stack):
    stack = await make_stack(prefills(), [])
    async with stack.post() as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["code"] == "no_decode_available"


async def test_without_any_engine_the_message_names_a_role_and_a_command(make_stack):
    stack = await make_stack([], [])
    async with stack.post() as response:
        assert response.status == 503
        error = (await response.json())["error"]
    assert error["code"] == "no_prefill_available"
    assert "pdserve prefill MODEL" in error["message"]


async def test_engines_with_different_layouts_are_not_paired(make_stack):
    prefill, decode = ScriptedEngine("prefill"), ScriptedEngine("decode", digest="d2")
    stack = await make_stack([prefill], [decode])
    assert text_in(await stack.stream()) == text_of(3, 4)
    assert legs([prefill, decode]) == ["local"]
    metrics = await stack.metrics()
    assert metrics['pdserve_disagg_decisions_total{decision="local",reason="no_pair"}'] == 1


async def test_a_pair_whose_transfers_fail_is_left_alone_while_both_engines_serve(make_stack):
    (prefill,), (lame, good) = prefills(), decodes(2)
    lame.stages = {"load_failures": ["peer_lost"]}
    good.stages = {"kv_bytes": 100}
    stack = await make_stack(
        [prefill],
        [lame, good],
        decode_policy="round_robin",
        cb_failure_threshold=1,
        cb_timeout_s=60,
    )
    for _ in range(6):
        assert text_in(await stack.stream()) == text_of(3, 4)
    assert len(lame.calls) == 1
    assert len(good.calls) == 5
    assert (await stack.metrics())["pdserve_open_edges"] == 1


# --- limits


async def test_requests_beyond_the_queue_get_429_at_once(make_stack):
    (prefill,) = prefills()
    prefill.gate.clear()
    stack = await make_stack([prefill], decodes(), max_concurrent_requests=1, queue_size=1)
    running, queued = (asyncio.create_task(stack.stream()) for _ in range(2))
    await until(lambda: stack.proxy.admission.num_waiting == 1)
    async with stack.post() as response:
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["type"] == "rate_limit_error"
    prefill.gate.set()
    assert text_in(await running) == text_in(await queued) == text_of(3, 4)


async def test_a_request_that_queues_too_long_gets_429(make_stack):
    (prefill,) = prefills()
    prefill.gate.clear()
    stack = await make_stack([prefill], decodes(), max_concurrent_requests=1, queue_timeout_s=0.05)
    running = asyncio.create_task(stack.stream())
    await until(lambda: stack.proxy.admission.num_running == 1)
    async with stack.post() as response:
        assert response.status == 429
    prefill.gate.set()
    await running


async def test_a_request_beyond_its_time_gets_504_and_frees_its_lease(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    prefill.gate.clear()
    stack = await make_stack([prefill], [decode], request_timeout_s=0.1)
    async with stack.post({"prompt": "hi", "stream": True}) as response:
        assert response.status == 504
        assert (await response.json())["error"]["code"] == "deadline_exceeded"
    await until(lambda: not prefill.leased)


async def test_a_stream_beyond_its_time_ends_with_an_error_event(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    decode.gate.clear()
    stack = await make_stack([prefill], [decode], request_timeout_s=1.0)
    events = events_of(await stack.stream())
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    await until(lambda: decode.ended["cancelled"] == 1 and not prefill.leased)


# --- breakers and lost engines


async def test_a_failing_engine_is_left_alone_until_it_has_recovered(make_stack, monkeypatch):
    bad, good = prefills(2)
    bad.hook = answers(500, b"boom", times=2)
    stack = await make_stack(
        [bad, good],
        decodes(),
        prefill_policy="round_robin",
        cb_failure_threshold=2,
        cb_timeout_s=600,
    )
    for _ in range(8):
        assert text_in(await stack.stream()) == text_of(3, 4)
    assert len(bad.calls) == 2
    assert (await stack.metrics())['pdserve_backends{role="prefill",state="breaker_open"}'] == 1
    later = SystemClock().monotonic_s() + 600.0
    monkeypatch.setattr(SystemClock, "monotonic_s", lambda clock: later)
    for _ in range(4):
        await stack.stream()
    assert len(bad.calls) == 4


async def test_a_decode_engine_that_dies_does_not_open_the_breaker_of_prefill(make_stack):
    (prefill,), (bad, good) = prefills(), decodes(2)
    bad.hook = drops()
    stack = await make_stack(
        [prefill], [bad, good], decode_policy="round_robin", cb_failure_threshold=1
    )
    for _ in range(4):
        assert text_in(await stack.stream()) == text_of(3, 4)
    assert len(prefill.calls) == 4


async def test_requests_at_an_engine_that_hangs_go_on_elsewhere(make_stack):
    stuck, good = prefills(2)
    never = asyncio.Event()

    async def hang(call, request):
        await never.wait()

    stuck.hook = hang
    stack = await make_stack(
        [stuck, good],
        decodes(),
        prefill_policy="round_robin",
        health_check_timeout_s=0.5,
        cb_failure_threshold=2,
    )
    request = asyncio.create_task(stack.stream())
    await until(lambda: len(stuck.calls) == 1)
    stuck.hang_health = never
    assert text_in(await asyncio.wait_for(request, 30)) == text_of(3, 4)


async def test_a_stream_whose_engine_hangs_goes_on_elsewhere(make_stack):
    (prefill,), (stuck, good) = prefills(), decodes(2)
    stuck.gate.clear()
    stack = await make_stack(
        [prefill],
        [stuck, good],
        decode_policy="round_robin",
        health_check_timeout_s=0.5,
        cb_failure_threshold=2,
    )
    request = asyncio.create_task(stack.stream({"max_tokens": 8}))
    await until(lambda: len(stuck.calls) == 1)
    stuck.hang_health = asyncio.Event()
    assert text_in(await asyncio.wait_for(request, 30)) == text_of(3, 8)
    assert legs([good]) == ["local"]


async def test_a_stream_too_long_to_be_remembered_ends_with_an_error(make_stack):
    (decode,) = decodes()
    big = {"index": 0, "text": "x" * 600_000, "finish_reason": None}
    decode.hook = drops(after=sse({"choices": [big]}))
    stack = await make_stack([], [decode])
    first, last = events_of(await stack.stream())
    assert first["choices"] == [big]
    assert last["error"]["code"] == "engine_dead"
    assert len(decode.calls) == 1


async def test_a_long_error_body_arrives_whole(make_stack):
    (prefill,) = prefills()
    body = msgspec.json.encode({"error": {"message": "m" * 300_000, "type": "t"}})
    prefill.hook = answers(400, body)
    stack = await make_stack([prefill], decodes())
    async with stack.post() as response:
        assert await response.read() == body
