"""Notes what a prefix cache gains and loses, for who listens. One thread, no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.wire.events import BlocksCleared, BlocksRemoved

if TYPE_CHECKING:
    from pdserve.wire.events import BlocksStored, KVEvent
    from pdserve.wire.ids import BlockHash


class EventLog:
    """The events since the last `drain`, in order."""

    def __init__(self) -> None:
        self._events: list[KVEvent] = []
        self._removed: list[BlockHash] | None = None

    def stored(self, event: BlocksStored) -> None:
        """Note blocks that can be found from now on."""
        self._events.append(event)
        self._removed = None

    def removed(self, name: BlockHash) -> None:
        """Note a block that cannot be found any more. Those in a row are one event."""
        if self._removed is None:
            self._removed = []
            self._events.append(BlocksRemoved(self._removed))
        self._removed.append(name)

    def cleared(self) -> None:
        """Note that nothing can be found any more."""
        self._events.append(BlocksCleared())
        self._removed = None

    def drain(self) -> list[KVEvent]:
        """Return what was noted, and begin again."""
        events, self._events = self._events, []
        self._removed = None
        return events
