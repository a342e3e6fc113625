"""Wraps a connector. The scheduler half moves nothing, so trouble is its workers'."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.connectors.base import KVConnectorBase
from pdserve.connectors.faulty.wire import PlannedTrouble
from pdserve.connectors.faulty.worker import FaultyWorker
from pdserve.connectors.memory import MemoryConnector

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.base import ConnectorContext, KVConnectorScheduler
    from pdserve.connectors.faulty.plan import Plan
    from pdserve.wire.transfer import Endpoint


class FaultyConnector(KVConnectorBase, frozen=True, kw_only=True):
    """See `KVConnectorBase`.

    Attributes:
        inner: Makes the halves that do the work; built over `handover`.
    """

    inner: KVConnectorBase
    plan: Plan

    @classmethod
    def around(cls, inner: KVConnectorBase, plan: Plan) -> FaultyConnector:
        """Wrap a connector, which keeps its name and what it can do."""
        if isinstance(inner, MemoryConnector):
            inner = msgspec.structs.replace(inner, trouble=PlannedTrouble(plan))
        return cls(name=inner.name, capabilities=inner.capabilities, inner=inner, plan=plan)

    def make_scheduler(
        self, context: ConnectorContext, endpoints: Sequence[Endpoint]
    ) -> KVConnectorScheduler:
        """See `KVConnectorBase`."""
        return self.inner.make_scheduler(context, endpoints)

    def make_worker(self, context: ConnectorContext, wake: Callable[[], None]) -> FaultyWorker:
        """See `KVConnectorBase`."""
        inner = self.inner.make_worker(context, wake)
        return FaultyWorker(inner, wake, plan=self.plan, rank=context.rank)
