"""LMCache's client where no server is; the kit and whole engines show what it does with one."""

from __future__ import annotations

import importlib.metadata
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.connectors.lmcache.client import StoreClient, StoreMissError
from pdserve.connectors.lmcache.messages import ChunkRange
from pdserve.connectors.lmcache.settings import LMCacheSettings
from pdserve.connectors.lmcache.slots import StoreLayout
from pdserve.errors import ConfigError
from pdserve.wire.ids import RequestId
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


class Answer:
    def __init__(self, value: object) -> None:
        self.value = value
        self.was_awaited = False

    def wait(self, _timeout_s: float) -> bool:
        self.was_awaited = True
        return True

    def result(self, _timeout_s: float) -> object:
        return self.value


def test_what_a_server_has_of_a_chunk_is_unlocked_before_its_rest_is_told_to_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The session may end then, and what is unlocked behind its end begins it anew."""
    client = StoreClient(
        LMCacheSettings(url=f"tcp://127.0.0.1:{free_port()}"),
        StoreLayout(context("P"), ""),
        engine="P",
        instance_id=1,
    )
    client.chunk_tokens = 16
    unlocking: list[Answer] = []

    def unlock(key: Any, _instance_id: int) -> Answer:
        assert key.worker_id == 1
        unlocking.append(Answer(True))
        return unlocking[-1]

    calls = SimpleNamespace(
        prepare_retrieve=lambda key, _: Answer(SimpleNamespace(success=key.worker_id == 1)),
        commit_retrieve=unlock,
    )
    with monkeypatch.context() as patch:
        patch.setattr(client, "_client", calls)
        with pytest.raises(StoreMissError, match=r"units \[0\]"):
            client.locked(
                ChunkRange(7, RequestId("r"), bytes(4 * 16), "", 0, 1), [0, 1], waits=True
            )
    assert [each.was_awaited for each in unlocking] == [True]
    client.close(is_up=False)


def test_another_version_of_lmcache_is_refused_by_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.5.7")
    with pytest.raises(
        ConfigError, match=r"lmcache 0\.5\.7 is installed and pdserve needs 0\.5\.6"
    ):
        StoreClient(LMCacheSettings(), StoreLayout(context("P"), ""), engine="P", instance_id=1)
