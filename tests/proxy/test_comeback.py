"""Engines that die or restart and come back: requests wait, or are served by who is left."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.observe.clock import ManualClock
from pdserve.proxy.backends import STARTUP_S
from tests.proxy.conftest import until
from tests.proxy.hooks import answers, ask, decodes, error, legs, prefills
from tests.proxy.scripted import ScriptedEngine, text_in, text_of, word
from tests.proxy.test_disconnect import assert_nothing_held, disconnects, leave
from tests.proxy.test_ladder import budget_spent, rungs
from tests.proxy.test_registration import is_ready, register, send


def port_of(engine: ScriptedEngine) -> int:
    return int(engine.url.rsplit(":", 1)[1])


async def restart(engine: ScriptedEngine) -> None:
    """Another life at the same place."""
    engine.incarnation = f"{engine.incarnation}+"
    engine.hook = None
    await engine.start(port_of(engine))


async def is_lost(stack, engine: ScriptedEngine) -> None:
    await until(lambda: not stack.proxy.backends.get(engine.url).available)


@pytest.mark.parametrize("stream", [True, False])
async def test_without_its_only_decode_engine_prefill_serves_within_its_budget(
    make_stack, stream, caplog
):
    (prefill,), (decode,) = prefills(), decodes()
    stack = await make_stack([prefill], [decode])
    await decode.stop()
    await is_lost(stack, decode)
    with caplog.at_level("INFO"):
        assert await ask(stack, stream=stream) == text_of(3, 4)
    assert legs([prefill]) == ["local"]
    assert prefill.calls[0].params["pdserve"]["is_fallback"] is True
    assert await rungs(stack) == {"local": 1}
    assert "ladder local(no_decode)" in caplog.text
    metrics = await stack.metrics()
    assert metrics['pdserve_disagg_decisions_total{decision="local",reason="no_decode"}'] == 1
    assert metrics['pdserve_kv_ladder_total{reason="no_decode",rung="local"}'] == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_beyond_that_budget_requests_wait_for_the_decode_engine(make_stack, stream):
    (prefill,), (decode,) = prefills(), decodes()
    prefill.hook = budget_spent(retry_after="3600")
    stack = await make_stack([prefill], [decode])
    await decode.stop()
    await is_lost(stack, decode)
    requests = [asyncio.create_task(ask(stack, stream=stream)) for _ in range(3)]
    await until(lambda: legs([prefill]) == ["local"] * 3)
    await stack.until_stages("queued", "queued", "queued")
    await restart(decode)
    assert await asyncio.gather(*requests) == [text_of(3, 4)] * 3
    assert legs([decode]) == ["decode"] * 3
    assert (await rungs(stack)).get("shed", 0) == 0
    await assert_nothing_held(stack)


@pytest.mark.slow
async def test_a_spent_budget_is_asked_again_when_it_says_so(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    told = budget_spent(retry_after="1")

    async def once(call, request):
        return await told(call, request) if len(prefill.calls) == 1 else None

    prefill.hook = once
    stack = await make_stack([prefill], [decode])
    await decode.stop()
    await is_lost(stack, decode)
    assert await ask(stack, stream=True) == text_of(3, 4)
    assert legs([prefill]) == ["local", "local"]


@pytest.mark.parametrize("takes_leave", [True, False])
async def test_when_every_engine_is_gone_requests_wait_for_their_return(
    make_stack, takes_leave, started
):
    stack = await make_stack()
    prefill, decode = [await started(role) for role in ("prefill", "decode")]
    for engine in (prefill, decode):
        await register(stack, engine)
    await until(lambda: is_ready(stack, prefill) and is_ready(stack, decode))
    for engine in (prefill, decode):
        if takes_leave:
            await send(stack, "DELETE", {"url": engine.url})
        await engine.stop()
    if not takes_leave:
        await asyncio.gather(is_lost(stack, prefill), is_lost(stack, decode))
    request = asyncio.create_task(ask(stack, stream=True))
    await stack.until_stages("queued")
    for engine in (prefill, decode):
        await restart(engine)
        await register(stack, engine)
    assert await request == text_of(3, 4)
    await assert_nothing_held(stack)


async def test_a_restart_of_the_only_decode_engine_costs_no_request(make_stack, started):
    """It takes its leave, and so is not known at all for a while."""
    stack = await make_stack()
    prefill, decode = [await started(role) for role in ("prefill", "decode")]
    for engine in (prefill, decode):
        await register(stack, engine)
    await until(lambda: is_ready(stack, prefill) and is_ready(stack, decode))
    await send(stack, "DELETE", {"url": decode.url})
    await decode.stop()
    assert await ask(stack, stream=True) == text_of(3, 4)
    assert legs([prefill]) == ["local"]
    await restart(decode)
    await register(stack, decode)
    await until(lambda: is_ready(stack, decode))
    assert await ask(stack, stream=True) == text_of(3, 4)
    assert legs([prefill, decode]) == ["local", "prefill", "decode"]


@pytest.mark.parametrize("gone", ["dies", "drains"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_restart_of_the_only_engine_is_waited_for_from_its_first_moment(
    make_stack, gone, stream
):
    """No health check has seen yet that it is away: only the request itself."""
    (engine,) = decodes()
    stack = await make_stack([], [engine], retry_max_retries=1, cb_failure_threshold=99)
    await stack.proxy.checks.stop()
    if gone == "dies":
        await engine.stop()
    else:
        engine.ready, engine.hook = False, answers(503, error("shutting_down"))
    request = asyncio.create_task(ask(stack, stream=stream))
    await stack.until_stages("queued")
    await until(lambda: not stack.proxy.backends.get(engine.url).available)
    engine.ready = True
    if gone == "dies":
        await restart(engine)
    engine.hook = None
    await stack.proxy.checks.check(stack.proxy.backends.get(engine.url))
    assert await request == text_of(3, 4)
    await assert_nothing_held(stack)


@pytest.mark.parametrize("is_static", [True, False], ids=["prefill is known", "none is known"])
async def test_a_proxy_that_has_just_started_waits_for_engines_to_register(
    make_stack, started, is_static
):
    """They renew their leases, of which a restarted proxy knows nothing, only every 3 s."""
    prefill, decode = [await started(role) for role in ("prefill", "decode")]
    stack = await make_stack([prefill] if is_static else [], [], ManualClock())
    request = asyncio.create_task(ask(stack, stream=True))
    await stack.until_stages("queued")
    if not is_static:
        await register(stack, prefill)
    await register(stack, decode)
    assert await request == text_of(3, 4)
    await assert_nothing_held(stack)


async def test_a_proxy_to_which_none_has_come_says_so_when_its_start_is_over(make_stack):
    stack = await make_stack([], [], clock := ManualClock())
    request = asyncio.create_task(stack.refused())
    await stack.until_stages("queued")
    clock.advance(STARTUP_S)
    async with asyncio.timeout(30.0):  # it could queue for longer
        assert await request == (503, "no_prefill_available")
    await assert_nothing_held(stack)


async def test_a_begun_stream_waits_and_goes_on_with_the_same_text(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    prefill.hook = budget_spent(retry_after="3600")
    decode.gate.clear()
    stack = await make_stack([prefill], [decode], retry_max_retries=1)
    async with stack.post({"prompt": "hi", "seed": 3, "stream": True}) as response:
        first = await response.content.readany()
        assert word(3, 0).encode() in first
        await until(lambda: legs([decode]) == ["decode"])
        await decode.stop()
        await until(lambda: "local" in legs([prefill]))
        await stack.until_stages("queued")
        decode.gate.set()
        await restart(decode)
        assert text_in(first + await response.content.read()) == text_of(3, 4)
    await assert_nothing_held(stack)


@pytest.mark.slow
async def test_who_waits_too_long_is_told_so(make_stack, caplog):
    (prefill,), (decode,) = prefills(), decodes()
    prefill.hook = budget_spent(retry_after="3600")
    stack = await make_stack([prefill], [decode], queue_timeout_s=0.1)
    await decode.stop()
    await is_lost(stack, decode)
    with caplog.at_level("INFO"):
        async with stack.post() as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "3600"
    assert "ladder local(no_decode),shed(budget)" in caplog.text
    await prefill.stop()
    await is_lost(stack, prefill)
    assert await stack.refused() == (503, "no_prefill_available")
    metrics = await stack.metrics()
    assert metrics['pdserve_kv_ladder_total{reason="no_engine",rung="shed"}'] == 1
    await assert_nothing_held(stack)


async def test_a_client_may_leave_while_it_waits(make_stack):
    (decode,) = decodes()
    stack = await make_stack([], [decode])
    await decode.stop()
    await is_lost(stack, decode)
    request = asyncio.create_task(stack.stream())
    await stack.until_stages("queued")
    await leave(request)
    await until(lambda: stack.proxy.admission.num_running == 0)
    assert await disconnects(stack, "queued") == 1
    await assert_nothing_held(stack)


async def test_an_open_breaker_of_the_only_engine_is_waited_for(make_stack):
    (decode,) = decodes()
    stack = await make_stack([], [decode], cb_failure_threshold=1, cb_timeout_s=0.2)
    stack.proxy.backends.get(decode.url).breaker.fail()
    assert await ask(stack, stream=True) == text_of(3, 4)
    metrics = await stack.metrics()
    assert metrics['pdserve_requests_total{outcome="ok"}'] == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_has_just_become_ready_is_seen_before_anything_else_is_tried(
    make_stack, role
):
    """The next check of its health would come only in ten minutes."""
    (prefill,), (decode,) = prefills(), decodes()
    late = prefill if role == "prefill" else decode
    late.ready = False
    stack = await make_stack([prefill], [decode], health_check_interval_s=600.0)
    backend = stack.proxy.backends.get(late.url)
    await stack.proxy.checks.stop()  # nobody looks at it in turn
    assert not backend.available
    late.ready = True
    answers = await asyncio.gather(*(ask(stack, stream=True) for _ in range(5)))
    assert answers == [text_of(3, 4)] * 5
    assert sorted(legs([prefill, decode])) == ["decode"] * 5 + ["prefill"] * 5
    assert await rungs(stack) == {}


async def test_an_engine_that_is_late_with_its_health_keeps_no_request_waiting(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    prefill.ready = False
    stack = await make_stack([prefill], [decode], health_check_interval_s=600.0)
    await stack.proxy.checks.stop()
    prefill.hang_health = asyncio.Event()
    assert await ask(stack, stream=True) == text_of(3, 4)
    assert legs([decode]) == ["local"]
    prefill.hang_health.set()
