"""Engines that fail, before the first byte and in the middle of a stream, and who takes over."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from aiohttp import web

from pdserve.observe.clock import SystemClock
from pdserve.proxy import strategies
from tests.proxy.conftest import until
from tests.proxy.hooks import (
    DONE,
    REFUSAL,
    answers,
    decodes,
    drops,
    first_chunk,
    hangs,
    in_bursts,
    legs,
    prefills,
)
from tests.proxy.scripted import events_of, sse, text_in, text_of, word

# --- the prefill engine fails

PULL_AND_PUSH = pytest.mark.parametrize("can_push", [False, True], ids=["pull", "push"])


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


@PULL_AND_PUSH
async def test_a_first_token_without_a_handoff_is_not_sent_twice(make_stack, can_push):
    (bad, good), (decode,) = prefills(2, can_push=can_push), decodes(can_push=can_push)
    bad.hook = drops(after=first_chunk())
    decode.eager = True
    stack = await make_stack([bad, good], [decode], prefill_policy="round_robin")
    stream = await stack.stream()
    assert text_in(stream) == text_of(3, 4)
    assert [len(bad.calls), len(good.calls)] == [1, 1]


@PULL_AND_PUSH
async def test_a_first_token_that_does_not_repeat_ends_the_stream_with_an_error(
    make_stack, can_push
):
    (bad, other), (decode,) = prefills(2, can_push=can_push), decodes(can_push=can_push)
    bad.hook = drops(after=first_chunk())
    other.seed_offset = decode.seed_offset = 1
    stack = await make_stack([bad, other], [decode], prefill_policy="round_robin")
    events = events_of(await stack.stream())
    assert len(events) == 2
    assert events[1]["error"]["code"] == "replay_diverged"
    await until(lambda: not other.leased)


@PULL_AND_PUSH
async def test_the_only_prefill_engine_failing_leaves_the_work_to_decode(make_stack, can_push):
    (bad,), (decode,) = prefills(can_push=can_push), decodes(can_push=can_push)
    bad.hook = drops(after=first_chunk())
    stack = await make_stack([bad], [decode], retry_max_retries=1, cb_failure_threshold=9)
    assert text_in(await stack.stream()) == text_of(3, 4)
    assert legs([bad]) == ["prefill", "prefill"]
    assert legs([decode]) == [*(["receive", "receive"] if can_push else []), "local"]
    assert decode.calls[-1].params["pdserve"]["is_fallback"] is True
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
    assert last["error"]["code"] == "engines_ended"
    await until(lambda: not prefill.leased)


async def test_a_request_that_breaks_every_engine_breaks_few(make_stack):
    engines = [*prefills(5), *decodes(5)]
    for engine in engines:
        engine.hook = answers(500, b"boom")
    stack = await make_stack(engines[:5], engines[5:], retry_max_retries=2)
    assert await stack.refused({"prompt": "hi", "stream": True}) == (502, "engine_failed")
    assert legs(engines) == ["prefill", "prefill", "prefill", "local"]


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
    assert (await stack.refused())[0] == 429
    assert legs(busy) == ["decode", "decode"]
    await until(lambda: not prefill.leased)


async def test_a_4xx_of_the_decode_engine_ends_the_stream_and_frees_the_lease(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    decode.hook = answers(400, REFUSAL)
    stack = await make_stack([prefill], [decode])
    events = events_of(await stack.stream())
    assert events[-1] == msgspec.json.decode(REFUSAL)
    await until(lambda: not prefill.leased)


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


@pytest.mark.slow
async def test_requests_at_an_engine_that_hangs_go_on_elsewhere(make_stack):
    stuck, good = prefills(2)
    stuck.hook = hangs()
    stack = await make_stack(
        [stuck, good],
        decodes(),
        prefill_policy="round_robin",
        health_check_timeout_s=0.5,
        cb_failure_threshold=2,
    )
    request = asyncio.create_task(stack.stream())
    await until(lambda: len(stuck.calls) == 1)
    stuck.hang_health = asyncio.Event()
    assert text_in(await asyncio.wait_for(request, 30)) == text_of(3, 4)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_of_any_length_that_loses_its_engine_twice_has_the_same_text(
    make_stack, path
):
    """Its engines are lost after 700 KiB and after twice as much."""
    num_tokens, engines, cuts = 12_000, decodes(3), [5000, 10_000]
    for engine in engines:
        engine.hook = in_bursts(engine, cuts)
    stack = await make_stack(prefills(), engines)
    stream = await stack.stream({"max_tokens": num_tokens}, path)
    assert text_in(stream) == text_of(3, num_tokens)
    assert sorted(legs(engines)) == ["decode", "local", "local"]
    assert stream.count(b'"finish_reason":"length"') == 1


async def test_a_long_error_body_arrives_whole(make_stack):
    (prefill,) = prefills()
    body = msgspec.json.encode({"error": {"message": "m" * 300_000, "type": "t"}})
    prefill.hook = answers(400, body)
    stack = await make_stack([prefill], decodes())
    async with stack.post() as response:
        assert await response.read() == body


# --- a request that is its own trouble

NON_FINITE = {"message": "the model makes NaN", "type": "server_error", "code": "non_finite_logits"}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_of_which_a_prefill_engine_makes_nan_is_sent_to_no_other(
    make_stack, stream
):
    engines = prefills(2)
    for engine in engines:
        engine.hook = answers(500, msgspec.json.encode({"error": NON_FINITE}))
    others = decodes(2)
    stack = await make_stack(engines, others, cb_failure_threshold=1)
    async with stack.post({"prompt": "hi", "seed": 3, "stream": stream}) as response:
        assert response.status == 500
        error = (await response.json())["error"]
    assert (error["code"], error["type"]) == ("non_finite_logits", "server_error")
    assert len(legs(engines)) == 1
    assert legs(others) == []
    for engine in engines:
        engine.hook = None
    assert text_in(await stack.stream()) == text_of(3, 4)  # no breaker is open
    assert len(legs(engines)) == 2
    metrics = await stack.metrics()
    assert metrics['pdserve_leg_failures_total{leg="prefill",reason="non_finite"}'] == 1


async def test_a_stream_of_which_a_decode_engine_makes_nan_ends_there(make_stack):
    (prefill,), others = prefills(), decodes(2)
    for engine in others:
        engine.hook = drops(after=sse({"error": NON_FINITE}) + DONE)
    stack = await make_stack([prefill], others)
    events = events_of(await stack.stream())
    assert events[-1]["error"]["code"] == "non_finite_logits"
    assert len(legs(others)) == 1
    assert legs([prefill]) == ["prefill"]
    await until(lambda: not prefill.leased)


DEAD = {"message": "the core ended", "type": "service_unavailable_error", "code": "engine_dead"}


@pytest.mark.parametrize(
    "hook",
    [
        drops(),
        answers(503, msgspec.json.encode({"error": DEAD})),
        drops(after=sse({"error": DEAD}) + DONE),
    ],
    ids=["hangs up", "says so", "says so in its stream"],
)
async def test_a_request_that_ended_two_engines_goes_to_no_third(make_stack, hook):
    engines, others = prefills(4), decodes(4)
    for engine in engines + others:
        engine.hook = hook
    stack = await make_stack(engines, others, prefill_policy="round_robin", retry_max_retries=9)
    assert await stack.refused({"prompt": "hi", "seed": 3, "stream": True}) == (
        502,
        "engines_ended",
    )
    assert len(legs(engines + others)) == 2


async def test_an_engine_that_had_ended_with_another_is_not_held_against_a_request(make_stack):
    (first, second), (third,) = prefills(2), decodes()

    async def both_end(call, request):
        first.ready = second.ready = False
        second.hook = drops()
        return await drops()(call, request)

    first.hook = both_end
    stack = await make_stack([first, second], [third], prefill_policy="round_robin")
    assert text_in(await stack.stream()) == text_of(3, 4)
    assert legs([first, second, third]) == ["prefill", "local"]
    assert not second.calls


async def test_an_engine_that_ends_while_it_waits_for_kv_is_not_held_against_a_request(
    make_stack, monkeypatch
):
    """As where the machine that had both of a pair is lost, and its parts go one by one."""
    monkeypatch.setattr(strategies, "LOST_RECEIVER_PATIENCE_S", 0.01)
    (first, second), (third,) = prefills(2, can_push=True), decodes(can_push=True)
    goes_on = asyncio.Event()

    async def ends_later(call, request):
        if len(third.calls) > 2:
            return None
        await goes_on.wait()
        return await drops()(call, request)

    async def takes_its_time(call, request):
        goes_on.set()
        await asyncio.sleep(0.2)

    first.hook, second.hook, third.hook = drops(), takes_its_time, ends_later
    stack = await make_stack([first, second], [third], prefill_policy="round_robin")
    assert text_in(await stack.stream()) == text_of(3, 4)
    assert legs([first]) == ["prefill"]
    assert legs([third])[:2] == ["receive", "receive"]
