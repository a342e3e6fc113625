"""The ledger's counts against its holdings, whoever shares blocks with whom."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from pdserve.kvcache.block_pool import BlockPool, OutOfBlocksError
from pdserve.kvcache.lease import BlockUser, Holding, Ledger
from pdserve.wire.ids import BlockHash

NUM_BLOCKS = 12
NAMES = [BlockHash(name) for name in (b"a", b"b", b"c")]


class LedgerMachine(RuleBasedStateMachine):
    """Requests, loads, leases and quarantines over prefixes that they share."""

    holdings = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.ledger = Ledger(self.pool)

    @rule(target=holdings, num_fresh=st.integers(0, 4), is_load=st.booleans())
    def open(self, num_fresh: int, is_load: bool) -> object:
        try:
            holding = self.ledger.open(self.pool.find(NAMES), num_fresh)
        except OutOfBlocksError:
            return multiple()
        if is_load:
            holding.become(BlockUser.RECEIVING)
        else:
            holding.publish(NAMES, min(len(NAMES), len(holding.blocks)))
        return holding

    @rule(
        holding=holdings,
        hold=st.sampled_from([BlockUser.REQUEST, BlockUser.LEASED, BlockUser.QUARANTINED]),
    )
    def change(self, holding: Holding, hold: BlockUser) -> None:
        """Fresh blocks of a load are nobody else's, so it may become anything."""
        holding.become(hold)

    @rule(holding=consumes(holdings))
    def end(self, holding: Holding) -> None:
        holding.end()

    @rule()
    def reset_prefix_cache(self) -> None:
        """Whoever holds blocks goes on; nobody finds them any more."""
        self.pool.forget_all()
        assert self.pool.find(NAMES) == []
        assert self.ledger.blocks_by_state()["cached"] == 0

    @invariant()
    def counts_are_those_of_the_holdings(self) -> None:
        self.ledger.check()
        self.pool.check()


TestLedger = LedgerMachine.TestCase


def test_cached_blocks_in_front_of_a_load_that_is_given_up_are_not_quarantined() -> None:
    pool = BlockPool(8)
    ledger = Ledger(pool)
    first = ledger.open([], 2)
    first.publish(NAMES, 2)
    load = ledger.open(first.blocks, 3)
    load.become(BlockUser.RECEIVING)
    load.become(BlockUser.QUARANTINED)
    assert ledger.blocks_by_state() == {
        "free": 3,
        "cached": 0,
        "held": 2,
        "leased": 0,
        "receiving": 0,
        "quarantined": 3,
    }


def test_a_block_that_is_leased_and_quarantined_is_quarantined() -> None:
    pool = BlockPool(8)
    ledger = Ledger(pool)
    stopped = ledger.open([], 2)
    stopped.publish(NAMES, 2)
    leased = ledger.open(stopped.blocks, 1)
    leased.become(BlockUser.LEASED)
    stopped.become(BlockUser.QUARANTINED)
    by_state = ledger.blocks_by_state()
    assert (by_state["leased"], by_state["quarantined"]) == (1, 2)
    stopped.end()
    assert ledger.blocks_by_state()["leased"] == 3
