"""KV in an LMCache server: one request computes it, later requests of any engine load it.

`scheduler` decides what to look up, load and save; `worker` runs the threads that do it, and
`slots` defines the layout of the server's memory. Only `client` and `http_side` know LMCache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.connectors.base import KVConnectorBase
from pdserve.connectors.lmcache.settings import LMCacheSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.base import (
        ConnectorContext,
        KVConnectorScheduler,
        KVConnectorWorker,
    )
    from pdserve.wire.transfer import Endpoint


class LMCacheConnector(KVConnectorBase, frozen=True, kw_only=True):
    """See `KVConnectorBase`.

    Attributes:
        checks_digests: See `moving.LoadingThread`.
    """

    name: str = "lmcache"
    settings: LMCacheSettings = LMCacheSettings()
    checks_digests: bool = True

    def make_scheduler(
        self, context: ConnectorContext, endpoints: Sequence[Endpoint]
    ) -> KVConnectorScheduler:
        """See `KVConnectorBase`."""
        from pdserve.connectors.lmcache.scheduler import LMCacheScheduler

        return LMCacheScheduler(context, self.settings)

    def make_worker(self, context: ConnectorContext, wake: Callable[[], None]) -> KVConnectorWorker:
        """See `KVConnectorBase`."""
        from pdserve.connectors.lmcache.worker import LMCacheWorker

        return LMCacheWorker(context, self.settings, wake, checks_digests=self.checks_digests)
