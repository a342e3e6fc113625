"""The one owner of a set of blocks, from the moment they are taken until they are free.

Every block that is not free belongs to a `Holding`, and every holding ends exactly once.
Its `BlockUser` says what may still touch the blocks: a request that computes, a load that reads
a peer's memory into them, or a peer that writes or reads them. Only the scheduler moves a holding
from one user to the next.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, assert_never

from pdserve.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.kvcache.block_pool import BlockPool
    from pdserve.wire.ids import BlockHash, BlockId


class BlockUser(enum.Enum):
    """Kind of user that may touch the blocks.

    REQUEST: steps of its request. RECEIVING: a load, or a peer that pushes, writes them; no
    step may read them yet. LEASED: a peer may read them. QUARANTINED: its request is over, but
    a transfer from or into them has not settled: they can neither be used nor freed.
    """

    REQUEST = "held"
    RECEIVING = "receiving"
    LEASED = "leased"
    QUARANTINED = "quarantined"


# Used every few milliseconds, while the value of an enum's member is a slow property.
_HELD, _LEASED = BlockUser.REQUEST.value, BlockUser.LEASED.value
_RECEIVING, _QUARANTINED = BlockUser.RECEIVING.value, BlockUser.QUARANTINED.value


class Holding:
    """A request's block table, and the right to it. Append-only until it ends.

    Attributes:
        user: Kind of user that may touch the blocks now.
        num_cached: Leading blocks that were complete when it was opened: this request
            never writes them.
        num_published: Leading blocks that were made findable, unless the cache was made to forget.
    """

    def __init__(self, ledger: Ledger, blocks: list[BlockId], num_cached: int) -> None:
        self._ledger = ledger
        self._blocks = blocks
        self.num_cached = num_cached
        self.num_published = num_cached
        self.user = BlockUser.REQUEST
        self._num_untouched = 0

    @property
    def blocks(self) -> Sequence[BlockId]:
        """The blocks in token order."""
        return self._blocks

    @property
    def touched(self) -> Sequence[BlockId]:
        """The blocks that its user, if it is a peer, writes or reads."""
        return self._blocks[self._num_untouched :]

    def grow(self, num_blocks: int) -> list[BlockId]:
        """Append `num_blocks` fresh blocks and return them. Only a request that computes grows.

        Raises:
            OutOfBlocksError: Nothing was taken.
        """
        if self.user is not BlockUser.REQUEST:
            raise InternalError(f"a {self.user.value} holding cannot grow")
        fresh = self._ledger.pool.take(num_blocks)
        self._blocks.extend(fresh)
        return fresh

    def publish(self, hashes: Sequence[BlockHash], num_full_blocks: int) -> list[int]:
        """Make the first `num_full_blocks` blocks findable; they are complete in memory.

        Blocks behind one of its own that the cache was made to forget stay unfindable: another
        copy of that one might be evicted before them.

        Returns:
            The indices of blocks whose contents could not be found before, ascending.
        """
        start, pool, blocks = self.num_published, self._ledger.pool, self._blocks
        self.num_published = max(start, num_full_blocks)
        if start and not pool.is_named(blocks[start - 1], hashes[start - 1]):
            return []
        indices = range(start, num_full_blocks)
        return [index for index in indices if pool.publish(blocks[index], hashes[index])]

    def become(self, user: BlockUser) -> None:
        """Hand the same blocks to another kind of user. O(blocks)."""
        self._ledger.leave(self)
        if user is not BlockUser.QUARANTINED:  # quarantine is for the previous user's transfers
            # A load begins behind the complete blocks; a reader may read all.
            is_load = user is BlockUser.RECEIVING
            self._num_untouched = max(self.num_cached, self.num_published) if is_load else 0
        self.user = user
        self._ledger.enter(self)

    def end(self) -> None:
        """Give every block back. A second call is an internal error."""
        if self not in self._ledger.holdings:
            raise InternalError("a holding ended twice")
        self._ledger.holdings.discard(self)
        self._ledger.leave(self)
        self._ledger.pool.release(self._blocks)


class Ledger:
    """Every holding of one pool, and how many blocks each kind of user has."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.holdings: set[Holding] = set()
        self._leases: dict[BlockId, int] = {}
        self._quarantines: dict[BlockId, int] = {}
        self._num_leased_and_quarantined = 0
        self._num_receiving = 0

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
        return holding

    def blocks_by_state(self) -> dict[str, int]:
        """Return the number of blocks by state; each counts once, for its most restricted user.

        A block in several leases is one leased block; one that is also quarantined is
        quarantined. A load does not write the cached blocks in front of it: they are neither
        receiving nor, if the load is given up, quarantined.
        """
        pool = self.pool
        num_quarantined, num_receiving = len(self._quarantines), self._num_receiving
        num_leased = len(self._leases) - self._num_leased_and_quarantined
        num_others = num_leased + num_quarantined + num_receiving
        num_free, num_cached = pool.num_free, pool.num_free_cached
        return {
            "free": num_free - num_cached,
            "cached": num_cached,
            _HELD: pool.num_blocks - num_free - num_others,
            _LEASED: num_leased,
            _RECEIVING: num_receiving,
            _QUARANTINED: num_quarantined,
        }

    def check(self) -> None:
        """Raise AssertionError if the counts do not match the holdings. O(blocks held)."""
        by_user: dict[BlockUser, set[BlockId]] = {user: set() for user in BlockUser}
        for holding in self.holdings:
            by_user[holding.user].update(holding.touched)
        quarantined, leased = by_user[BlockUser.QUARANTINED], by_user[BlockUser.LEASED]
        others = quarantined | leased | by_user[BlockUser.REQUEST]
        assert not by_user[BlockUser.RECEIVING] & others, "a block that is written has another user"
        by_state = self.blocks_by_state()
        assert by_state[BlockUser.QUARANTINED.value] == len(quarantined), by_state
        assert by_state[BlockUser.LEASED.value] == len(leased - quarantined), by_state
        assert by_state[BlockUser.RECEIVING.value] == len(by_user[BlockUser.RECEIVING]), by_state
        assert min(by_state.values()) >= 0, by_state
        assert sum(by_state.values()) == self.pool.num_blocks, by_state

    def enter(self, holding: Holding) -> None:
        """Count the blocks of `holding` for its user."""
        match holding.user:
            case BlockUser.REQUEST:
                return
            case BlockUser.RECEIVING:
                self._num_receiving += len(holding.touched)
            case BlockUser.LEASED:
                self._add(self._leases, self._quarantines, holding.touched)
            case BlockUser.QUARANTINED:
                self._add(self._quarantines, self._leases, holding.touched)
            case _:
                assert_never(holding.user)

    def leave(self, holding: Holding) -> None:
        """Undo the counts of `enter`."""
        match holding.user:
            case BlockUser.REQUEST:
                return
            case BlockUser.RECEIVING:
                self._num_receiving -= len(holding.touched)
            case BlockUser.LEASED:
                self._remove(self._leases, self._quarantines, holding.touched)
            case BlockUser.QUARANTINED:
                self._remove(self._quarantines, self._leases, holding.touched)
            case _:
                assert_never(holding.user)

    def _add(
        self, counts: dict[BlockId, int], others: dict[BlockId, int], blocks: Sequence[BlockId]
    ) -> None:
        for block in blocks:
            num = counts.get(block, 0)
            counts[block] = num + 1
            if not num and block in others:
                self._num_leased_and_quarantined += 1

    def _remove(
        self, counts: dict[BlockId, int], others: dict[BlockId, int], blocks: Sequence[BlockId]
    ) -> None:
        for block in blocks:
            counts[block] -= 1
            if not counts[block]:
                del counts[block]
                if block in others:
                    self._num_leased_and_quarantined -= 1
