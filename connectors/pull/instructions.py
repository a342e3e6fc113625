"""What the scheduler half of a pull connector asks of its worker halves, as values.

One `PullInstructions` per step, carried as the payload of a `ConnectorMetadata`, the same
for every rank. Within one value the order of application is: grants, watches, loads,
releases, aborts, ends.
"""

from __future__ import annotations

import msgspec

from pdserve.wire.ids import BlockId, EngineId, Incarnation, RequestId
from pdserve.wire.transfer import ConnectorMetadata, Endpoint, KVHandoff, LeaseEnd


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """One life of the engine that holds a lease, and where its ranks listen.

    Every rank of D gets the same instructions and deals with its own rank of the owner.

    Attributes:
        endpoints: In rank order; as many as D has ranks.
    """

    engine_id: EngineId
    incarnation: Incarnation
    endpoints: tuple[Endpoint, ...]

    @classmethod
    def of(cls, handoff: KVHandoff) -> Owner:
        """The engine that made `handoff`."""
        return cls(handoff.engine_id, handoff.incarnation, tuple(handoff.endpoints))


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """At P: lease the blocks of a finished request to whoever holds the nonce."""

    nonce: str
    request_id: RequestId
    block_ids: list[BlockId]


class End(msgspec.Struct, frozen=True, array_like=True):
    """At P: end a lease from this side."""

    nonce: str
    end: LeaseEnd


class Watch(msgspec.Struct, frozen=True, array_like=True):
    """At D: meet the owner and keep its lease alive from now on.

    Attributes:
        lease_s: The lease's length in seconds; a heartbeat goes out every sixth of it.
    """

    nonce: str
    owner: Owner
    lease_s: float


class Load(msgspec.Struct, frozen=True, array_like=True):
    """At D: copy `remote_block_ids` of the owner to `local_block_ids`, pair by pair.

    Attributes:
        load_id: Never used before by this engine; above 0. Reports carry it.
    """

    load_id: int
    request_id: RequestId
    nonce: str
    owner: Owner
    remote_block_ids: list[BlockId]
    local_block_ids: list[BlockId]


class Release(msgspec.Struct, frozen=True, array_like=True):
    """At D: tell the owner that its lease will not be read, and stop its heartbeats."""

    nonce: str
    owner: Owner


class PullInstructions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step's instructions.

    Attributes:
        aborts: Requests whose load is to stop; each still ends in one report.
    """

    grants: list[Grant] = []
    watches: list[Watch] = []
    loads: list[Load] = []
    releases: list[Release] = []
    aborts: list[RequestId] = []
    ends: list[End] = []

    def __bool__(self) -> bool:
        return bool(
            self.grants or self.watches or self.loads or self.releases or self.aborts or self.ends
        )

    def to_metadata(self) -> ConnectorMetadata:
        """Encode."""
        return ConnectorMetadata(msgspec.msgpack.encode(self))

    @staticmethod
    def from_metadata(metadata: ConnectorMetadata) -> PullInstructions:
        """Decode what `to_metadata` made."""
        return _DECODER.decode(metadata.payload)


# Made here and not at the first use, which is in a transfer thread: when two threads of a
# process learn the same type at once, msgspec 0.22 crashes.
_DECODER = msgspec.msgpack.Decoder(PullInstructions)
