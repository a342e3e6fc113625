"""Pushes through the real API servers (over engines without a model), and what breaks them."""

from __future__ import annotations

import asyncio
import contextlib
import random

import aiohttp
import msgspec
import pytest

from pdserve.config.http import KVTransfer
from pdserve.observe.clock import SystemClock
from tests.proxy.test_with_server import (
    BODIES,
    COMPLETIONS,
    _said,
    ask,
    deployed,
    text,
)
from tests.server.conftest import until

pytestmark = pytest.mark.slow

__all__ = ["text"]

PUSH = {"can_push": True}
SLOW = {"can_push": True, "prefill_s": 0.03, "step_s": 0.002}


def pushes(deployment) -> list[int]:
    """KV loads by push at each engine."""
    return [server.engine.stats.kv_loads["push"] for server in deployment.servers]


async def assert_same(deployment, body: dict, path: str = COMPLETIONS) -> None:
    """The deployment's answer is that of its last engine alone."""
    alone = deployment.servers[-1].url
    if body.get("stream"):
        got, whole = [_said(await ask(url, path, body)) for url in (deployment.url, alone)]
    else:
        answers = [
            msgspec.json.decode(await ask(url, path, body)) for url in (deployment.url, alone)
        ]
        got, whole = [answer | {"created": 0} for answer in answers]
    assert got == whole


@pytest.mark.covering(1)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("slow", ["prefill", "decode"])
async def test_the_text_does_not_depend_on_which_engine_is_slow(text, stream, slow):
    parameters = {"prefill": PUSH, "decode": PUSH, slow: SLOW}
    body = BODIES[COMPLETIONS] | {"stream": stream}
    async with deployed(
        text, prefill=[parameters["prefill"]], decode=[parameters["decode"]]
    ) as both:
        await asyncio.gather(*(assert_same(both, body) for _ in range(8)))
        assert pushes(both) == [0, 8]


@pytest.mark.parametrize("stream", [True, False])
async def test_tickets_are_sealed_with_the_deployments_secret(text, stream):
    body = BODIES[COMPLETIONS] | {"stream": stream}
    async with deployed(
        text, prefill=[PUSH], decode=[PUSH], engine_secret="s3cret", secret="s3cret"
    ) as both:
        await assert_same(both, body)
        assert pushes(both) == [0, 1]


class Astray(SystemClock):
    """A host's clocks, of which the wall clock is some minutes off."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def wall_s(self) -> float:
        return super().wall_s() + self._ahead_s


@pytest.mark.covering(1)
@pytest.mark.parametrize("ahead_s", [-300.0, 300.0])
@pytest.mark.parametrize("stream", [True, False])
async def test_engines_whose_clocks_are_minutes_off_are_pushed_to_in_time(text, stream, ahead_s):
    body = BODIES[COMPLETIONS] | {"stream": stream}
    async with deployed(
        text, prefill=[PUSH], decode=[PUSH], engine_clock=Astray(ahead_s), request_timeout_s=60.0
    ) as both:
        await assert_same(both, body)
        assert pushes(both) == [0, 1]
        for server in both.servers:
            [request, *_] = server.engine.requests
            left_s = request.deadline_s - SystemClock().monotonic_s()
            assert 0.0 < left_s <= 60.0


async def test_a_proxy_with_another_secret_still_serves_by_pull(text):
    async with deployed(
        text, prefill=[PUSH], decode=[PUSH], engine_secret="s3cret", secret="other"
    ) as both:
        for _ in range(4):
            await assert_same(both, BODIES[COMPLETIONS] | {"stream": True})
        assert pushes(both) == [0, 0]
        assert both.servers[1].engine.stats.kv_loads["pull"] == 4


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_ends_at_its_first_token_leaves_no_receiver(text, stream):
    ends = {**PUSH, "eos_after": 0}
    body = BODIES[COMPLETIONS] | {"stream": stream}
    async with deployed(text, prefill=[ends], decode=[ends]) as both:
        await assert_same(both, body)
        assert len(both.servers[0].engine.requests) == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after", [0, 1])
async def test_the_text_is_the_same_when_the_prefill_engine_dies(text, stream, after):
    """Before its first token, and at the second request."""
    dying = {**SLOW, "die_after": after}
    body = BODIES[COMPLETIONS] | {"stream": stream}
    async with deployed(text, prefill=[dying, SLOW], decode=[SLOW]) as both:
        for _ in range(2):
            await assert_same(both, body)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_text_is_the_same_when_the_prefill_engine_dies_while_its_receiver_waits(
    text,
    stream,
):
    slow = {**PUSH, "prefill_s": 0.2}
    body = BODIES[COMPLETIONS] | {"stream": stream}
    async with deployed(text, prefill=[slow, PUSH], decode=[PUSH]) as both:
        request = asyncio.create_task(assert_same(both, body))
        dying, _, receiver = (server.engine for server in both.servers)
        await until(lambda: len(receiver.requests) == 1 and dying.running)
        dying.die("by the test")
        await request


@pytest.mark.covering(1)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("after", range(0, 12, 3))
async def test_the_stream_is_the_same_when_the_receiver_dies(text, path, after):
    body = BODIES[path] | {"stream": True}
    async with deployed(text, prefill=[PUSH], decode=[{**PUSH, "die_after": after}, PUSH]) as both:
        await assert_same(both, body, path)
        # One that dies with the KV but before its first word has ended the lease.
        assert len(both.servers[0].engine.requests) == (1 if after else 2)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_receiver_dying_while_it_waits_costs_no_second_prefill(text, stream):
    slow = {**PUSH, "prefill_s": 0.2}
    body = BODIES[COMPLETIONS] | {"stream": stream}
    async with deployed(text, prefill=[slow], decode=[PUSH, PUSH]) as both:
        request = asyncio.create_task(ask(both.url, COMPLETIONS, body))
        prefill, dying, _ = (server.engine for server in both.servers)
        await until(lambda: dying.running and prefill.running)
        await asyncio.sleep(0.02)
        dying.die("by the test")
        await request
        assert len(prefill.requests) == 1
        await assert_same(both, body)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_push_that_does_not_arrive_is_pulled(text, stream):
    body = BODIES[COMPLETIONS] | {"stream": stream}
    async with deployed(text, prefill=[PUSH], decode=[{**PUSH, "num_broken": 2}]) as both:
        await assert_same(both, body)
        assert both.servers[1].engine.stats.kv_loads == {"push": 0, "pull": 1}
        assert len(both.servers[0].engine.requests) == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_failing", [2, 3, 5, 9])
async def test_the_ladder_ends_in_the_same_text(text, stream, num_failing):
    failing = {**PUSH, "num_broken": num_failing}
    body = BODIES[COMPLETIONS] | {"stream": stream}
    async with deployed(text, prefill=[PUSH, PUSH], decode=[failing, failing]) as both:
        got = await ask(both.url, COMPLETIONS, body)
        whole = await ask(both.servers[-1].url, COMPLETIONS, body)
    if stream:
        assert _said(got) == _said(whole)
    else:
        texts = [msgspec.json.decode(body)["choices"][0]["text"] for body in (got, whole)]
        assert texts[0] == texts[1]


async def test_a_spent_budget_is_a_503_with_retry_after(text):
    spent = {"recompute_tokens_per_s": 0}
    impatient = {"retry_max_retries": 0, "queue_timeout_s": 0.5}
    async with (
        deployed(text, prefill=[{"die_after": 0}], decode=[spent], **impatient) as both,
        aiohttp.ClientSession() as session,
        session.post(both.url + COMPLETIONS, json=BODIES[COMPLETIONS]) as response,
    ):
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert both.servers[1].engine.stats.recompute_tokens == 0


@pytest.mark.parametrize(
    "mode",
    [KVTransfer.PUSH, KVTransfer.PULL, pytest.param(KVTransfer.AUTO, marks=pytest.mark.matrix)],
)
async def test_streams_cut_off_at_random_moments_leave_nothing_behind(text, mode):
    rng = random.Random(3)
    async with deployed(text, prefill=[SLOW, SLOW], decode=[SLOW, SLOW], kv_mode=mode) as both:
        whole = _said(await ask(both.servers[-1].url, COMPLETIONS, _STREAM))

        async def one(cut_after_s: float | None) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(cut_after_s):
                    assert _said(await ask(both.url, COMPLETIONS, _STREAM)) == whole

        await asyncio.gather(*(one(rng.choice([None, rng.uniform(0, 0.2)])) for _ in range(60)))
        assert bool(sum(pushes(both))) is (mode is not KVTransfer.PULL)


_STREAM = BODIES[COMPLETIONS] | {"stream": True}
