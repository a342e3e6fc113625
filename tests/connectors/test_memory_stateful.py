"""A P and a D over the memory connector, in any order of events, with a clock that jumps.

The model knows who wrote each block of P. P's blocks are reused as soon as they settle, so
KV that was read too late, or from the wrong place, has other contents and is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.connectors.memory import MemoryFactory
from pdserve.connectors.memory.exchange import Exchange
from pdserve.observe.clock import ManualClock
from pdserve.wire.transfer import KVHandoff, LeaseEnd, LoadFailure
from tests.connectors.engines import Engine, FakeRequest, layout, prompt_of

LEASE_S = 6.0
NUM_BLOCKS = 6


@dataclass
class Lease:
    """One prefill at P."""

    handoff: KVHandoff
    blocks: list[int]
    seed: int
    life: int


class PairMachine(RuleBasedStateMachine):
    """P prefills, D queues, loads and gives up, the proxy releases, P restarts."""

    @initialize()
    def start(self) -> None:
        self.exchange, self.clock = Exchange(), ManualClock()
        self.life = 0
        self.p = self.make("P")
        self.d = self.make("D")
        self.p_free = set(range(NUM_BLOCKS))
        self.d_free = set(range(NUM_BLOCKS))
        self.leases: list[Lease] = []
        self.leased: dict[str, Lease] = {}
        self.waiting: list[tuple[FakeRequest, Lease]] = []
        self.loading: dict[str, tuple[Lease, list[int], int, FakeRequest]] = {}
        self.count = 0
        self.confirmed: set[str] = set()

    def make(self, engine_id: str) -> Engine:
        factory = MemoryFactory(self.exchange, clock=self.clock)
        return Engine(factory, engine_id, shape=layout(num_blocks=NUM_BLOCKS), lease_s=LEASE_S)

    @rule(num_tokens=st.integers(1, 40), staged=st.booleans())
    def prefill(self, num_tokens: int, staged: bool) -> None:
        needed = -(-num_tokens // 16)
        if len(self.p_free) < needed:
            return
        blocks = [self.p_free.pop() for _ in range(needed)]
        self.count += 1
        handoff = self.p.prefill(prompt_of(num_tokens), blocks, seed=self.count, step=False)
        lease = Lease(handoff, blocks, self.count, self.life)
        self.leases.append(lease)
        self.leased[handoff.request_id] = lease
        if not staged:
            self.step_p()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def queue(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.count += 1
        prompt = prompt_of(lease.handoff.num_tokens)
        request = self.d.queue(prompt, lease.handoff, f"d{self.count}", step=False)
        self.waiting.append((request, lease))
        self.step_d()

    @precondition(lambda self: self.waiting)
    @rule(hit=st.integers(0, 2), abort=st.booleans())
    def load(self, hit: int, abort: bool) -> None:
        request, lease = self.waiting[0]
        num_computed = 16 * min(hit, (lease.handoff.num_tokens - 1) // 16)
        if len(self.d_free) < len(lease.blocks):
            return
        self.waiting.pop(0)
        blocks = [self.d_free.pop() for _ in lease.blocks]
        match = self.d.scheduler.get_num_new_matched_tokens(request, num_computed)
        assert match is not None
        assert match.num_tokens == lease.handoff.num_tokens - num_computed
        self.d.scheduler.update_state_after_alloc(request, blocks, match.num_tokens)
        self.loading[request.request_id] = (lease, blocks, num_computed // 16, request)
        if abort:
            self.d.scheduler.request_aborted(request)
        self.step_d()

    @precondition(lambda self: self.waiting)
    @rule()
    def abort_waiting(self) -> None:
        request, _ = self.waiting.pop(0)
        self.d.scheduler.request_aborted(request)
        self.step_d()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.p.scheduler.release_lease(data.draw(st.sampled_from(self.leases)).handoff.nonce)

    @rule(by_s=st.sampled_from([0.4, 2.0, 7.0]))
    def let_time_pass(self, by_s: float) -> None:
        self.clock.advance(by_s)

    @rule()
    def step_p(self) -> None:
        for settled in self.p.step().settled:
            lease = self.leased.pop(settled.request_id)  # each lease settles once
            assert (settled.end is LeaseEnd.READ) == (lease.handoff.nonce in self.confirmed)
            self.p_free.update(lease.blocks)

    @rule()
    def step_d(self) -> None:
        report = self.d.step()
        for received in report.received:
            lease, blocks, skipped, _ = self.loading.pop(received.request_id)
            assert lease.life == self.life
            assert lease.handoff.nonce not in self.confirmed
            assert self.d.holds(blocks[skipped:], lease.blocks[skipped:], seed=lease.seed)
            self.confirmed.add(lease.handoff.nonce)
            self.d_free.update(blocks)
        for failed in report.failed:
            lease, blocks, _, request = self.loading.pop(failed.request_id)
            if lease.life != self.life:
                assert failed.reason in (
                    LoadFailure.PEER_LOST,
                    LoadFailure.LEASE_LOST,
                    LoadFailure.ABORTED,
                )
            assert self.d.scheduler.get_num_new_matched_tokens(request, 0).num_tokens == 0
            self.d_free.update(blocks)

    @rule()
    def restart_p(self) -> None:
        self.p.close()
        self.life += 1
        self.p = self.make("P")
        self.p_free = set(range(NUM_BLOCKS))
        self.leased.clear()

    @invariant()
    def p_never_reuses_a_block_that_is_leased(self) -> None:
        held = [b for lease in self.leased.values() for b in lease.blocks]
        assert len(held) == len(set(held))
        assert not self.p_free & set(held)

    def teardown(self) -> None:
        if not hasattr(self, "p"):
            return
        for request, _ in self.waiting:
            self.d.scheduler.request_aborted(request)
        for _ in range(4):
            self.step_d()
            self.step_p()
            self.clock.advance(LEASE_S + 1)
        self.step_p()
        assert not self.leased
        assert not self.loading
        assert self.p_free == set(range(NUM_BLOCKS)) == self.d_free
        assert self.p.scheduler.num_unknown_reports == 0
        self.p.close()
        self.d.close()


TestPair = PairMachine.TestCase
TestPair.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
