"""Turns events of blocks into those of grains, which mean the same at every block size.

Knows names only. A grain exists while all of its blocks do; it is forgotten with its last block,
which is the first that a cache evicts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from pdserve.wire.events import (
    DEVICE,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    GrainsCleared,
    GrainsRemoved,
    GrainsStored,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.wire.events import Grain, GrainEvent, KVEvent
    from pdserve.wire.ids import BlockHash


class GrainTracker:
    """Follows the grains of every medium of one engine core."""

    def __init__(self) -> None:
        self._media: dict[str, _Medium] = {}

    def apply(self, events: Iterable[KVEvent]) -> list[GrainEvent]:
        """Take events of blocks, in order; return the resulting events of grains."""
        changes: list[GrainEvent] = []
        for event in events:
            match event:
                case BlocksStored(medium=medium):
                    grains = self._medium(medium).store(event)
                    if grains:
                        changes.append(GrainsStored(grains, medium))
                case BlocksRemoved(blocks, medium):
                    grains = self._medium(medium).remove(blocks)
                    if grains:
                        changes.append(GrainsRemoved(grains, medium))
                case BlocksCleared():
                    self._media[DEVICE] = _Medium()
                    changes.append(GrainsCleared())
                case _:
                    assert_never(event)
        return changes

    def _medium(self, name: str) -> _Medium:
        medium = self._media.get(name)
        if medium is None:
            medium = self._media[name] = _Medium()
        return medium

    def grains(self) -> dict[str, set[int]]:
        """Return a copy of the current grains, by medium."""
        return {name: medium.present.copy() for name, medium in self._media.items()}


class _Medium:
    """The blocks and grains of one medium.

    Attributes:
        present: Grains whose blocks are all here.
    """

    def __init__(self) -> None:
        self.present: set[int] = set()
        self._blocks: set[BlockHash] = set()
        self._grains_with: dict[BlockHash, list[Grain]] = {}

    def store(self, event: BlocksStored) -> list[int]:
        """Note blocks, and the grains that end with them; return the grains now complete."""
        self._blocks.update(event.blocks)
        touched: list[Grain] = []
        grains_with = self._grains_with
        if grains_with:
            for name in event.blocks:
                touched += grains_with.get(name, ())
        for grain in event.grains:
            for name in grain.blocks:
                grains_with.setdefault(name, []).append(grain)
        return self._whole([*touched, *event.grains])

    def _whole(self, grains: Iterable[Grain]) -> list[int]:
        found = []
        for grain in grains:
            if grain.grain_hash not in self.present and self._blocks.issuperset(grain.blocks):
                self.present.add(grain.grain_hash)
                found.append(grain.grain_hash)
        return found

    def remove(self, blocks: Iterable[BlockHash]) -> list[int]:
        """Forget blocks; return the grains that they break."""
        broken = []
        for name in blocks:
            self._blocks.discard(name)
            for grain in list(self._grains_with.get(name, ())):
                if grain.grain_hash in self.present:
                    self.present.discard(grain.grain_hash)
                    broken.append(grain.grain_hash)
                if grain.blocks[-1] == name:
                    self._forget(grain)
        return broken

    def _forget(self, grain: Grain) -> None:
        for name in grain.blocks:
            grains = self._grains_with[name]
            grains.remove(grain)
            if not grains:
                del self._grains_with[name]
