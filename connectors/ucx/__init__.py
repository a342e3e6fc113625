"""KV over UCX without NIXL: messages with tags, for which both sides' movers agree on each copy.

The protocol is `connectors.transfer`, which a `TransferThread` runs over the side channel. Bytes go
through buffers on both sides (`messages`), so only `mover` ever writes to KV blocks.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from pdserve.connectors.base import Capabilities, KVConnectorBase
from pdserve.connectors.ucx.settings import UcxSettings
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
    from pdserve.connectors.ucx.mover import UcxMover
    from pdserve.wire.transfer import Endpoint


class UcxConnector(KVConnectorBase, frozen=True, kw_only=True):
    """See `KVConnectorBase`."""

    name: str = "ucx"
    capabilities: Capabilities = Capabilities(layerwise_save=True, push=True)
    settings: UcxSettings = UcxSettings()

    def make_scheduler(
        self, context: ConnectorContext, endpoints: Sequence[Endpoint]
    ) -> KVConnectorScheduler:
        """See `KVConnectorBase`."""
        from pdserve.connectors.handover.scheduler import HandoverScheduler

        clock = SystemClock()
        return HandoverScheduler(context, endpoints, new_nonce=secrets.token_urlsafe, clock=clock)

    def make_worker(self, context: ConnectorContext, wake: Callable[[], None]) -> KVConnectorWorker:
        """See `KVConnectorBase`."""
        from pdserve.connectors.transfer.worker import TransferWorker
        from pdserve.connectors.transfer_thread.thread import TransferThread
        from pdserve.connectors.ucx.mover import UcxMover

        clock = SystemClock()

        def start(kv: Tensor, layout: KVLayout) -> TransferThread:
            def make_mover(host: str, reactor: Reactor) -> UcxMover:
                return UcxMover(
                    kv=kv,
                    layout=layout,
                    host=host,
                    watch=reactor.watch,
                    clock=clock,
                    settings=self.settings,
                )

            return TransferThread(
                context, kv=kv, layout=layout, wake=wake, clock=clock, make_mover=make_mover
            )

        return TransferWorker(start, clock=clock)
