"""P's writer and D's reservations in one world, which a test moves on event by event.

Everything between the two is modelled: messages are in flight until they are delivered, in
order, or lost with their connection, which each side notices in its own time; a posted WRITE
lands, or fails, whenever it likes. What must hold however it comes: no byte lands in blocks that
D has reported, or in what it has taken digests of (unless it has said that they were wrong); none
is read from blocks that P has let go of, and each of both ends once.
"""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pdserve.connectors.handover.instructions import Chunk, Expect, Grant, Reserve, Stop
from pdserve.connectors.handover.lease import LeaseTable
from pdserve.connectors.nixl.processes import HostProcesses
from pdserve.connectors.transfer.destinations import Destination
from pdserve.connectors.transfer.mover import Job
from pdserve.connectors.transfer.protocol import (
    Abort,
    Accept,
    Fail,
    Hello,
    LeaseRelease,
    Progress,
    Pushed,
    Register,
    Taken,
)
from pdserve.connectors.transfer.pushes import ChunkStep
from pdserve.connectors.transfer.pushing import Pushing
from pdserve.connectors.transfer.receiving import Receiving
from pdserve.connectors.transfer.seams import Seams
from pdserve.wire.ids import BlockId, RequestId
from pdserve.wire.transfer import EngineRef, Failed, LeaseEnd, LoadFailure, Received
from tests.connectors.push_parts import (
    EDGES,
    LEASE_S,
    NONCES,
    PEER,
    POOL,
    SHAPE,
    Clock,
    D,
    Later,
    N,
    Nic,
    P,
    PDigests,
    Request,
    places_of,
    words,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.slicing import Route


class World:
    """See the module's docstring.

    Attributes:
        is_direct: P writes without D's agent, so that the end of it stops nothing.
    """

    def __init__(self, seed: int, *, is_direct: bool) -> None:
        self.random = random.Random(seed)
        self.is_direct = is_direct
        self.clock = Clock()
        self.nic = Nic()
        self.p_later, self.d_later = Later(), Later()
        self.requests = {nonce: Request(nonce, number) for number, nonce in enumerate(NONCES)}
        self.to_p: deque[Any] = deque()
        self.to_d: deque[Any] = deque()
        self.seen_by_p: list[Any] = []
        self.num_loads = self.num_fences = 0
        self.nic.is_fence = not self.is_direct
        self.is_bad = False
        self.checked: set[tuple[int, int, int]] = set()
        self.num_early = 0
        transfer = SimpleNamespace(lease_s=LEASE_S, transfer_timeout_s=8.0, handshake_timeout_s=3.0)
        context: Any = SimpleNamespace(
            shape=SHAPE, rank=0, config=SimpleNamespace(transfer=transfer)
        )
        self.leases = LeaseTable(LEASE_S)

        def seams(digests: Any, background: Any) -> Seams:
            anything: Any = self
            return Seams(
                context=context,
                clock=anything.clock,
                dialer=anything,
                mover=anything.nic,
                digests=digests,
                background=background,
                processes=anything,
                quarantine_s=5.0,
                piece_bytes=POOL.stride_bytes,
            )

        self.pushing = Pushing(seams(PDigests(), self.p_later), self.leases)
        self.receiving = Receiving(
            seams(self, self.d_later), line=self, fence=self.fence, is_alone=lambda: True
        )
        self.is_up = False
        self.p_knows_loss = True
        self.destination: Destination | None = None
        self.connect()

    # ---- D's line --------------------------------------------------------------------------

    def meet(self, owner: EngineRef) -> None:
        self.wants_to_meet = True

    def send_to(self, owner: EngineRef, rank: int, message: Any) -> bool:
        if isinstance(message, Taken) and not message.valid:
            request = next(r for r in self.requests.values() if r.load_id == message.load_id)
            blocks = set(request.d_blocks)
            self.checked = {place for place in self.checked if place[0] not in blocks}
        if self.is_up:
            self.to_p.append(message)
        return self.is_up

    def trouble(self, owner: EngineRef, rank: int) -> tuple[LoadFailure, str] | None:
        return None

    def process_of(self, owner: EngineRef, rank: int) -> Any:
        return HostProcesses().this

    # ---- D's seams -------------------------------------------------------------------------

    def writes_directly(self, process: Any) -> bool:
        return self.is_direct

    def is_alive(self, process: Any) -> bool:
        return True

    def fence(self, reason: str) -> None:
        """D's agent is destroyed, and every connection closed."""
        self.num_fences += 1
        self.nic.agent = b"agent %d" % self.num_fences
        self.lose_at_d()

    def found(
        self,
        _source: Any,
        route: Route,
        block_ids: Sequence[int],
        *,
        first_token: int,
        num_tokens: int,
    ) -> bytes:
        """One for each block. Of what is looked at here nothing may be under way."""
        tokens = range(first_token, num_tokens)
        self.checked |= {(block_ids[t // 16], lyr, t % 16) for t in tokens for lyr in route.layers}
        self.num_early += len(tokens) < N or len(route.layers) < SHAPE.num_layers
        for job in self.nic.waiting + self.nic.posted:
            self.check_landing(job)
        is_bad, self.is_bad = self.is_bad, False
        num_blocks = -(-num_tokens // 16) - first_token // 16
        return words(num_blocks, len(route.layers) + 100 * is_bad)

    # ---- the network -----------------------------------------------------------------------

    def connect(self) -> None:
        hello: Any = Hello(
            engine_id=D.engine_id,
            incarnation=D.incarnation,
            rank=0,
            wants_engine_id=P.engine_id,
            wants_incarnation=P.incarnation,
            wants_rank=0,
            layout_digest="",
            layout_fields={},
            shape=SHAPE,
            agent_metadata=self.nic.agent,
            pool=POOL,
        )
        self.is_up, self.p_knows_loss = True, False
        made = Destination(hello, lambda message: self.from_p(made, message))
        self.destination = made
        self.receiving.on_ready(PEER)

    def from_p(self, destination: Destination, message: Any) -> None:
        if destination is self.destination and self.is_up:
            self.to_d.append(message)

    def lose_at_d(self) -> None:
        """Messages to D are lost; those to P still come, and then the end."""
        if self.is_up:
            self.is_up = False
            self.to_d.clear()
            self.receiving.on_lost(PEER, LoadFailure.PEER_LOST, "lost")

    def p_notices(self) -> None:
        if not self.is_up and not self.p_knows_loss and not self.to_p:
            assert self.destination is not None
            self.p_knows_loss = True
            self.pushing.lost(self.destination)

    def reconnect(self) -> None:
        if not self.is_up and self.p_knows_loss:
            self.connect()

    def deliver_to_p(self) -> None:
        if self.to_p:
            message = self.to_p.popleft()
            self.seen_by_p.append(message)
            self.tell_p(message)

    def tell_p(self, message: Any) -> None:
        assert self.destination is not None
        match message:
            case Register():
                self.pushing.register(self.destination, message)
            case Taken():
                self.pushing.taken(self.destination, message)
            case Abort():
                self.pushing.abort(self.destination, message)
            case LeaseRelease():
                if not self.pushing.released(message.nonce, message.end):
                    self.leases.release(message.nonce, self.clock.now_s, message.end)

    def calm(self, times: int) -> None:
        """Messages travel, and what was posted stays where it is."""
        for _ in range(times):
            self.deliver_to_p()
            self.deliver_to_d()
            self.deliver_nic()
            self.p_later.run()
        self.take_reports()

    def begin(self, nonce: str) -> None:
        """The way that most go."""
        self.expect(nonce)
        self.reserve(nonce)
        self.calm(3)

    def deliver_to_d(self) -> None:
        if self.to_d:
            self.tell_d(self.to_d.popleft())

    def tell_d(self, message: Any) -> None:
        match message:
            case Accept():
                self.receiving.on_accept(PEER, message)
            case Progress():
                self.receiving.on_progress(PEER, message)
            case Pushed():
                self.receiving.on_pushed(PEER, message)
            case Fail():
                self.receiving.on_fail(PEER, message)

    def replay_to_p(self) -> None:
        registers = [m for m in self.seen_by_p if isinstance(m, Register)]
        if registers and not self.p_knows_loss:
            self.tell_p(self.random.choice(registers))

    def garbage_to_p(self, load_id: int, valid: bool, first: int) -> None:
        for message in (
            Taken(load_id, valid),
            Abort(load_id),
            Register("n1", load_id, RequestId("x"), [BlockId(1 << 20)], 0, N),
            Register("n2", load_id, RequestId("x"), [BlockId(1)] * 3, first, N),
            Register("n3", load_id, RequestId("x"), [], 0, N),
            Register("n3", load_id, RequestId("x"), [], 0, 0),
        ):
            self.tell_p(message)

    def garbage_to_d(self, load_id: int) -> None:
        handoff = self.requests["n1"].handoff
        for message in (
            Accept(load_id),
            Progress(load_id, 3),
            Pushed(load_id, handoff, b"", 0.0, 0, 0),
            Fail(load_id, "garbage"),
        ):
            self.tell_d(message)

    # ---- the NIC ---------------------------------------------------------------------------

    def post(self) -> None:
        if self.nic.waiting:
            job = self.random.choice(self.nic.waiting)
            self.nic.waiting.remove(job)
            self.nic.posted.append(job)

    def land(self, failure: str | None) -> None:
        if self.nic.posted:
            job = self.random.choice(self.nic.posted)
            self.check_landing(job)
            if not self.nic.can_land(job):
                failure = "its agent is gone"
            self.nic.end(job, failure)

    def nothing_in_flight_can_harm(self) -> None:
        for job in self.nic.posted:
            self.check_landing(job)

    def check_landing(self, job: Job) -> None:
        request = self.requests[job.tag.register.nonce]  # type: ignore[attr-defined]
        assert not request.is_settled, "P reads from blocks that it has let go of"
        assert not request.is_withdrawn, "P reads from blocks of a push that is withdrawn"
        load_id = job.tag.register.load_id  # type: ignore[attr-defined]
        if self.nic.can_land(job):
            reported = [r.load_id for each in self.requests.values() for r in each.reports]
            assert load_id not in reported, "P writes to blocks that are D's again"
            is_open = load_id in self.receiving._open
            places = places_of(job.remote_units, job.unit_bytes)
            assert not is_open or self.checked.isdisjoint(places), "P writes what D has checked"

    def deliver_nic(self) -> None:
        if self.nic.told:
            self.nic.told.popleft()()

    def digest_at_p(self) -> None:
        self.p_later.run()

    def digest_at_d(self, is_bad: bool) -> None:
        self.is_bad = is_bad
        self.d_later.run()
        self.is_bad = False

    # ---- the engines -----------------------------------------------------------------------

    def expect(self, nonce: str) -> None:
        request = self.requests[nonce]
        if not request.is_expected:
            request.is_expected = True
            self.pushing.expect(Expect(nonce, request.request_id, D))

    def reserve(self, nonce: str) -> None:
        request = self.requests[nonce]
        if not request.load_id:
            self.num_loads += 1
            request.load_id = self.num_loads
            self.receiving.reserve(
                Reserve(request.load_id, RequestId(f"d-{nonce}"), nonce, P, request.d_blocks, 0, N)
            )

    def run_step(self, nonce: str, layerwise: bool) -> None:
        request = self.requests[nonce]
        can = request.is_registered and not (request.is_stopped or request.is_withdrawn)
        if not can or request.num_steps >= len(EDGES) - 1:
            return
        start, end = EDGES[request.num_steps : request.num_steps + 2]
        chunk = Chunk(nonce, request.request_id, request.p_blocks, [1] * 3, start, end, N, 20)
        if layerwise and not request.is_in_step:
            request.is_in_step = True
            self.pushing.on_step(ChunkStep(chunk, 1, False, True, 0.0, 0.0))
            return
        is_layerwise, request.is_in_step = request.is_in_step, False
        request.num_steps += 1
        self.pushing.on_step(ChunkStep(chunk, 0, True, is_layerwise, 1.0, self.clock.now_s))

    def finish(self, nonce: str) -> None:
        request = self.requests[nonce]
        if request.num_steps < len(EDGES) - 1 or request.is_stopped or request.is_granted:
            return
        request.is_granted = True
        lease = nonce + "-other" if request.is_withdrawn else nonce
        handoff = None if request.is_withdrawn else request.handoff
        grant = Grant(lease, request.request_id, request.p_blocks, [1] * 3, N, handoff)
        self.leases.grant(
            lease,
            request.request_id,
            self.clock.now_s,
            block_ids=grant.block_ids,
            generations=grant.generations,
        )
        self.pushing.grant(grant)

    def stop(self, nonce: str) -> None:
        request = self.requests[nonce]
        if request.is_expected and not request.is_granted:
            request.is_stopped = True
            self.pushing.stop(Stop(nonce, request.request_id, "stopped"))

    def abort(self, nonce: str) -> None:
        self.receiving.abort(RequestId(f"d-{nonce}"))

    def release(self, nonce: str, end: LeaseEnd) -> None:
        request = self.requests[nonce]
        is_read = any(isinstance(report, Received) for report in request.reports)
        if self.is_up and request.reports and (end is not LeaseEnd.READ or is_read):
            self.to_p.append(LeaseRelease(nonce, end))

    def let_time_pass(self, by_s: float, is_heard: bool) -> None:
        self.clock.now_s += by_s
        if is_heard and self.is_up and self.destination is not None:
            self.pushing.heard(self.destination, NONCES)
            self.leases.heartbeat(NONCES, self.clock.now_s)
        self.tick()

    def tick(self) -> None:
        self.pushing.tick()
        self.leases.expire(self.clock.now_s)
        self.receiving.tick()
        self.take_reports()

    def take_reports(self) -> None:
        for registered in self.pushing.registered:
            request = self.requests[registered.nonce]
            assert not request.is_registered
            request.is_registered = True
        for withdrawn in self.pushing.withdrawn:
            request = self.requests[withdrawn.nonce]
            assert not request.is_withdrawn
            assert not (request.is_stopped and request.is_settled)
            request.is_withdrawn = True
        for settled in self.leases.take_settled():
            if settled.nonce in self.requests:
                assert not self.requests[settled.nonce].is_settled
                self.requests[settled.nonce].is_settled = True
        for report in self.receiving.received + self.receiving.failed:
            request = next(r for r in self.requests.values() if r.load_id == report.load_id)
            request.reports.append(report)
            assert len(request.reports) == 1
        self.pushing.registered, self.pushing.withdrawn = [], []
        self.receiving.received, self.receiving.failed = [], []

    def one_event(self) -> None:
        """Something happens. Of a hundred, some sixty help a push along."""
        draw = self.random
        nonce = draw.choice(NONCES)
        events: list[tuple[int, Callable[[], object]]] = [
            (8, lambda: self.begin(nonce)),
            (2, lambda: self.expect(nonce)),
            (2, lambda: self.reserve(nonce)),
            (12, lambda: self.run_step(nonce, draw.random() < 0.5)),
            (5, lambda: self.finish(nonce)),
            (10, self.post),
            (8, lambda: self.land(None)),
            (1, lambda: self.land("broken")),
            (5, self.deliver_nic),
            (6, self.deliver_to_p),
            (6, self.deliver_to_d),
            (6, lambda: self.calm(draw.choice((3, 10)))),
            (4, self.digest_at_p),
            (4, lambda: self.digest_at_d(draw.random() < 0.3)),
            (5, self.tick),
            (3, lambda: self.let_time_pass(draw.choice((0.3, 1.0)), is_heard=True)),
            (1, lambda: self.let_time_pass(draw.choice((2.0, 7.0)), draw.random() < 0.5)),
            (1, self.lose_at_d),
            (3, self.p_notices),
            (3, self.reconnect),
            (2, lambda: self.abort(nonce)),
            (1, lambda: self.stop(nonce)),
            (2, lambda: self.release(nonce, draw.choice((LeaseEnd.READ, LeaseEnd.RELEASED)))),
            (1, self.replay_to_p),
            (1, lambda: self.garbage_to_p(90, draw.random() < 0.5, draw.choice((-16, 3, 999)))),
            (1, lambda: self.garbage_to_d(90)),
        ]
        weights = [weight for weight, _ in events]
        draw.choices([event for _, event in events], weights)[0]()
        self.nothing_in_flight_can_harm()

    def let_all_end(self) -> None:
        """Everything moves again; after a while nothing is open, and all has been said."""
        for _ in range(60):
            while self.to_p or self.to_d or self.nic.told or self.p_later.todo or self.d_later.todo:
                for move in (self.deliver_to_p, self.deliver_to_d, self.deliver_nic):
                    move()
                self.p_later.run()
                self.d_later.run()
            for job in list(self.nic.waiting):
                self.nic.waiting.remove(job)
                self.nic.posted.append(job)
            for job in list(self.nic.posted):
                self.check_landing(job)
                self.nic.end(job, None if self.nic.can_land(job) else "its agent is gone")
            self.p_notices()
            self.reconnect()
            self.clock.now_s += 1.0
            self.tick()
        assert not self.pushing.num_live
        assert not self.receiving.num_open
        assert not self.leases._writers
        assert self.nic.known <= {self.nic.agent}, "P knows agents that are gone"
        for request in self.requests.values():
            assert len(request.reports) == bool(request.load_id)
            assert request.is_settled or not request.is_stopped
            for report in request.reports:
                assert isinstance(report, Received | Failed)
