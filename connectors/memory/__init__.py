"""KV between engines of one process: for tests and simulation."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from pdserve.connectors.handover.scheduler import HandoverScheduler
from pdserve.connectors.memory.exchange import Exchange
from pdserve.connectors.memory.worker import MemoryWorker
from pdserve.observe.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.connectors.base import (
        ConnectorContext,
        ConnectorFactory,
        KVConnectorScheduler,
        KVConnectorWorker,
    )
    from pdserve.observe.clock import Clock
    from pdserve.wire.transfer import Endpoint


class MemoryFactory:
    """See `ConnectorFactory`. Engines meet if their factories share an exchange.

    Args:
        exchange: None makes one of this factory's own.
        clock: Owns the lives of leases.
        new_nonce: Names leases; tests pass a counter.
    """

    def __init__(
        self,
        exchange: Exchange | None = None,
        *,
        clock: Clock | None = None,
        new_nonce: Callable[[], str] = secrets.token_urlsafe,
    ) -> None:
        self._exchange = exchange or Exchange()
        self._clock = clock or SystemClock()
        self._new_nonce = new_nonce

    def scheduler(
        self, context: ConnectorContext, endpoints: list[Endpoint]
    ) -> KVConnectorScheduler:
        """See `ConnectorFactory`."""
        return HandoverScheduler(context, endpoints, new_nonce=self._new_nonce, clock=self._clock)

    def worker(self, context: ConnectorContext, wake: Callable[[], None]) -> KVConnectorWorker:
        """See `ConnectorFactory`."""
        return MemoryWorker(context, wake, exchange=self._exchange, clock=self._clock)


FACTORY: ConnectorFactory = MemoryFactory()
