"""KV over UCX without NIXL: messages with tags, for which both sides' movers agree on each copy.

The protocol is `connectors.transfer`, which a `TransferThread` runs over the side channel. Bytes go
through buffers on both sides (`messages`), so only `mover` ever writes to KV blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.connectors.transfer_thread import TransferConnector
from pdserve.connectors.ucx.settings import UcxSettings
from pdserve.observe.clock import SystemClock

if TYPE_CHECKING:
    from torch import Tensor

    from pdserve.connectors.base import ConnectorContext, KVLayout
    from pdserve.connectors.side_channel.reactor import Reactor
    from pdserve.connectors.ucx.mover import UcxMover


class UcxConnector(TransferConnector, frozen=True, kw_only=True):
    """See `KVConnectorBase`."""

    name: str = "ucx"
    settings: UcxSettings = UcxSettings()

    def make_mover(
        self, context: ConnectorContext, kv: Tensor, layout: KVLayout, host: str, reactor: Reactor
    ) -> UcxMover:
        """See `TransferConnector`."""
        from pdserve.connectors.ucx.mover import UcxMover

        return UcxMover(
            kv=kv,
            layout=layout,
            host=host,
            watch=reactor.watch,
            clock=SystemClock(),
            settings=self.settings,
        )
