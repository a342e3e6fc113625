"""What opens and closes a breaker: what happens now, and not what is only heard of now."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.config.http import KVTransfer
from pdserve.observe.clock import ManualClock
from pdserve.proxy.backend import Breaker, BreakerState
from pdserve.wire.hop import KV_MODE_HEADER, LOAD_FAILURES_HEADER
from pdserve.wire.transfer import KVMode
from tests.proxy.conftest import Stack, until
from tests.proxy.hooks import decodes, kv_failed, prefills
from tests.proxy.scripted import ScriptedEngine

TIMEOUT_S = 5.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def breaker(clock: ManualClock) -> Breaker:
    return Breaker(clock, 2, TIMEOUT_S)


def half_open(breaker: Breaker, clock: ManualClock) -> None:
    for _ in range(2):
        breaker.fail()
    assert not breaker.allows
    clock.advance(TIMEOUT_S)
    assert breaker.allows


def test_one_request_tries_at_a_time(breaker: Breaker, clock: ManualClock) -> None:
    half_open(breaker, clock)
    trial = breaker.begin()
    assert not breaker.allows
    breaker.leave(trial)
    assert breaker.allows


def test_the_end_of_what_began_before_is_not_the_end_of_the_trial(
    breaker: Breaker, clock: ManualClock
) -> None:
    early = breaker.begin()
    half_open(breaker, clock)
    breaker.begin()
    breaker.leave(early)
    assert not breaker.allows


def test_a_trial_that_says_nothing_keeps_others_away_for_a_time_out(
    breaker: Breaker, clock: ManualClock
) -> None:
    half_open(breaker, clock)
    silent = breaker.begin()
    clock.advance(TIMEOUT_S)
    assert breaker.allows
    breaker.begin()
    breaker.leave(silent)
    assert not breaker.allows


def test_a_success_from_before_the_last_failure_closes_nothing(
    breaker: Breaker, clock: ManualClock
) -> None:
    began_s = clock.monotonic_s()
    clock.advance(1.0)
    half_open(breaker, clock)
    breaker.succeed(began_s)
    breaker.fail()
    assert not breaker.allows
    breaker.succeed(clock.monotonic_s())
    assert breaker.allows


@pytest.fixture
async def engines() -> tuple[ScriptedEngine, ScriptedEngine]:
    (prefill,), (decode,) = prefills(), decodes()
    decode.stages = {"kv_bytes": 1000}
    return prefill, decode


async def stack_of(make_stack, engines, *, cb_timeout_s: float) -> Stack:
    prefill, decode = engines
    return await make_stack(
        [prefill],
        [decode],
        kv_mode=KVTransfer.PULL,
        cb_failure_threshold=2,
        cb_timeout_s=cb_timeout_s,
    )


async def begun(stack: Stack, decode: ScriptedEngine) -> asyncio.Task[bytes]:
    """A stream that has its KV and goes on once the gate is open."""
    decode.gate.clear()
    stream = asyncio.create_task(stack.stream())
    await stack.until_stages("decode")
    return stream


async def opened(stack: Stack, decode: ScriptedEngine) -> None:
    """Have KV lost until the pair's breaker opens."""
    decode.hook = kv_failed(leg="decode")
    losing = [asyncio.create_task(stack.stream()) for _ in range(2)]
    await until(lambda: stack.proxy.breakers.num_open_pairs == 1)
    decode.hook = None
    decode.gate.set()
    await asyncio.gather(*losing)


async def test_streams_whose_kv_came_before_do_not_close_the_breaker_by_their_end(
    make_stack, engines
):
    _, decode = engines
    stack = await stack_of(make_stack, engines, cb_timeout_s=600.0)
    stream = await begun(stack, decode)
    await opened(stack, decode)
    await stream
    assert stack.proxy.breakers.num_open_pairs == 1


@pytest.mark.slow
@pytest.mark.parametrize("says", [True, False], ids=["says so", "of another make"])
async def test_a_pair_is_tried_for_as_long_as_kv_goes_over_it_and_not_for_a_whole_stream(
    make_stack, engines, says
):
    _, decode = engines
    stack = await stack_of(make_stack, engines, cb_timeout_s=0.2)
    await opened(stack, decode)
    breakers, pair = stack.proxy.breakers, [stack.proxy.backends.get(e.url) for e in engines]
    await until(lambda: breakers.lets_through(*pair, KVMode.PULL))
    decode.kv_headers = {KV_MODE_HEADER: "pull"} if says else {}
    stream = await begun(stack, decode)
    assert breakers.lets_through(*pair, KVMode.PULL)
    assert breakers.num_open_pairs == (0 if says else 1)
    decode.gate.set()
    await stream
    assert breakers.num_open_pairs == 0


async def test_pairs_that_never_failed_are_not_looked_at(make_stack, engines):
    _, decode = engines
    stack = await stack_of(make_stack, engines, cb_timeout_s=0.2)
    breakers, pair = stack.proxy.breakers, (*(e.url for e in engines), KVMode.PULL)
    await stack.stream()
    assert breakers.open_pairs() == []
    await opened(stack, decode)
    assert breakers.open_pairs() == [(*pair, BreakerState.OPEN)]
    await until(lambda: breakers.open_pairs() == [(*pair, BreakerState.HALF_OPEN)])
    await stack.stream()
    assert breakers.open_pairs() == []


async def test_kv_that_came_late_is_held_against_the_pair_once_and_at_once(make_stack, engines):
    _, decode = engines
    stack = await stack_of(make_stack, engines, cb_timeout_s=600.0)
    decode.kv_headers = {KV_MODE_HEADER: "pull", LOAD_FAILURES_HEADER: "timeout"}
    decode.stages = {"kv_bytes": 1000, "load_failures": ["timeout"]}
    await stack.stream()
    assert stack.proxy.breakers.num_open_pairs == 0
    stream = await begun(stack, decode)
    assert stack.proxy.breakers.num_open_pairs == 1
    decode.gate.set()
    await stream
    assert (await stack.metrics())["pdserve_kv_load_failures_reported_total"] == 2
