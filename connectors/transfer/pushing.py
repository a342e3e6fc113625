"""The writing side of pushes: P serves Ds that have registered their blocks.

It holds all pushes of one rank and takes the engine's instructions, computed steps and Ds'
messages; each push is a state machine of its own (`pushes`). For a push that ended badly the
engine gets `Withdrawn`, or `Settled` if the engine stopped it.

A push waits for D as long as D sends heartbeats that name its nonce. This module knows neither
links nor transports; the owner of the loop calls `tick`.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from pdserve.connectors.handover.instructions import Withdrawn
from pdserve.connectors.remembered import LEASES_REMEMBERED, Remembered
from pdserve.connectors.slicing import route_between, token_step
from pdserve.connectors.transfer.protocol import Fail
from pdserve.connectors.transfer.pushes import Ending, Observation, Push, PushSite
from pdserve.connectors.transfer.writing import Destinations, OutgoingState
from pdserve.errors import PeerError
from pdserve.observe.log import log_event
from pdserve.wire.transfer import LeaseEnd

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from pdserve.connectors.handover.instructions import Expect, Grant, Stop
    from pdserve.connectors.handover.lease import LeaseTable
    from pdserve.connectors.transfer.protocol import Abort, Hello, Register, Taken
    from pdserve.connectors.transfer.pushes import ChunkStep
    from pdserve.connectors.transfer.seams import Facts, Seams
    from pdserve.connectors.transfer.writing import Destination, OutgoingPart
    from pdserve.wire.ids import RequestId
    from pdserve.wire.transfer import KVShape

_log = logging.getLogger(__name__)

V = TypeVar("V")

_MAX_PARKED = 4096
MAX_PUSHED_BLOCKS = 50_000
"""`Pushed`, which has up to 18 bytes for each of P's blocks, is one frame of at most 1 MiB."""
_NEVER = float("inf")


class Pushing:
    """All pushes of one rank of P.

    Args:
        leases: Table that keeps blocks from settling while they are being written from.

    Attributes:
        observations: Costs of steps; the thread that runs steps empties it.
        last_step_s: When this rank last ran a step; the thread that runs steps writes it.
    """

    def __init__(self, seams: Seams, leases: LeaseTable, facts: Facts) -> None:
        self._shape, self._rank = seams.context.shape, seams.context.rank
        self._transfer = transfer = seams.transfer
        self._lease = f"{transfer.lease_s:.1f} s"
        self._timeout = f"{transfer.transfer_timeout_s:.1f} s"
        self._leases = leases
        self._facts = facts
        self._clock = seams.clock
        self._destinations = Destinations(seams.mover)
        self._pushes: dict[str, Push] = {}
        self._by_request: dict[RequestId, Push] = {}
        # By nonce, and by rank of D and load id: of loads that D gave up.
        self._over: Remembered[Ending] = Remembered()
        self._overtaken: Remembered[str] = Remembered()
        self.observations: deque[Observation] = deque(maxlen=256)
        self.last_step_s = seams.clock.monotonic_s()
        self._site = PushSite(
            seams, leases, facts, self._destinations, self.observations, on_over=self._on_over
        )

    @property
    def num_live(self) -> int:
        """Number of pushes that are not over."""
        return len(self._pushes)

    @property
    def reading(self) -> list[Push]:
        """Return the pushes that are reading from P's blocks now."""
        return [push for push in self._pushes.values() if push.is_reading]

    def due_s(self) -> float:
        """When `tick` has to be called next. O(pushes x ranks of D)."""
        live = [push for push in self._pushes.values() if push.ending is None]
        ends_s = (until_s for push in live for until_s, _ in self._deadlines(push))
        return min((*ends_s, *(push.next_progress_s for push in live)), default=_NEVER)

    def tick(self) -> None:
        """Do what is due by the clock. O(pushes x ranks of D)."""
        now_s = self._clock.monotonic_s()
        for push in list(self._pushes.values()):
            if push.ending is not None:
                continue
            overdue = (why for until_s, why in self._deadlines(push) if until_s <= now_s)
            why = next(overdue, None)
            if why is not None:
                push.end(why)
            elif now_s >= push.next_progress_s:
                push.tell_progress()

    # ---- what this engine wants --------------------------------------------------------

    def expect(self, expect: Expect) -> None:
        """Expect D's registrations for a request, and take up any that came before."""
        nonce = expect.nonce
        if (over := self._over.get(nonce)) is not None:
            self._facts.withdrawn.append(Withdrawn(nonce=nonce, reason=over.reason))
            return
        push = self._pushes.get(nonce)
        if push is None:
            push = self._pushes[nonce] = Push(nonce, self._site)
        elif push.expect is not None:
            self._facts.faults["push_repeated"] += 1
            return
        push.expect, push.alive_s = expect, self._clock.monotonic_s()
        self._by_request[expect.request_id] = push
        for part in list(push.parts.values()):
            why = _why_not_expected(push, part.destination.hello)
            if why is not None:
                del push.parts[part.destination.life]
                self._destinations.let_go(part)
                part.destination.send(Fail(part.register.load_id, why))
        push.advance()

    def on_step(self, step: ChunkStep) -> None:
        """Write the part of a chunk, or all of it, that is now complete in memory."""
        chunk = step.chunk
        push = self._pushes.get(chunk.nonce)
        if push is None or push.ending is not None:
            return
        push.waits_since_s = _NEVER
        if not push.is_registered or any(
            part.register.num_tokens != chunk.num_tokens for part in push.parts.values()
        ):
            self._facts.faults["push_unexpected"] += 1
            push.end(f"{chunk.num_tokens} tokens are computed, D has registered others")
            return
        if chunk.is_unproven and not (push.grant is not None and push.grant.is_proof):
            push.unproven = step
            return
        push.unproven = None
        push.write(step)

    def grant(self, grant: Grant) -> None:
        """Finish a request; under its push's nonce, D gets the handoff with the last byte.

        Under another nonce, or without a handoff, the push ends.
        """
        push = self._by_request.get(grant.request_id)
        if push is None or push.ending is not None:
            return
        if grant.nonce != push.nonce or grant.handoff is None:
            push.end("the engine has given the push up")
            return
        push.grant = grant
        push.table = (grant.block_ids, grant.generations)
        if grant.is_proof and push.unproven is not None:  # if not, this rank's step is not over yet
            push.write(push.unproven)
        push.say_if_pushed()

    def stop(self, stop: Stop) -> None:
        """Stop a push; `Settled` follows once nothing is reading from its blocks."""
        push = self._pushes.get(stop.nonce)
        if push is None:
            self._keep(self._over, stop.nonce, Ending(stop.reason, stop.is_answered))
            self._leases.stop(stop.nonce, stop.request_id, self._clock.monotonic_s())
            return
        push.stop = stop
        push.end(stop.reason, aborted=stop.is_answered)

    def end_all(self, reason: str) -> None:
        """End all pushes."""
        for push in list(self._pushes.values()):
            push.end(reason)

    # ---- messages from Ds --------------------------------------------------------------

    def register(self, destination: Destination, message: Register) -> None:
        """Take D's registration of blocks."""
        nonce = message.nonce
        push = self._pushes.get(nonce)
        known = None if push is None else push.parts.get(destination.life)
        if known is not None and known.register.load_id == message.load_id:
            self._facts.faults["push_repeated"] += 1
            return
        ending = self._over.get((destination.life, message.load_id))
        ending = ending or (self._over.get(nonce) if push is None else push.ending)
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
            self._facts.faults["push_refused"] += 1
            log_event(
                _log, "kv push refused", level=logging.WARNING, nonce=nonce, reason=str(error)
            )
            destination.send(Fail(message.load_id, str(error)))
            return
        if push is None:
            push = self._pushes[nonce] = Push(nonce, self._site)
        push.add_part(destination, message, route)

    def taken(self, destination: Destination, message: Taken) -> None:
        """Take D's verdict on the bytes written."""
        if message.valid and self._overtaken.pop((destination.life, message.load_id)) is not None:
            return
        push, part = self._find(destination, message.load_id)
        if push is None or part is None or part.state is not OutgoingState.PUSHED or push.ending:
            self._facts.faults["push_unexpected"] += 1
            return
        push.alive_s = self._clock.monotonic_s()
        if message.valid:
            push.close(part, OutgoingState.TAKEN)
            push.finish_if_over()
            return
        self._facts.faults["push_digest_mismatch"] += 1
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
            push.end("D's digests differ from P's, also after it was written again")
            return
        push.rewrite(part)

    def abort(self, destination: Destination, message: Abort) -> None:
        """End a push for D, which gets `Fail` once nothing is in flight."""
        push, part = self._find(destination, message.load_id)
        ending = Ending("D gave it up", aborted=True)
        if push is None or part is None or part.is_through:
            # It may have registered over another connection, and what comes of that is void now.
            self._keep(self._over, (destination.life, message.load_id), ending)
            destination.send(Fail(message.load_id, "nothing is being written"))
            return
        part.destination = destination  # it may ask over another connection
        push.end(ending.reason, aborted=ending.aborted)

    def heard(self, destination: Destination, nonces: Iterable[str]) -> None:
        """Note that D still waits for these."""
        now_s = self._clock.monotonic_s()
        for nonce in nonces:
            push = self._pushes.get(nonce)
            if push is not None and _why_not_expected(push, destination.hello) is None:
                push.alive_s = now_s

    def released(self, nonce: str, end: LeaseEnd) -> bool:
        """Take D's message that the lease under this nonce is over.

        Returns:
            Whether this object will tell the lease table later, once nothing more is being
            written.
        """
        push = self._pushes.get(nonce)
        if push is None:
            return False
        if end is LeaseEnd.READ:
            for life, part in push.parts.items():
                # Its `Taken` comes over another connection, and D has them all.
                if part.state is OutgoingState.PUSHED:
                    push.close(part, OutgoingState.TAKEN)
                    self._keep(self._overtaken, (life, part.register.load_id), nonce)
            push.finish_if_over()
            if nonce not in self._pushes:
                return False
        push.release = end
        push.end("D has released it")
        return True

    def lost(self, destination: Destination) -> None:
        """End the writing over a lost connection."""
        self._destinations.lost(destination)
        for push in list(self._pushes.values()):
            for part in push.parts.values():
                if part.destination is destination and part.state is not OutgoingState.TAKEN:
                    push.end(f"the connection to {destination.hello.engine_id} is lost")
                    break

    # ---- small answers -----------------------------------------------------------------

    def _on_over(self, push: Push) -> None:
        """Forget a push, and report its end if it ended badly."""
        del self._pushes[push.nonce]
        self._keep(self._over, push.nonce, push.ending or Ending("D has taken it"))
        expect, now_s = push.expect, self._clock.monotonic_s()
        if expect is not None:
            self._by_request.pop(expect.request_id, None)
            self._leases.end_write(expect.request_id, push)
        if push.stop is not None:
            self._leases.stop(push.stop.nonce, push.stop.request_id, now_s)
        elif push.ending is not None and expect is not None:
            reason = push.ending.reason
            self._facts.withdrawn.append(Withdrawn(nonce=push.nonce, reason=reason))
            log_event(_log, "kv push withdrawn", nonce=push.nonce, reason=reason)
        if push.release is not None:
            self._leases.release(push.nonce, now_s, push.release)

    def _deadlines(self, push: Push) -> Iterator[tuple[float, str]]:
        """Yield until when a push goes on as it stands now, and why not longer."""
        lease_s, timeout_s = self._transfer.lease_s, self._transfer.transfer_timeout_s
        if push.expect is None:
            yield push.since_s + lease_s, f"no request came for it within {self._lease}"
            return
        decode = push.expect.decode.engine_id
        yield push.alive_s + lease_s, f"no sign of life from {decode} for {self._lease}"
        # Perhaps one of its ranks has given up, and another still waits, unaware of it.
        incomplete_s = push.incomplete_since_s + lease_s
        yield incomplete_s, f"after {self._lease} only some of D's ranks have registered"
        # P's pool may be full of KV that D could read only into the blocks that wait here.
        stuck_s = max(push.waits_since_s, self.last_step_s) + lease_s
        yield stuck_s, f"D's blocks are waiting, but no step has run here for {self._lease}"
        for part in push.parts.values():
            late_s = part.posted_since_s + timeout_s
            yield late_s, f"a write to {decode} has not ended within {self._timeout}"
            yield part.until_s, f"D did not confirm within {self._timeout} that everything arrived"

    def _why_refused(
        self, push: Push | None, destination: Destination, message: Register
    ) -> str | None:
        if push is None and sum(p.expect is None for p in self._pushes.values()) >= _MAX_PARKED:
            return f"{_MAX_PARKED} registrations are already waiting for their requests"
        why = None if push is None else _why_not_of(push, destination, message)
        return why or _why_not_writable(self._shape, destination.hello, message)

    def _find(
        self, destination: Destination, load_id: int
    ) -> tuple[Push, OutgoingPart] | tuple[None, None]:
        """Return this rank of D's part by D's load id, whichever connection registered it."""
        for push in self._pushes.values():
            part = push.parts.get(destination.life)
            if part is not None and part.register.load_id == load_id:
                return push, part
        return None, None

    def _keep(self, over: Remembered[V], key: Hashable, value: V) -> None:
        now_s = self._clock.monotonic_s()
        until_s = now_s + LEASES_REMEMBERED * self._transfer.lease_s
        over.add(key, value, now_s=now_s, until_s=until_s)


def _why_not_writable(source: KVShape, hello: Hello, message: Register) -> str | None:
    """Return why a registration cannot be written to; None = it can, as far as is known."""
    shape = hello.shape
    num_blocks = -(-message.num_tokens // shape.block_size)
    if message.num_tokens < 1 or len(message.block_ids) != num_blocks:
        return f"{message.num_tokens} tokens do not match {len(message.block_ids)} blocks"
    if not all(0 <= block < shape.num_blocks for block in message.block_ids):
        return f"it names blocks outside its {shape.num_blocks}"
    if message.num_tokens > MAX_PUSHED_BLOCKS * source.block_size:
        return (
            f"{message.num_tokens} tokens are more than {MAX_PUSHED_BLOCKS} blocks: they are pulled"
        )
    step = token_step(source, shape)
    if not 0 <= message.first_token <= message.num_tokens or message.first_token % step:
        return f"it starts at token {message.first_token} of {message.num_tokens}"
    why = hello.pool.why_not_blocks_of(shape, hello.rank)
    return None if why is None else f"{hello.engine_id} {why}"


def _why_not_of(push: Push, destination: Destination, message: Register) -> str | None:
    """Return why a registration is not part of this push; None = it is."""
    if destination.life in push.parts:
        return "this rank has registered other blocks for it"
    why = _why_not_expected(push, destination.hello)
    if why is not None:
        return why
    if any(p.register.num_tokens != message.num_tokens for p in push.parts.values()):
        return f"another rank has registered a different number of tokens than {message.num_tokens}"
    return None


def _why_not_expected(push: Push, hello: Hello) -> str | None:
    """Return why a rank is not of this push's D; None = it is, or that is not known yet."""
    if push.expect is None:
        return None
    decode = push.expect.decode
    if (decode.engine_id, decode.incarnation) != (hello.engine_id, hello.incarnation):
        return (
            f"the push is for {decode.engine_id} incarnation {decode.incarnation}, not for "
            f"{hello.engine_id} incarnation {hello.incarnation}"
        )
    if decode.shape != hello.shape:
        return f"{hello.engine_id} reports another KV shape than the ticket"
    return None
