"""Messages of a server for an engine core: decoded, taken, run, aborted; nothing stays behind.

Two engines, P and D, with the shipped scheduler and connector scheduler half; transfers are the
memory connector's, in virtual time. What comes in is bytes, as from the socket.
"""

from __future__ import annotations

import itertools
from typing import Any, Final, Protocol

import msgspec
from hypothesis import strategies as st

from pdserve.connectors.memory.exchange import Exchange
from pdserve.engine.arrivals import Arrivals
from pdserve.observe.clock import ManualClock
from pdserve.wire.core_messages import (
    AbortRequests,
    Add,
    HandOver,
    KeepLeases,
    ReleaseLease,
    ToEngine,
    ids_in_unreadable,
)
from pdserve.wire.ids import RequestId
from pdserve.wire.request import GenerateRequest
from pdserve.wire.seal import UNREADABLE
from pdserve.wire.transfer import KVHandoff, PushTicket
from tests.fuzz.values import bent, like
from tests.scheduler.invariants import assert_nothing_held, check
from tests.toy import ToyEngine, sampling
from tests.toy_executor import expected_output

PROMPT: Final = [1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
_HOURS_S: Final = 36_000.0
_MAX_HOURS: Final = 4
_QUIET_STEPS: Final = 4


class Pair:
    """P and D, and what a server sends them.

    Attributes:
        num_refused: Outputs that were errors, over all inputs.
    """

    def __init__(self) -> None:
        self.clock = ManualClock()
        exchange = Exchange()
        self.p = ToyEngine("p", exchange, self.clock)
        self.d = ToyEngine("d", exchange, self.clock)
        self._arrivals = {id(each): Arrivals(each.scheduler) for each in (self.p, self.d)}
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._ids = itertools.count()
        self.num_refused = 0

    def request(self, **fields: Any) -> GenerateRequest:
        """A good request, under an id of its own."""
        return GenerateRequest(
            request_id=RequestId(f"r{next(self._ids)}"),
            prompt_token_ids=PROMPT,
            sampling=sampling(4, ignore_eos=True),
            arrival_s=self.clock.monotonic_s(),
            **fields,
        )

    def handoff(self) -> KVHandoff:
        """A good one, whose lease lives at P."""
        self.p.scheduler.add(self.request(remote_decode=True))
        (handoff,) = [output.handoff for output in self.p.settle() if output.handoff]
        return handoff

    def ticket(self) -> PushTicket:
        """A good one."""
        return PushTicket(nonce=f"n{next(self._ids)}", prefill=self.p.ref, decode=self.d.ref)

    def send(self, engine: ToyEngine, frame: bytes) -> None:
        """Give an engine a frame, as its process does."""
        scheduler, arrivals = engine.scheduler, self._arrivals[id(engine)]
        try:
            message = self._decoder.decode(frame)
        except UNREADABLE as error:
            for request_id in ids_in_unreadable(frame):
                scheduler.refuse(request_id, str(error))
            return
        match message:
            case Add():
                arrivals.put(message)
                arrivals.hand_on(may_take_all=True)
            case AbortRequests(request_ids):
                arrivals.forget(request_ids)
                scheduler.abort(request_ids)
            case ReleaseLease(nonce):
                scheduler.release_lease(nonce)
            case KeepLeases(nonces):
                scheduler.keep_leases(nonces)
            case HandOver(request_ids):
                scheduler.hand_over(request_ids)
            case _:
                pass

    def step(self, engine: ToyEngine) -> bool:
        """Let an engine run a step; whether it said anything."""
        outputs = engine.step()
        self.num_refused += sum(output.error is not None for output in outputs)
        check(engine.scheduler)
        return bool(outputs or engine.in_flight)

    def settle(self) -> None:
        """Let both run until nothing moves; then hours pass, and all leases are over."""
        for _ in range(_MAX_HOURS):
            num_quiet = 0
            while num_quiet < _QUIET_STEPS:
                moved = [self.step(engine) for engine in (self.p, self.d)]
                num_quiet = 0 if any(moved) else num_quiet + 1
            if self.p.scheduler.is_idle and self.d.scheduler.is_idle:
                break
            self.clock.advance(_HOURS_S)

    def check(self) -> None:
        """Nothing is held, and a good request is served as ever.

        Raises:
            AssertionError: Something is.
        """
        for engine in (self.p, self.d):
            assert_nothing_held(engine.scheduler)
            half: Any = engine.scheduler.state.connector
            assert not half._incoming
            assert not half._outgoing
            assert not half._by_nonce
            for rank in engine.executor.connectors:
                machine = rank._runner.machine
                assert not len(machine.server.leases)
                assert not any(peer._heartbeats for peer in machine.peers._peers.values())
            engine.executor.reports.clear()

    def check_service(self) -> None:
        """A good request is answered, by P and D together."""
        request = self.request(handoff=self.handoff())
        self.d.scheduler.add(request)
        outputs = self.d.settle()
        tokens = [token_id for output in outputs for token_id in output.new_token_ids]
        assert tokens == expected_output(PROMPT, request.sampling)
        self.settle()
        self.check()


@st.composite
def frames(draw: st.DrawFn, pair: Pair) -> list[tuple[ToyEngine, bytes]]:
    """What comes to P and D on behalf of one request or two."""
    engines = {"p": pair.p, "d": pair.d}
    kind = draw(st.sampled_from(["plain", "prefill", "handoff", "ticket", "both"]))
    adds: list[tuple[str, GenerateRequest]] = []
    match kind:
        case "plain":
            adds.append((draw(st.sampled_from("pd")), pair.request()))
        case "prefill":
            adds.append(("p", pair.request(remote_decode=True)))
        case "handoff":
            handoff = draw(like(pair.handoff()))
            adds.append(("d", pair.request(handoff=handoff)))
        case "ticket":
            ticket = draw(like(pair.ticket()))
            adds.append(("d", pair.request(ticket=ticket)))
            adds.append(("p", pair.request(ticket=ticket, remote_decode=True)))
        case _:
            handoff, ticket = draw(like(pair.handoff())), draw(like(pair.ticket()))
            adds.append((draw(st.sampled_from("pd")), pair.request(handoff=handoff, ticket=ticket)))
    sent: list[tuple[ToyEngine, bytes]] = []
    for name, request in adds:
        if draw(st.booleans()):
            request = draw(like(request, keep=frozenset({"handoff", "ticket"})))
        frame = msgspec.msgpack.encode(Add(request))
        if draw(st.integers(0, 9)) == 0:
            frame = draw(bent(frame))
        sent.append((engines[name], frame))
        if draw(st.integers(0, 3)) == 0:
            other = AbortRequests([request.request_id, RequestId("é"), request.request_id])
            sent.append((engines[name], msgspec.msgpack.encode(other)))
        if draw(st.integers(0, 3)) == 0:
            moved = HandOver([request.request_id, RequestId("é"), request.request_id])
            sent.append((engines[name], msgspec.msgpack.encode(moved)))
        if request.handoff is not None and draw(st.booleans()):
            nonce = request.handoff.nonce
            said = draw(st.sampled_from([ReleaseLease(nonce), KeepLeases([nonce, "é", nonce])]))
            sent.append((pair.p, msgspec.msgpack.encode(said)))
    return sent


class Target(Protocol):
    """What is fuzzed.

    Attributes:
        num_refused: Inputs, or parts of them, that were refused.
        num_held: What is held now and should not be.
    """

    num_refused: int

    @property
    def num_held(self) -> int: ...

    def try_one(self, data: st.DataObject) -> None:
        """Draw an input and try it; raise if it breaks anything or leaves anything behind."""

    def check_service(self) -> None:
        """Raise if a good request is not served as ever."""

    def close(self) -> None:
        """End it."""


class CoreTarget:
    """A `Pair` that lives for all inputs. See `Target`."""

    def __init__(self) -> None:
        self._pair = Pair()

    @property
    def num_refused(self) -> int:
        """See `Target`."""
        return self._pair.num_refused

    @property
    def num_held(self) -> int:
        """Blocks and leases."""
        return sum(
            engine.scheduler.kv.pool.num_blocks
            - engine.scheduler.kv.pool.num_free
            + sum(len(rank._runner.machine.server.leases) for rank in engine.executor.connectors)
            for engine in (self._pair.p, self._pair.d)
        )

    def try_one(self, data: st.DataObject) -> None:
        """See `Target`."""
        for engine, frame in data.draw(frames(self._pair)):
            self._pair.send(engine, frame)
            self._pair.step(engine)
        self._pair.settle()
        self._pair.check()

    def check_service(self) -> None:
        """See `Target`."""
        self._pair.check_service()

    def close(self) -> None:
        """See `Target`."""
