"""What the memory connector does in the situations that matter, one by one and poll by poll."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.connectors.conformance.engines import FIRST_TOKEN, Engine, prompt_of
from pdserve.connectors.conformance.values import make_shape
from pdserve.connectors.handover.instructions import Grant, Instructions, Reserve
from pdserve.connectors.memory import MemoryConnector
from pdserve.connectors.memory.exchange import Exchange, Spoil, Trouble
from pdserve.connectors.memory.rank import POLLS_ON_THE_WIRE
from pdserve.connectors.side_channel.frames import MAX_PAYLOAD_BYTES
from pdserve.connectors.transfer.protocol import Abort, Pushed, Register
from pdserve.connectors.transfer.pushing import MAX_PUSHED_BLOCKS
from pdserve.connectors.views import ScheduledRequest, StepView
from pdserve.observe.clock import ManualClock
from pdserve.wire.ids import BlockId
from pdserve.wire.request import FinishReason
from pdserve.wire.transfer import (
    KVHandoff,
    KVMode,
    KVShape,
    LeaseEnd,
    LoadFailure,
    PushTicket,
)
from tests.connectors.test_pair_of_ranks import PartitionedExchange

if TYPE_CHECKING:
    from pdserve.connectors.conformance.engines import KitRequest
    from pdserve.connectors.memory.exchange import ExchangeMember
    from pdserve.connectors.transfer.machine import TransferMachine
    from pdserve.wire.transfer import ConnectorMetadata, Endpoint

LEASE_S = 6.0
PROMPT = prompt_of(40)
SEED = 3


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
    """Spoils the copies into a rank's memory of these numbers, counted from 0.

    Attributes:
        late: For how many polls a frame to this rank, and a copy of it, is under way.
        loses_next: A link breaks as this rank sends over it.
    """

    def __init__(self, *numbers: int) -> None:
        self._numbers, self._count = numbers, itertools.count()
        self.late, self.loses_next = 0, False

    def frame_polls(self) -> int:
        return self.late

    def copy_polls(self) -> int:
        return self.late

    def loses_link(self) -> bool:
        loses, self.loses_next = self.loses_next, False
        return loses

    def spoils(self) -> Spoil | None:
        return Spoil.CORRUPT if next(self._count) in self._numbers else None


class World:
    """A P and a D that meet in one exchange, with a push planned between them."""

    def __init__(
        self,
        shapes: tuple[KVShape, KVShape],
        exchange: Exchange,
        *,
        hit: int = 0,
        trouble_at_p: Trouble | None = None,
        trouble_at_d: Trouble | None = None,
    ) -> None:
        self.exchange, self.clock = exchange, ManualClock()
        self.p = self.engine("P", shapes[0], trouble=trouble_at_p)
        self.d = self.engine("D", shapes[1], trouble=trouble_at_d)
        self.ticket = PushTicket(nonce="push", prefill=self.p.ref, decode=self.d.ref)
        self.at_p = self.p.new_request(PROMPT, ticket=self.ticket, remote_decode=True)
        self.at_d = self.d.new_request(PROMPT, ticket=self.ticket)
        self.p_blocks = list(range(-(-len(PROMPT) // shapes[0].block_size)))
        self.d_blocks = list(range(1, 1 + -(-len(PROMPT) // shapes[1].block_size)))
        self.first = hit * shapes[1].block_size
        self.num_computed = 0

    def engine(
        self, name: str, shape: KVShape, *, trouble: Trouble | None = None, **fields: Any
    ) -> Engine:
        nonces = itertools.count()
        connector = MemoryConnector(
            exchange=self.exchange,
            clock=self.clock,
            new_nonce=lambda: f"{name} {next(nonces)}",
            trouble=trouble or Trouble(),
        )
        return Engine(connector, name, shape=shape, lease_s=LEASE_S, **fields)

    @property
    def registered(self) -> bool:
        """Whether P's request was told that D is ready."""
        return any("registered" in why for _, why in self.p.ready)

    @property
    def withdrawn(self) -> bool:
        """Whether it was told that there is no push."""
        return any("withdrawn" in why for _, why in self.p.ready)

    def why_withdrawn(self) -> str:
        """What it was told of why."""
        (why,) = (why for _, why in self.p.ready if "withdrawn" in why)
        return why

    def machine(self, engine: Engine) -> TransferMachine:
        """What an engine's first rank runs."""
        return engine.ranks[0].worker._runner.machine  # type: ignore[attr-defined]

    def reserve(self) -> None:
        """D takes blocks and registers them; P's request may run after that."""
        self.p.arrive(self.at_p)
        self.d.arrive(self.at_d)
        if self.first:
            self.d.write(self.d_blocks, SEED, 0, self.first)
        self.d.stage_load(self.at_d, self.d_blocks, num_computed=self.first)
        self.p.step()
        self.d.step()
        self.p.step()

    def compute(self, end: int) -> None:
        """One step of P, up to token `end`; its bytes begin to move with the next poll."""
        self.run(self.plan(end))

    def plan(self, end: int) -> ConnectorMetadata | None:
        """What the scheduler half says of such a step."""
        if not self.num_computed:
            self.p.start(self.at_p, self.p_blocks)
        start, self.num_computed = self.num_computed, end
        self.p.write(self.p_blocks, SEED, start, end)
        table = [BlockId(block) for block in self.p_blocks]
        scheduled = ScheduledRequest(self.at_p, table, [1] * len(table), start, end)
        step = StepView({self.at_p.request_id: end - start}, lambda _: scheduled)
        return self.p.scheduler.build_connector_meta(step)

    def run(self, metadata: ConnectorMetadata | None = None) -> None:
        """What the workers do in it; without metadata it is a step of other requests."""
        for rank in self.p.ranks:
            if metadata is not None:
                rank.worker.start_load_kv(metadata)
            rank.worker.wait_for_save()

    def finish(self) -> KVHandoff:
        return self.p.hand_over(self.at_p, self.p_blocks, [1] * len(self.p_blocks))

    def poll(self, num: int = 1) -> None:
        for _ in range(num):
            self.p.step()
            self.d.step()

    def rot(self, block: int) -> None:
        self.d.ranks[-1].kv[self.d_blocks[block]] += 1


@pytest.fixture
def world() -> World:
    return World((make_shape(), make_shape()), OneAddress())


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("hit", [0, 1])
def test_a_push_is_there_soon_after_the_last_chunk_with_its_first_token(
    shapes: tuple[KVShape, KVShape], hit: int
) -> None:
    world = World(shapes, OneAddress(), hit=hit)
    world.reserve()
    world.compute(32)
    world.poll(POLLS_ON_THE_WIRE)
    assert world.d.holds(world.d_blocks, SEED, 0, 32)  # behind the step that computed it
    world.compute(40)
    handoff = world.finish()
    world.poll(POLLS_ON_THE_WIRE + 1)
    (received,) = world.d.received
    assert (received.mode, received.handoff) == (KVMode.PUSH, handoff)
    assert handoff.nonce == "push"
    assert handoff.first_token_ids == [FIRST_TOKEN]
    assert world.d.holds(world.d_blocks, SEED, 0, 40)
    assert received.num_bytes >= world.d.num_bytes(40 - world.first)
    world.poll(2)
    assert [settled.end for settled in world.p.settled] == [LeaseEnd.READ]
    assert not world.p.faults
    assert not world.d.faults


def test_a_chunk_that_is_told_after_its_push_has_ended_is_not_written(world: World) -> None:
    """The engine had staged it before it heard."""
    world.reserve()
    world.compute(16)
    world.poll()
    told = world.plan(40)
    world.d.abort(world.at_d)
    world.d.step()
    world.p.step()
    assert not world.withdrawn  # something is on the wire
    world.run(told)
    while not world.d.failed:
        world.poll()
    after = world.d.snapshot(world.d_blocks)
    world.poll(5)
    assert all(map(equal, after, world.d.snapshot(world.d_blocks)))
    assert not world.d.holds(world.d_blocks, SEED, 16, 40)


def test_a_registration_that_comes_twice_counts_once(world: World) -> None:
    world.reserve()
    pushing = world.machine(world.p).server.pushing
    (part,) = pushing._pushes["push"].parts.values()
    pushing.register(part.destination, part.register)
    world.compute(40)
    world.finish()
    world.poll(POLLS_ON_THE_WIRE + 1)
    assert world.d.received
    assert world.p.faults == {"push_repeated": 1}


def test_what_one_rank_of_d_has_aborted_is_aborted_to_another_that_hears_of_it_from_p() -> None:
    world = World((make_shape(), make_shape(tp=2)), OneAddress())
    world.reserve()
    world.d.abort(world.at_d)
    told = world.d.scheduler.take_instructions()
    assert told is not None
    one, other = (rank.worker for rank in world.d.ranks)
    one.post(told)
    failed = []
    for _ in range(POLLS_ON_THE_WIRE):
        one.get_finished()
        world.p.step()
        failed += other.get_finished().failed
    assert [each.reason for each in failed] == [LoadFailure.ABORTED]


def test_a_request_that_ends_with_its_first_token_leaves_d_without_a_warning_or_a_fault(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.reserve()
    world.compute(40)
    world.at_p.finish_reason = FinishReason.STOP
    assert world.p.scheduler.request_finished(world.at_p, (), ()) is not None
    world.poll(2 * POLLS_ON_THE_WIRE)
    assert [each.reason for each in world.d.failed] == [LoadFailure.ABORTED]
    assert not world.p.faults
    assert not world.d.faults
    assert not caplog.records


def rotten(*numbers: int) -> World:
    return World((make_shape(), make_shape()), OneAddress(), trouble_at_d=Rot(*numbers))


def test_blocks_are_held_until_d_has_found_them_good_although_their_lease_is_over() -> None:
    world = rotten(0)  # what was written has to be written once more
    world.reserve()
    world.compute(40)
    handoff = world.finish()
    world.p.give_up(handoff.nonce)  # by a proxy that has had it pulled elsewhere
    for _ in range(3 * POLLS_ON_THE_WIRE):
        world.poll()
        if world.p.settled:
            world.p.write(world.p_blocks, SEED + 1, 0, 40)  # somebody else's by now
    assert world.d.received
    assert world.d.holds(world.d_blocks, SEED, 0, 40)
    assert world.d.faults == {"push_digest_mismatch": 1}
    assert [settled.end for settled in world.p.settled] == [LeaseEnd.RELEASED]


def test_a_p_whose_writes_no_fence_stops_is_asked_again_until_it_says_that_it_is_over() -> None:
    wire = Rot()
    world = World((make_shape(), make_shape()), Exchange(is_direct=True), trouble_at_d=wire)
    world.reserve()
    world.compute(40)
    world.clock.advance(LEASE_S / 6)
    wire.loses_next = True  # with the next heartbeat
    world.d.step()
    assert not wire.loses_next
    assert not world.d.failed, "P may still write"
    world.clock.advance(1.0)
    world.poll(POLLS_ON_THE_WIRE + 1)
    assert [failed.reason for failed in world.d.failed] == [LoadFailure.PEER_LOST]
    assert world.withdrawn
    assert not world.d.faults


def test_a_p_that_is_mute_is_given_up_after_a_lease_and_shut_out(world: World) -> None:
    world.reserve()
    world.compute(40)
    world.exchange.is_silent = True  # type: ignore[attr-defined]
    world.clock.advance(LEASE_S)
    world.d.step()
    assert [failed.reason for failed in world.d.failed] == [LoadFailure.TIMEOUT]
    assert world.d.faults["push_fenced"] == 1
    world.exchange.is_silent = False  # type: ignore[attr-defined]
    before = world.d.snapshot(world.d_blocks)
    for _ in range(5):
        world.p.step()
    assert all(map(equal, before, world.d.snapshot(world.d_blocks)))


def test_p_waits_for_d_as_long_as_it_says_that_it_has_the_request_queued(world: World) -> None:
    world.p.arrive(world.at_p)
    world.d.arrive(world.at_d)
    for _ in range(10):
        world.poll()
        world.clock.advance(LEASE_S / 2)
    assert not world.withdrawn
    world.poll()
    world.clock.advance(LEASE_S)
    world.p.step()
    assert world.withdrawn
    assert not world.registered


def test_a_push_that_a_rank_of_d_never_registers_is_withdrawn_after_a_lease() -> None:
    world = World((make_shape(), make_shape(tp=2)), OneAddress())
    world.p.arrive(world.at_p)
    world.d.arrive(world.at_d)
    world.d.stage_load(world.at_d, world.d_blocks, num_computed=0)
    metadata = world.d.scheduler.take_instructions()
    assert metadata is not None
    first, second = world.d.ranks
    first.worker.post(metadata)
    watches = Instructions.from_metadata(metadata).watches
    second.worker.post(Instructions(watches=watches).to_metadata())
    failed = list(first.worker.get_finished().failed)
    for _ in range(3):  # both say that they wait
        world.p.step()
        assert not world.withdrawn
        world.clock.advance(LEASE_S / 3)
        failed += first.worker.get_finished().failed
        second.worker.get_finished()
    world.p.step()
    assert world.withdrawn
    failed += first.worker.get_finished().failed
    assert [each.reason for each in failed] == [LoadFailure.WITHDRAWN]


def test_p_waits_for_ds_blocks_as_long_as_d_does_while_it_runs_other_requests(
    world: World,
) -> None:
    world.reserve()
    for _ in range(6):
        world.clock.advance(LEASE_S / 2)
        world.run()
        world.poll()
    assert not world.withdrawn
    assert not world.d.failed
    world.compute(40)
    world.finish()
    world.poll(POLLS_ON_THE_WIRE + 2)
    assert world.d.received


def test_a_p_that_runs_no_step_gives_ds_blocks_back_after_a_lease(world: World) -> None:
    world.reserve()
    for _ in range(3):
        world.clock.advance(LEASE_S / 3)
        world.poll()
    world.poll()
    assert "no step has run" in world.why_withdrawn()
    assert [failed.reason for failed in world.d.failed] == [LoadFailure.WITHDRAWN]


def test_a_registration_without_a_request_fails_after_a_lease_and_so_does_the_request(
    world: World,
) -> None:
    world.d.arrive(world.at_d)
    world.d.stage_load(world.at_d, world.d_blocks)
    for _ in range(3):
        world.poll()
        assert not world.d.failed
        world.clock.advance(LEASE_S / 3)
    world.poll(2)
    assert [failed.reason for failed in world.d.failed] == [LoadFailure.WITHDRAWN]
    assert "no request came" in world.d.failed[0].detail
    world.p.arrive(world.at_p)
    world.poll()
    assert "no request came" in world.why_withdrawn()


def test_a_write_that_never_ends_ends_its_push_though_both_sides_are_alive() -> None:
    wire = Rot()
    world = World((make_shape(), make_shape()), OneAddress(), trouble_at_p=wire)
    world.reserve()
    wire.late = 1000
    world.compute(40)
    wire.late = 0
    for _ in range(int(world.p.context.config.transfer.transfer_timeout_s)):
        world.poll()
        assert not world.machine(world.p).server.pushing._pushes["push"].ending
        world.clock.advance(1.0)
    world.poll()
    assert "has not ended" in str(world.machine(world.p).server.pushing._pushes["push"].ending)
    assert not world.d.failed, "it may still land"
    world.poll(1000 + POLLS_ON_THE_WIRE)
    assert "has not ended" in world.why_withdrawn()
    assert [failed.reason for failed in world.d.failed] == [LoadFailure.WITHDRAWN]


def test_a_push_holds_its_blocks_also_before_its_first_chunk_is_told(world: World) -> None:
    """The engine has the last token before its worker tells of the step that gave it."""
    world.reserve()
    told = world.plan(40)
    world.finish()
    world.p.give_up("push")
    world.poll(3)
    assert not world.p.settled
    world.run(told)
    world.poll(POLLS_ON_THE_WIRE + 2)
    assert world.d.received
    assert world.d.holds(world.d_blocks, SEED, 0, 40)
    assert len(world.p.settled) == 1


def test_a_lease_under_another_nonce_ends_the_push(world: World) -> None:
    world.reserve()
    world.compute(40)
    blocks = [BlockId(block) for block in world.p_blocks]
    grant = Grant("other", world.at_p.request_id, blocks, [1] * len(blocks), 40, None)
    world.p.post(Instructions(grants=[grant]).to_metadata())
    world.poll(POLLS_ON_THE_WIRE + 1)
    assert [failed.reason for failed in world.d.failed] == [LoadFailure.WITHDRAWN]


def test_what_p_said_before_it_writes_once_more_is_not_believed_of_that() -> None:
    wire = Rot(0)
    world = World((make_shape(), make_shape()), OneAddress(), trouble_at_d=wire)
    world.reserve()
    world.compute(40)
    world.finish()
    wire.late = 1
    for _ in range(POLLS_ON_THE_WIRE + 1):
        world.p.step()
    wire.late = 2  # what P says from time to time, behind its word that all is written
    world.clock.advance(LEASE_S / 6)
    world.p.step()
    wire.late = 0
    world.d.step()
    assert world.d.faults == {"push_digest_mismatch": 1}
    world.d.step()
    world.poll(POLLS_ON_THE_WIRE + 2)
    assert world.d.received
    assert world.d.holds(world.d_blocks, SEED, 0, 40)
    assert world.d.faults == {"push_digest_mismatch": 1}


def test_a_release_that_overtakes_what_a_rank_of_d_has_checked_is_no_fault() -> None:
    """Each rank of D has a connection of its own, and the release comes over one of them."""
    exchange, wire = PartitionedExchange(), Rot()
    world = World((make_shape(), make_shape(tp=2)), exchange, trouble_at_p=wire)
    world.reserve()
    world.compute(40)
    world.finish()
    wire.late = 1
    while not world.d.received:
        world.poll()
    world.d.step()
    exchange.cut = {world.d.ranks[1].endpoint}  # type: ignore[arg-type]
    world.p.step()
    assert not world.machine(world.p).num_open
    assert [settled.end for settled in world.p.settled] == [LeaseEnd.READ]
    exchange.cut = set()
    world.poll(2)
    assert not world.p.faults


def test_a_registration_that_its_abort_overtakes_is_not_written_to(world: World) -> None:
    """D may give a load up over a later connection than the one by which it registered."""
    world.p.arrive(world.at_p)
    world.d.arrive(world.at_d)
    world.poll()
    server = world.machine(world.p).server
    (client,) = server._clients
    assert client.destination is not None
    server.pushing.abort(client.destination, Abort(load_id=1))
    world.d.stage_load(world.at_d, world.d_blocks)
    world.poll(2)
    assert [failed.reason for failed in world.d.failed] == [LoadFailure.ABORTED]
    assert not world.registered


def test_an_abort_that_crosses_the_end_of_a_push_is_no_fault() -> None:
    wire = Rot()
    world = World((make_shape(), make_shape()), OneAddress(), trouble_at_d=wire)
    world.reserve()
    world.compute(40)
    world.finish()
    wire.late = 1
    for _ in range(POLLS_ON_THE_WIRE + 1):
        world.p.step()
    wire.late = 0
    world.d.abort(world.at_d)
    world.d.step()
    world.poll(3)
    assert [failed.reason for failed in world.d.failed] == [LoadFailure.ABORTED]
    assert not world.p.faults
    assert not world.d.faults


def test_d_is_driven_only_for_writes_that_go_on_after_their_post() -> None:
    world = World((make_shape(), make_shape()), Exchange(is_driven=True))
    world.reserve()
    assert not world.machine(world.d).needs_progress
    world.compute(32)
    world.poll()
    assert world.machine(world.d).needs_progress
    world.poll(POLLS_ON_THE_WIRE)
    assert world.d.holds(world.d_blocks, SEED, 0, 32)
    assert world.machine(world.d).needs_progress, "it was told for the whole push"


@pytest.mark.parametrize("change", [{"num_units": 1 << 40}, {"stride_bytes": 4}], ids=str)
def test_blocks_in_a_pool_of_another_size_are_refused(world: World, change: Any) -> None:
    world.d.arrive(world.at_d)
    world.poll()
    (client,) = world.machine(world.p).server._clients
    assert client.destination is not None
    hello = client.destination.hello
    pool = msgspec.structs.replace(hello.pool, **change)
    client.destination.hello = msgspec.structs.replace(hello, pool=pool)
    world.d.stage_load(world.at_d, world.d_blocks)
    world.poll(2)
    (failed,) = world.d.failed
    assert f"it has {1 << 40}" in failed.detail or "of 4" in failed.detail


def test_a_prompt_whose_push_would_fit_no_frame_is_refused(world: World) -> None:
    world.reserve()
    pushing = world.machine(world.p).server.pushing
    (part,) = pushing._pushes["push"].parts.values()
    world.compute(40)
    word = [(1 << 32) - 1] * MAX_PUSHED_BLOCKS
    handoff = msgspec.structs.replace(world.finish(), block_ids=word, generations=word)
    pushed = Pushed(1, handoff, bytes(8 * MAX_PUSHED_BLOCKS), 0.0, 1, 1)
    assert len(msgspec.msgpack.encode(pushed)) < MAX_PAYLOAD_BYTES

    num_blocks = MAX_PUSHED_BLOCKS + 1
    blocks, num_tokens = [BlockId(0)] * num_blocks, num_blocks * world.p.context.shape.block_size
    message = Register("other", 2, world.at_d.request_id, blocks, 0, num_tokens)
    pushing.register(part.destination, message)
    world.poll(POLLS_ON_THE_WIRE)
    assert world.p.faults == {"push_refused": 1}


def test_a_d_that_came_first_but_is_not_the_one_makes_way(world: World) -> None:
    other = world.engine("E", make_shape())
    forged = msgspec.structs.replace(world.ticket, decode=other.ref)
    theirs = other.new_request(PROMPT, ticket=forged)
    other.arrive(theirs)
    other.stage_load(theirs, world.d_blocks)
    other.step()
    other.step()
    assert not other.failed
    world.reserve()
    world.compute(40)
    world.finish()
    world.poll(POLLS_ON_THE_WIRE + 1)
    other.step()
    assert [failed.reason for failed in other.failed] == [LoadFailure.WITHDRAWN]
    assert world.d.received


def test_only_the_d_of_the_ticket_may_register() -> None:
    shape = make_shape()
    world = World((shape, shape), OneAddress())
    other = world.engine("E", shape)
    world.p.arrive(world.at_p)
    world.p.step()
    forged = msgspec.structs.replace(world.ticket, decode=other.ref)
    request = other.new_request(PROMPT, ticket=forged)
    other.arrive(request)
    other.stage_load(request, world.d_blocks)
    other.step()
    other.step()
    assert [failed.reason for failed in other.failed] == [LoadFailure.WITHDRAWN]
    world.p.step()
    assert not world.registered


def test_a_nonce_is_registered_once(world: World) -> None:
    world.reserve()
    again = world.d.new_request(PROMPT, ticket=world.ticket)
    assert "another request has its nonce" in str(world.d.refusal(again))
    reserve = Reserve(
        1 << 20,
        again.request_id,
        "push",
        world.ticket.prefill,
        [BlockId(block) for block in (20, 21, 22)],
        0,
        len(PROMPT),
    )
    world.d.post(Instructions(reserves=[reserve]).to_metadata())
    world.d.step()
    world.d.step()
    failed = [each.request_id for _, report in world.d.said for each in report.failed]
    assert failed == [again.request_id]
    world.compute(40)
    world.finish()
    world.poll(POLLS_ON_THE_WIRE + 1)
    assert [received.request_id for received in world.d.received] == [world.at_d.request_id]


# ---- pulls --------------------------------------------------------------------------------------


def pulling(world: World) -> KitRequest:
    request = world.d.queue(PROMPT, world.p.prefill(PROMPT, world.p_blocks, seed=SEED))
    world.d.load(request, world.d_blocks)
    return request


@pytest.mark.parametrize("is_pushed", [False, True])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_d_has_in_other_bits_of_a_block_of_p_is_no_fault_of_the_rest(
    is_pushed: bool, is_damaged: bool
) -> None:
    world = World((make_shape(), make_shape(block_size=8)), OneAddress(), hit=1)
    if is_pushed:
        world.reserve()
        world.compute(40)
        world.finish()
    else:
        request = world.d.queue(PROMPT, world.p.prefill(PROMPT, world.p_blocks, seed=SEED))
        world.d.load(request, world.d_blocks, num_computed=world.first)
    world.rot(0)  # D's own, of other sums in another order
    for _ in range(2):
        for _ in range(POLLS_ON_THE_WIRE - 1):
            world.poll()
            if is_damaged:
                world.rot(1)
        world.poll()
        world.p.step()
        if is_damaged:
            world.rot(1)
    world.poll(POLLS_ON_THE_WIRE)
    assert len(world.d.received) == (not is_damaged)
    assert [failed.reason for failed in world.d.failed] == [LoadFailure.DIGEST] * is_damaged


def test_heartbeats_for_a_lease_of_an_earlier_life_renew_none_of_this_one(world: World) -> None:
    handoff = world.p.prefill(PROMPT, world.p_blocks, seed=SEED)
    world.d.queue(PROMPT, handoff)
    world.p.close()
    reborn = world.engine("P", world.p.context.shape)
    assert reborn.prefill(PROMPT, world.p_blocks, seed=SEED).nonce == handoff.nonce
    for _ in range(2):
        world.clock.advance(LEASE_S / 2)
        world.d.step()
    reborn.step()
    assert [settled.end for settled in reborn.settled] == [LeaseEnd.EXPIRED]


# ---- engines that reuse a block too early are found out ------------------------------------------


def test_a_block_that_is_loaded_again_before_its_load_is_over_is_a_fault(world: World) -> None:
    request = pulling(world)
    world.d.abort(request)
    another = world.d.queue(PROMPT, world.p.prefill(PROMPT, [5, 6, 7], seed=SEED))
    world.d.load(another, world.d_blocks)
    assert world.d.faults == {"block_reused_under_load": 1}


def test_a_block_that_is_handed_out_again_under_a_write_is_a_fault(world: World) -> None:
    world.reserve()
    world.compute(40)
    world.p.prefill(PROMPT, world.p_blocks, generations=[2] * len(world.p_blocks))
    assert world.p.faults["block_reused_under_write"] > 0


def test_a_block_that_is_handed_out_again_under_a_lease_is_a_fault_and_no_kv(
    world: World,
) -> None:
    pulling(world)
    world.p.prefill(PROMPT, world.p_blocks, generations=[2] * len(world.p_blocks), seed=9)
    world.poll(POLLS_ON_THE_WIRE)
    assert world.p.faults == {"block_reused": 1}
    assert [failed.reason for failed in world.d.failed] == [LoadFailure.LEASE_LOST]


def equal(one: Any, other: Any) -> bool:
    return bool((one == other).all())
