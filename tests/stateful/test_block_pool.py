"""The block pool against a model that knows what is in every block."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from pdserve.errors import InternalError
from pdserve.kvcache.block_pool import BlockPool, OutOfBlocksError
from pdserve.wire.ids import BlockHash, BlockId
from tests.stateful.reaching import in_ci

NUM_BLOCKS = 4
HASHES = st.sampled_from([BlockHash(name) for name in (b"a", b"b", b"c")])


class PoolMachine(RuleBasedStateMachine):
    """Random take, find and hold, publish, release, forget."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: Counter[BlockId] = Counter()
        self.content: dict[BlockId, BlockHash] = {}
        self.free_order = [BlockId(block) for block in range(NUM_BLOCKS)]

    @rule(target=leases, n=st.integers(0, NUM_BLOCKS + 1))
    def take(self, n: int) -> object:
        if n > len(self.free_order):
            with pytest.raises(OutOfBlocksError):
                self.pool.take(n)
            assert self.pool.num_free == len(self.free_order)
            return multiple()
        got = self.pool.take(n)
        assert set(got) == set(self.free_order[:n]), "not the blocks freed longest ago"
        assert got == sorted(got)
        del self.free_order[:n]
        self.held.update(got)
        for block in got:
            self.content.pop(block, None)  # a new owner overwrites it
        return got

    @rule(target=leases, prefix=st.lists(HASHES, min_size=1, max_size=3, unique=True))
    def find_and_hold(self, prefix: list[BlockHash]) -> object:
        found = self.pool.find(prefix)
        assert [self.content.get(block) for block in found] == prefix[: len(found)]
        was_free = sum(self.held[block] == 0 for block in found)
        assert self.pool.num_free_among(found) == was_free
        self.pool.hold(found)
        self.held.update(found)
        self.free_order = [block for block in self.free_order if block not in found]
        return found

    @rule(lease=leases, index=st.integers(0, NUM_BLOCKS), name=HASHES)
    def publish(self, lease: list[BlockId], index: int, name: BlockHash) -> None:
        if lease:
            block = lease[index % len(lease)]
            if self.content.get(block, name) == name:  # a held block's contents never change
                self.pool.publish(block, name)
                self.content[block] = name

    @rule(lease=consumes(leases))
    def release(self, lease: list[BlockId]) -> None:
        exclusive = sum(self.held[block] == 1 for block in lease)
        assert self.pool.num_exclusive_among(lease) == exclusive
        self.pool.release(lease)
        self.held.subtract(lease)
        self.free_order += [block for block in reversed(lease) if self.held[block] == 0]

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        assert self.pool.num_free_cached == 0

    @invariant()
    def conserved(self) -> None:
        self.pool.check()
        assert self.pool.num_free == len(self.free_order)


TestPool = PoolMachine.TestCase
TestPool.settings = in_ci(100)


def test_a_free_block_can_neither_be_released_nor_published() -> None:
    pool = BlockPool(2)
    with pytest.raises(InternalError, match="released twice"):
        pool.release([BlockId(0)])
    with pytest.raises(InternalError, match="is free"):
        pool.publish(BlockId(0), BlockHash(b"a"))
    pool.check()
