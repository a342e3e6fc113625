"""KV between engines of one process, for tests and simulation.

It runs the product's transfer protocol (`connectors.transfer`) over links and copies inside the
process (`exchange`, `rank`), driven by its engines' calls: without threads, and with no time but
that of the clock that is passed in.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import msgspec

from pdserve.connectors.base import Capabilities, KVConnectorBase
from pdserve.connectors.memory.exchange import Exchange, Trouble
from pdserve.observe.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from pdserve.connectors.base import ConnectorContext, KVConnectorScheduler, KVConnectorWorker
    from pdserve.connectors.memory.rank import MemoryRank
    from pdserve.observe.clock import Clock
    from pdserve.wire.transfer import Endpoint


class MemoryConnector(KVConnectorBase, frozen=True, kw_only=True):
    """See `KVConnectorBase`. Engines meet if their connectors share an exchange.

    Attributes:
        exchange: The exchange of its ranks; by default one of this connector's own.
        clock: The clock by which leases expire.
        new_nonce: Names leases; tests pass a counter.
        trouble: Faults to inject on the wire of its ranks.
        piece_bytes: Approximate size in bytes of the copies into which transfers are cut.
    """

    name: str = "memory"
    capabilities: Capabilities = Capabilities(push=True)
    exchange: Exchange = msgspec.field(default_factory=Exchange)
    clock: Clock = msgspec.field(default_factory=SystemClock)
    new_nonce: Callable[[], str] = secrets.token_urlsafe
    trouble: Trouble = msgspec.field(default_factory=Trouble)
    piece_bytes: int = 1 << 16

    def make_scheduler(
        self, context: ConnectorContext, endpoints: Sequence[Endpoint]
    ) -> KVConnectorScheduler:
        """See `KVConnectorBase`."""
        from pdserve.connectors.handover.scheduler import HandoverScheduler

        return HandoverScheduler(context, endpoints, new_nonce=self.new_nonce, clock=self.clock)

    def make_worker(self, context: ConnectorContext, wake: Callable[[], None]) -> KVConnectorWorker:
        """See `KVConnectorBase`."""
        from pdserve.connectors.memory.rank import MemoryRank
        from pdserve.connectors.transfer.worker import TransferWorker

        def start(kv: Tensor) -> MemoryRank:
            return MemoryRank(
                context,
                kv=kv,
                exchange=self.exchange,
                wake=wake,
                clock=self.clock,
                trouble=self.trouble,
                piece_bytes=self.piece_bytes,
            )

        return TransferWorker(start, clock=self.clock)
