"""KV over NIXL: D reads P's leased blocks, or P writes into those that D has reserved.

`worker` is a facade over the thread in `transfer`. That one runs both sides over a `reactor`: P's
(`serving` what is read, `pushing` what is written) and D's (`peers` it is connected to, `loads`
that it reads, `receiving` what is written to it). They speak `protocol` over `channel` and
`frames`, and have bytes moved by `lanes`, each a thread with an `agent` of its own.
The scheduler half is `pdserve.connectors.handover.scheduler`.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from pdserve.connectors.base import Capabilities, KVConnectorBase
from pdserve.connectors.nixl.settings import NixlSettings
from pdserve.observe.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.base import ConnectorContext, KVConnectorScheduler, KVConnectorWorker
    from pdserve.wire.transfer import Endpoint


class NixlConnector(KVConnectorBase, frozen=True, kw_only=True):
    """See `KVConnectorBase`."""

    name: str = "nixl"
    capabilities: Capabilities = Capabilities(layerwise_save=True, push=True)
    settings: NixlSettings = NixlSettings()

    def make_scheduler(
        self, context: ConnectorContext, endpoints: Sequence[Endpoint]
    ) -> KVConnectorScheduler:
        """See `KVConnectorBase`."""
        from pdserve.connectors.handover.scheduler import HandoverScheduler

        clock = SystemClock()
        return HandoverScheduler(context, endpoints, new_nonce=secrets.token_urlsafe, clock=clock)

    def make_worker(self, context: ConnectorContext, wake: Callable[[], None]) -> KVConnectorWorker:
        """See `KVConnectorBase`."""
        from pdserve.connectors.nixl.worker import NixlWorker

        return NixlWorker(
            context,
            wake,
            clock=SystemClock(),
            quarantine_s=context.config.transfer.quarantine_s,
            settings=self.settings,
        )
