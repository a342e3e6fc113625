"""A connector between engines, except for the mover of bytes.

The transfer protocol of a rank runs in a thread of its own (`thread`), over the side channel.
"""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING

from pdserve.connectors.base import Capabilities, KVConnectorBase
from pdserve.observe.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from pdserve.connectors.base import ConnectorContext, KVConnectorScheduler, KVConnectorWorker
    from pdserve.connectors.side_channel.reactor import Reactor
    from pdserve.connectors.transfer_thread.thread import ThreadMover
    from pdserve.wire.transfer import Endpoint


class TransferConnector(KVConnectorBase, frozen=True, kw_only=True):
    """The transfer protocol over TCP and a mover. See `KVConnectorBase`."""

    capabilities: Capabilities = Capabilities(push=True)

    def make_mover(
        self, context: ConnectorContext, kv: Tensor, host: str, reactor: Reactor
    ) -> ThreadMover:
        """Make what moves the bytes of one rank, as `TransferThread` asks for it.

        Args:
            kv: KV memory, as in `TransferThread`.
            host: Numeric address that the side channel is bound to.
            reactor: The thread's event loop.

        Raises:
            ConfigError: The mover cannot be loaded.
        """
        raise NotImplementedError

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

        clock = SystemClock()

        def start(kv: Tensor) -> TransferThread:
            make_mover = partial(self.make_mover, context, kv)
            return TransferThread(context, kv=kv, wake=wake, clock=clock, make_mover=make_mover)

        return TransferWorker(start, clock=clock)
