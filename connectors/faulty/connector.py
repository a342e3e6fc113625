"""Wraps a connector: trouble is its workers' and the wire's; the scheduler half moves nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.connectors.base import KVConnectorBase
from pdserve.connectors.faulty.plan import MAX_POLLS_LATE, FaultKind
from pdserve.connectors.faulty.worker import FaultyWorker
from pdserve.connectors.memory import MemoryConnector
from pdserve.connectors.memory.trouble import Spoil, Trouble

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.base import ConnectorContext, KVConnectorScheduler
    from pdserve.connectors.faulty.plan import Plan
    from pdserve.wire.transfer import Endpoint

_SPOILS = ((FaultKind.CORRUPT, Spoil.CORRUPT), (FaultKind.TRUNCATE, Spoil.TRUNCATE))


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


class PlannedTrouble(Trouble):
    """A lossy link and a late mover of the memory connector. See `Trouble`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def frame_polls(self) -> int:
        """See `Trouble`."""
        return self._late(FaultKind.LATE_FRAME)

    def loses_link(self) -> bool:
        """See `Trouble`."""
        return self._plan.strikes(FaultKind.LOST_LINK)

    def copy_polls(self) -> int:
        """See `Trouble`."""
        return self._late(FaultKind.LATE_COPY)

    def spoils(self) -> Spoil | None:
        """See `Trouble`."""
        return next((spoil for kind, spoil in _SPOILS if self._plan.strikes(kind)), None)

    def _late(self, kind: FaultKind) -> int:
        return 1 + self._plan.below(MAX_POLLS_LATE) if self._plan.strikes(kind) else 0
