"""The publisher's side of the KV events' wire: numbers batches, answers who lacks some. No I/O."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.wire.events import (
    DEVICE,
    Ask,
    Batch,
    GrainsCleared,
    GrainsRemoved,
    GrainsStored,
    MissingBatches,
    SnapshotPart,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pdserve.wire.events import Answer, GrainEvent, RoutingLoad
    from pdserve.wire.learned import LearnedTimes

_NUM_KEPT: Final = 1024
"""Batches kept: some seconds of a busy engine. A reader that lacks more gets a snapshot."""
PART_GRAINS: Final = 1 << 16
"""Maximum grains in one part of a snapshot: about half a megabyte."""


class GrainStream:
    """One engine core's stream, and the state of a reader that has received all of it.

    Args:
        epoch: Epoch of the first batch.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._next_seq = 0
        self._kept: deque[Batch] = deque(maxlen=_NUM_KEPT)
        self._pending: list[GrainEvent] = []
        self._grains: dict[str, set[int]] = {}
        self.num_pending = 0

    def add(self, events: Iterable[GrainEvent]) -> None:
        """Take events for the next batch."""
        for event in events:
            self._pending.append(event)
            apply(event, self._grains)
            self.num_pending += 1 if isinstance(event, GrainsCleared) else len(event.grains)

    def batch(self, load: RoutingLoad | None = None, learned: LearnedTimes | None = None) -> Batch:
        """Return a batch of the events added since the last one; a heartbeat has none.

        Args:
            load, learned: Further contents of this batch.
        """
        batch = Batch(self._epoch, self._next_seq, self._pending)
        self._pending, self.num_pending = [], 0
        self._next_seq += 1
        self._kept.append(batch)
        return msgspec.structs.replace(batch, load=load, learned=learned)

    def restart(self, grains: Mapping[str, set[int]]) -> None:
        """Begin a new epoch that starts from the current `grains`."""
        self._epoch += 1
        self._next_seq = 0
        self._kept.clear()
        self._pending, self.num_pending = [], 0
        self._grains = {medium: set(each) for medium, each in grains.items()}

    def answer(self, ask: Ask) -> Iterator[Answer]:
        """Yield the missing batches, or the parts of a snapshot. Only between two batches."""
        assert not self._pending, "a snapshot would be ahead of its number"
        first = self._next_seq - len(self._kept)
        if ask.epoch == self._epoch and first <= ask.next_seq <= self._next_seq:
            yield MissingBatches(ask.ask, list(islice(self._kept, ask.next_seq - first, None)))
            return
        chunks = [
            GrainsStored(list(chunk), medium)
            for medium, grains in self._grains.items()
            for chunk in _chunks(grains)
        ]
        for part, stored in enumerate(chunks or [GrainsStored([])]):
            yield SnapshotPart(
                ask.ask, self._epoch, self._next_seq, part, max(1, len(chunks)), [stored]
            )


def apply(event: GrainEvent, grains: dict[str, set[int]]) -> None:
    """Change `grains`, by medium, as the event says."""
    match event:
        case GrainsStored():
            grains.setdefault(event.medium, set()).update(event.grains)
        case GrainsRemoved():
            grains.setdefault(event.medium, set()).difference_update(event.grains)
        case GrainsCleared():
            grains.pop(DEVICE, None)


def _chunks(grains: set[int]) -> Iterator[Iterable[int]]:
    rest = iter(grains)
    for _ in range(0, len(grains), PART_GRAINS):
        yield islice(rest, PART_GRAINS)
