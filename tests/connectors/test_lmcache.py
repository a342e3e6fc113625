"""The store's conformance kit on LMCache: a real server, both halves, shapes of all kinds."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pdserve.connectors.base import KVConnectorBase
from pdserve.connectors.conformance import Engine, make_shape
from pdserve.connectors.conformance.pull import PullConformance
from pdserve.connectors.conformance.store import StoreConformance
from pdserve.connectors.lmcache import LMCacheConnector
from pdserve.connectors.lmcache.settings import LMCacheSettings
from pdserve.connectors.multi import MultiConnector
from pdserve.connectors.nixl import NixlConnector

if TYPE_CHECKING:
    from pdserve.wire.transfer import KVShape
    from tests.lmcache_server import LMCacheServer


class LMCacheConformance(StoreConformance):
    """Each test has a namespace of its own in the server that all of them share."""

    url: ClassVar[str]

    def make_connector(self) -> KVConnectorBase:
        namespace = secrets.token_hex(4)
        return LMCacheConnector(settings=LMCacheSettings(url=self.url, namespace=namespace))

    def new(self, name: str, **arguments: Any) -> Engine:
        engine = super().new(name, **arguments)
        engine.until(lambda: engine.scheduler.store_stats.is_up)
        return engine


@pytest.fixture(autouse=True, scope="module")
def _server(lmcache_server: LMCacheServer) -> None:
    LMCacheConformance.url = lmcache_server.url


class TestOneRank(LMCacheConformance):
    prefill_shape: ClassVar[KVShape] = make_shape()


class TestFourRanks(LMCacheConformance):
    prefill_shape: ClassVar[KVShape] = make_shape(tp=2, pp=2)


class TestMoreRanksThanHeads(LMCacheConformance):
    prefill_shape: ClassVar[KVShape] = make_shape(tp=4, num_kv_heads=2, num_layers=3)


class TestBesideNixl(PullConformance):
    """Real NIXL, with the store told of every request."""

    def make_connector(self) -> KVConnectorBase:
        namespace = secrets.token_hex(4)
        settings = LMCacheSettings(url=LMCacheConformance.url, namespace=namespace)
        return MultiConnector.of([NixlConnector(), LMCacheConnector(settings=settings)])


class TestBesideNixlAsAStore(LMCacheConformance):
    def make_connector(self) -> KVConnectorBase:
        return MultiConnector.of([NixlConnector(), super().make_connector()])


class TestLatent(LMCacheConformance):
    prefill_shape: ClassVar[KVShape] = make_shape(tp=2, num_planes=1, num_kv_heads=1, head_dim=12)
