"""What is done, in which order, when KV does not get where it is wanted; and that it is told."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter

import pytest
from aiohttp import web

from pdserve.config.http import KVTransfer
from pdserve.proxy.story import LadderRung
from tests.proxy.conftest import until
from tests.proxy.hooks import (
    answers,
    ask,
    decodes,
    drops,
    error,
    kv_failed,
    legs,
    prefills,
)
from tests.proxy.scripted import ScriptedEngine, events_of, text_in, text_of, word
from tests.proxy.test_disconnect import assert_nothing_held


def budget_spent(leg: str = "local", retry_after: str = "7"):
    async def hook(call, request):
        if call.leg != leg:
            return None
        return web.Response(
            status=503,
            body=error("recompute_budget_exhausted", "spent"),
            content_type="application/json",
            headers={"Retry-After": retry_after},
        )

    return hook


def both(*hooks):
    """The first hook that answers."""

    async def hook(call, request):
        for one in hooks:
            if (answer := await one(call, request)) is not None:
                return answer
        return None

    return hook


async def rungs(stack) -> dict[str, float]:
    """How often each rung was taken, for whatever reason."""
    counts: Counter[str] = Counter()
    for series, count in (await stack.metrics()).items():
        if found := re.fullmatch(r'pdserve_kv_ladder_total\{.*rung="(\w+)"\}', series):
            counts[found[1]] += count
    assert counts.keys() == {rung.value for rung in LadderRung}
    return {rung: count for rung, count in counts.items() if count}


async def failures(stack, leg: str, reason: str) -> float:
    metrics = await stack.metrics()
    return metrics[f'pdserve_leg_failures_total{{leg="{leg}",reason="{reason}"}}']


async def test_all_goes_well_and_no_rung_is_counted(make_stack, caplog):
    stack = await make_stack(prefills(), decodes())
    with caplog.at_level("INFO"):
        assert await ask(stack, stream=True) == text_of(3, 4)
    assert await rungs(stack) == {}
    assert "ladder" not in caplog.text


@pytest.mark.covering(1)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (kv_failed(), "kv_failed"),
        (kv_failed(reasons="peer_lost,timeout"), "kv_failed"),
        (kv_failed(reasons="digest"), "kv_failed"),
        (answers(409, error("handoff_refused")), "handoff_refused"),
    ],
)
async def test_another_decode_engine_reads_what_one_could_not(
    make_stack, stream, hook, reason, caplog
):
    (prefill,), (bad, good) = prefills(), decodes(2)
    bad.hook = hook
    stack = await make_stack([prefill], [bad, good], decode_policy="round_robin")
    with caplog.at_level("INFO"):
        assert await ask(stack, stream=stream) == text_of(3, 4)
    assert legs([prefill, bad, good]) == ["prefill", "decode", "decode"]
    assert await rungs(stack) == {"other_decode": 1}
    assert f"| ladder other_decode({reason})" in caplog.text
    assert await failures(stack, "decode", reason) == 1
    metrics = await stack.metrics()
    assert metrics[f'pdserve_kv_ladder_total{{reason="{reason}",rung="other_decode"}}'] == 1
    (told,) = (await stack.get("/debug/requests?finished=1"))["finished"]
    assert (told["rungs"], told["rung_reasons"]) == (["other_decode"], [reason])
    await assert_nothing_held(stack)


async def test_an_engine_that_could_not_read_is_not_blamed_but_its_pair_is(make_stack):
    (prefill,), (far, near) = prefills(), decodes(2)
    far.hook = kv_failed(leg="decode")
    stack = await make_stack(
        [prefill],
        [far, near],
        decode_policy="round_robin",
        cb_failure_threshold=1,
        cb_timeout_s=600,
    )
    for _ in range(4):
        assert await ask(stack, stream=True) == text_of(3, 4)
    assert legs([far]) == ["decode"]
    metrics = await stack.metrics()
    assert metrics["pdserve_open_edges"] == 1
    assert metrics['pdserve_backends{role="decode",state="ready"}'] == 2
    assert await failures(stack, "decode", "kv_failed") == 1


async def test_a_pair_that_cannot_reach_each_other_serves_locally_without_a_second_try(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    decode.hook = kv_failed(leg="decode", reasons="peer_lost")
    stack = await make_stack([prefill], [decode], cb_failure_threshold=1, cb_timeout_s=600)
    assert await ask(stack, stream=True) == text_of(3, 4)
    assert legs([prefill, decode]) == ["prefill", "decode", "local"]
    assert await ask(stack, stream=True) == text_of(3, 4)
    assert legs([prefill, decode]) == ["prefill", "decode", "local", "local"]
    assert [call.params["pdserve"].get("is_fallback") for call in decode.calls] == [
        None,
        True,
        True,
    ]
    metrics = await stack.metrics()
    assert metrics['pdserve_disagg_decisions_total{decision="local",reason="kv_failed"}'] == 1
    assert metrics['pdserve_disagg_decisions_total{decision="local",reason="no_pair"}'] == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_another_prefill_engine_prefills_again_and_nothing_is_said_twice(make_stack, stream):
    (lost, other), (decode,) = prefills(2), decodes()
    decode.hook = kv_failed(1, leg="decode")
    stack = await make_stack([lost, other], [decode], prefill_policy="round_robin")
    assert await ask(stack, stream=stream) == text_of(3, 4)
    assert legs([lost, other, decode]) == ["prefill", "prefill", "decode", "decode"]
    assert await rungs(stack) == {"other_prefill": 1}
    await until(lambda: len(lost.released) == 1)
    await assert_nothing_held(stack)


async def test_a_lease_that_is_lost_is_offered_to_no_other_engine(make_stack):
    """And its engine may prefill again: a fresh lease is all that was missing."""
    (prefill,), (decode, other) = prefills(), decodes(2)
    decode.hook = kv_failed(1, leg="decode", reasons="lease_lost")
    stack = await make_stack([prefill], [decode, other], decode_policy="round_robin")
    assert await ask(stack, stream=True) == text_of(3, 4)
    assert legs([prefill]) == ["prefill", "prefill"]
    first, second = prefill.released[0], prefill.read[0]
    assert first != second
    assert await rungs(stack) == {"other_prefill": 1}


async def test_a_handoff_of_an_engine_that_restarted_is_offered_to_nobody(make_stack):
    (prefill,), (decode, other) = prefills(), decodes(2)
    restarted = asyncio.Event()

    async def late(call, request):
        if call.leg == "decode":
            await restarted.wait()
            return await kv_failed()(call, request)
        return None

    decode.hook = other.hook = late
    stack = await make_stack([prefill], [decode, other], retry_max_retries=5)
    request = asyncio.create_task(ask(stack, stream=True))
    await until(lambda: legs([decode, other]) == ["decode"])
    prefill.incarnation = "life-2"
    backend = stack.proxy.backends.get(prefill.url)
    await until(lambda: backend.info.incarnation == "life-2")
    restarted.set()
    assert await request == text_of(3, 4)
    assert sorted(legs([decode, other])) == ["decode", "local"]


async def test_the_ladder_is_bounded_by_the_retries(make_stack):
    ps, ds = prefills(5), decodes(5)
    for engine in ds:
        engine.hook = kv_failed(leg="decode")
    stack = await make_stack(ps, ds, retry_max_retries=2)
    assert await ask(stack, stream=True) == text_of(3, 4)
    assert sorted(legs([*ps, *ds])) == ["decode"] * 3 + ["local", "prefill"]
    assert await rungs(stack) == {"other_decode": 2, "local": 1}
    await assert_nothing_held(stack)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stream_that_nobody_may_compute_is_shed_with_the_engines_retry_after(
    make_stack, stream, caplog
):
    (prefill,), ds = prefills(), decodes(2)
    prefill.hook = answers(500, b"boom")
    for engine in ds:
        engine.hook = budget_spent()
    stack = await make_stack([prefill], ds, cb_failure_threshold=99)
    with caplog.at_level("INFO"):
        async with stack.post({"prompt": "hi", "stream": stream}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "7"
            assert (await response.json())["error"]["code"] == "recompute_budget_exhausted"
    assert legs(ds) == ["local", "local"]
    counted = await rungs(stack)
    assert counted["shed"] == 1
    assert "local(prefill_failed),shed(budget)" in caplog.text
    metrics = await stack.metrics()
    assert metrics['pdserve_requests_total{outcome="shed"}'] == 1
    assert metrics['pdserve_backends{role="decode",state="ready"}'] == 2


async def test_a_begun_stream_that_is_shed_ends_with_an_error_event(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    decode.hook = both(kv_failed(leg="decode"), budget_spent())
    prefill.hook = budget_spent()
    stack = await make_stack([prefill], [decode])
    first, last = events_of(await stack.stream())
    assert first["choices"][0]["text"] == word(3, 0)
    assert last["error"]["code"] == "recompute_budget_exhausted"
    await assert_nothing_held(stack)


async def test_an_outage_of_prefill_is_a_fallback_and_a_deployment_without_it_is_none(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    await prefill.start()
    await prefill.stop()
    stack = await make_stack([prefill], [decode])
    assert await ask(stack, stream=True) == text_of(3, 4)
    assert decode.calls[0].params["pdserve"]["is_fallback"] is True
    assert await rungs(stack) == {"local": 1}
    (alone,) = decodes()
    stack = await make_stack([], [alone])
    assert await ask(stack, stream=True) == text_of(3, 4)
    assert "is_fallback" not in alone.calls[0].params["pdserve"]
    assert await rungs(stack) == {}


async def test_a_stream_lost_in_the_middle_counts_its_rung_and_no_fallback(make_stack):
    (prefill,), (bad, good) = prefills(), decodes(2)
    bad.token_delay_s = 0.02
    stack = await make_stack([prefill], [bad, good], decode_policy="round_robin")
    request = asyncio.create_task(stack.stream({"max_tokens": 8}))
    await until(lambda: len(bad.calls) == 1)
    await asyncio.sleep(0.07)
    await bad.stop()
    assert text_in(await request) == text_of(3, 8)
    if legs([good]) == ["local"]:  # it had begun to speak
        assert await rungs(stack) == {"local": 1}
        assert "is_fallback" not in good.calls[0].params["pdserve"]


@pytest.mark.parametrize("leg", ["prefill", "decode", "local", "receive"])
async def test_every_leg_carries_the_time_that_its_client_still_waits(make_stack, leg):
    mode = KVTransfer.AUTO if leg == "receive" else KVTransfer.PULL
    prefill = ScriptedEngine("prefill", can_push=True)
    decode = ScriptedEngine("decode", can_push=True)
    if leg == "local":
        decode.hook = answers(500, b"no", leg="decode")
    stack = await make_stack(
        [prefill], [decode], kv_mode=mode, request_timeout_s=50.0, retry_max_retries=0
    )
    before_s = time.monotonic()
    assert await ask(stack, stream=True) == text_of(3, 4)
    told = {
        call.leg: float(call.headers["X-Pdserve-Time-Left"])
        for call in [*prefill.calls, *decode.calls]
    }
    assert 50.0 - (time.monotonic() - before_s) - 0.01 <= told[leg] <= 50.0


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_says_it_is_too_late_is_not_blamed(make_stack, stream):
    (prefill,), (decode,) = prefills(), decodes()
    prefill.hook = answers(504, error("deadline_exceeded", "late"))
    stack = await make_stack([prefill], [decode], cb_failure_threshold=1)
    assert await stack.refused({"prompt": "hi", "stream": stream}) == (504, "deadline_exceeded")
    assert legs([prefill, decode]) == ["prefill"]
    metrics = await stack.metrics()
    assert metrics['pdserve_backends{role="prefill",state="ready"}'] == 1
    await assert_nothing_held(stack)


async def test_the_story_names_every_rung(make_stack):
    (prefill,), (bad, other) = prefills(), decodes(2)
    bad.hook = drops()
    started = asyncio.Event()

    async def hang(call, request):
        started.set()
        await asyncio.Event().wait()

    other.hook = hang
    stack = await make_stack([prefill], [bad, other], decode_policy="round_robin")
    async with stack.post({"prompt": "hi", "stream": True}):
        await started.wait()
        (live,) = (await stack.get("/debug/requests"))["running"]
    told = [event["event"] for event in live["story"]]
    assert "ladder: other_decode (dropped)" in told
    assert live["kv_mode"] == "pull"
