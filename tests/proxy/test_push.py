"""A push: both engines at once, and a client that sees one stream whatever comes first."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from aiohttp import web

from pdserve.config.http import KVTransfer
from pdserve.proxy import legs as proxy_legs
from pdserve.proxy import strategies
from pdserve.proxy.brain.work import EngineWork
from pdserve.wire.transfer import TICKETS
from tests.proxy import hooks
from tests.proxy.conftest import until
from tests.proxy.hooks import (
    answers,
    ask,
    drops,
    error,
    first_chunk,
    hangs,
    kv_failed,
    legs,
    streaming,
)
from tests.proxy.scripted import pushed, sse, text_in, text_of, word
from tests.proxy.test_disconnect import assert_nothing_held, leave
from tests.proxy.test_ladder import rungs

SECRET = "s3cret"


prefills = partial(hooks.prefills, can_push=True)
decodes = partial(hooks.decodes, can_push=True)


# --- when all is well


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("mode", [KVTransfer.AUTO, KVTransfer.PUSH])
async def test_both_engines_get_the_request_at_once_with_one_signed_ticket(
    make_stack, stream, mode
):
    (prefill,), (decode,) = prefills(), decodes()
    prefill.hook = hangs()
    stack = await make_stack([prefill], [decode], secret=SECRET, kv_mode=mode)
    request = asyncio.create_task(ask(stack, stream=stream))
    await until(lambda: legs([prefill, decode]) == ["prefill", "receive"])
    (at_p,), (at_d,) = prefill.calls, decode.calls
    ticket = at_p.ticket
    assert ticket == at_d.ticket
    assert at_p.params["pdserve"]["ticket"] == at_d.params["pdserve"]["ticket"]
    assert TICKETS.open(at_p.params["pdserve"]["ticket"], SECRET) == ticket
    assert (ticket.prefill.engine_id, ticket.decode.engine_id) == ("p0", "d0")
    assert ticket.decode.incarnation == decode.incarnation
    assert at_d.params["pdserve"]["first_delivered"] is stream
    assert at_d.params["pdserve"]["on_load_failure"] == "report"
    assert {call.headers["X-Pdserve-KV-Mode"] for call in (at_p, at_d)} == {"push"}
    await leave(request)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("eager", [True, False])
async def test_the_client_gets_the_text_of_one_engine(make_stack, stream, eager, caplog):
    (prefill,), (decode,) = prefills(), decodes()
    decode.eager = eager
    stack = await make_stack([prefill], [decode])
    with caplog.at_level("INFO"):
        assert await ask(stack, stream=stream) == text_of(3, 4)
    assert legs([prefill, decode]) == ["prefill", "receive"]
    metrics = await stack.metrics()
    assert metrics['pdserve_kv_mode_total{mode="push"}'] == 1
    assert metrics['pdserve_kv_mode_total{mode="pull"}'] == 0
    assert sum(v for k, v in metrics.items() if k.startswith("pdserve_kv_ladder_total")) == 0
    assert "path=push" in caplog.text


@pytest.mark.parametrize(
    ("given", "body", "reason"),
    [
        ({"kv_mode": KVTransfer.PUSH}, {}, "engines"),
        ({}, {}, "engines"),
        ({"kv_mode": KVTransfer.PUSH}, {"n": 2}, "request"),
        ({"kv_mode": KVTransfer.PULL}, {}, None),
    ],
    ids=["push", "auto", "two choices", "pull"],
)
async def test_a_request_that_is_pulled_where_a_push_was_allowed_says_why(
    make_stack, caplog, given, body, reason
):
    (prefill,), (decode,) = prefills(), decodes()
    decode.can_push = reason == "request"  # an engine of several cores takes no tickets
    stack = await make_stack([prefill], [decode], **given)
    with caplog.at_level("INFO"):
        await stack.stream(body)
    assert "path=pull" in caplog.text
    assert ("no push" in caplog.text) is bool(reason)
    assert not reason or f" | no push: {reason}" in caplog.text
    metrics = await stack.metrics()
    name = "pdserve_kv_not_pushed_total"
    told = {k: v for k, v in metrics.items() if k.startswith(name) and v}
    assert told == ({f'{name}{{reason="{reason}"}}': 1.0} if reason else {})


async def test_its_stream_counts_as_the_decode_engines_once_the_prompt_is_computed(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    stack = await make_stack([prefill], [decode], split_policy="predicted")
    work = stack.proxy.pairing.ledger.of(decode.url)
    goes_on = asyncio.Event()

    async def computes(call, request):
        await goes_on.wait()

    prefill.hook = computes
    decode.gate.clear()
    request = asyncio.create_task(ask(stack, stream=True))
    await until(lambda: legs([prefill, decode]) == ["prefill", "receive"])
    assert (work.num_coming, work.num_streams, work.kv_tokens) == (1, 0, 0)
    assert work.coming_tokens > 0
    goes_on.set()
    await until(lambda: work.num_streams == 1)
    assert (work.num_coming, work.coming_tokens) == (0, 0)
    decode.gate.set()
    assert await request == text_of(3, 4)
    assert work == EngineWork()


async def test_the_second_token_never_passes_the_first(make_stack):
    """The decode engine is done before the prefill engine says its first word."""
    (prefill,), (decode,) = prefills(), decodes()
    decode.eager = True
    prefill.gate.clear()
    stack = await make_stack([prefill], [decode])
    request = asyncio.create_task(stack.stream())
    await until(lambda: decode.ended["done"] == 1)
    await asyncio.sleep(0.02)
    assert not request.done()
    prefill.gate.set()
    stream = await request
    assert text_in(stream) == text_of(3, 4)
    assert b"pdserve" not in stream


async def test_a_decode_engine_that_speaks_between_first_token_and_handoff_waits(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    decode.eager = True
    handed_over = asyncio.Event()

    async def slow(call, request):
        response = await streaming(request)
        await response.write(first_chunk())
        await handed_over.wait()
        await response.write(sse({"pdserve_handoff": prefill.handoff(call)}))
        await response.write(b"data: [DONE]\n\n")
        return response

    prefill.hook = slow
    stack = await make_stack([prefill], [decode])
    async with stack.post({"prompt": "hi", "seed": 3, "stream": True}) as response:
        first = await response.content.readany()
        assert word(3, 0).encode() in first
        await until(lambda: decode.ended["done"] == 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(response.content.readany(), 0.05)
        handed_over.set()
        assert text_in(first + await response.content.read()) == text_of(3, 4)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_ends_at_its_first_token_leaves_the_receiver(make_stack, stream):
    (prefill,), (decode,) = prefills(), decodes()
    prefill.finish_at_prefill = True
    stack = await make_stack([prefill], [decode], cb_failure_threshold=1)
    assert await ask(stack, stream=stream) == text_of(3, 1)
    await until(lambda: decode.ended["cancelled"] == 1)
    metrics = await stack.metrics()
    assert metrics["pdserve_open_edges"] == 0
    await assert_nothing_held(stack)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_receiver_that_hears_first_that_the_request_ended_is_no_failure(make_stack, stream):
    """The prefill engine tells the other one at once; its own answer may be slower."""
    (prefill,), (decode,) = prefills(), decodes()
    prefill.finish_at_prefill = True
    prefill.token_delay_s = 0.05
    decode.hook = kv_failed()
    stack = await make_stack([prefill], [decode], cb_failure_threshold=1)
    if not stream:

        async def slow(call, request):
            await asyncio.sleep(0.05)

        prefill.hook = slow
    assert await ask(stack, stream=stream) == text_of(3, 1)
    assert legs([prefill, decode]) == ["prefill", "receive"]
    metrics = await stack.metrics()
    assert metrics["pdserve_open_edges"] == 0
    assert sum(v for k, v in metrics.items() if k.startswith("pdserve_kv_ladder_total")) == 0


# --- when it is pulled instead


@pytest.mark.parametrize(
    "body",
    [
        {"n": 2},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"max_tokens": 1},
        {"max_tokens": 0},
        {"prompt_logprobs": 1},
        {"echo": True, "logprobs": 1},
    ],
    ids=str,
)
async def test_what_one_ticket_cannot_cover_is_pulled(make_stack, body):
    (prefill,), (decode,) = prefills(), decodes()
    stack = await make_stack([prefill], [decode], kv_mode=KVTransfer.PUSH)
    async with stack.post({"prompt": "hi", "seed": 3, **body}) as response:
        assert response.status == 200
    assert prefill.calls[0].ticket is None
    assert "receive" not in legs([decode])


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [1, 2], [[1, 2]]], ids=str)
async def test_one_prompt_is_pushed_however_it_is_written(make_stack, prompt):
    (prefill,), (decode,) = prefills(), decodes()
    stack = await make_stack([prefill], [decode])
    assert await ask(stack, stream=True, prompt=prompt, n=1) == text_of(3, 4)
    assert legs([decode]) == ["receive"]


@pytest.mark.parametrize("which", ["prefill", "decode"])
@pytest.mark.parametrize("mode", [KVTransfer.AUTO, KVTransfer.PUSH])
async def test_engines_that_cannot_push_are_pulled_from(make_stack, which, mode):
    (prefill,), (decode,) = prefills(), decodes()
    (prefill if which == "prefill" else decode).can_push = False
    stack = await make_stack([prefill], [decode], kv_mode=mode)
    assert await ask(stack, stream=True) == text_of(3, 4)
    assert legs([prefill, decode]) == ["prefill", "decode"]


async def test_nothing_is_pushed_where_the_user_says_pull(make_stack, caplog):
    stack = await make_stack(prefills(), decodes(), kv_mode=KVTransfer.PULL)
    with caplog.at_level("INFO"):
        assert await ask(stack, stream=True) == text_of(3, 4)
    assert legs(stack.engines) == ["prefill", "decode"]
    assert {call.headers["X-Pdserve-KV-Mode"] for e in stack.engines for call in e.calls} == {
        "pull"
    }
    assert "path=pull" in caplog.text


async def test_engines_of_other_block_sizes_are_paired_and_pushed_between(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    decode.block_size = 64
    stack = await make_stack([prefill], [decode])
    assert await ask(stack, stream=True) == text_of(3, 4)
    ticket = prefill.calls[0].ticket
    assert (ticket.prefill.shape.block_size, ticket.decode.shape.block_size) == (16, 64)


@pytest.mark.slow
async def test_a_pair_whose_pushes_fail_is_pulled_from_and_both_engines_serve(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    decode.hook = kv_failed(leg="receive")
    stack = await make_stack([prefill], [decode], cb_failure_threshold=2, cb_timeout_s=600)
    for _ in range(4):
        assert await ask(stack, stream=True) == text_of(3, 4)
    assert legs([decode]) == ["receive", "decode"] * 2 + ["decode"] * 2
    assert len(prefill.calls) == 4
    metrics = await stack.metrics()
    assert metrics["pdserve_open_edges"] == 1
    assert (await rungs(stack))["retry_decode"] == 2
    assert metrics['pdserve_backends{role="decode",state="ready"}'] == 1


async def test_what_is_pulled_in_vain_does_not_keep_others_from_being_pushed(make_stack):
    """One client's requests, as those for many choices, may fail where nobody else's do."""
    (prefill,), (decode,) = prefills(), decodes()
    decode.hook = kv_failed(leg="decode")
    stack = await make_stack([prefill], [decode], cb_failure_threshold=2, cb_timeout_s=600)
    for _ in range(2):
        assert await ask(stack, stream=False, n=2)
    decode.hook = None
    before = len(decode.calls)
    assert await ask(stack, stream=True) == text_of(3, 4)
    assert legs([decode])[before:] == ["receive"]


async def test_push_means_push_whatever_became_of_former_ones(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    decode.hook = kv_failed(3, leg="receive")
    stack = await make_stack(
        [prefill], [decode], kv_mode=KVTransfer.PUSH, cb_failure_threshold=1, cb_timeout_s=600
    )
    for _ in range(4):
        assert await ask(stack, stream=True) == text_of(3, 4)
    assert legs([decode]) == ["receive", "decode"] * 3 + ["receive"]


# --- the decode engine fails


@pytest.mark.parametrize("stream", [True, False])
async def test_what_could_not_be_written_is_read_from_the_handoff_by_the_same_engine(
    make_stack, stream, caplog
):
    (prefill,), (decode, other) = prefills(), decodes(2)
    decode.hook = other.hook = kv_failed(leg="receive")
    stack = await make_stack([prefill], [decode, other])
    with caplog.at_level("INFO"):
        assert await ask(stack, stream=stream) == text_of(3, 4)
    assert legs([prefill]) == ["prefill"]
    assert sorted(map(legs, ([decode], [other]))) == [[], ["receive", "decode"]]
    assert prefill.read == [prefill.calls[0].ticket.nonce]
    assert "ladder retry_decode" in caplog.text
    await assert_nothing_held(stack)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_receiver_that_dies_before_its_first_word_is_replaced_without_a_second_prefill(
    make_stack, stream
):
    (prefill,), (bad, good) = prefills(), decodes(2)
    handed_over = asyncio.Event()

    async def dies_late(call, request):
        if call.leg == "receive":
            await pushed(call.ticket.nonce).wait()
            handed_over.set()
            request.transport.abort()
            return web.Response()
        return None

    bad.hook = dies_late
    good.hook = hangs("receive")
    stack = await make_stack([prefill], [bad, good], decode_policy="round_robin")
    assert await ask(stack, stream=stream) == text_of(3, 4)
    assert handed_over.is_set()
    assert legs([prefill, bad, good]) == ["prefill", "receive", "decode"]
    assert (await rungs(stack))["other_decode"] == 1
    await assert_nothing_held(stack)


async def test_a_receiver_that_dies_early_does_not_cost_what_is_prefilled(make_stack):
    (prefill,), (bad, good) = prefills(), decodes(2)
    bad.hook = drops()
    prefill.gate.clear()
    stack = await make_stack([prefill], [bad, good], decode_policy="round_robin")
    request = asyncio.create_task(ask(stack, stream=True))
    await until(lambda: len(bad.calls) == 1)
    await asyncio.sleep(0.05)
    prefill.gate.set()
    assert await request == text_of(3, 4)
    assert legs([prefill, good]) == ["prefill", "decode"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("hook", "patience"),
    [(drops(), "LOST_RECEIVER_PATIENCE_S"), (kv_failed(leg="receive"), "PUSH_PATIENCE_S")],
    ids=["dropped", "kv failed"],
)
async def test_a_prefill_engine_that_waits_in_vain_is_left_in_time(
    make_stack, stream, hook, patience, monkeypatch
):
    monkeypatch.setattr(strategies, patience, 0.1)
    (prefill,), (bad, good) = prefills(), decodes(2)
    bad.hook = hook
    waited = True

    async def waits_once(call, request):
        nonlocal waited
        if waited:
            waited = False
            await asyncio.Event().wait()

    prefill.hook = waits_once
    stack = await make_stack([prefill], [bad, good], decode_policy="round_robin")
    assert await ask(stack, stream=stream) == text_of(3, 4)
    assert legs([prefill]) == ["prefill", "prefill"]
    assert prefill.calls[0].ticket != prefill.calls[1].ticket
    await until(lambda: prefill.ended["cancelled"] == 1)
    await assert_nothing_held(stack)


@pytest.mark.parametrize(
    "hook",
    [answers(503, b"starting"), answers(429, b'{"error":{"message":"full"}}')],
    ids=["503", "429"],
)
async def test_a_receiver_that_does_not_take_the_request_is_replaced_at_once(make_stack, hook):
    (prefill,), (bad, good) = prefills(), decodes(2)
    bad.hook = hook

    async def waits_for_its_receiver(call, request):
        if call.ticket.decode.engine_id == bad.engine_id:
            await asyncio.Event().wait()

    prefill.hook = waits_for_its_receiver
    stack = await make_stack([prefill], [bad, good], decode_policy="round_robin")
    async with asyncio.timeout(2):
        assert await ask(stack, stream=True) == text_of(3, 4)
    assert legs([good]) == ["receive"]
    await assert_nothing_held(stack)


async def test_a_receiver_lost_in_mid_stream_is_replayed_elsewhere(make_stack):
    (prefill,), (bad, good) = prefills(), decodes(2)
    second = {"index": 0, "text": word(3, 1) + word(3, 2), "logprobs": None, "finish_reason": None}
    has_come = asyncio.Event()

    async def lost(call, request):
        response = await streaming(request)
        await response.write(sse({"choices": [second]}))
        await has_come.wait()
        request.transport.abort()
        return response

    bad.hook = lost
    stack = await make_stack([prefill], [bad, good], decode_policy="round_robin")
    body = {"prompt": "hi", "seed": 3, "stream": True, "max_tokens": 8}
    seen = b""
    async with stack.post(body) as response:
        async for piece in response.content.iter_any():
            seen += piece
            if word(3, 2).encode() in seen:
                has_come.set()
    assert text_in(seen) == text_of(3, 8)
    assert legs([good]) == ["local"]
    await assert_nothing_held(stack)
    metrics = await stack.metrics()
    key = 'pdserve_disagg_decisions_total{decision="local",reason="stream_lost"}'
    assert metrics[key] == 1


async def test_a_refused_ticket_is_pulled_instead_and_blames_the_pair(make_stack):
    (prefill,), (decode,) = prefills(), decodes()

    async def refuses(call, request):
        if call.ticket is not None:
            return web.Response(status=409, body=error("handoff_refused"))
        return None

    prefill.hook = decode.hook = refuses
    stack = await make_stack([prefill], [decode], cb_failure_threshold=1, cb_timeout_s=600)
    for _ in range(3):
        assert await ask(stack, stream=True) == text_of(3, 4)
    metrics = await stack.metrics()
    assert metrics['pdserve_kv_mode_total{mode="push"}'] == 1
    assert metrics['pdserve_backends{role="prefill",state="ready"}'] == 1


@pytest.mark.parametrize("which", ["prefill", "decode"])
async def test_a_request_is_pushed_at_most_once(make_stack, which):
    (prefill,), (decode,) = prefills(), decodes()

    async def refuses(call, request):
        if call.ticket is not None:
            return web.Response(status=409, body=error("handoff_refused"))
        return None

    (prefill if which == "prefill" else decode).hook = refuses
    stack = await make_stack([prefill], [decode], kv_mode=KVTransfer.PUSH)
    assert await ask(stack, stream=True) == text_of(3, 4)
    assert sum(call.ticket is not None for call in prefill.calls) == 1
    assert legs([decode])[-1] == "decode"


async def test_a_field_that_the_receiver_refuses_first_is_the_clients_answer(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    prefill.hook = hangs()
    body = b'{"error": {"message": "max_tokens", "type": "invalid_request_error"}}'
    decode.hook = answers(400, body)
    stack = await make_stack([prefill], [decode])
    async with stack.post({"prompt": "hi", "stream": True}) as response:
        assert (response.status, await response.read()) == (400, body)
    await assert_nothing_held(stack)


# --- the prefill engine fails


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hook", [answers(500, b"boom"), drops()], ids=["500", "dropped"])
async def test_another_pair_with_a_ticket_of_its_own_takes_over(make_stack, hook, stream):
    (bad, good), (decode,) = prefills(2), decodes()
    bad.hook = hook
    stack = await make_stack([bad, good], [decode], prefill_policy="round_robin")
    assert await ask(stack, stream=stream) == text_of(3, 4)
    assert legs([bad, good, decode]) == ["prefill", "prefill", "receive", "receive"]
    first, second = decode.calls
    assert first.ticket.nonce != second.ticket.nonce
    assert second.ticket.prefill.engine_id == good.engine_id
    await until(lambda: decode.ended["cancelled"] == 1)
    assert (await rungs(stack))["other_prefill"] == 1
    await assert_nothing_held(stack)


# --- the client leaves


async def test_a_handoff_that_comes_in_the_moment_of_the_leaving_is_given_back(
    make_stack, monkeypatch
):
    """The leg is over, and nobody has looked at what it ended with."""
    (engine,), (decode,) = prefills(), decodes()
    decode.hook = hangs()
    serving: list[asyncio.Task] = []
    begin, prefill = proxy_legs.Legs.begin, proxy_legs.Legs.prefill

    def watched(self, mode):
        serving.append(asyncio.current_task())
        begin(self, mode)

    async def leaves_with_it(self, *args):
        outcome = await prefill(self, *args)
        serving[0].cancel()
        return outcome

    monkeypatch.setattr(proxy_legs.Legs, "begin", watched)
    monkeypatch.setattr(proxy_legs.Legs, "prefill", leaves_with_it)
    stack = await make_stack([engine], [decode])
    request = asyncio.create_task(stack.stream())
    await until(lambda: len(engine.released) == 1)
    await leave(request)
    await assert_nothing_held(stack)
