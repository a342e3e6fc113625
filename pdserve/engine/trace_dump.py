"""The trace of an engine core, on its way here piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import EngineDeadError
from pdserve.observe.trace import whole

if TYPE_CHECKING:
    import asyncio

    from pdserve.wire.codec import TracePiece
    from pdserve.wire.trace import ProcessTrace


class TraceDump:
    """A dump of a core's trace on its way here.

    Args:
        trace: Is set when the last piece has come.
    """

    def __init__(self, trace: asyncio.Future[ProcessTrace]) -> None:
        self.trace = trace
        self._pieces: list[bytes] = []

    def take(self, piece: TracePiece) -> None:
        """Take one more piece."""
        if piece.events:
            self._pieces.append(piece.events)
        if piece.process is not None and not self.trace.done():
            self.trace.set_result(whole(piece.process, self._pieces))

    def fail(self, reason: str) -> None:
        """Fail the dump: there will be no more pieces."""
        if not self.trace.done():
            self.trace.set_exception(EngineDeadError(reason))
