"""What the log says of engines that come and go, and at which level: somebody is paged by it."""

from __future__ import annotations

import logging
import socket
from unittest.mock import Mock

import aiohttp
import pytest

from pdserve.config.http import ProxyConfig
from pdserve.observe.clock import ManualClock
from pdserve.proxy.app import Proxy
from pdserve.proxy.connections import failure_of
from tests.proxy.conftest import until
from tests.proxy.scripted import ScriptedEngine
from tests.proxy.test_registration import register, send


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "pdserve.proxy")

    def about(url: str) -> list[tuple[str, str]]:
        lines = [(each.levelname, each.getMessage()) for each in caplog.records]
        return [(level, line.partition(" url=")[0]) for level, line in lines if url in line]

    return about


async def test_one_of_several_engines_that_goes_away_is_a_warning_and_the_last_one_an_error(
    make_stack, said
):
    engines = [ScriptedEngine("both"), ScriptedEngine("both")]
    await make_stack(engines)
    first, last = (engine.url for engine in engines)
    await engines[0].stop()
    await until(lambda: len(said(first)) == 2)
    await engines[1].stop()
    await until(lambda: len(said(last)) == 2)
    assert said(first) == [("INFO", "engine ready"), ("WARNING", "engine unreachable")]
    assert said(last) == [("INFO", "engine ready"), ("ERROR", "engine unreachable")]


async def test_an_engine_that_was_never_there_is_a_warning_after_a_minute_and_each_minute(said):
    clock, url = ManualClock(), "http://127.0.0.1:9"
    proxy = Proxy(ProxyConfig(prefill=(url,)), clock=clock)
    backend = proxy.backends.get(url)
    assert backend is not None
    try:
        for _ in range(13):
            await proxy.checks.check(backend)
            clock.advance(10)
    finally:
        await proxy.stop()
    assert [level for level, _ in said(url)] == ["INFO", "WARNING", "WARNING"]
    assert {event for _, event in said(url)} == {"engine unreachable"}


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (ConnectionRefusedError(111, "Connect call failed ('::1', 2)"), "Connection refused"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
    ],
    ids=["refused", "unknown"],
)
def test_an_engine_that_cannot_be_reached_is_told_with_its_url_once(cause, reason):
    error = aiohttp.ClientConnectorError(Mock(), cause)
    assert failure_of("http://d:2/", error).detail == f"cannot connect to http://d:2/: {reason}"


async def test_an_engine_that_leaves_in_order_is_no_warning(make_stack, started, said):
    stack = await make_stack()
    engine = await started("both")
    await register(stack, engine)
    await until(lambda: ("INFO", "engine ready") in said(engine.url))
    await send(stack, "DELETE", {"url": engine.url})
    assert {level for level, _ in said(engine.url)} == {"INFO"}
    assert said(engine.url)[-1] == ("INFO", "engine gone")
