"""Instructions of a connector's scheduler half to its worker halves, and their answers.

`Instructions` belong to no step and are posted as soon as they are staged; every rank gets the
same value and does its part. `Chunk`s travel with a step: what it computes of requests that are
handed over.

One `Instructions` is applied in the order of its fields.

Facts that mean the same for all connectors come back in the fields of reports. The others, which
concern pushes at P, come back in their opaque payload: `PushNews`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.wire.ids import BlockId, RequestId
from pdserve.wire.transfer import ConnectorMetadata, EngineRef, KVHandoff, LeaseEnd


class Expect(msgspec.Struct, frozen=True, array_like=True):
    """At P: a request waits for `decode` to register blocks under `nonce`.

    An earlier registration takes effect now. Without one, the push is withdrawn after the length
    of a lease, unless D says that the request is still queued there.
    """

    nonce: str
    request_id: RequestId
    decode: EngineRef


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """At P: lease the blocks of a finished request to the engine that presents the nonce.

    Attributes:
        block_ids, generations: The request's whole table.
        num_tokens: Tokens in these blocks.
        handoff: What D gets with the last byte, if a push is in flight under this nonce.
        is_proof: Whether the last chunk was unproven, and the load it depended on has arrived.
    """

    nonce: str
    request_id: RequestId
    block_ids: list[BlockId]
    generations: list[int]
    num_tokens: int
    handoff: KVHandoff | None = None
    is_proof: bool = False


class Watch(msgspec.Struct, frozen=True, array_like=True):
    """At D: meet the owner and keep its lease (or its patience) alive from now on.

    Attributes:
        lease_s: The lease's length in seconds; a heartbeat goes out every sixth of it.
    """

    nonce: str
    owner: EngineRef
    lease_s: float


class Load(msgspec.Struct, frozen=True, array_like=True):
    """At D: pull the tokens from `first_token` to the end of the handoff.

    Both tables are whole: they begin with token 0. `connectors.slicing` computes which bytes of
    which ranks to copy.

    Attributes:
        load_id: A number above 0 that this engine has never used before; reports carry it.
    """

    load_id: int
    request_id: RequestId
    nonce: str
    owner: EngineRef
    remote_block_ids: list[BlockId]
    local_block_ids: list[BlockId]
    first_token: int
    num_tokens: int


class Reserve(msgspec.Struct, frozen=True, array_like=True):
    """At D: have `owner` write the tokens from `first_token` on into these blocks.

    The table is whole. The reservation ends in one report, `Received` with a handoff or `Failed`;
    until then P may write to the blocks.
    """

    load_id: int
    request_id: RequestId
    nonce: str
    owner: EngineRef
    local_block_ids: list[BlockId]
    first_token: int
    num_tokens: int


class EndLease(msgspec.Struct, frozen=True, array_like=True):
    """At D: tell the owner that its lease is no longer needed, and stop its heartbeats.

    Attributes:
        end: READ if all ranks have everything they wanted, RELEASED if nothing was read.
    """

    nonce: str
    owner: EngineRef
    end: LeaseEnd = LeaseEnd.RELEASED


class Stop(msgspec.Struct, frozen=True, array_like=True):
    """At P: write nothing more under this nonce, and tell D.

    Ends in `Settled` once nothing reads from the blocks any more, even if nothing ever did. A step
    that was planned earlier may still bring a `Chunk` of it, which is ignored.

    Attributes:
        is_answered: Whether nobody needs D any more, as the request ended well without it.
    """

    nonce: str
    request_id: RequestId
    reason: str
    is_answered: bool = False


class Instructions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Instructions that are posted at once.

    Attributes:
        unwatches: At D: nonces, possibly unknown, whose heartbeats stop. Their owners are not
            notified: another engine takes the leases over, or they expire.
        ends: At P: nonces of leases that will not be read.
        keeps: At P: nonces of leases that cannot be read yet, as their handoffs are still here.
        aborts: Requests whose load or reservation must stop; each still ends in one report.
    """

    expects: list[Expect] = []
    grants: list[Grant] = []
    watches: list[Watch] = []
    reserves: list[Reserve] = []
    loads: list[Load] = []
    releases: list[EndLease] = []
    unwatches: list[str] = []
    aborts: list[RequestId] = []
    stops: list[Stop] = []
    ends: list[str] = []
    keeps: list[str] = []

    def __bool__(self) -> bool:
        return any(getattr(self, field) for field in self.__struct_fields__)

    def to_metadata(self) -> ConnectorMetadata:
        """Encode."""
        return ConnectorMetadata(msgspec.msgpack.encode(self))

    @staticmethod
    def from_metadata(metadata: ConnectorMetadata) -> Instructions:
        """Decode what `to_metadata` made."""
        return _DECODER.decode(metadata.payload)


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """The part of a handed-over request that is complete in memory once this step has run.

    Attributes:
        nonce: The push's; empty if the KV will be pulled, under a nonce that is not drawn yet.
        block_ids: P's whole table so far.
        start_token: Number of tokens complete before; for a push they were announced already.
        end_token: Number of tokens complete after. Only whole blocks are worth writing before the
            last chunk, whose end is `num_tokens`. For a pull, no last chunk is sent.
        num_tokens: Tokens of the prompt.
        num_step_tokens: Tokens that the step computes, over all requests.
        is_unproven: Whether a load inside the step may have failed. The chunk is not written until
            the grant confirms it; the chunk after it contains its tokens as well.
    """

    nonce: str
    request_id: RequestId
    block_ids: list[BlockId]
    generations: list[int]
    start_token: int
    end_token: int
    num_tokens: int
    num_step_tokens: int
    is_unproven: bool = False


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """D has reserved blocks for the push `nonce`. Counts once every rank has it."""

    nonce: str


class Withdrawn(msgspec.Struct, frozen=True, kw_only=True):
    """The push under `nonce` was withdrawn, before or during it. One rank's report is enough.

    D gave it up or is gone. The computed KV can still be leased and pulled.
    """

    nonce: str
    reason: str = ""


class PushNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank has learned about pushes since its last report, each fact once."""

    rank: int
    registered: list[Registered] = []
    withdrawn: list[Withdrawn] = []

    @staticmethod
    def from_payload(payload: bytes) -> PushNews:
        """Decode a payload made by `to_payloads`."""
        return _NEWS_DECODER.decode(payload)

    def to_payloads(self) -> list[bytes]:
        """Encode for a report; empty if there is no news."""
        return [msgspec.msgpack.encode(self)] if self.registered or self.withdrawn else []


# Made here and not at the first use, which is in a transfer thread: msgspec 0.22 crashes when two
# threads of a process make a decoder for the same type at once.
_DECODER = msgspec.msgpack.Decoder(Instructions)
_NEWS_DECODER = msgspec.msgpack.Decoder(PushNews)
read_chunks: Final = msgspec.msgpack.Decoder(list[Chunk]).decode
