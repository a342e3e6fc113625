"""The messages between the two ends of a link.

D connects, to every rank of P that has KV for it (`connectors.slicing.routes`), and speaks
first. One connection carries pulls and pushes. Both `Hello` and `Welcome` name the life
(incarnation) of who says it, and frames are authenticated in sequence, so every message is
of these two lives and no others; loads are named by D's `load_id`, which is never used again.

    D                                P
    Hello            ------------>
                     <------------   Welcome | Refuse
    [one small READ] Ready ------>      (both sides have wired up their transports)
    Heartbeat*       ------------>      (leases, and pushes that wait for their turn)

    pull
    Begin            ------------>      (the lease outlives a release until the read ends)
    [READ] Assist?   ------------>      (the transport needs P's help: drive until Done)
    Done             ------------>
                     <------------   Confirm(valid, digests)
    EndRead          ------------>      (given up; the lease goes on, it may be read again)
    LeaseRelease     ------------>      (the lease is over: read by all ranks, or not wanted)

    push
    Register         ------------>
                     <------------   Accept | Fail
                     <------------   Progress*     (D's patience begins anew with each)
    [WRITE]          <------------   Progress*     (so much is written: D may check it)
                     <------------   Pushed(handoff, digests)
    Taken            ------------>      (checked; False: write it all once more, or fail)
    Abort            ------------>
                     <------------   Fail          (nothing is written any more)

Where a copy needs both sides, their movers agree on it in `MoverFrame`s, which either may send
once they have met.

Each request has an answer: Register by Accept or Fail, Pushed by Taken or Abort, Abort by
Fail, before which a Pushed may come that was under way. After `Fail`, and only then, the blocks
are D's again; if P cannot be asked any more, once D's own agent has been destroyed, and, where P
writes without it (on the same host, see `Processes`), once P's process has ended.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated

import msgspec

from pdserve.connectors.slicing import block_bytes
from pdserve.wire.ids import BlockId, EngineId, Incarnation, RequestId
from pdserve.wire.transfer import MAX_NAME_CHARS, KVHandoff, KVShape, LeaseEnd, Numerics

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NotNegative = Annotated[int, msgspec.Meta(ge=0)]
"""What comes over the wire is refused by the decoder if it is below."""
Nonce = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
"""Names a lease or a push, and is remembered when these are over."""


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Registered memory that a peer may read.

    Attributes:
        address: Address of the first byte, in the owner's address space.
        stride_bytes: Bytes per unit (a block); units are contiguous.
        memory: NIXL's name of the memory type, DRAM or VRAM.
        device: Device index; 0 for DRAM.
    """

    address: NotNegative
    stride_bytes: Annotated[int, msgspec.Meta(ge=1)]
    num_units: Annotated[int, msgspec.Meta(ge=1)]
    memory: str
    device: NotNegative

    @property
    def num_bytes(self) -> int:
        """Total size in bytes."""
        return self.stride_bytes * self.num_units

    def why_not_blocks_of(self, shape: KVShape, rank: int) -> str | None:
        """Return why this cannot be all blocks of a rank in that shape; None = it can."""
        wanted = (shape.num_blocks, block_bytes(shape, rank))
        found = (self.num_units, self.stride_bytes)
        if found == wanted:
            return None
        return (
            f"should have {wanted[0]} blocks of {wanted[1]} bytes, it has {found[0]} of {found[1]}"
        )

    def why_outside(self, units: npt.NDArray[np.int32], unit_bytes: int) -> str | None:
        """Return why these cannot be units of this memory, `unit_bytes` each; None: they can."""
        if self.num_bytes % unit_bytes:
            return f"units of {unit_bytes} bytes do not divide {self} evenly"
        num_units = self.num_bytes // unit_bytes
        if len(units) > num_units:
            return f"{len(units)} units of {unit_bytes} bytes are more than {self} has"
        if len(units) and not 0 <= units.min() <= units.max() < num_units:
            return f"units {units.min()} to {units.max()} of {unit_bytes} bytes are not in {self}"
        return None


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """D's introduction, naming the rank of P that it wants to talk to.

    Attributes:
        rank: The sender's rank within its engine.
        wants_incarnation: The life of P whose handoff D holds.
        wants_rank: The rank that D expects the other end to be.
        shape: How D's KV is shared out.
        agent_metadata, pool: D's own memory, for pushes.
        numerics: How D rounds; None where its version does not say.
    """

    engine_id: EngineId
    incarnation: Incarnation
    rank: int
    wants_engine_id: EngineId
    wants_incarnation: Incarnation
    wants_rank: int
    layout_digest: str
    layout_fields: dict[str, str]
    shape: KVShape
    agent_metadata: bytes
    pool: Region
    numerics: Numerics | None = None


class Process(msgspec.Struct, frozen=True, array_like=True):
    """The identity of a process on its host; see `Processes`.

    Attributes:
        host: Equal for processes that could write to one another's memory.
        started: Start time; tells it from earlier processes with the same pid.
    """

    host: str
    pid: int
    started: int


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """P's memory, and how to reach it.

    Attributes:
        agent_metadata: For `add_remote_agent`.
        pool: All KV blocks, one unit each.
        scratch: For the warm-up transfer.
        shape: How P's KV is shared out.
    """

    agent_metadata: bytes
    pool: Region
    scratch: Region
    shape: KVShape
    process: Process


class RefuseReason(enum.Enum):
    """Why P will not serve this D."""

    STALE = "stale"
    INCOMPATIBLE = "incompatible"


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """P's refusal to serve D; `detail` names both values."""

    reason: RefuseReason
    detail: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The warm-up transfer has completed."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Renew these leases."""

    nonces: list[Nonce]


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """D is about to read; `read_id` is D's own name for this load."""

    nonce: Nonce
    read_id: int


class Assist(msgspec.Struct, frozen=True, tag="assist"):
    """The read did not complete in its post: its transport needs P to make progress."""

    read_id: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """All bytes are at D: was the lease still valid, and what should they be?

    Attributes:
        first_token: First token of the read.
    """

    nonce: Nonce
    read_id: int
    first_token: NotNegative


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """P's answer to `Done`. Only `valid`, and digests that match, make the bytes KV.

    Attributes:
        digests: One little-endian uint64 per block of P from the one of `first_token` on, of
            this rank's share that this rank of D reads (`connectors.digests`).
    """

    read_id: int
    valid: bool
    digests: bytes = b""


class EndRead(msgspec.Struct, frozen=True, tag="end_read"):
    """A read that was begun is over without being used; the lease goes on."""

    nonce: Nonce
    read_id: int


class LeaseRelease(msgspec.Struct, frozen=True, tag="release"):
    """The lease is not needed any more."""

    nonce: Nonce
    end: LeaseEnd = LeaseEnd.RELEASED


class Register(msgspec.Struct, frozen=True, tag="register"):
    """Write the prompt's KV into these blocks as it is computed.

    Attributes:
        load_id: D's name for the load, never used before.
        block_ids: D's whole block table.
        first_token: First token to write; D has those before it.
    """

    nonce: Nonce
    load_id: int
    request_id: RequestId
    block_ids: list[BlockId]
    first_token: int
    num_tokens: int


class Accept(msgspec.Struct, frozen=True, tag="accept"):
    """P will write. It keeps the registration until it fails or D has taken all."""

    load_id: int


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Sent with each chunk, when it settles, and every sixth of a lease while P has the load.

    Attributes:
        num_tokens: Tokens that are written or being written.
        needs_agent: A write did not complete in its post: from here on its transport needs D's
            agent to make progress.
        num_settled: Tokens that are written: no write to them is in flight, nor will be unless D
            reports them wrong. D may check them. At an edge of P's blocks, or all.
        layers_end: Of the tokens after those, up to the last one, the layers before this
            (absolute) are written, too.
    """

    load_id: int
    num_tokens: int
    needs_agent: bool = False
    num_settled: int = 0
    layers_end: int = 0


class Pushed(msgspec.Struct, frozen=True, tag="pushed"):
    """Every byte is written.

    Attributes:
        digests: As in `Confirm`, from the block of the registration's `first_token` on.
        exposed_s: Seconds from the end of the last computed chunk to this: the last byte is
            written, its digest taken, and the handoff there.
        num_bytes, num_descriptors: Written by this rank to this rank.
    """

    load_id: int
    handoff: KVHandoff
    digests: bytes
    exposed_s: float
    num_bytes: int
    num_descriptors: int


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """D's answer to `Pushed`: whether the digests match. If not, P writes once more."""

    load_id: int
    valid: bool


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """D no longer wants the load."""

    load_id: int


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    """P writes nothing (more) for this registration; nothing is in flight.

    Attributes:
        aborted: Whether nobody wants the KV: the request ended well with its first token, or a rank
            of D asked for it by `Abort`. Another rank of D may learn this from P before it does
            from its own engine.
    """

    load_id: int
    reason: str
    aborted: bool = False


class MoverFrame(msgspec.Struct, frozen=True, tag="mover"):
    """A message from one side's mover to the other's, opaque to the protocol."""

    body: bytes


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The sender closes the connection on purpose."""

    reason: str


ToServer = (
    Hello
    | Ready
    | Heartbeat
    | Begin
    | Assist
    | Done
    | EndRead
    | LeaseRelease
    | Register
    | Taken
    | Abort
    | MoverFrame
    | Bye
)
ToClient = Welcome | Refuse | Confirm | Accept | Progress | Pushed | Fail | MoverFrame | Bye
