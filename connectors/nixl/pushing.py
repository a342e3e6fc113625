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

D is waited for as long as it says that it waits: by heartbeats, which name the nonce. It knows
neither sockets nor NIXL; whoever runs the loop calls `tick`.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter, deque
from typing import TYPE_CHECKING

from pdserve.connectors.bygone import LEASES_REMEMBERED, Bygone
from pdserve.connectors.nixl.destinations import Destinations
from pdserve.connectors.nixl.protocol import Accept, Fail, Progress, Pushed
from pdserve.connectors.nixl.pushes import (
    ChunkStep,
    Observation,
    Push,
    why_not_expected,
    why_not_writable,
    written_of,
)
from pdserve.connectors.nixl.writing import Part, PartState, Span
from pdserve.connectors.slicing import route_between, routes_from, shard_of
from pdserve.errors import PeerError
from pdserve.observe.log import log_event
from pdserve.wire.transfer import LeaseEnd, Registered, Withdrawn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.digests import BlockDigests
    from pdserve.connectors.handover.instructions import Expect, Grant, Stop
    from pdserve.connectors.handover.lease import LeaseTable
    from pdserve.connectors.nixl.background import Background
    from pdserve.connectors.nixl.destinations import Destination
    from pdserve.connectors.nixl.jobs import Settled
    from pdserve.connectors.nixl.lanes import Lanes
    from pdserve.connectors.nixl.protocol import Abort, Register, Taken
    from pdserve.observe.clock import Clock

_log = logging.getLogger(__name__)

_PROGRESS_PER_LEASE = 6
_MAX_PARKED = 4096
_NEVER = float("inf")


class Pushing:
    """All pushes of one rank of P.

    Args:
        leases: Where it holds off the settling of blocks that are being written from.

    Attributes:
        registered, withdrawn: Facts for the next report; the owner of the loop empties them.
        faults: What should stay rare, by name, since whoever reports it last emptied this.
        observations: What steps have cost; the thread that runs steps empties it.
        last_step_s: When this rank last ran a step; the thread that runs steps writes it.
    """

    def __init__(
        self,
        context: ConnectorContext,
        *,
        leases: LeaseTable,
        lanes: Lanes,
        digests: BlockDigests,
        background: Background,
        clock: Clock,
    ) -> None:
        self._shape, self._rank = context.shape, context.rank
        self._shard = shard_of(context.shape, context.rank)
        self._transfer = context.config.transfer
        self._leases = leases
        self._lanes = lanes
        self._digests = digests
        self._background = background
        self._clock = clock
        self._destinations = Destinations(lanes)
        self._pushes: dict[str, Push] = {}
        self._by_request: dict[str, str] = {}
        self._over: Bygone[str] = Bygone()
        self.registered: list[Registered] = []
        self.withdrawn: list[Withdrawn] = []
        self.faults: Counter[str] = Counter()
        self.observations: deque[Observation] = deque(maxlen=256)
        self.last_step_s = clock.monotonic_s()

    @property
    def num_live(self) -> int:
        """Pushes that are not over."""
        return len(self._pushes)

    def due_s(self) -> float:
        """When `tick` has to be called next. O(pushes x ranks of D)."""
        return min((self._due_s(push) for push in self._pushes.values()), default=_NEVER)

    def tick(self) -> None:
        """Do what is due by the clock. O(pushes x ranks of D)."""
        now_s = self._now_s()
        for push in list(self._pushes.values()):
            if push.ending is not None:
                continue
            why = self._why_overdue(push, now_s)
            if why is not None:
                self._end(push, why)
            elif now_s >= push.next_progress_s:
                self._tell_progress(push)

    # ---- what this engine wants --------------------------------------------------------

    def expect(self, expect: Expect) -> None:
        """A request waits for D; take up the registrations that came before."""
        nonce, now_s = expect.nonce, self._now_s()
        if (over := self._over.get(nonce)) is not None:
            self.withdrawn.append(Withdrawn(nonce=nonce, reason=over))
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
            why = self._why_not_expected(push, part.destination)
            if why is not None:
                del push.parts[part.destination.life]
                self._destinations.let_go(part.destination, part)
                part.destination.send(Fail(part.register.load_id, why))
        self._advance(push)

    def on_step(self, step: ChunkStep) -> None:
        """Part of a chunk, or all of it, is complete in memory: write it."""
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
        is_last = chunk.end_token >= chunk.num_tokens
        end = chunk.num_tokens if is_last else self._block_edge(chunk.end_token)
        push.table = (chunk.block_ids, chunk.generations)
        if end > push.announced:
            self._write_layers(push, end, step)
        if not step.is_over:
            return
        if is_last:
            push.computed_s, push.last_step = step.ended_s, step
        if end > push.announced:
            self._digest(push, push.announced, end)
            push.announced, push.layers_end = end, 0
        self._tell_progress(push)
        for part in list(push.parts.values()):
            self._say_if_pushed(push, part)

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
        for part in list(push.parts.values()):
            self._say_if_pushed(push, part)

    def stop(self, stop: Stop) -> None:
        """Write nothing more; `Settled` follows when nothing reads from the blocks."""
        push = self._pushes.get(stop.nonce)
        if push is None:
            self._remember(stop.nonce, stop.reason)
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
        if (over := self._over.get(nonce)) is not None:
            destination.send(Fail(message.load_id, f"the push is over: {over}"))
            return
        push = self._pushes.get(nonce)
        known = None if push is None else push.parts.get(destination.life)
        if known is not None and known.register.load_id == message.load_id:
            self.faults["push_repeated"] += 1
            return
        try:
            why = self._why_not(push, destination, message)
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
        part = push.parts[destination.life] = Part(destination, message, route)
        if route:
            ready = functools.partial(self._on_ready, push, part)
            part.remote = self._destinations.use(destination, part, ready)
        else:
            part.is_ready = True
        self._advance(push)

    def taken(self, destination: Destination, message: Taken) -> None:
        """D has checked what was written."""
        push, part = self._find(destination, message.load_id)
        if push is None or part is None or part.state is not PartState.PUSHED or push.ending:
            self.faults["push_unexpected"] += 1
            return
        push.alive_s = self._now_s()
        if message.valid:
            self._close(part, PartState.TAKEN)
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
        part.was_rewritten = True
        part.state, part.until_s = PartState.ACCEPTED, _NEVER
        part.add(Span(part.register.first_token, part.register.num_tokens, None))
        self._pump(push, part)

    def abort(self, destination: Destination, message: Abort) -> None:
        """D does not want it any more. It hears `Fail` when nothing is in flight."""
        push, part = self._find(destination, message.load_id)
        if push is None or part is None or part.is_through:
            destination.send(Fail(message.load_id, "nothing is being written"))
            return
        part.destination = destination  # it may ask over another connection
        self._end(push, "D gave it up")

    def heard(self, destination: Destination, nonces: Iterable[str]) -> None:
        """D still waits for these."""
        now_s = self._now_s()
        for nonce in nonces:
            push = self._pushes.get(nonce)
            if push is not None and self._why_not_expected(push, destination) is None:
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
            for part in push.parts.values():
                # Its `Taken` comes over another connection, and D has them all.
                if part.state is PartState.PUSHED:
                    self._close(part, PartState.TAKEN)
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
                if part.destination is destination and part.state is not PartState.TAKEN:
                    self._end(push, f"the connection to {destination.hello.engine_id} is lost")
                    break

    # ---- registrations -----------------------------------------------------------------

    def _open(self, nonce: str) -> Push:
        now_s = self._now_s()
        push = self._pushes[nonce] = Push(nonce, now_s, now_s, now_s + self._progress_s)
        return push

    def _why_not(
        self, push: Push | None, destination: Destination, message: Register
    ) -> str | None:
        """Why a registration is refused."""
        if push is None and sum(p.expect is None for p in self._pushes.values()) >= _MAX_PARKED:
            return f"{_MAX_PARKED} registrations wait for their requests already"
        if push is not None:
            if push.ending is not None:
                return f"the push is over: {push.ending}"
            if destination.life in push.parts:
                return "this rank has registered other blocks for it"
            why = self._why_not_expected(push, destination)
            if why is not None:
                return why
            if any(p.register.num_tokens != message.num_tokens for p in push.parts.values()):
                return f"{message.num_tokens} tokens are not what another rank said"
        return why_not_writable(self._shape, destination.hello, message)

    def _why_not_expected(self, push: Push, destination: Destination) -> str | None:
        if push.expect is None:
            return None
        return why_not_expected(push.expect.decode, destination.hello)

    def _on_ready(self, push: Push, part: Part, failure: str | None) -> None:
        """The lanes have wired up to a rank of D, or cannot."""
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
            if part.state is PartState.PARKED and part.is_ready:
                part.state = PartState.ACCEPTED
                part.destination.send(Accept(part.register.load_id))
        wanted = {
            route.dest_rank
            for route in routes_from(self._shape, push.expect.decode.shape, self._rank)
        }
        accepted = {
            part.destination.hello.rank
            for part in push.parts.values()
            if part.state is PartState.ACCEPTED
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

    # ---- writing -----------------------------------------------------------------------

    def _write_layers(self, push: Push, end: int, step: ChunkStep) -> None:
        """Write what the step has made complete: some layers, or all, of the chunk's tokens."""
        num_layers, start = len(self._shard.layers), self._shard.layers.start
        layers_end = num_layers if step.is_over else min(step.layers_end, num_layers)
        if layers_end <= push.layers_end:
            return
        is_whole = step.is_over and push.layers_end == 0
        layers = None if is_whole else range(start + push.layers_end, start + layers_end)
        if push.layers_end == 0 and not step.is_over:
            self._tell_progress(push, num_tokens=end)
        push.chunk_end, push.layers_end = end, layers_end
        for part in list(push.parts.values()):
            part.add(Span(push.announced, end, layers))
            self._pump(push, part)
        if not (step.is_over or push.num_digesting or push.ending):
            self._digest(push, push.announced, end, num_layers=layers_end)

    def _pump(self, push: Push, part: Part) -> None:
        try:
            part.pump(
                self._shape,
                push.table[0],
                self._lanes,
                functools.partial(self._on_settled, push),
                functools.partial(self._on_slow, push),
            )
        except PeerError as error:
            self._end(push, str(error))

    def _on_slow(self, push: Push, part: Part) -> None:
        """Have D's agent driven. One that is not needed would only take time from D's steps."""
        if not (part.needs_agent or part.is_through):
            part.needs_agent = True
            self._say_progress(push, part)

    def _on_settled(self, push: Push, part: Part, settled: Settled) -> None:
        if push.ending is not None:
            self._settle(push)
            return
        if settled.failure is not None:
            self.faults["push_write_failed"] += 1
            self._end(push, f"a write to {part.destination.hello.engine_id}: {settled.failure}")
            return
        self._pump(push, part)
        if part.is_idle:
            self._observe(push)
            self._say_if_pushed(push, part)
        if part.state is PartState.ACCEPTED and written_of(push, part, self._shard) > part.told:
            self._say_progress(push, part)

    def _digest(
        self, push: Push, first_token: int, end_token: int, *, num_layers: int | None = None
    ) -> None:
        """Take the digests of what has become complete, off this thread."""
        block_ids, generations = push.table
        push.num_digesting += 1

        def work() -> Callable[[], None]:
            self._digests.take(
                block_ids, generations, end_token, first_token=first_token, num_layers=num_layers
            )
            return done

        def done() -> None:
            push.num_digesting -= 1
            if num_layers is None:
                push.digested = max(push.digested, end_token)
            if push.ending is not None:
                self._settle(push)
                return
            for part in list(push.parts.values()):
                self._say_if_pushed(push, part)

        self._background.submit(work)

    def _observe(self, push: Push) -> None:
        """Learn from the last chunk, once it is written everywhere."""
        step, parts = push.last_step, push.parts.values()
        if step is None or not all(part.is_idle for part in parts):
            return
        push.last_step = None
        self.observations.append(
            Observation(
                step.chunk.num_step_tokens,
                step.layerwise,
                step.step_s,
                max(0.0, max(part.last_s for part in parts) - step.ended_s),
            )
        )

    def _say_if_pushed(self, push: Push, part: Part) -> None:
        """Give D the handoff, once there is one and every byte is written."""
        grant, register = push.grant, part.register
        if (
            grant is None
            or grant.handoff is None
            or push.ending is not None
            or part.state is not PartState.ACCEPTED
            or not part.is_idle
            or min(push.announced, push.digested) < grant.num_tokens
        ):
            return
        if grant.num_tokens != register.num_tokens:
            self._end(push, f"{grant.num_tokens} tokens, D has registered {register.num_tokens}")
            return
        digests = b""
        if part.route:
            digests = self._digests.of(
                *push.table, grant.num_tokens, part.route, first_token=register.first_token
            )
        part.state = PartState.PUSHED
        part.until_s = self._now_s() + self._transfer.transfer_timeout_s
        part.destination.send(
            Pushed(
                load_id=register.load_id,
                handoff=grant.handoff,
                digests=digests,
                exposed_s=self._now_s() - push.computed_s,
                num_bytes=part.num_bytes,
                num_descriptors=part.num_descriptors,
            )
        )

    # ---- ending ------------------------------------------------------------------------

    def _end(self, push: Push, reason: str) -> None:
        """Write nothing more; the rest follows once what is in flight has settled."""
        if push.ending is None:
            push.ending = reason
            for part in push.parts.values():
                if not part.is_through:
                    part.stop(self._lanes)
        self._settle(push)

    def _settle(self, push: Push) -> None:
        """Tell each D of a push that is ending, once nothing is in flight to it."""
        for part in push.parts.values():
            if not (part.num_jobs or part.is_through):
                self._close(part, PartState.OVER)
                part.destination.send(Fail(part.register.load_id, push.ending or ""))
        self._finish_if_over(push)

    def _close(self, part: Part, state: PartState) -> None:
        part.state = state
        self._destinations.let_go(part.destination, part)

    def _finish_if_over(self, push: Push) -> None:
        """Forget a push that has nothing left to do, and say how it ended if it ended badly."""
        parts = push.parts.values()
        is_taken = bool(parts) and all(part.state is PartState.TAKEN for part in parts)
        if push.is_reading or not (is_taken or push.ending is not None):
            return
        if self._pushes.pop(push.nonce, None) is None:
            return
        self._remember(push.nonce, push.ending or "D has taken it")
        expect, now_s = push.expect, self._now_s()
        if expect is not None:
            self._by_request.pop(expect.request_id, None)
            self._leases.end_write(expect.request_id, push)
        if push.stop is not None:
            self._leases.stop(push.stop.nonce, push.stop.request_id, now_s)
        elif push.ending is not None and expect is not None:
            self.withdrawn.append(Withdrawn(nonce=push.nonce, reason=push.ending))
            log_event(_log, "kv push withdrawn", nonce=push.nonce, reason=push.ending)
        if push.release is not None:
            self._leases.release(push.nonce, now_s, push.release)

    # ---- the clock ---------------------------------------------------------------------

    def _why_overdue(self, push: Push, now_s: float) -> str | None:
        lease_s = self._transfer.lease_s
        if push.expect is None:
            late = now_s >= push.since_s + lease_s
            return f"no request came for it in {lease_s:.1f} s" if late else None
        if now_s >= push.alive_s + lease_s:
            return f"no sign of life from {push.expect.decode.engine_id} for {lease_s:.1f} s"
        if now_s >= push.incomplete_since_s + lease_s:
            # One of its ranks has given up, perhaps, and another that was not told so waits on.
            return f"only some of D's ranks have registered for {lease_s:.1f} s"
        if now_s >= self._stuck_at_s(push):
            # Its pool may be full of what D would read, had it the blocks that wait for this.
            return f"D's blocks wait, and no step has run here for {lease_s:.1f} s"
        if any(now_s >= part.until_s for part in push.parts.values()):
            return f"D did not say in {self._transfer.transfer_timeout_s:.1f} s if it has it all"
        return None

    def _due_s(self, push: Push) -> float:
        if push.ending is not None:
            return _NEVER
        since_s = push.since_s if push.expect is None else push.alive_s
        untils_s = (part.until_s for part in push.parts.values())
        lease_s, stuck_s = self._transfer.lease_s, self._stuck_at_s(push)
        since_s = min(since_s, push.incomplete_since_s)
        return min(since_s + lease_s, stuck_s, push.next_progress_s, *untils_s)

    def _stuck_at_s(self, push: Push) -> float:
        """When a push that has not begun is given up, for nothing goes on at this engine."""
        return max(push.waits_since_s, self.last_step_s) + self._transfer.lease_s

    def _tell_progress(self, push: Push, num_tokens: int = 0) -> None:
        push.next_progress_s = self._now_s() + self._progress_s
        for part in push.parts.values():
            if not part.is_through:
                self._say_progress(push, part, num_tokens)

    def _say_progress(self, push: Push, part: Part, num_tokens: int = 0) -> None:
        """Tell D how far it is; `num_tokens` are about to be written."""
        num_settled, layers_end = part.told = written_of(push, part, self._shard)
        part.destination.send(
            Progress(
                load_id=part.register.load_id,
                num_tokens=max(num_tokens, push.announced),
                needs_agent=part.needs_agent,
                num_settled=num_settled,
                layers_end=layers_end,
            )
        )

    # ---- small answers -----------------------------------------------------------------

    @property
    def _progress_s(self) -> float:
        return self._transfer.lease_s / _PROGRESS_PER_LEASE

    def _find(
        self, destination: Destination, load_id: int
    ) -> tuple[Push, Part] | tuple[None, None]:
        """The part that this rank of D calls so, whatever connection it registered over."""
        for push in self._pushes.values():
            part = push.parts.get(destination.life)
            if part is not None and part.register.load_id == load_id:
                return push, part
        return None, None

    def _block_edge(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._shape.block_size

    def _remember(self, nonce: str, reason: str) -> None:
        now_s = self._now_s()
        until_s = now_s + LEASES_REMEMBERED * self._transfer.lease_s
        self._over.add(nonce, reason, now_s=now_s, until_s=until_s)

    def _now_s(self) -> float:
        return self._clock.monotonic_s()
