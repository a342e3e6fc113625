"""Engines that are left: what runs there ends there, or goes on elsewhere, within the deadline."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from aiohttp import web

from pdserve.observe.clock import ManualClock
from pdserve.proxy.backend import Health
from pdserve.wire.transfer import HANDOFFS
from tests.proxy.conftest import until
from tests.proxy.hooks import answers, ask, decodes, drops, hangs, kv_failed, legs, prefills
from tests.proxy.scripted import Call, ScriptedEngine, sse, text_in, text_of, word
from tests.proxy.test_registration import is_ready, register, send

DEADLINE_S = 5.0


async def drain(stack, engine: ScriptedEngine, deadline_s: float = DEADLINE_S) -> dict:
    body = {"url": engine.url, "deadline_s": deadline_s}
    async with stack.client.post(f"{stack.url}/drain", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def resume(stack, engine: ScriptedEngine) -> None:
    async with stack.client.delete(f"{stack.url}/drain", json={"url": engine.url}) as response:
        assert response.status == 200


def free(*engines: ScriptedEngine) -> None:
    """They hold no KV, as far as they say."""
    for engine in engines:
        engine.num_held = 0


async def test_what_runs_at_an_engine_ends_there_and_nothing_more_is_sent_to_it(make_stack):
    leaving, staying = decodes(2)
    free(leaving)
    leaving.gate.clear()
    stack = await make_stack([], [leaving, staying], decode_policy="round_robin")
    stream = asyncio.create_task(stack.stream())
    await until(lambda: len(leaving.calls) == 1)
    draining = asyncio.create_task(drain(stack, leaving))
    await until(lambda: not is_ready(stack, leaving))
    others = await asyncio.gather(*(ask(stack, stream=False) for _ in range(4)))
    assert others == [text_of(3, 4)] * 4
    assert not draining.done()
    leaving.gate.set()
    assert text_in(await stream) == text_of(3, 4)
    report = await draining
    assert (report["is_empty"], report["num_finished"], report["num_moved"]) == (True, 1, 0)
    assert report["seconds"] < 4
    assert (len(leaving.calls), len(staying.calls)) == (1, 4)
    metrics = await stack.metrics()
    assert metrics['pdserve_drains_total{outcome="empty"}'] == 1
    assert metrics['pdserve_backends{role="decode",state="draining"}'] == 1
    assert metrics['pdserve_migrations_total{outcome="replayed",why="drain"}'] == 0


@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("way", ["local", "pull", "push"])
async def test_what_still_runs_shortly_before_the_deadline_goes_on_elsewhere(
    make_stack, way, stream
):
    """With the same text, and where no retry is allowed."""
    leaving, staying = decodes(2, can_push=True)
    free(leaving)
    if stream:
        leaving.gate.clear()
    else:
        leaving.hook = hangs()
    engines = [] if way == "local" else prefills(can_push=True)
    mode = {"kv_mode": way} if engines else {}
    stack = await make_stack(engines, [leaving, staying], retry_max_retries=0, **mode)
    staying.ready = False
    await until(lambda: not is_ready(stack, staying))
    answer = asyncio.create_task(ask(stack, stream=stream, max_tokens=8))
    await until(lambda: len(leaving.calls) == 1)
    staying.ready = True
    await until(lambda: is_ready(stack, staying))
    report = await drain(stack, leaving, deadline_s=0.3)
    assert await answer == text_of(3, 8)
    assert (report["num_finished"], report["num_moved"]) == (0, 1)
    assert report["seconds"] < 2.0
    assert legs([staying]) == ["local"]
    metrics = await stack.metrics()
    assert metrics['pdserve_migrations_total{outcome="replayed",why="drain"}'] == 1
    assert metrics['pdserve_backends{role="decode",state="breaker_open"}'] == 0
    failures = [v for k, v in metrics.items() if k.startswith("pdserve_leg_failures_total")]
    assert sum(failures) == 0


@pytest.mark.slow
@pytest.mark.parametrize("can_push", [False, True])
async def test_prompts_that_wait_at_a_prefill_engine_go_to_another_one(make_stack, can_push):
    leaving, staying = prefills(2, can_push=can_push)
    free(leaving)
    leaving.gate.clear()
    stack = await make_stack(
        [leaving, staying],
        decodes(can_push=can_push),
        prefill_policy="round_robin",
        retry_max_retries=0,
    )
    answer = asyncio.create_task(ask(stack, stream=True))
    await until(lambda: len(leaving.calls) == 1)
    report = await drain(stack, leaving, deadline_s=0.2)
    assert await answer == text_of(3, 4)
    assert report["num_moved"] == 1
    assert legs([leaving, staying]) == ["prefill", "prefill"]


@pytest.mark.slow
async def test_a_prefill_engine_is_empty_only_when_its_kv_was_read(make_stack):
    (prefill,), (decode,) = prefills(), decodes()
    stack = await make_stack([prefill], [decode])
    report = await drain(stack, prefill, deadline_s=0.3)
    assert (report["is_empty"], report["num_moved"]) == (False, 0)
    assert 0.3 <= report["seconds"] < 1.0
    draining = asyncio.create_task(drain(stack, prefill))
    await asyncio.sleep(0.05)
    free(prefill)
    report = await draining
    assert (report["is_empty"], report["seconds"] < 2.0) == (True, True)


async def test_an_engine_is_sent_requests_again_once_it_is_resumed(make_stack):
    (engine,) = decodes()
    free(engine)
    stack = await make_stack([], [engine])
    assert (await drain(stack, engine))["is_empty"]
    answer = asyncio.create_task(ask(stack, stream=False))
    await asyncio.sleep(0.1)
    assert engine.calls == []
    await resume(stack, engine)
    assert await answer == text_of(3, 4)
    assert (await stack.metrics())['pdserve_drains_total{outcome="resumed"}'] == 1


async def test_a_drain_ends_when_its_engine_is_resumed(make_stack):
    (engine,) = decodes()
    engine.gate.clear()
    stack = await make_stack([], [engine])
    answer = asyncio.create_task(ask(stack, stream=True))
    await until(lambda: len(engine.calls) == 1)
    draining = asyncio.create_task(drain(stack, engine))
    await until(lambda: not is_ready(stack, engine))
    await resume(stack, engine)
    assert not (await draining)["is_empty"]
    drains = {k: v for k, v in (await stack.metrics()).items() if k.startswith("pdserve_drains")}
    assert drains == {
        'pdserve_drains_total{outcome="resumed"}': 1,
        'pdserve_drains_total{outcome="empty"}': 0,
        'pdserve_drains_total{outcome="deadline"}': 0,
    }
    engine.gate.set()
    assert await answer == text_of(3, 4)
    assert legs([engine]) == ["local"]


async def test_an_engine_that_was_restarted_is_drained_no_more(make_stack):
    (engine,) = decodes()
    free(engine)
    stack = await make_stack([], [engine])
    await drain(stack, engine)
    engine.incarnation = "life-2"
    await until(lambda: is_ready(stack, engine))
    assert await ask(stack, stream=False) == text_of(3, 4)


async def test_an_engine_whose_lease_runs_out_comes_back_as_drained_as_it_was(make_stack):
    engine, other = decodes(2)
    free(engine)
    stack = await make_stack([], [other])
    await engine.start()
    await register(stack, engine)
    await until(lambda: is_ready(stack, engine))
    await drain(stack, engine)
    await register(stack, engine, lease_s=0.05)
    await until(lambda: stack.proxy.backends.get(engine.url) is None)
    await register(stack, engine)
    await until(lambda: stack.proxy.backends.get(engine.url).health is Health.READY)
    assert not is_ready(stack, engine)
    await resume(stack, engine)
    await until(lambda: is_ready(stack, engine))
    await engine.stop()


async def test_a_drain_goes_on_when_who_asked_for_it_leaves(make_stack):
    (engine,) = decodes()
    engine.gate.clear()
    stack = await make_stack([], [engine, *decodes()])
    answer = asyncio.create_task(ask(stack, stream=True))
    await until(lambda: len(engine.calls) == 1)
    asking = asyncio.create_task(drain(stack, engine, deadline_s=0.3))
    await until(lambda: not is_ready(stack, engine))
    asking.cancel()
    assert await answer == text_of(3, 4)
    assert legs([engine]) == ["local"]


async def test_what_an_engine_has_that_gets_sigterm_goes_on_elsewhere_before_it_ends(
    make_stack, started
):
    stack = await make_stack(retry_max_retries=0)
    leaving, staying = [await started("decode") for _ in range(2)]
    leaving.gate.clear()
    await register(stack, leaving)
    await until(lambda: is_ready(stack, leaving))
    answer = asyncio.create_task(ask(stack, stream=True))
    await until(lambda: len(leaving.calls) == 1)
    await register(stack, staying)
    await until(lambda: is_ready(stack, staying))
    begun_s = time.monotonic()
    assert (await send(stack, "DELETE", {"url": leaving.url, "deadline_s": 0.3}))[0] == 200
    assert await answer == text_of(3, 4)
    assert time.monotonic() - begun_s < 5.0
    assert legs([leaving, staying]) == ["local", "local"]


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b'{"url": "http://127.0.0.1:9"}', 404, "no engine is known at 'http://127.0.0.1:9'"),
        (b'{"url": "x", "deadline_s": -1}', 400, "deadline_s"),
        (b'{"url": "x", "deadline_s": 1e9}', 400, "deadline_s"),
        (b"{}", 400, "url"),
        (b"\xff", 400, "does not name an engine to drain"),
    ],
)
async def test_what_cannot_be_drained_is_told(make_stack, body, status, told):
    stack = await make_stack([], decodes())
    for method in ("POST", "DELETE"):
        async with stack.client.request(method, f"{stack.url}/drain", data=body) as response:
            assert response.status == status
            error = msgspec.json.decode(await response.read())["error"]
            assert told in error["message"]


def pause(*engines: ScriptedEngine) -> None:
    """Their streams stop behind the first token that they send."""
    for engine in engines:
        engine.gate.clear()


async def ask_to_move(stack, clock: ManualClock, engine: ScriptedEngine) -> asyncio.Task[dict]:
    """Have half of a drain's time pass, after which its stream is asked to move."""
    draining = asyncio.create_task(drain(stack, engine))
    await until(lambda: not is_ready(stack, engine))
    clock.advance(DEADLINE_S / 2)
    await until(lambda: engine.given_away)
    return draining


async def drain_by_half(stack, clock: ManualClock, engine: ScriptedEngine) -> asyncio.Task[dict]:
    """Have half of a drain's time pass; its stream goes on once it has been asked to move."""
    draining = await ask_to_move(stack, clock, engine)
    engine.gate.set()
    return draining


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("way", "path"),
    [("local", COMPLETIONS), ("pull", COMPLETIONS), ("push", COMPLETIONS), ("push", CHAT)],
)
async def test_streams_are_moved_with_their_kv_in_the_second_half_of_the_time(
    make_stack, way, path
):
    leaving, staying = decodes(2, can_push=True)
    free(leaving)
    pause(leaving)
    engines = [] if way == "local" else prefills(can_push=True)
    mode = {"kv_mode": way} if engines else {}
    clock = ManualClock()
    stack = await make_stack(engines, [leaving, staying], clock, retry_max_retries=0, **mode)
    staying.ready = False
    await until(lambda: not is_ready(stack, staying))
    body = {"max_tokens": 9, "prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}
    answer = asyncio.create_task(stack.stream(body, path))
    await until(lambda: len(leaving.calls) == 1)
    staying.ready = True
    await until(lambda: is_ready(stack, staying))
    report = await (await drain_by_half(stack, clock, leaving))
    stream = await answer
    assert text_in(stream) == text_of(3, 9)
    assert stream.count(b"[DONE]") == 1
    assert b"pdserve" not in stream
    assert (report["is_empty"], report["num_moved"]) == (True, 1)
    assert legs([staying]) == ["decode"]
    assert leaving.ended["moved"] == 1
    assert leaving.read == [HANDOFFS.peek(handoff_of(staying)).nonce]
    assert not leaving.leased
    metrics = await stack.metrics()
    assert metrics['pdserve_migrations_total{outcome="moved",why="drain"}'] == 1
    assert metrics['pdserve_migrations_total{outcome="replayed",why="drain"}'] == 0
    assert metrics["pdserve_migration_stall_seconds_count"] == 1


def handoff_of(engine: ScriptedEngine) -> str:
    return engine.calls[-1].params["pdserve"]["handoffs"][0]


async def test_a_handoff_is_used_that_is_on_its_way_when_its_stream_is_taken_away(make_stack):
    """Its lease is held by nobody else."""
    leaving, staying = decodes(2)
    free(leaving)
    pause(leaving)
    leaving.hook = is_too_busy_to_notice
    clock = ManualClock()
    stack = await make_stack([], [leaving, staying], clock, decode_policy="round_robin")
    answer = asyncio.create_task(stack.stream({"max_tokens": 9}))
    await until(lambda: len(leaving.calls) == 1)
    draining = await ask_to_move(stack, clock, leaving)
    clock.advance(DEADLINE_S / 2)
    assert (await draining)["num_moved"] == 1
    leaving.gate.set()
    assert text_in(await answer) == text_of(3, 9)
    assert legs([staying]) == ["decode"]
    assert not leaving.leased
    metrics = await stack.metrics()
    assert metrics['pdserve_migrations_total{outcome="moved",why="drain"}'] == 1
    assert metrics['pdserve_migrations_total{outcome="replayed",why="drain"}'] == 0


async def is_too_busy_to_notice(call: Call, request: web.Request) -> None:
    """That its client leaves."""
    request.transport.pause_reading()


async def test_a_stream_may_be_moved_twice(make_stack):
    one, other = decodes(2)
    free(one, other)
    pause(one, other)
    clock = ManualClock()
    stack = await make_stack([], [one, other], clock, decode_policy="round_robin")
    answer = asyncio.create_task(stack.stream({"max_tokens": 12}))
    await until(lambda: len(one.calls) == 1)
    await (await drain_by_half(stack, clock, one))
    await resume(stack, one)
    await (await drain_by_half(stack, clock, other))
    assert text_in(await answer) == text_of(3, 12)
    assert legs([one, other]) == ["local", "decode", "decode"]
    metrics = await stack.metrics()
    assert metrics['pdserve_migrations_total{outcome="moved",why="drain"}'] == 2


@pytest.mark.parametrize(
    "hook", [answers(503, b"{}"), drops(), kv_failed()], ids=["503", "drops", "no kv"]
)
async def test_a_stream_that_nobody_can_go_on_with_is_begun_again(make_stack, hook):
    leaving, good, bad = decodes(3)
    free(leaving)
    pause(leaving)
    bad.hook = hook
    clock = ManualClock()
    stack = await make_stack([], [leaving, good, bad], clock, decode_policy="round_robin")
    answer = asyncio.create_task(stack.stream({"max_tokens": 9}))
    await until(lambda: len(leaving.calls) == 1)
    draining = await drain_by_half(stack, clock, leaving)
    assert text_in(await answer) == text_of(3, 9)
    assert legs([bad, good]) == ["decode", "local"]
    assert (await draining)["is_empty"]
    await until(lambda: not leaving.leased)
    metrics = await stack.metrics()
    assert metrics['pdserve_migrations_total{outcome="failed",why="drain"}'] == 1


async def test_the_client_of_a_stream_that_moves_may_leave(make_stack):
    leaving, staying = decodes(2)
    free(leaving)
    pause(leaving)
    staying.hook = hangs()
    clock = ManualClock()
    stack = await make_stack([], [leaving, staying], clock, decode_policy="round_robin")
    answer = asyncio.create_task(stack.stream({"max_tokens": 9}))
    await until(lambda: len(leaving.calls) == 1)
    draining = await drain_by_half(stack, clock, leaving)
    await until(lambda: len(staying.calls) == 1)
    assert leaving.leased
    answer.cancel()
    await until(lambda: not leaving.leased)
    assert (await draining)["is_empty"]


@pytest.mark.parametrize("way", ["local", "pull"])
async def test_the_client_may_leave_before_the_handoff_of_a_stream_that_moves(make_stack, way):
    """Its lease is held by nobody else."""
    leaving = decodes(1)[0]
    free(leaving)
    pause(leaving)
    leaving.hook = is_too_busy_to_notice
    clock = ManualClock()
    stack = await make_stack([] if way == "local" else prefills(), [leaving], clock)
    answer = asyncio.create_task(stack.stream({"max_tokens": 9}))
    await until(lambda: len(leaving.calls) == 1)
    draining = await ask_to_move(stack, clock, leaving)
    answer.cancel()
    await until(lambda: not any(each.legs for each in stack.proxy.backends))
    leaving.gate.set()
    await until(lambda: leaving.leased or leaving.released)
    await until(lambda: not leaving.leased)
    assert (await draining)["is_empty"]


async def test_the_handoff_of_a_stream_that_breaks_off_behind_it_is_given_back(make_stack):
    breaks, goes_on = decodes(2)

    async def hook(call: Call, request: web.Request) -> web.StreamResponse | None:
        if call.leg != "decode":
            return None
        await breaks.read_lease(call)
        handoff = sse({"pdserve_handoff": breaks.handoff(call, 2)})
        return await drops(after=breaks.chunk(call, word(3, 1)) + handoff)(call, request)

    breaks.hook = hook
    stack = await make_stack(prefills(), [breaks, goes_on], decode_policy="round_robin")
    while not breaks.calls:
        assert text_in(await stack.stream({"max_tokens": 6})) == text_of(3, 6)
    await until(lambda: not breaks.leased)
    assert breaks.released


async def test_answers_in_one_piece_and_of_several_choices_are_not_moved(make_stack):
    leaving, staying = decodes(2)
    leaving.gate.clear()
    stack = await make_stack([], [leaving, staying], decode_policy="round_robin")
    asked = [{"stream": False}, {"stream": True, "n": 2}, {"stream": True, "max_tokens": 1}]
    for body in asked:
        call = asyncio.create_task(ask(stack, **body))
        await until(lambda: leaving.calls or staying.calls)
        (seen,) = leaving.calls + staying.calls
        assert "may_move" not in seen.params["pdserve"]
        leaving.calls.clear()
        staying.calls.clear()
        call.cancel()
        await asyncio.wait({call})
