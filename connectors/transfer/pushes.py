"""One push at P: its state, its writes, its messages to D, and its end.

    push:   PARKED (registered, nobody asked for it yet) -.
            EXPECTED (asked for) -----------------------> registered by all ranks of D: `Registered`
                -> written chunk by chunk -> granted -> taken by all: over, nothing is reported
       from any state, on trouble or when D or the scheduler ends it ---> ENDING

    part:   PARKED -> ACCEPTED -> PUSHED -> TAKEN         (one rank of D)
                         ^----------'  once, if D's digests differ

A chunk is written as steps complete it, layer by layer or at once, to all ranks of D in parallel,
while its digests are taken. Each rank is told how far its part is (`Progress`), and gets the
handoff at the end (`Pushed`).

A push that is ENDING writes nothing more. Once its writes in flight have settled, every rank of D
that is not through gets `Fail`, and its blocks are its own again. Each push ends exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pdserve.connectors.handover.instructions import Registered
from pdserve.connectors.slicing import routes_from, shard_of
from pdserve.connectors.transfer.protocol import Accept, Fail, Progress, Pushed
from pdserve.connectors.transfer.writing import OutgoingPart, OutgoingState, Span
from pdserve.errors import PeerError

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from pdserve.connectors.handover.instructions import Chunk, Expect, Grant, Stop
    from pdserve.connectors.handover.lease import LeaseTable
    from pdserve.connectors.slicing import Route
    from pdserve.connectors.transfer.protocol import Register
    from pdserve.connectors.transfer.seams import Facts, JobEnd, Seams
    from pdserve.connectors.transfer.writing import Destination, Destinations
    from pdserve.wire.ids import BlockId
    from pdserve.wire.transfer import LeaseEnd

_PROGRESS_PER_LEASE = 6
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class ChunkStep:
    """What a step computed of a pushed request, as seen by the thread that runs steps.

    Attributes:
        layers_end: Layers of this rank that are complete in memory.
        is_over: Whether the step has ended, so that all layers are complete.
        layerwise: Whether the chunk is written layer by layer.
        step_s: Duration of the step, if it is over.
        ended_s: When the step ended (monotonic seconds).
    """

    chunk: Chunk
    layers_end: int
    is_over: bool
    layerwise: bool
    step_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Observation:
    """The cost of a step's last chunk, for `LayerwiseChoice`.

    Attributes:
        step_s: Seconds from the start of the step to the end of its computation.
        exposed_s: Seconds from there to the last byte written.
    """

    num_step_tokens: int
    layerwise: bool
    step_s: float
    exposed_s: float


class Ending(NamedTuple):
    """Why a push is over, or ending; `aborted` as in `Fail`."""

    reason: str
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class PushSite:
    """State shared by the pushes of one rank of P.

    Attributes:
        on_over: Called with a push that has nothing left to do.
    """

    seams: Seams
    leases: LeaseTable
    facts: Facts
    destinations: Destinations
    observations: deque[Observation]
    on_over: Callable[[Push], None]


class Push:
    """One nonce.

    Attributes:
        alive_s: When D last gave a sign of life.
        incomplete_since_s: Since when only some ranks of D have registered; inf if none or all
            have.
        waits_since_s: Since when D's blocks have waited for the first chunk; inf if none wait.
        table: P's blocks and their generations, as far as a chunk or the grant has named them.
        announced: Number of tokens that are written or being written.
        chunk_end, layers_end: The end of the chunk after those tokens, and how many of its layers
            are written or being written.
        digested: Number of tokens whose digests are taken.
        num_digesting: Number of unfinished digest tasks, which read from the blocks.
        computed_s: When the last chunk was complete.
        unproven: A step whose chunk may be written once the grant proves it.
        ending: Why the push is ending.
        stop, release: What to act on once the push is over, for the engine or the lease table.
    """

    def __init__(self, nonce: str, site: PushSite) -> None:
        self._site = site
        self._seams = site.seams
        context = site.seams.context
        self._shape, self._rank = context.shape, context.rank
        self._layers = shard_of(context.shape, context.rank).layers
        self.nonce = nonce
        self.since_s = self.alive_s = self._now_s()
        self.next_progress_s = self.since_s + self._progress_s
        self.expect: Expect | None = None
        self.parts: dict[tuple[str, str, int], OutgoingPart] = {}
        self.is_registered = False
        self.incomplete_since_s = self.waits_since_s = _NEVER
        self.table: tuple[list[BlockId], list[int]] = ([], [])
        self.announced = self.chunk_end = self.layers_end = 0
        self.digested = self.num_digesting = 0
        self.computed_s = 0.0
        self.last_step: ChunkStep | None = None
        self.unproven: ChunkStep | None = None
        self.grant: Grant | None = None
        self.ending: Ending | None = None
        self.is_over = False
        self.stop: Stop | None = None
        self.release: LeaseEnd | None = None

    @property
    def is_reading(self) -> bool:
        """Whether any of its work is reading from P's blocks."""
        return self.num_digesting > 0 or any(part.num_jobs for part in self.parts.values())

    @property
    def _progress_s(self) -> float:
        """Interval between progress messages to D."""
        return self._seams.transfer.lease_s / _PROGRESS_PER_LEASE

    # ---- registrations -----------------------------------------------------------------

    def add_part(self, destination: Destination, register: Register, route: Route) -> None:
        """Add a rank of D that has registered blocks."""
        self.alive_s = self._now_s()
        part = self.parts[destination.life] = OutgoingPart(
            self._seams,
            destination,
            register,
            route,
            on_settled=self._on_settled,
            on_slow=self._on_slow,
        )

        def on_ready(failure: str | None) -> None:
            """Handle the end of the mover's warm-up."""
            part.is_ready = failure is None
            if failure is not None:
                self.end(f"{destination.hello.engine_id} cannot be written: {failure}")
            elif part.remote is not None:
                self.advance()

        if route:
            part.remote = self._site.destinations.use(destination, part, on_ready)
        else:
            part.is_ready = True
        self.advance()

    def advance(self) -> None:
        """Accept the parts that can be; report once all ranks of D have registered."""
        if self.expect is None or self.ending is not None or self.is_registered:
            return
        for part in self.parts.values():
            if part.state is OutgoingState.PARKED and part.is_ready:
                part.state = OutgoingState.ACCEPTED
                part.destination.send(Accept(part.register.load_id))
        wanted = {
            route.dest_rank
            for route in routes_from(self._shape, self.expect.decode.shape, self._rank)
        }
        accepted = {
            part.destination.hello.rank
            for part in self.parts.values()
            if part.state is OutgoingState.ACCEPTED
        }
        if wanted <= accepted:
            self.is_registered = True
            self.incomplete_since_s, self.waits_since_s = _NEVER, self._now_s()
            self._site.facts.registered.append(Registered(nonce=self.nonce))
            # From now on its request may run and have its KV written until the push is over: a
            # lease that ends before the first chunk has come here must not settle before that.
            self._site.leases.begin_write(self.expect.request_id, self)
        elif self.parts:
            self.incomplete_since_s = min(self.incomplete_since_s, self._now_s())

    # ---- writing -----------------------------------------------------------------------

    def write(self, step: ChunkStep) -> None:
        """Write the part of a chunk, or all of it, that a step has completed."""
        chunk = step.chunk
        is_last = chunk.end_token >= chunk.num_tokens
        size = self._shape.block_size
        end = chunk.num_tokens if is_last else chunk.end_token - chunk.end_token % size
        self.table = (chunk.block_ids, chunk.generations)
        if end > self.announced:
            self._write_layers(end, step)
        if not step.is_over:
            return
        if is_last:
            self.computed_s = step.ended_s
            self.last_step = None if chunk.is_unproven else step
        if end > self.announced:
            self._digest(self.announced, end)
            self.announced, self.layers_end = end, 0
        self.tell_progress()
        self.say_if_pushed()

    def rewrite(self, part: OutgoingPart) -> None:
        """Write everything again to a rank of D."""
        part.was_rewritten = True
        part.state, part.until_s = OutgoingState.ACCEPTED, _NEVER
        part.add(Span(part.register.first_token, part.register.num_tokens, None))
        self._pump(part)

    def _write_layers(self, end: int, step: ChunkStep) -> None:
        """Write the layers, some or all, that the step has completed for the chunk's tokens."""
        num_layers, start = len(self._layers), self._layers.start
        layers_end = num_layers if step.is_over else min(step.layers_end, num_layers)
        if layers_end <= self.layers_end:
            return
        is_whole = step.is_over and self.layers_end == 0
        layers = None if is_whole else range(start + self.layers_end, start + layers_end)
        if self.layers_end == 0 and not step.is_over:
            self.tell_progress(num_tokens=end)
        self.chunk_end, self.layers_end = end, layers_end
        for part in list(self.parts.values()):
            part.add(Span(self.announced, end, layers))
            self._pump(part)
        if not (step.is_over or self.num_digesting or self.ending):
            self._digest(self.announced, end, num_layers=layers_end)

    def _pump(self, part: OutgoingPart) -> None:
        if self.ending is not None:  # another rank of D could not be written to, and all were told
            return
        try:
            part.pump(self.table[0])
        except PeerError as error:
            self.end(str(error))

    def _on_slow(self, part: OutgoingPart) -> None:
        """Have D's agent driven. If it were not needed, it would only take time from D's steps."""
        if not (part.needs_agent or part.is_through):
            part.needs_agent = True
            self._say_progress(part)

    def _on_settled(self, part: OutgoingPart, settled: JobEnd) -> None:
        if self.ending is not None:
            self._settle()
            return
        if settled.failure is not None:
            self._site.facts.faults["push_write_failed"] += 1
            self.end(f"a write to {part.destination.hello.engine_id}: {settled.failure}")
            return
        self._pump(part)
        if part.is_idle:
            self._observe()
            self._say_if_pushed(part)
        if part.state is OutgoingState.ACCEPTED and self._written(part) > part.reported:
            self._say_progress(part)

    def _digest(self, first_token: int, end_token: int, *, num_layers: int | None = None) -> None:
        """Take the digests of newly completed tokens, off this thread."""
        self.num_digesting += 1

        def done() -> None:
            self.num_digesting -= 1
            if num_layers is None:
                self.digested = max(self.digested, end_token)
            if self.ending is not None:
                self._settle()
                return
            self.say_if_pushed()

        self._seams.take_digests(
            self.table,
            end_token,
            self.expect.request_id if self.expect else "",
            done,
            first_token=first_token,
            num_layers=num_layers,
        )

    def _observe(self) -> None:
        """Learn from the last chunk, once it is written everywhere."""
        step, parts = self.last_step, self.parts.values()
        if step is None or not all(part.is_idle for part in parts):
            return
        self.last_step = None
        exposed_s = max(0.0, max(part.last_s for part in parts) - step.ended_s)
        self._site.observations.append(
            Observation(step.chunk.num_step_tokens, step.layerwise, step.step_s, exposed_s)
        )

    # ---- messages to D -----------------------------------------------------------------

    def tell_progress(self, num_tokens: int = 0) -> None:
        """Send D the push's progress; `num_tokens` are about to be written."""
        self.next_progress_s = self._now_s() + self._progress_s
        for part in self.parts.values():
            if not part.is_through:
                self._say_progress(part, num_tokens)

    def say_if_pushed(self) -> None:
        """Send each rank of D the handoff, once there is one and all its bytes are written."""
        for part in list(self.parts.values()):
            self._say_if_pushed(part)

    def _say_if_pushed(self, part: OutgoingPart) -> None:
        grant, register = self.grant, part.register
        if (
            grant is None
            or grant.handoff is None
            or self.ending is not None
            or part.state is not OutgoingState.ACCEPTED
            or not part.is_idle
            or min(self.announced, self.digested) < grant.num_tokens
        ):
            return
        digests = self._seams.digests.of(
            *self.table, grant.num_tokens, part.route, first_token=register.first_token
        )
        part.state = OutgoingState.PUSHED
        part.until_s = self._now_s() + self._seams.transfer.transfer_timeout_s
        part.destination.send(
            Pushed(
                load_id=register.load_id,
                handoff=grant.handoff,
                digests=digests,
                exposed_s=self._now_s() - self.computed_s,
                num_bytes=part.num_bytes,
                num_descriptors=part.num_descriptors,
            )
        )

    def _say_progress(self, part: OutgoingPart, num_tokens: int = 0) -> None:
        """Send one rank of D the progress of its part."""
        num_settled, layers_end = part.reported = self._written(part)
        part.destination.send(
            Progress(
                load_id=part.register.load_id,
                num_tokens=max(num_tokens, self.announced),
                needs_agent=part.needs_agent,
                num_settled=num_settled,
                layers_end=layers_end,
            )
        )

    def _written(self, part: OutgoingPart) -> tuple[int, int]:
        """Return how much is written to one rank of D, in the terms of `Progress`.

        Returns:
            Number of tokens written in full, and the end of the layers written of the tokens after
            those, up to the prompt's last one; 0 = none.
        """
        span = part.first_unsettled
        if span is None:
            is_last = self.chunk_end >= part.register.num_tokens
            is_layerwise = is_last and self.layers_end > 0
            return self.announced, self._layers.start + self.layers_end if is_layerwise else 0
        is_last = span.end_token >= part.register.num_tokens
        return span.first_token, span.layers.start if is_last and span.layers is not None else 0

    # ---- ending ------------------------------------------------------------------------

    def end(self, reason: str, *, aborted: bool = False) -> None:
        """Stop writing; the push ends once its writes in flight have settled."""
        if self.ending is None:
            self.ending = Ending(reason, aborted)
            for part in self.parts.values():
                if not part.is_through:
                    part.stop()
        self._settle()

    def _settle(self) -> None:
        """Tell each rank of D that the push is ending, once nothing is in flight to it."""
        ending = self.ending or Ending("")
        for part in self.parts.values():
            if not (part.num_jobs or part.is_through):
                self.close(part, OutgoingState.OVER)
                part.destination.send(Fail(part.register.load_id, *ending))
        self.finish_if_over()

    def close(self, part: OutgoingPart, state: OutgoingState) -> None:
        """Close a part from which its rank of D needs nothing more."""
        part.state = state
        self._site.destinations.let_go(part)

    def finish_if_over(self) -> None:
        """Call `on_over`, once, when there is nothing left to do."""
        parts = self.parts.values()
        is_taken = bool(parts) and all(part.state is OutgoingState.TAKEN for part in parts)
        if self.is_over or self.is_reading or not (is_taken or self.ending is not None):
            return
        self.is_over = True
        self._site.on_over(self)

    def _now_s(self) -> float:
        return self._seams.clock.monotonic_s()
