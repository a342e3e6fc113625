"""Wraps a connector's factory. The scheduler half moves nothing, so trouble is its workers'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.connectors.faulty.worker import Fabric, FaultyWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.connectors.base import (
        ConnectorContext,
        ConnectorFactory,
        KVConnectorScheduler,
        KVConnectorWorker,
    )
    from pdserve.connectors.faulty.plan import Plan
    from pdserve.wire.transfer import Endpoint


class FaultyFactory:
    """See `ConnectorFactory`.

    Args:
        inner: Makes the halves that do the work; built over `handover`.
        fabric: Shared by factories whose engines meet; None makes one of this factory's own.
    """

    def __init__(
        self, inner: ConnectorFactory, plan: Plan, *, fabric: Fabric | None = None
    ) -> None:
        self._inner = inner
        self._plan = plan
        self.fabric = fabric or Fabric()

    def scheduler(
        self, context: ConnectorContext, endpoints: list[Endpoint]
    ) -> KVConnectorScheduler:
        """See `ConnectorFactory`."""
        return self._inner.scheduler(context, endpoints)

    def worker(self, context: ConnectorContext, wake: Callable[[], None]) -> KVConnectorWorker:
        """See `ConnectorFactory`."""
        inner = self._inner.worker(context, wake)
        return FaultyWorker(inner, context, wake, plan=self._plan, fabric=self.fabric)
