"""KV between engines of one process: for tests and simulation."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import msgspec

from pdserve.connectors.base import Capabilities, KVConnectorBase
from pdserve.connectors.memory.exchange import Exchange
from pdserve.observe.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.base import ConnectorContext, KVConnectorScheduler, KVConnectorWorker
    from pdserve.observe.clock import Clock
    from pdserve.wire.transfer import Endpoint


class MemoryConnector(KVConnectorBase, frozen=True, kw_only=True):
    """See `KVConnectorBase`. Engines meet if their connectors share an exchange.

    Attributes:
        exchange: One of this connector's own if none is given.
        clock: Owns the lives of leases.
        new_nonce: Names leases; tests pass a counter.
    """

    name: str = "memory"
    capabilities: Capabilities = Capabilities(push=True)
    exchange: Exchange = msgspec.field(default_factory=Exchange)
    clock: Clock = msgspec.field(default_factory=SystemClock)
    new_nonce: Callable[[], str] = secrets.token_urlsafe

    def make_scheduler(
        self, context: ConnectorContext, endpoints: Sequence[Endpoint]
    ) -> KVConnectorScheduler:
        """See `KVConnectorBase`."""
        from pdserve.connectors.handover.scheduler import HandoverScheduler

        return HandoverScheduler(context, endpoints, new_nonce=self.new_nonce, clock=self.clock)

    def make_worker(self, context: ConnectorContext, wake: Callable[[], None]) -> KVConnectorWorker:
        """See `KVConnectorBase`."""
        from pdserve.connectors.memory.worker import MemoryWorker

        return MemoryWorker(context, wake, exchange=self.exchange, clock=self.clock)
