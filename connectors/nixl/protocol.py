"""What two transfer threads say to one another over the side channel.

D connects and speaks first; P answers and never speaks unasked, but for `Bye`.

    D                                P
    Hello            ------------>      (drives its NIXL side until Ready)
                     <------------   Welcome | Refuse
    [one small READ] Ready ------>
    Heartbeat*       ------------>
    Begin            ------------>      (the lease outlives a release until the read ends)
    [READ] Assist?   ------------>      (the transport needs P's help: drive until Done)
    Done             ------------>
                     <------------   Confirm(valid)
    Release          ------------>      (not read, or given up)
"""

from __future__ import annotations

import enum

import msgspec

from pdserve.wire.ids import EngineId, Incarnation


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Registered memory that a peer may read.

    Attributes:
        address: Of the first byte, in the owner's address space.
        stride_bytes: Bytes per unit (a block); units lie densely.
        num_units: How many.
        memory: NIXL's name of the memory type, DRAM or VRAM.
        device: Device index; 0 for DRAM.
    """

    address: int
    stride_bytes: int
    num_units: int
    memory: str
    device: int

    @property
    def num_bytes(self) -> int:
        """Its whole size."""
        return self.stride_bytes * self.num_units


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """D introduces itself and says whom it wants to talk to.

    Attributes:
        rank: Of the one that says this, within its engine.
        wants_incarnation: The life of P that D holds a handoff of.
        wants_rank: The rank of P that holds the KV of this rank of D.
    """

    engine_id: EngineId
    incarnation: Incarnation
    rank: int
    wants_engine_id: EngineId
    wants_incarnation: Incarnation
    wants_rank: int
    layout_digest: str
    layout_fields: dict[str, str]


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """P's memory, and how to reach it.

    Attributes:
        agent_metadata: For `add_remote_agent`.
        pool: All KV blocks, one unit each.
        scratch: For the warm-up transfer.
    """

    agent_metadata: bytes
    pool: Region
    scratch: Region


class RefuseReason(enum.Enum):
    """Why P will not serve this D."""

    STALE = "stale"
    INCOMPATIBLE = "incompatible"


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """P will not serve; `detail` names both values."""

    reason: RefuseReason
    detail: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The warm-up transfer is through."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Renew these leases."""

    nonces: list[str]


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """D is about to read; `read_id` is D's own name for this load."""

    nonce: str
    read_id: int


class Assist(msgspec.Struct, frozen=True, tag="assist"):
    """The read did not complete in its post: its transport needs P to make progress."""

    read_id: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """All bytes are at D: was the lease still valid?"""

    nonce: str
    read_id: int


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """P's answer to `Done`. Only `valid` makes the bytes KV."""

    read_id: int
    valid: bool


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The lease will not be read; a read of it that was begun (`read_id` > 0) is over."""

    nonce: str
    read_id: int = 0


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """This side closes the connection on purpose."""

    reason: str


ToServer = Hello | Ready | Heartbeat | Begin | Assist | Done | Release | Bye
ToClient = Welcome | Refuse | Confirm | Bye
