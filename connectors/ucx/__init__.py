"""KV over UCX without NIXL: tagged messages; both sides' movers agree on each copy.

A `TransferThread` runs the protocol, `connectors.transfer`, over the side channel. Bytes go
through buffers on both sides (`messages`), so only `mover` ever writes to KV blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from pdserve.config.checks import require
from pdserve.connectors.transfer_thread import TransferConnector
from pdserve.observe.clock import SystemClock

if TYPE_CHECKING:
    from torch import Tensor

    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.side_channel.reactor import Reactor
    from pdserve.connectors.ucx.mover import UcxMover


class UcxSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of UCX alone, as given by `--kv-transfer-config.ucx.*`."""

    tls: Annotated[
        str, Meta(description="UCX transports, in UCX_TLS's form, as tcp or rc,cuda; empty is all")
    ] = ""
    messages: Annotated[
        int,
        Meta(description="maximum 8 MiB messages in flight each way; a peer may use a quarter"),
    ] = 16

    def __post_init__(self) -> None:
        flag = "kv-transfer-config.ucx.messages"
        require(4 <= self.messages <= 1024, flag, self.messages, "use 4 to 1024")


class UcxConnector(TransferConnector, frozen=True, kw_only=True):
    """See `KVConnectorBase`."""

    name: str = "ucx"
    settings: UcxSettings = UcxSettings()

    def make_mover(
        self, context: ConnectorContext, kv: Tensor, host: str, reactor: Reactor
    ) -> UcxMover:
        """See `TransferConnector`."""
        from pdserve.connectors.transfer_thread.host import net_devices
        from pdserve.connectors.ucx.mover import UcxMover

        options = {"NET_DEVICES": net_devices(host), "TLS": self.settings.tls}
        return UcxMover(
            kv=kv,
            layout=context.layout,
            watch=reactor.watch,
            clock=SystemClock(),
            options={name: value for name, value in options.items() if value},
            max_messages=self.settings.messages,
            timeout_s=2 * context.config.transfer.transfer_timeout_s,
        )
