"""Places by what tenants have had: bounds, bands, pauses, and a queue that one tenant fills."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import OverloadedError
from pdserve.observe.clock import ManualClock
from pdserve.proxy.admission import (
    CRITICAL,
    RISE_S,
    SHEDDABLE,
    STANDARD,
    AdmissionQueue,
    Claim,
    FairPlaces,
    band_of,
)
from pdserve.proxy.shares import RECENT_S, RecentWork
from tests.proxy.conftest import until
from tests.proxy.hooks import REFUSAL, answers
from tests.proxy.scripted import ScriptedEngine


class Service:
    """Places whose requests end when they are told to; notes who was served."""

    def __init__(self, num_places: int = 1) -> None:
        self.clock = ManualClock(0.0)
        self.places = FairPlaces(num_places, self.clock.monotonic_s)
        self.running: list[Claim] = []
        self.served: list[str] = []

    def ask(self, tenant: str = "", *, band: int = STANDARD, cost: float = 1.0, **more) -> Claim:
        claim = Claim(tenant, band, cost, **more)
        claim.grant = lambda: self._granted(claim)
        self.places.ask(claim)
        return claim

    def _granted(self, claim: Claim) -> None:
        self.running.append(claim)
        self.served.append(claim.tenant)

    def end(self, cost: float | None = None) -> None:
        self.places.take_back(self.running.pop(0), cost)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100)), min_size=20, max_size=60),
    st.integers(1, 3),
)
def test_tenants_that_always_wait_differ_by_no_more_than_two_of_the_largest(requests, num_places):
    service = Service(num_places)
    had: dict[str, float] = dict.fromkeys("abc", 0.0)
    waiting = {name: [cost for tenant, cost in requests if tenant == name] for name in "abc"}
    largest = max(cost for _, cost in requests) * num_places
    claims = {
        name: [service.ask(name, cost=cost) for cost in costs] for name, costs in waiting.items()
    }
    backlogged = [name for name in "abc" if claims[name]]
    while service.running and all(any(c.is_waiting for c in claims[n]) for n in backlogged):
        ended = service.running[0]
        had[ended.tenant] += ended.cost
        service.end()
        counts = [had[name] for name in backlogged]
        assert max(counts) - min(counts) <= 2 * largest


@given(st.data())
def test_whatever_comes_and_goes_no_place_is_lost_and_none_is_given_twice(data):
    service = Service(data.draw(st.integers(1, 3)))
    waiting: list[Claim] = []
    for _ in range(data.draw(st.integers(1, 40))):
        service.clock.advance(data.draw(st.sampled_from([0.0, 1.0, RISE_S])))
        move = data.draw(st.sampled_from(["ask", "end", "withdraw"]))
        if move == "ask":
            band = data.draw(st.sampled_from([CRITICAL, STANDARD, SHEDDABLE]))
            tenant = data.draw(st.sampled_from("abc"))
            waiting.append(service.ask(tenant, band=band, cost=data.draw(st.integers(1, 9))))
        elif move == "end" and service.running:
            service.end(data.draw(st.sampled_from([None, 0.0, 50.0])))
        elif waiting := [each for each in waiting if each.is_waiting]:
            service.places.withdraw(waiting[data.draw(st.integers(0, len(waiting) - 1))])
        places = service.places
        assert places.num_running == len(service.running) <= 3
        assert places.num_waiting == sum(each.is_waiting for each in waiting)
        assert service.running or not places.num_waiting, "nobody runs, and somebody waits"
    while service.running:
        service.end()
    assert service.places.num_waiting == service.places.num_running == 0
    assert not service.places._num_of
    assert not service.places._num_in_band


def test_a_tenant_with_ten_times_as_many_requests_gets_no_more_than_the_other():
    service = Service()
    for _ in range(100):
        service.ask("greedy")
    for _ in range(10):
        service.ask("modest")
    for _ in range(20):
        service.end()
    assert service.served[1:21].count("modest") == 10


def test_who_comes_back_from_a_pause_has_saved_nothing_up():
    service = Service()
    for _ in range(50):
        service.ask("steady")
    for _ in range(40):
        service.end()
    for _ in range(10):
        service.ask("back")
    for _ in range(10):
        service.end()
    assert service.served[41:51].count("back") == 5


def test_what_a_request_took_counts_in_place_of_what_was_expected():
    service = Service()
    service.ask("a", cost=10)
    service.ask("b", cost=10)
    service.ask("a", cost=10)
    service.ask("b", cost=10)
    service.end(cost=1000)
    assert service.served == ["a", "b"]
    service.end(cost=10)
    service.end()
    assert service.served == ["a", "b", "b", "a"]


def test_a_critical_request_comes_first_and_lower_bands_leave_places_to_it():
    service = Service(4)
    for _ in range(8):
        service.ask("a", band=SHEDDABLE)
    assert len(service.running) == 4, "nobody else is there"
    service.ask("b", band=CRITICAL)
    service.end()
    assert service.served[-1] == "b"
    for _ in range(2):
        service.end()
    running = [each.band for each in service.running]
    assert running == [SHEDDABLE, CRITICAL], "the others are kept for what is critical"


def test_who_waits_rises_a_band_every_half_minute():
    service = Service()
    service.ask("a")
    late = service.ask("a", band=SHEDDABLE)
    service.clock.advance(2 * RISE_S)
    service.ask("a", band=CRITICAL)
    service.end()
    assert late.is_running
    assert (band_of(-7), band_of(0), band_of(3)) == (CRITICAL, STANDARD, SHEDDABLE)


def test_a_request_that_should_not_begin_yet_is_asked_again_and_told_of_its_share():
    service, asked, ready = Service(4), [], []

    def is_ready(is_over_share: bool) -> bool:
        asked.append(is_over_share)
        return bool(ready)

    service.ask("modest")
    service.ask("greedy", cost=1, is_ready=is_ready)
    assert len(service.running) == 1
    ready.append(True)
    service.places.look()
    assert asked == [False, False]
    service.ask("greedy", cost=5, is_ready=is_ready)
    service.ask("greedy", cost=5, is_ready=is_ready)
    assert asked[-1] is True
    service.clock.advance(RECENT_S + 1)
    assert not service.places.is_over_share("greedy"), "nobody else was there of late"


def held_while_another_waits(band: int) -> tuple[Claim, Claim]:
    """A claim of a tenant over its share that waits for idle engines, and another's behind it."""
    service = Service(4)
    service.ask("modest", cost=100)
    service.clock.advance(RECENT_S - 1)
    service.end()
    service.ask("greedy", cost=60)
    held = service.ask("greedy", band=band, is_ready=lambda is_over_share: not is_over_share)
    return held, service.ask("modest")


def test_tenants_whose_work_came_to_nothing_are_within_their_share():
    work = RecentWork()
    work.add("a", 1.0, 0.0)
    work.add("b", 1.0, 2.0)
    for tenant in "ab":
        work.add(tenant, -2.0, 5.0)
    assert not any(work.is_over_share(tenant, 5.0) for tenant in "ab")


_REQUESTS = st.tuples(
    st.sampled_from("abc"), st.integers(1, 100), st.integers(0, 100), st.sampled_from((0, 5, 30))
)
"""Tenant, expected and actual cost, and seconds before it comes."""


@given(st.lists(_REQUESTS, max_size=20))
def test_who_is_over_its_share_has_had_clearly_more_than_the_mean_of_late(requests):
    service = Service(num_places=1)
    had: dict[str, float] = {}
    at_s: dict[str, float] = {}
    for tenant, expected, took, passed_s in requests:
        service.clock.advance(passed_s)
        service.ask(tenant, cost=expected)
        service.end(took)
        now_s = service.clock.monotonic_s()
        had = {
            each: cost * 0.5 ** (passed_s / 20)
            for each, cost in had.items()
            if now_s - at_s[each] <= RECENT_S
        }
        had[tenant] = had.get(tenant, 0.0) + took
        at_s[tenant] = now_s
        limit = 1.25 * sum(had.values()) / len(had)
        for each in "abc":
            cost = had.get(each, 0.0)
            if abs(cost - limit) > 1e-6:
                assert service.places.is_over_share(each) == (cost > limit)


def test_a_tenant_within_its_share_passes_one_that_is_held_for_idle_engines():
    held, other = held_while_another_waits(STANDARD)
    assert (held.is_waiting, other.is_running) == (True, True)


def test_nobody_passes_a_request_of_a_higher_band_that_is_held():
    held, other = held_while_another_waits(CRITICAL)
    assert (held.is_waiting, other.is_waiting) == (True, True)


def test_who_goes_round_waits_for_a_place_but_for_nobody_else():
    service = Service(2)
    service.ask("a", is_ready=lambda is_over_share: False)
    goes, stays = (service.ask("a", goes_round=True) for _ in range(2))
    assert (goes.is_running, stays.is_running, service.places.num_waiting) == (True, True, 1)
    full = service.ask("a", goes_round=True)
    assert full.is_waiting


def test_a_wait_is_expected_to_be_as_slow_as_waits_were_of_late():
    service = Service()
    for _ in range(20):
        service.ask("a", num_tokens=100)

    def wait_s() -> float:
        return service.places.wait_s("a", lambda tokens: tokens / 400)

    assert service.places.wait_s("b", lambda tokens: tokens / 400) == 0.0, "it is nobody's turn"
    assert wait_s() == pytest.approx(1900 / 400)
    for _ in range(10):  # others get three of four places
        service.clock.advance(1.0)
        service.end()
    assert service.places.num_waiting == 9
    assert 2 * 900 / 400 < wait_s() < 9.1


async def test_a_queue_that_one_tenant_fills_has_room_for_another():
    admission = AdmissionQueue(1, 3, 5.0)
    release = asyncio.Event()

    async def run(tenant: str) -> str:
        async with admission.place(Claim(tenant)):
            await release.wait()
        return tenant

    tasks = [asyncio.create_task(run("greedy")) for _ in range(4)]
    await asyncio.sleep(0)
    admission.require_room("modest")
    with pytest.raises(OverloadedError):
        admission.require_room("greedy")
    modest = asyncio.create_task(run("modest"))
    await asyncio.sleep(0)
    release.set()
    assert await modest == "modest"
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(each, OverloadedError) for each in ends] == [False, False, False, True]
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_tenants_are_told_apart_by_key_or_by_the_gateways_header(make_stack):
    engines = [ScriptedEngine("prefill")], [ScriptedEngine("decode")]
    stack = await make_stack(*engines, api_keys=("one", "two"), tenant_header="X-Tenant")
    for key, tenant in itertools.product(("one", "two"), ("", "acme")):
        headers = {"Authorization": f"Bearer {key}", "X-Tenant": tenant}
        async with stack.post(headers=headers) as response:
            assert response.status == 200
    counted = {
        name: value
        for name, value in (await stack.metrics()).items()
        if name.startswith("pdserve_tenant_tokens_total") and 'kind="output"' in name
    }
    names = [name.partition('tenant="')[2].partition('"')[0] for name in counted]
    assert sorted(name[:4] for name in names) == ["acme", "key-", "key-", "othe", "unna"]
    assert sorted(counted.values()) == [0, 0, 4, 4, 8]
    assert not any("one" in name for name in names)


async def test_a_prompt_that_no_engine_computes_is_charged_to_nobody(make_stack):
    decode = ScriptedEngine("decode")
    decode.hook = answers(400, REFUSAL)
    stack = await make_stack([], [decode], queue_timeout_s=0.1)
    assert (await stack.refused())[0] == 400
    await decode.stop()
    await until(lambda: not any(each.available for each in stack.proxy.backends))
    assert (await stack.refused())[0] == 503
    metrics = await stack.metrics()
    assert metrics['pdserve_tenant_tokens_total{kind="prompt",tenant="unnamed"}'] == 0
