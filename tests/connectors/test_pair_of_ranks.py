"""A pair of engines with two ranks each, over the memory connector, under everything that the
pair of single ranks endures, and with ranks that fall behind or lose their peer alone.

The toy workers of both ranks hold different KV and check every value that they read.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from pdserve.connectors.memory.exchange import Exchange
from tests.stateful.reaching import run_until_reached
from tests.stateful.test_pair import PairMachine
from tests.toy import ToyEngine

if TYPE_CHECKING:
    from pdserve.connectors.memory.exchange import ExchangeMember
    from pdserve.wire.transfer import Endpoint

NUM_RANKS = 2
RANKS = st.sampled_from([set(), {0}, {1}])


class PartitionedExchange(Exchange):
    """An exchange in which some workers cannot be found for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.cut: set[Endpoint] = set()

    def is_cut(self, one: ExchangeMember, other: ExchangeMember) -> bool:
        return not self.cut.isdisjoint((one.endpoint, other.endpoint))


class RanksMachine(PairMachine):
    """See the module's docstring."""

    reached: ClassVar[Counter[str]] = Counter()
    new_exchange = PartitionedExchange

    def _engine(self, name: str, **fields: int) -> ToyEngine:
        return ToyEngine(name, self.exchange, self.clock, num_ranks=NUM_RANKS, **fields)

    @rule(late_in_p=RANKS, late_in_d=RANKS, lost=RANKS)
    def ranks_differ(self, late_in_p: set[int], late_in_d: set[int], lost: set[int]) -> None:
        """From now on some ranks are late, and some do not find their peer."""
        assert isinstance(self.exchange, PartitionedExchange)
        ends = self.prefill.ref.endpoints
        self.prefill.executor.late, self.decode.executor.late = set(late_in_p), set(late_in_d)
        self.exchange.cut = {end for rank, end in enumerate(ends) if rank in lost}

    def teardown(self) -> None:
        assert isinstance(self.exchange, PartitionedExchange)
        # What is on its way comes to one rank of D, and half of it is given up before the other.
        self.decode.executor.late = self.decode.executor.late or {1}
        self._take_prefill(self.prefill.settle())
        self._take_decode(self.decode.settle())
        gone = sorted(self.by_decode)[::2]
        self.decode.scheduler.abort(gone)
        for request_id in gone:
            del self.by_decode[request_id]
        self.prefill.executor.late, self.decode.executor.late = set(), set()
        self._take_decode(self.decode.settle())
        self.exchange.cut = set()
        super().teardown()
        for engine in (self.prefill, self.decode):
            assert engine.executor.quorum.num_open == 0
            assert not [name for name in engine.scheduler.stats().kv_faults if "reused" in name]
        for failed in (fact for report in self.decode.executor.reports for fact in report.failed):
            told = [rank for rank in range(NUM_RANKS) if f"rank {rank}: " in failed.detail]
            self.reached["failed on one rank"] += len(told) == 1
            self.reached["aborted on one rank"] += failed.detail.count("aborted") == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_that_differ_in_time_and_luck_give_only_right_tokens_and_keep_no_block() -> None:
    wanted = ("pulled", "pushed", "failed on one rank", "aborted on one rank", "expired")
    run_until_reached(RanksMachine, wanted, max_examples=10, first_seed=5)
