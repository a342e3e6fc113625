"""LMCache's client where no server is; the kit and whole engines show what it does with one."""

from __future__ import annotations

import importlib.metadata
import threading

import pytest

from pdserve.connectors.lmcache.client import StoreClient
from pdserve.connectors.lmcache.settings import LMCacheSettings
from pdserve.connectors.lmcache.slots import StoreLayout
from pdserve.errors import ConfigError
from tests.connectors.engines import context
from tests.lmcache_server import free_port


@pytest.mark.slow
@pytest.mark.parametrize("num_pings", [0, 1800])  # of an hour
def test_a_client_of_a_server_that_is_not_there_is_closed_at_once(num_pings: int) -> None:
    settings = LMCacheSettings(url=f"tcp://127.0.0.1:{free_port()}")
    client = StoreClient(settings, StoreLayout(context("P"), ""), engine="P", instance_id=1)
    pings = [client.ping() for _ in range(num_pings)]
    closing = threading.Thread(target=client.close, kwargs={"is_up": False}, daemon=True)
    closing.start()
    closing.join(20.0)
    assert not closing.is_alive()
    assert not any(ping.query() for ping in pings)


def test_another_version_of_lmcache_is_refused_by_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.5.7")
    with pytest.raises(
        ConfigError, match=r"lmcache 0\.5\.7 is installed and pdserve needs 0\.5\.6"
    ):
        StoreClient(LMCacheSettings(), StoreLayout(context("P"), ""), engine="P", instance_id=1)
