"""Reference-counted pool of fixed-size KV blocks, findable by the prefix they hold.

Logs which prefixes become findable or are lost. Knows ids, references and hashes, but not
requests, tokens or memory.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from pdserve.errors import InternalError
from pdserve.wire.events import BlocksCleared, BlocksRemoved
from pdserve.wire.ids import BlockHash, BlockId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.wire.events import BlocksStored, KVEvent


class OutOfBlocksError(Exception):
    """The pool has fewer free blocks than asked for; nothing was taken."""


class EventLog:
    """Blocks that became findable or were lost since `drain`, in order. One thread, no I/O."""

    def __init__(self) -> None:
        self._events: list[KVEvent] = []
        self._removed: list[BlockHash] | None = None

    def stored(self, event: BlocksStored) -> None:
        """Note blocks that can be found from now on."""
        self._events.append(event)
        self._removed = None

    def removed(self, name: BlockHash) -> None:
        """Note a block that cannot be found any more. Successive ones are one event."""
        if self._removed is None:
            self._removed = []
            self._events.append(BlocksRemoved(self._removed))
        self._removed.append(name)

    def cleared(self) -> None:
        """Note that nothing can be found any more."""
        self._events.append(BlocksCleared())
        self._removed = None

    def drain(self) -> list[KVEvent]:
        """Return the events noted since the last call."""
        events, self._events = self._events, []
        self._removed = None
        return events


class BlockPool:
    """Hands out KV blocks, shares them by reference count, caches them by hash.

    A block is in exactly one of two places: *held* (references > 0) or *free*
    (references == 0, in eviction order). A free block may still carry the hash of its
    last contents, so a later prefix can take it back without recomputing. The free list
    is first in, first out: the window between a block's release and its reuse is as
    long as it can be. Contents can be found as long as any block has them, even if several
    blocks had them: so the beginning of a prefix that is held whole can always be found.

    Args:
        num_blocks: Number of blocks, > 0.
        events: Log of hashes that cannot be found any more; publishers log the new ones.
    """

    def __init__(self, num_blocks: int, events: EventLog | None = None) -> None:
        if num_blocks <= 0:
            raise InternalError(f"num_blocks must be > 0, got {num_blocks}")
        self._events = events
        self._refs = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._hash: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, BlockId] = {}
        self._further: dict[BlockHash, list[BlockId]] = {}
        self._free: OrderedDict[BlockId, None] = OrderedDict(
            (BlockId(i), None) for i in range(num_blocks)
        )
        self._num_free_cached = 0

    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
        return len(self._refs)

    @property
    def num_free(self) -> int:
        """Number of blocks that `take` could return now."""
        return len(self._free)

    @property
    def num_free_cached(self) -> int:
        """Number of free blocks that are still findable by hash."""
        return self._num_free_cached

    def take(self, n: int) -> list[BlockId]:
        """Take the `n` blocks freed longest ago, in ascending order of id.

        Ascending, so that neighbours in a table are neighbours in memory where the free
        list allows it, and a transfer needs fewer descriptors.

        Raises:
            OutOfBlocksError: Fewer than `n` are free. The pool is unchanged.
        """
        if n > len(self._free):
            raise OutOfBlocksError(f"asked for {n} blocks, {len(self._free)} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(n)]
        for block in taken:
            if self._hash[block] is not None:
                self._num_free_cached -= 1
                self._forget(block)
            self._refs[block] = 1
            self._generations[block] += 1
        return sorted(taken)

    def generations_of(self, blocks: Iterable[BlockId]) -> list[int]:
        """Return how often each block was handed out; a new number means new contents."""
        return [self._generations[block] for block in blocks]

    def find(self, prefix: Iterable[BlockHash]) -> list[BlockId]:
        """Return the blocks of the longest cached run of `prefix`; holds nothing.

        Valid until the next `take`, `forget` or `forget_all`.
        """
        found: list[BlockId] = []
        for name in prefix:
            block = self._by_hash.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_among(self, blocks: Iterable[BlockId]) -> int:
        """Count those of `blocks` that are free, so that `hold` would shrink the free list."""
        return sum(self._refs[block] == 0 for block in blocks)

    def num_exclusive_among(self, blocks: Iterable[BlockId]) -> int:
        """Count those of `blocks` with one reference, which `release` would free."""
        return sum(self._refs[block] == 1 for block in blocks)

    def hold(self, blocks: Sequence[BlockId]) -> None:
        """Add one reference to each of `blocks` (as returned by `find`)."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
                self._num_free_cached -= self._hash[block] is not None
            self._refs[block] += 1

    def publish(self, block: BlockId, name: BlockHash) -> bool:
        """Make a full, held block findable by its hash, behind others with the same hash.

        Returns:
            Whether no block could be found by that hash before.
        """
        if self._refs[block] == 0:
            raise InternalError(f"block {block} is free; only a held block can be published")
        if self._hash[block] == name:
            return False
        self._forget(block)
        self._hash[block] = name
        if name in self._by_hash:
            self._further.setdefault(name, []).append(block)
            return False
        self._by_hash[name] = block
        return True

    def is_named(self, block: BlockId, name: BlockHash) -> bool:
        """Return whether this very block is among those that can be found by `name`."""
        return self._hash[block] == name

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference on each block; at zero it becomes evictable.

        Tails first, so that a shared prefix outlives its suffixes.

        Raises:
            InternalError: A block was not held. The pool is unchanged.
        """
        for block in blocks:
            if self._refs[block] == 0:
                raise InternalError(f"block {block} released twice")
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                self._num_free_cached += self._hash[block] is not None

    def forget(self, blocks: Iterable[BlockId]) -> None:
        """Make these blocks, which are held, unfindable."""
        for block in blocks:
            assert self._refs[block], "a free block would have to be counted"
            self._forget(block)

    def forget_all(self) -> None:
        """Forget every hash. Held blocks keep their contents and their holders."""
        self._by_hash.clear()
        self._further.clear()
        self._hash = [None] * len(self._refs)
        self._num_free_cached = 0
        if self._events is not None:
            self._events.cleared()

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. O(num_blocks)."""
        free = {block for block, refs in enumerate(self._refs) if refs == 0}
        assert free == set(self._free)
        assert all(refs >= 0 for refs in self._refs)
        names = Counter(name for name in self._hash if name is not None)
        assert names.keys() == self._by_hash.keys()
        assert all(self._hash[block] == name for name, block in self._by_hash.items())
        for name, number in names.items():
            further = self._further.get(name, [])
            assert len({self._by_hash[name], *further}) == number == len(further) + 1
        assert [] not in self._further.values()
        assert self._further.keys() <= names.keys()
        assert self._num_free_cached == sum(self._hash[block] is not None for block in free)

    def _forget(self, block: BlockId) -> None:
        name = self._hash[block]
        if name is None:
            return
        self._hash[block] = None
        further = self._further.get(name)
        if further is None:
            del self._by_hash[name]
            if self._events is not None:
                self._events.removed(name)
            return
        if self._by_hash[name] == block:
            self._by_hash[name] = further.pop(0)
        else:
            further.remove(block)
        if not further:
            del self._further[name]
