"""The one owner of a set of blocks, from the moment they are taken until they are free.

Every block that is not free belongs to a `Holding`, and every holding ends exactly once.
What may still touch the blocks is its `Hold`: a request that computes, a load that a
peer's memory is read into, a peer that reads. Only the scheduler moves a holding from
one to the next.
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import TYPE_CHECKING

from pdserve.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.kvcache.block_pool import BlockPool
    from pdserve.wire.ids import BlockHash, BlockId


class Hold(enum.Enum):
    """Who may touch the blocks."""

    REQUEST = "held"
    RECEIVING = "receiving"
    LEASED = "leased"


class Holding:
    """A request's block table, and the right to it. Append-only until it ends."""

    def __init__(self, ledger: Ledger, blocks: list[BlockId], num_published: int) -> None:
        self._ledger = ledger
        self._blocks = blocks
        self._num_published = num_published
        self.hold = Hold.REQUEST

    @property
    def blocks(self) -> Sequence[BlockId]:
        """The blocks in token order."""
        return self._blocks

    def grow(self, num_blocks: int) -> list[BlockId]:
        """Append `num_blocks` fresh blocks and return them.

        Raises:
            OutOfBlocksError: Nothing was taken.
        """
        fresh = self._ledger.pool.take(num_blocks)
        self._blocks.extend(fresh)
        self._ledger.num_blocks[self.hold] += num_blocks
        return fresh

    def publish(self, hashes: Sequence[BlockHash], num_full_blocks: int) -> None:
        """Make the first `num_full_blocks` blocks findable; they are complete in memory."""
        for index in range(self._num_published, num_full_blocks):
            self._ledger.pool.publish(self._blocks[index], hashes[index])
        self._num_published = max(self._num_published, num_full_blocks)

    def become(self, hold: Hold) -> None:
        """Hand the same blocks to another kind of user."""
        self._ledger.num_blocks[self.hold] -= len(self._blocks)
        self._ledger.num_blocks[hold] += len(self._blocks)
        self.hold = hold

    def end(self) -> None:
        """Give every block back. A second call is our own mistake."""
        if self not in self._ledger.holdings:
            raise InternalError("a holding ended twice")
        self._ledger.holdings.discard(self)
        self._ledger.num_blocks[self.hold] -= len(self._blocks)
        self._ledger.pool.release(self._blocks)


class Ledger:
    """Every holding of one pool, and how many blocks each kind of user has."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.holdings: set[Holding] = set()
        self.num_blocks: Counter[Hold] = Counter()

    def open(self, cached: Sequence[BlockId], num_fresh: int) -> Holding:
        """Hold `cached` blocks and `num_fresh` new ones behind them.

        Raises:
            OutOfBlocksError: Nothing was held or taken.
        """
        self.pool.hold(cached)
        try:
            fresh = self.pool.take(num_fresh)
        except BaseException:
            self.pool.release(cached)
            raise
        holding = Holding(self, [*cached, *fresh], len(cached))
        self.holdings.add(holding)
        self.num_blocks[Hold.REQUEST] += len(holding.blocks)
        return holding

    def blocks_by_state(self) -> dict[str, int]:
        """Blocks by state; a block with two users counts as the more restricted one's."""
        pool = self.pool
        leased, receiving = self.num_blocks[Hold.LEASED], self.num_blocks[Hold.RECEIVING]
        return {
            "free": pool.num_free - pool.num_free_cached,
            "cached": pool.num_free_cached,
            Hold.REQUEST.value: max(0, pool.num_blocks - pool.num_free - leased - receiving),
            Hold.LEASED.value: leased,
            Hold.RECEIVING.value: receiving,
        }
