"""One request from end to end, and the ways it ends that are no failure of an engine."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from aiohttp import web

from pdserve.observe.clock import ManualClock
from pdserve.proxy.backends import STARTUP_S
from tests.proxy.conftest import until
from tests.proxy.hooks import DONE, REFUSAL, answers, decodes, hangs, legs, prefills, streaming
from tests.proxy.scripted import ScriptedEngine, events_of, text_in, text_of, word

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


async def test_kv_transfer_params_of_a_user_are_dropped_named_and_never_returned(make_stack):
    stack = await make_stack(prefills(), decodes())
    forged = {"do_remote_prefill": True, "pdserve": {"handoffs": ["forged"]}}
    async with stack.post({"prompt": "hi", "seed": 3, "kv_transfer_params": forged}) as response:
        assert "kv_transfer_params" not in await response.json()
        assert response.headers["X-Pdserve-Ignored-Fields"] == "kv_transfer_params"
    assert "forged" not in str(stack.engines[0].calls[0].body)
    async with stack.post({"prompt": "hi", "seed": 3, "kv_transfer_params": None}) as response:
        assert "X-Pdserve-Ignored-Fields" not in response.headers
    for bad in ("remote", {"do_remote_decode": 3}):  # as an engine answers
        async with stack.post({"prompt": "hi", "kv_transfer_params": bad}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "kv_transfer_params"


async def test_the_first_token_does_not_wait_for_the_decode_engine(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    decode.hook = hangs()
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
        response = await streaming(request)
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


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
async def test_engines_that_cannot_serve_now_are_a_503_with_retry_after(make_stack, stream):
    engines = [*prefills(), *decodes()]
    for engine in engines:
        engine.hook = answers(503, b'{"error":{"message":"the server is shutting down"}}')
    stack = await make_stack(engines[:1], engines[1:], queue_timeout_s=0.5)
    async with stack.post({"prompt": "hi", "stream": stream}) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["code"] == "engine_not_ready"
    assert (await stack.metrics())['pdserve_requests_total{outcome="shed"}'] == 1


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
    stack = await make_stack(prefills(), [], clock := ManualClock())
    clock.advance(STARTUP_S)
    async with stack.post() as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["code"] == "no_decode_available"


async def test_without_any_engine_the_message_names_a_role_and_a_command(make_stack):
    stack = await make_stack([], [], clock := ManualClock())
    clock.advance(STARTUP_S)
    async with stack.post() as response:
        assert response.status == 503
        error = (await response.json())["error"]
    assert error["code"] == "no_prefill_available"
    assert "pdserve prefill MODEL" in error["message"]


async def test_engines_with_different_layouts_are_not_paired(make_stack):
    """They differ in what may differ in a rolling update."""
    prefill, decode = ScriptedEngine("prefill"), ScriptedEngine("decode")
    decode.weights = "w2"
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
    assert (await stack.refused())[0] == 429
    prefill.gate.set()
    await running


async def test_a_request_beyond_its_time_gets_504_and_frees_its_lease(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    prefill.gate.clear()
    stack = await make_stack([prefill], [decode], request_timeout_s=0.1)
    assert await stack.refused({"prompt": "hi", "stream": True}) == (504, "deadline_exceeded")
    await until(lambda: not prefill.leased)


@pytest.mark.slow
async def test_a_stream_beyond_its_time_ends_with_an_error_event(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    decode.gate.clear()
    stack = await make_stack([prefill], [decode], request_timeout_s=1.0)
    events = events_of(await stack.stream())
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    await until(lambda: decode.ended["cancelled"] == 1 and not prefill.leased)


# --- who may share a request


@pytest.mark.parametrize(
    ("fields", "digests", "shared"),
    [
        ({}, ("a", "b"), True),
        ({"guided_regex": "a+"}, ("a", "a"), True),
        ({"guided_regex": "a+"}, ("a", "b"), False),
        ({"response_format": {"type": "json_object"}}, ("a", "b"), False),
        ({"structured_outputs": {"choice": ["a"]}}, ("a", "b"), False),
        ({"tools": [{"type": "function"}]}, ("a", "b"), False),
        ({"tools": []}, ("a", "b"), True),
        ({"guided_regex": None}, ("a", "b"), True),
        ({"guided_regex": "a+"}, ("", "b"), True),
    ],
)
@pytest.mark.parametrize("kv_mode", ["push", "pull"])
async def test_what_each_engine_works_out_by_itself_is_shared_by_equal_ones_only(
    make_stack, fields, digests, shared, kv_mode
):
    (prefill,), (decode,) = prefills(), decodes()
    prefill.text_digest, decode.text_digest = digests
    stack = await make_stack([prefill], [decode], kv_mode=kv_mode)
    assert text_in(await stack.stream(fields)) == text_of(3, 4)
    assert legs([prefill]) == (["prefill"] if shared else [])
