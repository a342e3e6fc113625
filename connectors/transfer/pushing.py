"""The writing side of a push: what P does for Ds that have registered their blocks.

    push:   PARKED (registered, nobody asked for it yet) -.
            EXPECTED (asked for) -----------------------> registered by all ranks of D: `Registered`
                -> written chunk by chunk -> granted -> taken by all: over, and nothing is said
       any of them, on trouble, on D's word, at the scheduler's ---> ENDING

    part:   PARKED -> ACCEPTED -> PUSHED -> TAKEN         (one rank of D)
                         ^----------'  once, if D's digests differ

A push that is ENDING writes nothing more. Once what was in flight has settled, every D that
is not through hears `Fail`, after which its blocks are its own again; then the engine hears
`Withdrawn`, or `Settled` if it was the one to stop it. Each push ends so exactly once.

D is waited for as long as it says that it waits: by heartbeats, which name the nonce. What is
written, and when, is `chunks`'s. It knows neither links nor transports; whoever runs the loop calls
`tick`.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from pdserve.connectors.handover.instructions import Registered, Withdrawn
from pdserve.connectors.remembered import LEASES_REMEMBERED, Remembered
from pdserve.connectors.slicing import route_between, routes_from
from pdserve.connectors.transfer.chunks import ChunkWriter
from pdserve.connectors.transfer.destinations import Destinations
from pdserve.connectors.transfer.protocol import Accept, Fail
from pdserve.connectors.transfer.pushes import (
    Ending,
    Push,
    push_due_s,
    why_not_expected,
    why_not_of,
    why_not_writable,
    why_overdue,
)
from pdserve.connectors.transfer.writing import OutgoingPart, OutgoingState
from pdserve.errors import PeerError
from pdserve.observe.log import log_event
from pdserve.wire.transfer import LeaseEnd

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Hashable, Iterable

    from pdserve.connectors.handover.instructions import Expect, Grant, Stop
    from pdserve.connectors.handover.lease import LeaseTable
    from pdserve.connectors.transfer.destinations import Destination
    from pdserve.connectors.transfer.protocol import Abort, Register, Taken
    from pdserve.connectors.transfer.pushes import ChunkStep, Observation
    from pdserve.connectors.transfer.seams import Seams

_log = logging.getLogger(__name__)

V = TypeVar("V")

_MAX_PARKED = 4096
_NEVER = float("inf")


class Pushing:
    """All pushes of one rank of P.

    Args:
        leases: Where it holds off the settling of blocks that are being written from.

    Attributes:
        registered, withdrawn: Facts for the next report; the owner of the loop empties them.
        faults: What should stay rare, by name, since whoever reports it last emptied this.
        last_step_s: When this rank last ran a step; the thread that runs steps writes it.
    """

    def __init__(self, seams: Seams, leases: LeaseTable) -> None:
        self._shape, self._rank = seams.context.shape, seams.context.rank
        self._transfer = seams.transfer
        self._leases = leases
        self._mover = seams.mover
        self._clock = seams.clock
        self._destinations = Destinations(seams.mover)
        self._pushes: dict[str, Push] = {}
        self._by_request: dict[str, str] = {}
        self._over: Remembered[Ending] = Remembered()
        self._overtaken: Remembered[str] = Remembered()
        self.registered: list[Registered] = []
        self.withdrawn: list[Withdrawn] = []
        self.faults: Counter[str] = Counter()
        self.last_step_s = seams.clock.monotonic_s()
        self._chunks = ChunkWriter(seams, faults=self.faults, end=self._end, settle=self._settle)

    @property
    def observations(self) -> deque[Observation]:
        """What steps have cost; the thread that runs steps empties it."""
        return self._chunks.observations

    @property
    def num_live(self) -> int:
        """Pushes that are not over."""
        return len(self._pushes)

    @property
    def reading(self) -> list[Push]:
        """Those of which something reads from P's blocks now."""
        return [push for push in self._pushes.values() if push.is_reading]

    def due_s(self) -> float:
        """When `tick` has to be called next. O(pushes x ranks of D)."""
        transfer, last_step_s = self._transfer, self.last_step_s
        return min(
            (
                push_due_s(push, transfer=transfer, last_step_s=last_step_s)
                for push in self._pushes.values()
            ),
            default=_NEVER,
        )

    def tick(self) -> None:
        """Do what is due by the clock. O(pushes x ranks of D)."""
        now_s = self._now_s()
        for push in list(self._pushes.values()):
            if push.ending is not None:
                continue
            why = why_overdue(push, now_s, transfer=self._transfer, last_step_s=self.last_step_s)
            if why is not None:
                self._end(push, why)
            elif now_s >= push.next_progress_s:
                self._chunks.tell_progress(push)

    # ---- what this engine wants --------------------------------------------------------

    def expect(self, expect: Expect) -> None:
        """A request waits for D; take up the registrations that came before."""
        nonce, now_s = expect.nonce, self._now_s()
        if (over := self._over.get(nonce)) is not None:
            self.withdrawn.append(Withdrawn(nonce=nonce, reason=over.reason))
            return
        push = self._pushes.get(nonce)
        if push is None:
            push = self._open(nonce)
        elif push.expect is not None:
            self.faults["push_repeated"] += 1
            return
        push.expect, push.alive_s = expect, now_s
        self._by_request[expect.request_id] = nonce
        for part in list(push.parts.values()):
            why = why_not_expected(push, part.destination.hello)
            if why is not None:
                del push.parts[part.destination.life]
                self._destinations.let_go(part)
                part.destination.send(Fail(part.register.load_id, why))
        self._advance(push)

    def on_step(self, step: ChunkStep) -> None:
        """OutgoingPart of a chunk, or all of it, is complete in memory: write it."""
        chunk = step.chunk
        push = self._pushes.get(chunk.nonce)
        if push is None or push.ending is not None:
            return
        push.waits_since_s = _NEVER
        if not push.is_registered or any(
            part.register.num_tokens != chunk.num_tokens for part in push.parts.values()
        ):
            self.faults["push_unexpected"] += 1
            self._end(push, f"{chunk.num_tokens} tokens are computed, D has registered others")
            return
        if chunk.is_unproven and not (push.grant is not None and push.grant.is_proof):
            push.unproven = step
            return
        push.unproven = None
        self._chunks.write(push, step)

    def grant(self, grant: Grant) -> None:
        """The request is finished; under its push's nonce, D gets the handoff with the last byte.

        Under another nonce, or without a handoff, the push is none any more.
        """
        nonce = self._by_request.get(grant.request_id)
        push = self._pushes.get(nonce) if nonce is not None else None
        if push is None or push.ending is not None:
            return
        if grant.nonce != push.nonce or grant.handoff is None:
            self._end(push, "the engine has given the push up")
            return
        push.grant = grant
        push.table = (grant.block_ids, grant.generations)
        if grant.is_proof and push.unproven is not None:  # if not, this rank's step is not over yet
            self._chunks.write(push, push.unproven)
        self._chunks.say_if_pushed(push)

    def stop(self, stop: Stop) -> None:
        """Write nothing more; `Settled` follows when nothing reads from the blocks."""
        push = self._pushes.get(stop.nonce)
        if push is None:
            self._remember(stop.nonce, Ending(stop.reason))
            self._leases.stop(stop.nonce, stop.request_id, self._now_s())
            return
        push.stop = stop
        self._end(push, stop.reason)

    def end_all(self, reason: str) -> None:
        """Write nothing more at all."""
        for push in list(self._pushes.values()):
            self._end(push, reason)

    # ---- what Ds say -------------------------------------------------------------------

    def register(self, destination: Destination, message: Register) -> None:
        """D has blocks for it."""
        nonce = message.nonce
        push = self._pushes.get(nonce)
        known = None if push is None else push.parts.get(destination.life)
        if known is not None and known.register.load_id == message.load_id:
            self.faults["push_repeated"] += 1
            return
        ending = self._over.get(nonce) if push is None else push.ending
        if ending is not None:
            reason = f"the push is over: {ending.reason}"
            destination.send(Fail(message.load_id, reason, ending.aborted))
            return
        try:
            why = self._why_refused(push, destination, message)
            if why is not None:
                raise PeerError(why)
            route = route_between(
                self._shape, destination.hello.shape, self._rank, destination.hello.rank
            )
        except PeerError as error:
            self.faults["push_refused"] += 1
            log_event(
                _log, "kv push refused", level=logging.WARNING, nonce=nonce, reason=str(error)
            )
            destination.send(Fail(message.load_id, str(error)))
            return
        if push is None:
            push = self._open(nonce)
        push.alive_s = self._now_s()
        part = push.parts[destination.life] = OutgoingPart(destination, message, route)
        if route:
            ready = functools.partial(self._on_ready, push, part)
            part.remote = self._destinations.use(destination, part, ready)
        else:
            part.is_ready = True
        self._advance(push)

    def taken(self, destination: Destination, message: Taken) -> None:
        """D has checked what was written."""
        if message.valid and self._overtaken.pop((destination.life, message.load_id)) is not None:
            return
        push, part = self._find(destination, message.load_id)
        if push is None or part is None or part.state is not OutgoingState.PUSHED or push.ending:
            self.faults["push_unexpected"] += 1
            return
        push.alive_s = self._now_s()
        if message.valid:
            self._close(part, OutgoingState.TAKEN)
            self._finish_if_over(push)
            return
        self.faults["push_digest_mismatch"] += 1
        log_event(
            _log,
            "kv push refused by its digests",
            level=logging.ERROR,
            nonce=push.nonce,
            peer=destination.hello.engine_id,
            rank=destination.hello.rank,
            was_rewritten=part.was_rewritten,
        )
        if part.was_rewritten:
            self._end(push, "D's digests differ from P's, also after it was written again")
            return
        self._chunks.rewrite(push, part)

    def abort(self, destination: Destination, message: Abort) -> None:
        """D does not want it any more. It hears `Fail` when nothing is in flight."""
        push, part = self._find(destination, message.load_id)
        if push is None or part is None or part.is_through:
            destination.send(Fail(message.load_id, "nothing is being written"))
            return
        part.destination = destination  # it may ask over another connection
        self._end(push, "D gave it up", aborted=True)

    def heard(self, destination: Destination, nonces: Iterable[str]) -> None:
        """D still waits for these."""
        now_s = self._now_s()
        for nonce in nonces:
            push = self._pushes.get(nonce)
            if push is not None and why_not_expected(push, destination.hello) is None:
                push.alive_s = now_s

    def released(self, nonce: str, end: LeaseEnd) -> bool:
        """D says that the lease under this nonce is over.

        Returns:
            Whether the lease table is to be told later, by this object, when nothing is written
            any more.
        """
        push = self._pushes.get(nonce)
        if push is None:
            return False
        if end is LeaseEnd.READ:
            for life, part in push.parts.items():
                # Its `Taken` comes over another connection, and D has them all.
                if part.state is OutgoingState.PUSHED:
                    self._close(part, OutgoingState.TAKEN)
                    self._keep(self._overtaken, (life, part.register.load_id), nonce)
            self._finish_if_over(push)
            if nonce not in self._pushes:
                return False
        push.release = end
        self._end(push, "D has released it")
        return True

    def lost(self, destination: Destination) -> None:
        """A connection is gone: nothing is written for it any more."""
        self._destinations.lost(destination)
        for push in list(self._pushes.values()):
            for part in push.parts.values():
                if part.destination is destination and part.state is not OutgoingState.TAKEN:
                    self._end(push, f"the connection to {destination.hello.engine_id} is lost")
                    break

    # ---- registrations -----------------------------------------------------------------

    def _open(self, nonce: str) -> Push:
        now_s = self._now_s()
        push = self._pushes[nonce] = Push(nonce, now_s, now_s, now_s + self._chunks.progress_s)
        return push

    def _why_refused(
        self, push: Push | None, destination: Destination, message: Register
    ) -> str | None:
        if push is None and sum(p.expect is None for p in self._pushes.values()) >= _MAX_PARKED:
            return f"{_MAX_PARKED} registrations wait for their requests already"
        why = None if push is None else why_not_of(push, destination, message)
        return why or why_not_writable(self._shape, destination.hello, message)

    def _on_ready(self, push: Push, part: OutgoingPart, failure: str | None) -> None:
        """The mover has warmed up to a rank of D, or cannot."""
        part.is_ready = failure is None
        if failure is not None:
            self._end(push, f"{part.destination.hello.engine_id} cannot be written: {failure}")
        elif part.remote is not None:
            self._advance(push)

    def _advance(self, push: Push) -> None:
        """Accept what can be, and say so once all ranks of D have registered."""
        if push.expect is None or push.ending is not None or push.is_registered:
            return
        for part in push.parts.values():
            if part.state is OutgoingState.PARKED and part.is_ready:
                part.state = OutgoingState.ACCEPTED
                part.destination.send(Accept(part.register.load_id))
        wanted = {
            route.dest_rank
            for route in routes_from(self._shape, push.expect.decode.shape, self._rank)
        }
        accepted = {
            part.destination.hello.rank
            for part in push.parts.values()
            if part.state is OutgoingState.ACCEPTED
        }
        if wanted <= accepted:
            push.is_registered = True
            push.incomplete_since_s, push.waits_since_s = _NEVER, self._now_s()
            self.registered.append(Registered(nonce=push.nonce))
            # From now on its request may run, and what it computes be written until it is over:
            # a lease that ends before the first chunk has come here settles no earlier.
            self._leases.begin_write(push.expect.request_id, push)
        elif push.parts:
            push.incomplete_since_s = min(push.incomplete_since_s, self._now_s())

    # ---- ending ------------------------------------------------------------------------

    def _end(self, push: Push, reason: str, *, aborted: bool = False) -> None:
        """Write nothing more; the rest follows once what is in flight has settled."""
        if push.ending is None:
            push.ending = Ending(reason, aborted)
            for part in push.parts.values():
                if not part.is_through:
                    part.stop(self._mover)
        self._settle(push)

    def _settle(self, push: Push) -> None:
        """Tell each D of a push that is ending, once nothing is in flight to it."""
        ending = push.ending or Ending("")
        for part in push.parts.values():
            if not (part.num_jobs or part.is_through):
                self._close(part, OutgoingState.OVER)
                part.destination.send(Fail(part.register.load_id, *ending))
        self._finish_if_over(push)

    def _close(self, part: OutgoingPart, state: OutgoingState) -> None:
        part.state = state
        self._destinations.let_go(part)

    def _finish_if_over(self, push: Push) -> None:
        """Forget a push that has nothing left to do, and say how it ended if it ended badly."""
        parts = push.parts.values()
        is_taken = bool(parts) and all(part.state is OutgoingState.TAKEN for part in parts)
        if push.is_reading or not (is_taken or push.ending is not None):
            return
        if self._pushes.pop(push.nonce, None) is None:
            return
        self._remember(push.nonce, push.ending or Ending("D has taken it"))
        expect, now_s = push.expect, self._now_s()
        if expect is not None:
            self._by_request.pop(expect.request_id, None)
            self._leases.end_write(expect.request_id, push)
        if push.stop is not None:
            self._leases.stop(push.stop.nonce, push.stop.request_id, now_s)
        elif push.ending is not None and expect is not None:
            reason = push.ending.reason
            self.withdrawn.append(Withdrawn(nonce=push.nonce, reason=reason))
            log_event(_log, "kv push withdrawn", nonce=push.nonce, reason=reason)
        if push.release is not None:
            self._leases.release(push.nonce, now_s, push.release)

    # ---- small answers -----------------------------------------------------------------

    def _find(
        self, destination: Destination, load_id: int
    ) -> tuple[Push, OutgoingPart] | tuple[None, None]:
        """The part that this rank of D calls so, whatever connection it registered over."""
        for push in self._pushes.values():
            part = push.parts.get(destination.life)
            if part is not None and part.register.load_id == load_id:
                return push, part
        return None, None

    def _remember(self, nonce: str, ending: Ending) -> None:
        self._keep(self._over, nonce, ending)

    def _keep(self, over: Remembered[V], key: Hashable, value: V) -> None:
        now_s = self._now_s()
        until_s = now_s + LEASES_REMEMBERED * self._transfer.lease_s
        over.add(key, value, now_s=now_s, until_s=until_s)

    def _now_s(self) -> float:
        return self._clock.monotonic_s()
