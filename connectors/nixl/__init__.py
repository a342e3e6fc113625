"""KV over NIXL: D reads P's leased blocks, or P writes into those that D has reserved.

The protocol is `connectors.transfer`, which a `TransferThread` runs over the side channel. Bytes
are moved by `mover` through `lanes`, each a thread with its own `agent`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.config.checks import require
from pdserve.connectors.transfer_thread import TransferConnector
from pdserve.observe.clock import SystemClock

if TYPE_CHECKING:
    from torch import Tensor

    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.nixl.mover import NixlMover
    from pdserve.connectors.side_channel.reactor import Reactor


_MAX_LANES: Final = 64


class NixlSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of NIXL alone, as given by `--kv-transfer-config.nixl.*`."""

    lanes: Annotated[
        int, Meta(description="threads that post transfers, each with its own NIXL agent")
    ] = 2
    backends: Annotated[tuple[str, ...], Meta(description="NIXL backends, in order")] = ("UCX",)

    def __post_init__(self) -> None:
        flag = "kv-transfer-config.nixl.lanes"
        require(1 <= self.lanes <= _MAX_LANES, flag, self.lanes, f"use 1 to {_MAX_LANES}")


class NixlConnector(TransferConnector, frozen=True, kw_only=True):
    """See `KVConnectorBase`."""

    name: str = "nixl"
    settings: NixlSettings = NixlSettings()

    def make_mover(
        self, context: ConnectorContext, kv: Tensor, host: str, reactor: Reactor
    ) -> NixlMover:
        """See `TransferConnector`."""
        from pdserve.connectors.nixl.mover import NixlMover

        return NixlMover(
            context,
            kv=kv,
            host=host,
            wake=reactor.wake,
            clock=SystemClock(),
            num_lanes=self.settings.lanes,
            backends=self.settings.backends,
        )
