"""KV over NIXL: D reads P's leased blocks, or P writes into those that D has reserved.

The protocol is `connectors.transfer`, which a `TransferThread` runs over the side channel. Bytes
are moved by `mover`: by `lanes`, each a thread with an `agent` of its own.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from pdserve.connectors.base import Capabilities, KVConnectorBase
from pdserve.connectors.nixl.settings import NixlSettings
from pdserve.observe.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from pdserve.connectors.base import (
        ConnectorContext,
        KVConnectorScheduler,
        KVConnectorWorker,
        KVLayout,
    )
    from pdserve.connectors.side_channel.reactor import Reactor
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
        from pdserve.connectors.nixl.mover import NixlMover
        from pdserve.connectors.transfer.worker import TransferWorker
        from pdserve.connectors.transfer_thread.thread import TransferThread

        clock = SystemClock()

        def start(kv: Tensor, layout: KVLayout) -> TransferThread:
            def make_mover(host: str, reactor: Reactor) -> NixlMover:
                return NixlMover(
                    context,
                    kv=kv,
                    host=host,
                    wake=reactor.wake,
                    clock=clock,
                    settings=self.settings,
                )

            return TransferThread(
                context, kv=kv, layout=layout, wake=wake, clock=clock, make_mover=make_mover
            )

        return TransferWorker(start, clock=clock)
