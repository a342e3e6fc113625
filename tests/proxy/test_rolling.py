"""A deployment that is rolled to other weights, or to another version, behind one proxy."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdserve.wire.transfer import HANDOFFS
from tests.proxy.conftest import until
from tests.proxy.hooks import ask, drops, first_chunk, legs
from tests.proxy.scripted import LEASES, ScriptedEngine, events_of, text_in, text_of, word
from tests.proxy.test_registration import is_ready, register, send


def revision(weights: str, number: int = 1) -> tuple[list[ScriptedEngine], list[ScriptedEngine]]:
    """Prefill and decode engines of some weights."""
    prefills = [ScriptedEngine("prefill", engine_id=f"p{i} {weights}") for i in range(number)]
    decodes = [ScriptedEngine("decode", engine_id=f"d{i} {weights}") for i in range(number)]
    for engine in prefills + decodes:
        engine.weights = weights
        engine.can_push = True
    return prefills, decodes


def assert_no_mixed_pair(decodes: list[ScriptedEngine]) -> None:
    for engine in decodes:
        for call in engine.calls:
            for owner in LEASES.values():
                if set(owner.read) & nonces_of(call):
                    assert owner.weights == engine.weights


def nonces_of(call) -> set[str]:
    if call.ticket is not None:
        return {call.ticket.nonce}
    return {HANDOFFS.peek(text).nonce for text in call.params["pdserve"].get("handoffs", ())}


@pytest.mark.parametrize("kv_mode", ["pull", "auto"])
async def test_engines_of_both_weights_register_and_pairs_are_of_equal_ones(make_stack, kv_mode):
    (old_ps, old_ds), (new_ps, new_ds) = revision("w1"), revision("w2")
    stack = await make_stack(kv_mode=kv_mode, prefill_policy="round_robin")
    engines = [*old_ps, *new_ds, *new_ps, *old_ds]
    for engine in engines:
        await engine.start()
        assert (await register(stack, engine))[0] == 200
    await until(lambda: all(is_ready(stack, engine) for engine in engines))
    texts = await asyncio.gather(*(ask(stack, stream=bool(i % 2)) for i in range(24)))
    assert set(texts) == {text_of(3, 4)}
    assert all(engine.calls for engine in engines), "each group has its share"
    assert_no_mixed_pair(old_ds + new_ds)
    assert [model["id"] for model in (await stack.get("/v1/models"))["data"]] == ["tiny"]
    assert (await stack.get("/readyz"))["engines"] == {"prefill": 2, "decode": 2, "both": 0}
    for engine in engines:
        await engine.stop()


async def test_a_prefill_engine_without_a_decode_engine_of_its_weights_leaves_the_work_to_others(
    make_stack,
):
    (prefills, _), (_, decodes) = revision("w1"), revision("w2")
    stack = await make_stack(prefills, decodes)
    assert text_in(await stack.stream()) == text_of(3, 4)
    assert legs(decodes) == ["local"]
    assert decodes[0].calls[0].params["pdserve"]["is_fallback"]
    metrics = await stack.metrics()
    assert metrics['pdserve_disagg_decisions_total{decision="local",reason="no_pair"}'] == 1


async def test_a_stream_goes_on_only_where_its_weights_are(make_stack):
    prefills, (bad, good) = revision("w1", 2)[0][:1], revision("w1", 2)[1]
    others = revision("w2", 3)[1]
    bad.gate.clear()
    stack = await make_stack(prefills, [bad, good, *others], kv_mode="pull")
    good.ready = False
    await until(lambda: not is_ready(stack, good))
    request = asyncio.create_task(stack.stream({"max_tokens": 8}))
    await until(lambda: len(bad.calls) == 1)
    good.ready = True
    await until(lambda: is_ready(stack, good))
    await bad.stop()
    assert text_in(await request) == text_of(3, 8)
    assert legs([good]) == ["local"]
    assert legs(others) == []


async def test_a_stream_whose_weights_are_gone_ends_with_an_error_that_says_so(make_stack):
    """Even where the others would have said the same: nobody knows that beforehand."""
    (prefills, decodes), (_, others) = revision("w1"), revision("w2")
    stack = await make_stack(prefills, [*decodes, *others], queue_timeout_s=0.1, kv_mode="pull")

    async def gone(call, request):
        for engine in prefills + decodes:
            engine.ready = False
        await until(lambda: not any(is_ready(stack, each) for each in prefills + decodes))
        request.transport.abort()

    decodes[0].hook = gone
    first, last = events_of(await stack.stream())
    assert first["choices"][0]["text"] == word(3, 0)
    assert last["error"]["code"] == "weights_replaced"
    assert "weights with which this stream started" in last["error"]["message"]
    assert legs(others) == []


@pytest.mark.parametrize("after", [b"", b"data: {"])
async def test_a_request_of_which_nothing_was_sent_is_begun_again_on_other_weights(
    make_stack, after
):
    (_, decodes), (_, others) = revision("w1"), revision("w2")
    decodes[0].hook = drops(after=after)
    stack = await make_stack([], decodes + others, decode_policy="round_robin")
    for _ in range(2):
        assert await ask(stack, stream=True) == text_of(3, 4)
    assert legs(decodes)
    assert len(legs(others)) == 2


async def test_an_engine_that_was_replaced_unnoticed_does_not_go_on_with_a_stream(make_stack):
    """Its address is that of the former one, and the proxy has not asked it since."""
    (engine,) = revision("w1")[1]
    stack = await make_stack([], [engine], health_check_interval_s=60.0, retry_max_retries=1)
    last_words = drops(times=1, after=first_chunk())

    async def replaced(call, request):
        answer = await last_words(call, request)
        if answer is None:
            engine.weights = "w2"
        return answer

    engine.hook = replaced
    first, last = events_of(await stack.stream())
    assert first["choices"][0]["text"] == word(3, 0)
    assert "an engine stopped answering" in last["error"]["message"]
    assert len(engine.calls) > 1


@pytest.mark.parametrize("weights", ["w1", "w2"])
async def test_another_model_is_refused_with_both_names(make_stack, weights):
    (prefills, _), (_, decodes) = revision("w1"), revision(weights)
    stack = await make_stack(prefills)
    engine = await decodes[0].start()
    engine.model = "other"
    status, body = await register(stack, engine)
    assert status == 409
    assert "served model name is other here and tiny there" in body["error"]["message"]
    assert "--served-model-name" in body["error"]["message"]
    await engine.stop()


async def test_of_engines_given_to_the_proxy_under_two_names_one_serves(make_stack, caplog):
    _, (decode,) = engines = revision("w1")
    decode.model = "other"
    stack = await make_stack(*engines)
    [told] = [each for each in caplog.records if "served model name" in each.message]
    assert told.levelno == logging.ERROR
    assert "other here and tiny there" in told.getMessage()
    assert not is_ready(stack, decode)
    models = await stack.get("/v1/models")
    assert [each["id"] for each in models["data"]] == ["tiny"]


@pytest.mark.parametrize(
    ("digests", "are_named"), [("ab", True), ("aa", False), (("", "b"), False)]
)
async def test_engines_that_read_requests_differently_are_named(
    make_stack, caplog, digests, are_named
):
    (prefill,), (decode,) = engines = revision("w1")
    prefill.text_digest, decode.text_digest = digests
    await make_stack(*engines)
    told = [each.getMessage() for each in caplog.records if "read requests diff" in each.message]
    assert len(told) == are_named
    assert all(prefill.url in each and decode.url in each for each in told)


@pytest.mark.parametrize(("lengths", "are_named"), [((2048, 4096), True), ((2048, 2048), False)])
async def test_engines_that_decode_and_differ_in_length_are_named(
    make_stack, caplog, lengths, are_named
):
    decodes = [ScriptedEngine("decode", engine_id=f"d{number}") for number in range(2)]
    for decode, length in zip(decodes, lengths, strict=True):
        decode.max_model_len = length
    await make_stack([ScriptedEngine("prefill")], decodes)
    told = [each.getMessage() for each in caplog.records if "different lengths" in each.message]
    assert len(told) == are_named
    assert all(str(length) in each for each in told for length in lengths)


async def test_engines_of_the_former_protocol_are_pulled_between(make_stack):
    """A ticket is the proxy's own, and they could not read it."""
    prefills, decodes = revision("w1")
    for engine in prefills + decodes:
        engine.protocol = 1
    stack = await make_stack(prefills, decodes, kv_mode="push")
    assert text_in(await stack.stream()) == text_of(3, 4)
    assert legs(prefills + decodes) == ["prefill", "decode"]


async def test_a_layout_field_that_only_one_version_knows_is_no_misfit(make_stack):
    stack = await make_stack()
    known = {"schema": "1", "weights": "w1", "dtype": "float32"}
    later = {"protocol": "2", "weights": "w2", "dtype": "float32", "numerics": "x"}
    misfit = {**later, "dtype": "bfloat16"}
    statuses = []
    for number, layout in enumerate((known, later, misfit)):
        engine = {
            **ScriptedEngine("both", engine_id=f"{number}").info(),
            "layout": layout,
            "layout_digest": f"{layout}",
        }
        body = {"url": f"http://a..{number}", "role": "both", "engine": engine, "lease_s": 30.0}
        statuses.append((await send(stack, "POST", body))[0])
    assert statuses == [200, 200, 409]
