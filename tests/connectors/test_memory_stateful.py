"""A P and a D of any shapes over the memory connector, in any order of events, with a clock that
jumps: pulls and pushes, aborts, lost peers, restarts, rotten blocks, replayed tickets.

The model knows who wrote each token. Blocks are reused as soon as they are free, D's free blocks
are scribbled on, and a restarted P hands out the nonces of its earlier life once more: KV that
was read too late, came from the wrong place, or lands where it should not, is noticed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pdserve.connectors.conformance.engines import Engine, prompt_of
from pdserve.connectors.conformance.values import make_shape
from pdserve.connectors.memory import MemoryConnector
from pdserve.connectors.memory.exchange import Exchange, Spoil, Trouble
from pdserve.connectors.views import ScheduledRequest, StepView
from pdserve.observe.clock import ManualClock
from pdserve.wire.ids import BlockId
from pdserve.wire.transfer import (
    Endpoint,
    KVHandoff,
    KVMode,
    KVShape,
    LeaseEnd,
    LoadFailure,
    PushTicket,
)
from tests.stateful.reaching import run_until_reached

if TYPE_CHECKING:
    from pdserve.connectors.conformance.engines import KitRequest
    from pdserve.connectors.memory.exchange import ExchangeMember

LEASE_S = 6.0
HITS = st.integers(0, 2)
OFTEN = [True, True, True, False]
SCRIBBLE = -7.0
MAX_TOKENS = 24


def shape(tp: int, pp: int, block_size: int) -> KVShape:
    return make_shape(
        tp=tp,
        pp=pp,
        block_size=block_size,
        num_blocks=64 // block_size,
        num_layers=2,
        num_kv_heads=2,
        head_dim=2,
    )


SHAPES = [
    (shape(1, 1, 8), shape(1, 1, 8)),
    (shape(2, 1, 8), shape(1, 1, 16)),
    (shape(1, 2, 16), shape(2, 1, 8)),
    (shape(4, 1, 8), shape(1, 2, 8)),
]


class OneAddress(Exchange):
    """An exchange in which a restarted engine listens where its earlier life did.

    Attributes:
        is_silent: Nothing gets through.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_silent = False
        self._places: dict[tuple[str, int], Endpoint] = {}

    def is_cut(self, one: ExchangeMember, other: ExchangeMember) -> bool:
        return self.is_silent

    def place_of(self, rank: ExchangeMember) -> Endpoint:
        place = (rank.context.engine_id, rank.context.rank)
        if place not in self._places:
            self._places[place] = super().place_of(rank)
        return self._places[place]


class Rot(Trouble):
    """Spoils the next copy into a rank's memory."""

    is_next = False

    def spoils(self) -> Spoil | None:
        is_next, self.is_next = self.is_next, False
        return Spoil.CORRUPT if is_next else None


@dataclass
class Lease:
    """One prefill at P that was handed off."""

    handoff: KVHandoff
    seed: int
    life: int


@dataclass
class Load:
    """Blocks of D that a load fills."""

    request: KitRequest
    blocks: list[int]
    first: int
    seed: int
    life: int
    push: Push | None = None


@dataclass
class Push:
    """One request under a ticket, at both ends."""

    ticket: PushTicket
    at_p: KitRequest
    at_d: KitRequest | None
    seed: int
    life: int
    blocks: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    num_computed: int = 0
    handoff: KVHandoff | None = None
    is_over_at_p: bool = False
    is_registered: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.at_p.prompt_token_ids)


class PairMachine(RuleBasedStateMachine):
    """P computes, D loads and gives up, the proxy releases, P restarts.

    Attributes:
        reached: How often the situations that matter came up, over all runs.
    """

    reached: ClassVar[Counter[str]] = Counter()

    rot_at_d: Rot

    @initialize(shapes=st.sampled_from(SHAPES))
    def start(self, shapes: tuple[KVShape, KVShape]) -> None:
        self.exchange, self.clock = OneAddress(), ManualClock()
        self.shapes = {"P": shapes[0], "D": shapes[1]}
        self.life = 0
        self.count = 0
        self.rot_at_d = Rot()
        self.d = self.make("D", self.rot_at_d)
        self.d_free = set(range(shapes[1].num_blocks))
        self.scribble(self.d_free)
        self.leases: list[Lease] = []
        self.waiting: list[tuple[KitRequest, Lease]] = []
        self.loads: dict[str, Load] = {}
        self.start_p()

    def start_p(self) -> None:
        self.p = self.make("P")
        self.p_free = list(range(self.shapes["P"].num_blocks))
        self.p_generations: Counter[int] = Counter()
        self.held: dict[str, list[int]] = {}
        self.pushes: list[Push] = []
        self.read: set[str] = set()
        self.stopped: set[str] = set()

    def make(self, name: str, trouble: Trouble | None = None) -> Engine:
        nonces = (f"{name}-{number}" for number in itertools.count())
        connector = MemoryConnector(
            exchange=self.exchange,
            clock=self.clock,
            new_nonce=lambda: next(nonces),
            trouble=trouble or Trouble(),
        )
        return Engine(
            connector,
            name,
            shape=self.shapes[name],
            incarnation=f"life {self.life}",
            lease_s=LEASE_S,
        )

    def blocks_at_p(self, num_tokens: int) -> tuple[list[int], list[int]] | None:
        """Take P's blocks that were freed longest ago, with their generations."""
        needed = -(-num_tokens // self.p.block_size)
        if len(self.p_free) < needed:
            return None
        blocks = [self.p_free.pop(0) for _ in range(needed)]
        self.p_generations.update(blocks)
        return blocks, [self.p_generations[block] for block in blocks]

    def blocks_at_d(self, num_tokens: int) -> list[int] | None:
        needed = -(-num_tokens // self.d.block_size)
        if len(self.d_free) < needed:
            return None
        return [self.d_free.pop() for _ in range(needed)]

    def scribble(self, blocks: set[int] | list[int]) -> None:
        for rank in self.d.ranks:
            rank.kv[sorted(blocks)] = SCRIBBLE

    def free_at_d(self, blocks: list[int]) -> None:
        self.scribble(blocks)
        self.d_free.update(blocks)

    # ---- pulls -----------------------------------------------------------------------

    @rule(num_tokens=st.integers(1, MAX_TOKENS), hit=HITS, is_eager=st.sampled_from(OFTEN))
    def prefill(self, num_tokens: int, hit: int, is_eager: bool) -> None:
        """An eager one is loaded at once."""
        taken = self.blocks_at_p(num_tokens)
        if taken is None:
            return
        blocks, generations = taken
        self.count += 1
        handoff = self.p.prefill(
            prompt_of(num_tokens), blocks, seed=self.count, generations=generations, step=False
        )
        self.held[handoff.request_id] = blocks
        self.leases.append(Lease(handoff, self.count, self.life))
        if is_eager:
            self.step_p()
            request = self.d.queue(prompt_of(num_tokens), handoff, step=False)
            self.waiting.append((request, self.leases[-1]))
            self.load_next(hit)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def queue(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases[-4:]))
        request = self.d.queue(prompt_of(lease.handoff.num_tokens), lease.handoff, step=False)
        self.waiting.append((request, lease))
        self.step_d()

    @precondition(lambda self: self.waiting)
    @rule(hit=HITS, is_aborted=st.booleans())
    def load(self, hit: int, is_aborted: bool) -> None:
        request, _ = self.waiting[0]
        if self.load_next(hit) and is_aborted:
            self.d.abort(request)
        self.step_d()

    def load_next(self, hit: int) -> bool:
        request, lease = self.waiting[0]
        if self.reserve(request, hit, lease.seed, lease.life) is None:
            return False
        self.waiting.pop(0)
        return True

    def reserve(
        self, request: KitRequest, hit: int, seed: int, life: int, push: Push | None = None
    ) -> Load | None:
        """Take blocks for a load behind `hit` blocks that D has."""
        num_tokens = len(request.prompt_token_ids)
        first = self.d.block_size * min(hit, (num_tokens - 1) // self.d.block_size)
        blocks = self.blocks_at_d(num_tokens)
        if blocks is None:
            return None
        if first:
            self.d.write(blocks, seed, 0, first)
        self.d.stage_load(request, blocks, num_computed=first)
        load = self.loads[request.request_id] = Load(request, blocks, first, seed, life, push)
        return load

    @precondition(lambda self: self.waiting)
    @rule()
    def abort_waiting(self) -> None:
        request, _ = self.waiting.pop(0)
        assert not self.d.abort(request)
        self.step_d()

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def abort_load(self, data: st.DataObject) -> None:
        load = self.loads[data.draw(st.sampled_from(sorted(self.loads)))]
        self.reached["reservation aborted"] += load.push is not None
        self.d.abort(load.request)
        self.step_d()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases[-4:]))
        if lease.life == self.life:
            self.p.give_up(lease.handoff.nonce)

    # ---- pushes ----------------------------------------------------------------------

    @rule(
        num_tokens=st.integers(1, MAX_TOKENS),
        hit=HITS,
        comes_to_d=st.sampled_from(OFTEN),
        is_eager=st.sampled_from(OFTEN),
    )
    def plan_push(self, num_tokens: int, hit: int, comes_to_d: bool, is_eager: bool) -> None:
        """In an eager one D has registered its blocks at once."""
        if len(self.pushes) > 4:
            self.pushes = [push for push in self.pushes if push.at_d or not push.is_over_at_p]
        if len(self.pushes) > 4:
            return
        self.count += 1
        ticket = PushTicket(nonce=f"push {self.count}", prefill=self.p.ref, decode=self.d.ref)
        push = self.add_push(ticket, prompt_of(num_tokens), comes_to_d)
        if is_eager and push.at_d is not None:
            if self.reserve(push.at_d, hit, push.seed, push.life, push) is not None:
                push.at_d = None
            self.step_d()
            self.step_p()

    def add_push(self, ticket: PushTicket, prompt: list[int], comes_to_d: bool) -> Push:
        at_p = self.p.new_request(prompt, ticket=ticket, remote_decode=True)
        self.p.arrive(at_p)
        at_d = None
        if comes_to_d:
            at_d = self.d.new_request(prompt, ticket=ticket)
            if self.d.refusal(at_d) is not None:
                assert any(load.request.ticket == ticket for load in self.loads.values()) or any(
                    push.ticket == ticket and push.at_d is not None for push in self.pushes
                )
                at_d = None
        push = Push(ticket, at_p, at_d, self.count, self.life)
        self.pushes.append(push)
        return push

    @rule(
        num_tokens=st.integers(1, MAX_TOKENS),
        hit=HITS,
        chunk=st.sampled_from([3, 8, 24]),
        num_steps=st.integers(0, 4),
        is_rotten=st.sampled_from([False, False, False, True]),
    )
    def push_through(
        self, num_tokens: int, hit: int, chunk: int, num_steps: int, is_rotten: bool
    ) -> None:
        """A whole push, as far as there is room; a rotten one arrives damaged, once."""
        num_pushes = len(self.pushes)
        self.plan_push(num_tokens, hit, True, True)
        push = self.pushes[-1] if len(self.pushes) > num_pushes else None
        while push is not None and push.num_computed < num_tokens:
            before = push.num_computed
            self._compute(push, chunk)
            self.step_both(num_steps)
            if push.num_computed == before:
                return
        if push is not None:
            self._finish(push)
            if is_rotten:
                self.rot_at_d.is_next = True
            self.step_both(num_steps)

    def step_both(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step_d()
            self.step_p()

    @precondition(lambda self: self.pushes)
    @rule(data=st.data(), num_steps=st.integers(0, 4))
    def go_on(self, data: st.DataObject, num_steps: int) -> None:
        """The next thing that would happen to a push, at either end."""
        push = data.draw(st.sampled_from(self.pushes))
        if push.at_d is not None and data.draw(st.booleans()):
            if self.reserve(push.at_d, data.draw(HITS), push.seed, push.life, push) is not None:
                push.at_d = None
        elif push.is_over_at_p:
            return
        elif push.num_computed < push.num_tokens:
            self._compute(push, data.draw(st.sampled_from([3, 8, 24])))
        else:
            self._finish(push)
        self.step_both(num_steps)

    def _compute(self, push: Push, num_tokens: int) -> None:
        """Admit a request at P if it may be, and let a step compute some of it."""
        scheduler = self.p.scheduler
        if not push.blocks:
            match = scheduler.get_num_new_matched_tokens(push.at_p, 0)
            if match is None:
                return
            taken = self.blocks_at_p(push.num_tokens)
            if taken is None:
                return
            push.blocks, push.generations = taken
            push.is_registered = match.is_pinned
            scheduler.update_state_after_alloc(
                push.at_p, table(push.blocks), 0, generations=push.generations
            )
        start = push.num_computed
        push.num_computed = end = min(start + num_tokens, push.num_tokens)
        self.p.write(push.blocks, push.seed, start, end)
        scheduled = ScheduledRequest(push.at_p, table(push.blocks), push.generations, start, end)
        step = StepView({push.at_p.request_id: end - start}, lambda _: scheduled)
        metadata = scheduler.build_connector_meta(step)
        for rank in self.p.ranks:
            if metadata is not None:
                rank.worker.start_load_kv(metadata)
            rank.worker.wait_for_save()

    def _finish(self, push: Push) -> None:
        handoff = self.p.hand_over(push.at_p, push.blocks, push.generations)
        push.handoff, push.is_over_at_p = handoff, True
        self.held[push.at_p.request_id] = push.blocks
        self.leases.append(Lease(handoff, push.seed, push.life))

    @precondition(lambda self: self.pushes)
    @rule(data=st.data())
    def abort_push(self, data: st.DataObject) -> None:
        """Its client left P, or it ended with its first token."""
        push = data.draw(st.sampled_from(self.pushes))
        if not push.is_over_at_p:
            self._abort_push(push)

    def _abort_push(self, push: Push) -> None:
        push.is_over_at_p = True
        if self.p.abort(push.at_p):
            in_flight = sum(rank.worker._runner.mover.is_moving for rank in self.p.ranks)
            self.reached["aborted during a write"] += in_flight > 0
            self.held[push.at_p.request_id] = push.blocks
        else:
            assert not push.is_registered
            self.p_free += push.blocks
            stops = self.p.scheduler._staged.stops
            self.stopped |= {stop.request_id for stop in stops} & {push.at_p.request_id}

    @precondition(lambda self: self.pushes)
    @rule(data=st.data())
    def replay_ticket(self, data: st.DataObject) -> None:
        push = data.draw(st.sampled_from(self.pushes))
        if len(self.pushes) < 5:
            self.add_push(push.ticket, push.at_p.prompt_token_ids, comes_to_d=True)

    # ---- what happens to both ----------------------------------------------------------

    @precondition(lambda self: self.leases or self.pushes)
    @rule(data=st.data())
    def rot(self, data: st.DataObject) -> None:
        """A block changes on its way: the last one of a pull at D, before it is checked."""
        pulls = [key for key, load in self.loads.items() if load.push is None]
        if pulls:
            load = self.loads[data.draw(st.sampled_from(sorted(pulls)))]
            rank = data.draw(st.sampled_from(self.d.ranks))
            rank.kv[load.blocks[-1]] += 1

    @rule(by_s=st.sampled_from([0.4, 0.4, 2.0, 7.0]))
    def let_time_pass(self, by_s: float) -> None:
        self.clock.advance(by_s)

    @rule()
    def step_p(self) -> None:
        for settled in self.p.step().settled:
            if settled.request_id in self.stopped:
                self.stopped.remove(settled.request_id)  # it never had blocks
                continue
            blocks = self.held.pop(settled.request_id)  # each settles once
            self.reached[f"lease {settled.end.value}"] += 1
            assert settled.end is not LeaseEnd.READ or settled.nonce in self.read
            self.p_free += blocks

    @rule()
    def step_d(self) -> None:
        report = self.d.step()
        self.reached["tried again"] += len(self.d.retried)
        self.d.retried.clear()
        for received in report.received:
            load = self.loads.pop(received.request_id)
            assert load.life == self.life
            assert self.d.holds(load.blocks, load.seed, 0, len(load.request.prompt_token_ids)), (
                "not what P wrote"
            )
            handoff = load.request.handoff
            assert received.mode is (KVMode.PULL if load.push is None else KVMode.PUSH)
            self.reached[received.mode.value] += 1
            if load.push is not None:
                load.request.handoff = handoff = received.handoff
                assert handoff == load.push.handoff
            assert handoff is not None
            self.read.add(handoff.nonce)
            self.free_at_d(load.blocks)
        for failed in report.failed:
            load = self.loads.pop(failed.request_id)
            kind = "pull" if load.push is None else "push"
            self.reached[f"{kind} failed: {failed.reason.value}"] += 1
            assert failed.num_valid_tokens >= load.first
            if failed.reason is LoadFailure.DIGEST:
                assert self.d.holds(load.blocks, load.seed, 0, failed.num_valid_tokens)
            again = self.d.scheduler.get_num_new_matched_tokens(load.request, 0)
            assert again is not None
            assert again.num_tokens == 0
            self.free_at_d(load.blocks)

    @precondition(lambda self: self.count >= 5)
    @rule()
    def restart_p(self) -> None:
        self.step_d()  # what had come whole while P lived is D's
        self.p.close()
        for push in self.pushes:
            if push.at_d is not None:
                self.d.abort(push.at_d)
        self.life += 1
        self.start_p()

    @invariant()
    def p_never_reuses_a_block_that_is_held(self) -> None:
        if hasattr(self, "p"):
            held = [block for blocks in self.held.values() for block in blocks]
            held += [b for push in self.pushes if not push.is_over_at_p for b in push.blocks]
            assert len(held) == len(set(held))
            assert not set(self.p_free) & set(held)

    @invariant()
    def nothing_lands_in_a_free_block_of_d(self) -> None:
        if hasattr(self, "d"):
            for rank in self.d.ranks:
                assert (rank.kv[sorted(self.d_free)] == SCRIBBLE).all()

    @invariant()
    def nobody_reused_a_block_too_early(self) -> None:
        if hasattr(self, "p"):
            assert not [name for name in self.p.faults | self.d.faults if "reused" in name]

    def teardown(self) -> None:
        if not hasattr(self, "p"):
            return
        for request, _ in self.waiting:
            self.d.abort(request)
        for push in self.pushes:
            if push.at_d is not None:
                self.d.abort(push.at_d)
            if not push.is_over_at_p:
                self._abort_push(push)
        for _ in range(12):
            self.step_d()
            self.step_p()
            self.clock.advance(LEASE_S / 2)
        assert not self.held
        assert not self.loads
        assert set(self.p_free) == set(range(self.shapes["P"].num_blocks))
        assert len(self.p_free) == self.shapes["P"].num_blocks
        assert self.d_free == set(range(self.shapes["D"].num_blocks))
        self.nothing_lands_in_a_free_block_of_d()
        self.nobody_reused_a_block_too_early()
        assert not self.p.scheduler.faults["report_unknown"]
        for rank in (*self.p.ranks, *self.d.ranks):
            machine = rank.worker._runner.machine
            assert not machine.num_open
            assert not machine.server.num_leases
            assert not any(peer._heartbeats for peer in machine.peers._peers.values())
        assert self.p.quorum.num_open == self.d.quorum.num_open == 0
        self.p.close()
        self.d.close()


def table(blocks: list[int]) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


WANTED = (
    "pull",
    "push",
    "reservation aborted",
    "lease read",
    "lease released",
    "lease expired",
    "lease aborted",
    "pull failed: lease_lost",
    "pull failed: aborted",
    "push failed: withdrawn",
    "push failed: aborted",
)


@pytest.mark.slow
def test_a_pair_of_any_shapes_gives_right_kv_or_none_and_keeps_no_block() -> None:
    run_until_reached(PairMachine, WANTED, max_examples=30, stateful_step_count=50)
