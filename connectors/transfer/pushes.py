"""What P knows of a push: whom it is for, why a registration is refused, when it is given up.

Values, and what follows from them; `pushing` acts on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pdserve.connectors.slicing import token_step

if TYPE_CHECKING:
    from pdserve.config.schema import TransferConfig
    from pdserve.connectors.handover.instructions import Chunk, Expect, Grant, Stop
    from pdserve.connectors.slicing import Shard
    from pdserve.connectors.transfer.destinations import Destination
    from pdserve.connectors.transfer.protocol import Hello, Register
    from pdserve.connectors.transfer.writing import OutgoingPart
    from pdserve.wire.ids import BlockId
    from pdserve.wire.transfer import KVShape, LeaseEnd

_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class ChunkStep:
    """What a step did to a pushed request, as the thread that runs steps saw it.

    Attributes:
        layers_end: Layers of this rank that are complete in memory.
        is_over: The step has ended: all layers are.
        layerwise: It was to be written layer by layer.
        step_s: How long the step took, if it is over.
        ended_s: When it ended (monotonic seconds).
    """

    chunk: Chunk
    layers_end: int
    is_over: bool
    layerwise: bool
    step_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Observation:
    """What a step's last chunk has cost, for `LayerwiseChoice.observe`."""

    num_step_tokens: int
    layerwise: bool
    step_s: float
    exposed_s: float


class Ending(NamedTuple):
    """Why a push is over, or ending; `aborted` as in `Fail`."""

    reason: str
    aborted: bool = False


@dataclass(slots=True, eq=False)
class Push:
    """One nonce.

    Attributes:
        alive_s: When D last gave a sign of life.
        incomplete_since_s: Since when some ranks of D have registered, and others have not; inf if
            none has, or all have.
        waits_since_s: Since when D's blocks wait for the first chunk; inf while they do not.
        table: P's blocks and their generations, as far as a chunk or the grant has named them.
        announced: Tokens that are written or being written.
        chunk_end, layers_end: The end of the chunk behind them, and how many layers of it are
            written or being written.
        digested: Tokens whose digests are taken.
        num_digesting: Work on digests that has not ended; it reads from the blocks.
        computed_s: When the last chunk was complete.
        unproven: A step whose chunk may be written once the grant proves it.
        ending: Why it is ending.
    """

    nonce: str
    since_s: float
    alive_s: float
    next_progress_s: float
    expect: Expect | None = None
    parts: dict[tuple[str, str, int], OutgoingPart] = field(default_factory=dict)
    is_registered: bool = False
    incomplete_since_s: float = _NEVER
    waits_since_s: float = _NEVER
    table: tuple[list[BlockId], list[int]] = ((), ())  # type: ignore[assignment]
    announced: int = 0
    chunk_end: int = 0
    layers_end: int = 0
    digested: int = 0
    num_digesting: int = 0
    computed_s: float = 0.0
    last_step: ChunkStep | None = None
    unproven: ChunkStep | None = None
    grant: Grant | None = None
    ending: Ending | None = None
    stop: Stop | None = None
    release: LeaseEnd | None = None

    @property
    def is_reading(self) -> bool:
        """Whether something of it reads from P's blocks."""
        return self.num_digesting > 0 or any(part.num_jobs for part in self.parts.values())


def written_of(push: Push, part: OutgoingPart, mine: Shard) -> tuple[int, int]:
    """What of a push is written to one rank of D, as `Progress` says it.

    Args:
        mine: What this rank of P has.

    Returns:
        Tokens of which everything is, and, of those behind them up to the prompt's last, the end
        of the layers that are; 0 = none.
    """
    span = part.first_unsettled
    if span is None:
        is_last = push.chunk_end >= part.register.num_tokens
        is_layerwise = is_last and push.layers_end > 0
        return push.announced, mine.layers.start + push.layers_end if is_layerwise else 0
    is_last = span.end_token >= part.register.num_tokens
    return span.first_token, span.layers.start if is_last and span.layers is not None else 0


def why_not_writable(source: KVShape, hello: Hello, message: Register) -> str | None:
    """Why what a rank of D has registered cannot be written; None = it can, as far as is known."""
    shape = hello.shape
    num_blocks = -(-message.num_tokens // shape.block_size)
    if message.num_tokens < 1 or len(message.block_ids) < num_blocks:
        return f"{message.num_tokens} tokens in {len(message.block_ids)} blocks"
    if not all(0 <= block < shape.num_blocks for block in message.block_ids):
        return f"it names blocks outside of its {shape.num_blocks}"
    step = token_step(source, shape)
    if not 0 <= message.first_token <= message.num_tokens or message.first_token % step:
        return f"it begins at token {message.first_token} of {message.num_tokens}"
    why = hello.pool.why_not_blocks_of(shape, hello.rank)
    return None if why is None else f"{hello.engine_id} {why}"


def why_not_of(push: Push, destination: Destination, message: Register) -> str | None:
    """Why what a rank of D has registered is no part of this push; None = it is."""
    if destination.life in push.parts:
        return "this rank has registered other blocks for it"
    why = why_not_expected(push, destination.hello)
    if why is not None:
        return why
    if any(p.register.num_tokens != message.num_tokens for p in push.parts.values()):
        return f"{message.num_tokens} tokens are not what another rank said"
    return None


def why_not_expected(push: Push, hello: Hello) -> str | None:
    """Why a rank is not of the D that a push is for; None = it is, or nobody knows yet."""
    if push.expect is None:
        return None
    decode = push.expect.decode
    if (decode.engine_id, decode.incarnation) != (hello.engine_id, hello.incarnation):
        return (
            f"the push is for {decode.engine_id} incarnation {decode.incarnation}, not for "
            f"{hello.engine_id} incarnation {hello.incarnation}"
        )
    if decode.shape != hello.shape:
        return f"{hello.engine_id} says another shape of its KV than the ticket"
    return None


def why_overdue(
    push: Push, now_s: float, *, transfer: TransferConfig, last_step_s: float
) -> str | None:
    """Why a push is given up now; None = it is not.

    Args:
        now_s: Monotonic seconds, like all times here.
        last_step_s: When this rank of P last ran a step.
    """
    lease_s = transfer.lease_s
    if push.expect is None:
        late = now_s >= push.since_s + lease_s
        return f"no request came for it in {lease_s:.1f} s" if late else None
    if now_s >= push.alive_s + lease_s:
        return f"no sign of life from {push.expect.decode.engine_id} for {lease_s:.1f} s"
    if now_s >= push.incomplete_since_s + lease_s:
        # One of its ranks has given up, perhaps, and another that was not told so waits on.
        return f"only some of D's ranks have registered for {lease_s:.1f} s"
    if now_s >= _stuck_at_s(push, lease_s, last_step_s):
        # Its pool may be full of what D would read, had it the blocks that wait for this.
        return f"D's blocks wait, and no step has run here for {lease_s:.1f} s"
    timeout_s = transfer.transfer_timeout_s
    if any(now_s >= part.posted_since_s + timeout_s for part in push.parts.values()):
        return f"a write to {push.expect.decode.engine_id} has not ended in {timeout_s:.1f} s"
    if any(now_s >= part.until_s for part in push.parts.values()):
        return f"D did not say in {timeout_s:.1f} s if it has it all"
    return None


def push_due_s(push: Push, *, transfer: TransferConfig, last_step_s: float) -> float:
    """When something has to be done about a push by the clock; inf = never."""
    if push.ending is not None:
        return _NEVER
    lease_s = transfer.lease_s
    since_s = push.since_s if push.expect is None else push.alive_s
    untils_s = (
        min(part.until_s, part.posted_since_s + transfer.transfer_timeout_s)
        for part in push.parts.values()
    )
    stuck_s = _stuck_at_s(push, lease_s, last_step_s)
    since_s = min(since_s, push.incomplete_since_s)
    return min(since_s + lease_s, stuck_s, push.next_progress_s, *untils_s)


def _stuck_at_s(push: Push, lease_s: float, last_step_s: float) -> float:
    """When a push that has not begun is given up, for nothing goes on at this engine."""
    return max(push.waits_since_s, last_step_s) + lease_s
