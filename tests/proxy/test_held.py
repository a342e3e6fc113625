"""Requests that the proxy holds back: who is held, who goes round, and how many begin at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import pytest

from pdserve.config.http import ProxyConfig
from pdserve.observe.clock import ManualClock
from pdserve.proxy.admission import FairPlaces
from pdserve.proxy.backend import Backend, Health
from pdserve.proxy.backends import Backends
from pdserve.proxy.brain.pairing import Pairing
from pdserve.proxy.brain.prompt import RoutePrompt
from pdserve.proxy.breakers import Breakers
from pdserve.proxy.gate import Gate
from pdserve.proxy.metrics import Metrics
from pdserve.proxy.routing import Router
from tests.proxy.conftest import until
from tests.proxy.scripted import ScriptedEngine, text_of
from tests.proxy.test_pairing import learned


@pytest.fixture
async def stack(make_stack):
    """One that knows what its engines take, and rejects nothing.

    No time passes for it: what an engine was given lately is not over for being late here.
    """
    engines = [ScriptedEngine("prefill")], [ScriptedEngine("decode")]
    settings = {"tenant_header": "X-Tenant", "early_rejection": False}
    stack = await make_stack(*engines, ManualClock(), split_policy="predicted", **settings)
    stack.proxy.pairing.model = learned()
    return stack


def closed(engine: ScriptedEngine) -> asyncio.Event:
    """Have an engine answer nothing until the event is set."""
    opened = asyncio.Event()

    async def hang(call, request):
        await opened.wait()

    engine.hook = hang
    return opened


FIRST_TOKENS = itertools.count()


async def served(stack, tenant: str, num_tokens: int, ttft_ms: float, num_output: int = 4) -> None:
    """Post a prompt that no other begins like, and check the answer."""
    prompt = [next(FIRST_TOKENS)] * num_tokens
    slo = {"ttft_ms": ttft_ms}
    body = {"prompt": prompt, "max_tokens": num_output, "seed": 3, "slo": slo}
    async with stack.post(body, headers={"X-Tenant": tenant}) as response:
        assert response.status == 200, await response.text()
        assert (await response.json())["choices"][0]["text"] == text_of(3, num_output)


async def test_a_tenant_over_its_share_is_held_for_prefill_engines_and_uses_idle_decode_engines(
    stack,
):
    prefill, decode = stack.engines
    admission, log = stack.proxy.admission, stack.proxy.pairing.log
    await served(stack, "greedy", 300, 1000, num_output=2000)
    opened = closed(prefill)
    modest = asyncio.create_task(served(stack, "modest", 1500, 1000))
    await until(lambda: len(prefill.calls) == 2)
    held = asyncio.create_task(served(stack, "greedy", 16_000, 2000, num_output=200))
    await until(lambda: admission.num_waiting == 1)
    assert len(decode.calls) == 1, "it is idle, and not for prompts"
    async with asyncio.timeout(30.0):
        await served(stack, "greedy", 600, 1000)
    assert [each.leg for each in decode.calls[1:]] == ["local"]
    assert log.newest()[0].decision.question.held_s > 1.0
    assert (admission.num_waiting, len(prefill.calls)) == (1, 2)
    opened.set()
    await asyncio.gather(modest, held)
    assert len(prefill.calls) == 3


async def test_engines_hear_which_requests_are_of_a_tenant_over_its_share(stack):
    prefill, decode = stack.engines
    told = []
    for tenant in ("greedy", "modest", "greedy", "modest"):
        num = len(prefill.calls), len(decode.calls)
        await served(stack, tenant, 300, 2000, num_output=1000 if tenant == "greedy" else 4)
        calls = [*prefill.calls[num[0] :], *decode.calls[num[1] :]]
        told.append({call.headers.get("X-Pdserve-Yields") for call in calls})
    assert told == [{None}, {None}, {"1"}, {None}], "alone, nobody is over its share"


async def test_the_choice_on_which_a_request_is_admitted_is_the_only_one(make_stack):
    engines = [[ScriptedEngine(role) for _ in range(2)] for role in ("prefill", "decode")]
    stack = await make_stack(*engines, split_policy="predicted")
    stack.proxy.pairing.model = learned()
    for number in range(1, 6):
        await served(stack, "", 100, 1000)  # too short to be named: engines are drawn in turn
        assert (await stack.metrics())["pdserve_route_seconds_count"] == number


async def test_of_those_that_wait_no_more_begin_at_once_than_an_engine_will_compute_soon(stack):
    prefill, decode = stack.engines
    opened, ledger = closed(prefill), stack.proxy.pairing.ledger
    with ledger.hold(decode.url, "local", 200_000, 0):
        with ledger.hold(prefill.url, "prefill", 10_000, 0):
            waiting = [asyncio.create_task(served(stack, "", 4000, 600)) for _ in range(6)]
            await until(lambda: stack.proxy.admission.num_waiting == 6)
        assert stack.proxy.admission.num_waiting == 4
        assert ledger.at(prefill.url).num_prompts == 2, "they count before they are sent"
        opened.set()
        await asyncio.gather(*waiting)
    assert ledger.at(prefill.url).num_prompts == 0


async def test_who_leaves_between_its_grant_and_its_turn_is_no_work_of_an_engine(stack):
    prefill, decode = stack.engines
    places, ledger = stack.proxy.admission.places, stack.proxy.pairing.ledger
    ask, handlers = places.ask, []

    def note(claim):
        handlers.append(asyncio.current_task())
        ask(claim)

    places.ask = note
    with ledger.hold(decode.url, "local", 200_000, 0):
        with ledger.hold(prefill.url, "prefill", 10_000, 0):
            client = asyncio.create_task(served(stack, "", 4000, 600))
            await until(lambda: places.num_waiting == 1)
        assert (places.num_running, ledger.at(prefill.url).num_prompts) == (1, 1)
        handlers[0].cancel()  # it has not run since
        await asyncio.gather(client, return_exceptions=True)
    assert (places.num_running, ledger.at(prefill.url).num_prompts) == (0, 0)
    assert prefill.calls == []


async def test_names_that_are_no_text_are_names_like_others(stack):
    """A header that is not UTF-8 reaches routing and metrics as text that they can write."""
    reader, writer = await asyncio.open_connection(*stack.url.removeprefix("http://").split(":"))
    body = b'{"prompt": %b, "max_tokens": 4}' % str([next(FIRST_TOKENS)] * 300).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n" % len(body)
    writer.write(head + b"X-Session-Id: \xff\r\nX-Tenant: \xff\r\n\r\n" + body)
    status = await reader.readline()
    writer.close()
    assert b" 200 " in status
    assert any('tenant="\ufffd"' in name for name in await stack.metrics())


def test_reports_of_many_busy_engines_do_not_each_have_all_of_them_looked_at():
    clock, metrics, num, looked = ManualClock(), Metrics(), 40, []
    urls = tuple(f"http://{number}" for number in range(num))
    config = ProxyConfig(
        prefill=urls[::2], decode=urls[1::2], split_policy="predicted", early_rejection=False
    )
    backends = Backends(config, clock, Breakers(config, clock, metrics))
    for each in backends:
        each.health = Health.READY
    places = FairPlaces(9, clock.monotonic_s)

    class Counting(Pairing):
        def backlog_s(self, engine: Backend) -> float:
            looked.append(engine)
            return super().backlog_s(engine)

    pairing = Counting(config, clock, metrics.route, on_change=places.look)
    pairing.model = learned()
    router = Router(config, backends, None, pairing)
    gate = Gate(config, router, backends, pairing, places, metrics.gate)

    def report() -> None:
        for url in urls:
            pairing.ledger.heard(url, num_prompts=1, num_streams=0)

    with contextlib.ExitStack() as held:
        for url in urls:
            held.enter_context(pairing.ledger.hold(url, "local", 100_000, 0))
        places.ask(gate.claim(RoutePrompt(4000, num_tokens=1000)))
        report()
        assert (places.num_waiting, len(looked)) == (1, num)
    assert places.num_waiting == 1, "as it was a moment ago"
    clock.advance(0.01)
    report()
    assert places.num_waiting == 0
