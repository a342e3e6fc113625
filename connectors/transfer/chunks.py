"""What P writes of a push: chunk by chunk to every rank of D, their digests, what D is told.

A chunk is written as steps make it complete, layer by layer or at once, to all ranks of D side by
side, and its digests are taken beside that. Each rank hears how far its part is (`Progress`), and
at the end gets the handoff (`Pushed`). What begins a push and what ends it is `pushing`'s.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING

from pdserve.connectors.slicing import shard_of
from pdserve.connectors.transfer.protocol import Progress, Pushed
from pdserve.connectors.transfer.pushes import Observation, written_of
from pdserve.connectors.transfer.writing import OutgoingState, Span
from pdserve.errors import PeerError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from pdserve.connectors.transfer.pushes import ChunkStep, Push
    from pdserve.connectors.transfer.seams import JobEnd, Seams
    from pdserve.connectors.transfer.writing import OutgoingPart

_PROGRESS_PER_LEASE = 6
_NEVER = float("inf")


class ChunkWriter:
    """Writes the pushes of one rank of P.

    Args:
        faults: Where it counts what should stay rare.
        end: Ends a push, for a reason; `settle` is called when something has ended that a push
            which is ending waits for.

    Attributes:
        observations: What steps have cost; the thread that runs steps empties it.
        progress_s: How often D is told how far a push is.
    """

    def __init__(
        self,
        seams: Seams,
        *,
        faults: Counter[str],
        end: Callable[[Push, str], None],
        settle: Callable[[Push], None],
    ) -> None:
        self._seams = seams
        self._shape = seams.context.shape
        self._shard = shard_of(seams.context.shape, seams.context.rank)
        self._transfer = seams.transfer
        self._digests = seams.digests
        self._faults = faults
        self._end = end
        self._settle = settle
        self.observations: deque[Observation] = deque(maxlen=256)
        self.progress_s = self._transfer.lease_s / _PROGRESS_PER_LEASE

    def write(self, push: Push, step: ChunkStep) -> None:
        """Write what a step has made complete of a chunk, or all of it."""
        chunk = step.chunk
        is_last = chunk.end_token >= chunk.num_tokens
        end = chunk.num_tokens if is_last else self._block_edge(chunk.end_token)
        push.table = (chunk.block_ids, chunk.generations)
        if end > push.announced:
            self._write_layers(push, end, step)
        if not step.is_over:
            return
        if is_last:
            push.computed_s = step.ended_s
            push.last_step = None if chunk.is_unproven else step
        if end > push.announced:
            self._digest(push, push.announced, end)
            push.announced, push.layers_end = end, 0
        self.tell_progress(push)
        self.say_if_pushed(push)

    def rewrite(self, push: Push, part: OutgoingPart) -> None:
        """Write everything once more to a rank of D."""
        part.was_rewritten = True
        part.state, part.until_s = OutgoingState.ACCEPTED, _NEVER
        part.add(Span(part.register.first_token, part.register.num_tokens, None))
        self._pump(push, part)

    def tell_progress(self, push: Push, num_tokens: int = 0) -> None:
        """Tell D how far a push is; `num_tokens` are about to be written."""
        push.next_progress_s = self._now_s() + self.progress_s
        for part in push.parts.values():
            if not part.is_through:
                self._say_progress(push, part, num_tokens)

    def say_if_pushed(self, push: Push) -> None:
        """Give each rank of D the handoff, once there is one and every byte is written to it."""
        for part in list(push.parts.values()):
            self._say_if_pushed(push, part)

    def _write_layers(self, push: Push, end: int, step: ChunkStep) -> None:
        """Write what the step has made complete: some layers, or all, of the chunk's tokens."""
        num_layers, start = len(self._shard.layers), self._shard.layers.start
        layers_end = num_layers if step.is_over else min(step.layers_end, num_layers)
        if layers_end <= push.layers_end:
            return
        is_whole = step.is_over and push.layers_end == 0
        layers = None if is_whole else range(start + push.layers_end, start + layers_end)
        if push.layers_end == 0 and not step.is_over:
            self.tell_progress(push, num_tokens=end)
        push.chunk_end, push.layers_end = end, layers_end
        for part in list(push.parts.values()):
            part.add(Span(push.announced, end, layers))
            self._pump(push, part)
        if not (step.is_over or push.num_digesting or push.ending):
            self._digest(push, push.announced, end, num_layers=layers_end)

    def _pump(self, push: Push, part: OutgoingPart) -> None:
        try:
            part.pump(
                self._seams,
                push.table[0],
                functools.partial(self._on_settled, push),
                functools.partial(self._on_slow, push),
            )
        except PeerError as error:
            self._end(push, str(error))

    def _on_slow(self, push: Push, part: OutgoingPart) -> None:
        """Have D's agent driven. One that is not needed would only take time from D's steps."""
        if not (part.needs_agent or part.is_through):
            part.needs_agent = True
            self._say_progress(push, part)

    def _on_settled(self, push: Push, part: OutgoingPart, settled: JobEnd) -> None:
        if push.ending is not None:
            self._settle(push)
            return
        if settled.failure is not None:
            self._faults["push_write_failed"] += 1
            self._end(push, f"a write to {part.destination.hello.engine_id}: {settled.failure}")
            return
        self._pump(push, part)
        if part.is_idle:
            self._observe(push)
            self._say_if_pushed(push, part)
        if part.state is OutgoingState.ACCEPTED and written_of(push, part, self._shard) > part.told:
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
            self.say_if_pushed(push)

        self._seams.background.submit(work, push.expect.request_id if push.expect else "")

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

    def _say_if_pushed(self, push: Push, part: OutgoingPart) -> None:
        """Give D the handoff, once there is one and every byte is written."""
        grant, register = push.grant, part.register
        if (
            grant is None
            or grant.handoff is None
            or push.ending is not None
            or part.state is not OutgoingState.ACCEPTED
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
        part.state = OutgoingState.PUSHED
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

    def _say_progress(self, push: Push, part: OutgoingPart, num_tokens: int = 0) -> None:
        """Tell one rank of D how far its part is."""
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

    def _block_edge(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._shape.block_size

    def _now_s(self) -> float:
        return self._seams.clock.monotonic_s()
