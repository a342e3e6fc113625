"""How often engines are asked how they are, and what that costs in a large fleet."""

from __future__ import annotations

from types import SimpleNamespace

from pdserve.config.schema import Role
from pdserve.observe.clock import ManualClock
from pdserve.proxy.backend import Backend, Breaker, Health
from pdserve.proxy.checks import interval_of
from tests.proxy.conftest import until
from tests.proxy.scripted import ScriptedEngine


def engine(number: int, health: Health = Health.READY) -> Backend:
    breaker = Breaker(ManualClock(), 3, 5.0)
    url = f"http://10.0.0.{number}:8000"
    return Backend(url, Role.DECODE, is_static=True, breaker=breaker, health=health)


async def test_an_engine_that_reports_itself_ready_is_asked_nothing_else(make_stack):
    ready = ScriptedEngine("decode")
    await make_stack([], [ready], health_check_interval_s=0.02)
    await until(lambda: ready.requests["info"] >= 4)
    assert ready.requests["/readyz"] == 0


async def test_an_engine_that_is_not_ready_is_asked_why(make_stack):
    ready, other = ScriptedEngine("decode"), ScriptedEngine("decode")
    stack = await make_stack([], [ready, other])
    other.ready = False
    backend = stack.proxy.backends.get(other.url)
    await until(lambda: backend.health is Health.NOT_READY)
    assert backend.reason.startswith("/readyz answers 503")


async def test_another_proxy_is_no_engine(make_stack):
    """Two that name each other would send a request to and fro until its time is over."""
    inner = await make_stack([ScriptedEngine("prefill")], [ScriptedEngine("decode")])
    named = SimpleNamespace(url=inner.url)
    outer = await make_stack([], [named], queue_timeout_s=0.1)
    backend = outer.proxy.backends.get(inner.url)
    await until(lambda: backend.health is Health.NOT_READY)
    assert "it is a proxy" in backend.reason
    assert (await outer.refused())[0] == 503
    assert not any(engine.calls for engine in inner.engines)


def test_checks_of_a_small_fleet_come_at_the_interval_and_sooner_of_those_that_are_away():
    assert interval_of(engine(1), 200, 1.0) == 1.0
    assert interval_of(engine(1, Health.UNREACHABLE), 200, 1.0) < 0.5


def test_a_large_fleet_is_asked_no_more_often_in_all_and_not_all_at_once():
    intervals = [interval_of(engine(number), 1000, 1.0) for number in range(1000)]
    assert 180 < sum(1 / each for each in intervals) < 220
    assert len(set(intervals)) > 990
    assert max(intervals) < 2 * min(intervals)


def test_engines_of_a_large_fleet_that_are_away_are_still_asked_sooner_than_others():
    assert interval_of(engine(1, Health.NOT_READY), 1000, 1.0) < 0.3 * interval_of(
        engine(1), 1000, 1.0
    )
