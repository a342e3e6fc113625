"""Trouble on the wire of the memory connector: a lossy link and a late mover, by a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.connectors.faulty.plan import MAX_POLLS_LATE, FaultKind
from pdserve.connectors.memory.trouble import Spoil, Trouble

if TYPE_CHECKING:
    from pdserve.connectors.faulty.plan import Plan

_SPOILS = ((FaultKind.CORRUPT, Spoil.CORRUPT), (FaultKind.TRUNCATE, Spoil.TRUNCATE))


class PlannedTrouble(Trouble):
    """See `Trouble`, and the table of the package."""

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
