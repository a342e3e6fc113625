"""What the scheduler half of a connector asks of its worker halves, and what they say, as values.

`Instructions` belong to no step and are posted as soon as they are staged; the same value
goes to every rank, and each does its part. `StepInstructions` go with a step: what it
computes of requests that are pushed.

Within one `Instructions` the order of application is that of its fields.

What means the same for all connectors comes back in reports; the rest, at P alone and of pushes, is
the opaque payload of them: `PushNews`.
"""

from __future__ import annotations

import msgspec

from pdserve.wire.ids import BlockId, RequestId
from pdserve.wire.transfer import ConnectorMetadata, EngineRef, KVHandoff, LeaseEnd


class Expect(msgspec.Struct, frozen=True, array_like=True):
    """At P: a request waits for `decode` to register blocks under `nonce`.

    A registration that came before is taken up now. If none has come and the D does not say
    that it still has the request queued, the push is withdrawn after a lease's time.
    """

    nonce: str
    request_id: RequestId
    decode: EngineRef


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """At P: lease the blocks of a finished request to whoever holds the nonce.

    Attributes:
        block_ids, generations: The request's whole table.
        num_tokens: Tokens in them.
        handoff: For a push that is under way under this nonce: what D gets with the last byte.
        is_proof: The last chunk was unproven, and what it waited for has come.
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
    """At D: pull the tokens from `first_token` on, as far as the handoff goes.

    Both tables are whole: they begin with token 0. Which bytes of which ranks that means is
    `connectors.slicing`'s to say.

    Attributes:
        load_id: Never used before by this engine; above 0. Reports carry it.
    """

    load_id: int
    request_id: RequestId
    nonce: str
    owner: EngineRef
    remote_block_ids: list[BlockId]
    local_block_ids: list[BlockId]
    first_token: int
    num_tokens: int
    generations: list[int] = []


class Reserve(msgspec.Struct, frozen=True, array_like=True):
    """At D: have `owner` write the tokens from `first_token` on into these blocks.

    The table is whole. It ends in one report, `Received` with a handoff or `Failed`; until
    then the blocks are P's to write.
    """

    load_id: int
    request_id: RequestId
    nonce: str
    owner: EngineRef
    local_block_ids: list[BlockId]
    first_token: int
    num_tokens: int


class EndLease(msgspec.Struct, frozen=True, array_like=True):
    """At D: tell the owner that its lease is not needed any more, and stop its heartbeats.

    Attributes:
        end: READ if all ranks have what they wanted, RELEASED if nothing was read.
    """

    nonce: str
    owner: EngineRef
    end: LeaseEnd = LeaseEnd.RELEASED


class Stop(msgspec.Struct, frozen=True, array_like=True):
    """At P: write nothing more under this nonce and tell D so.

    Ends in `Settled`, once nothing is read from the blocks any more; also if nothing ever was.
    A step that was planned before may still bring a `Chunk` of it, which is ignored.
    """

    nonce: str
    request_id: RequestId
    reason: str


class End(msgspec.Struct, frozen=True, array_like=True):
    """At P: end a lease from this side."""

    nonce: str
    end: LeaseEnd


class Instructions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is posted at once.

    Attributes:
        unwatches: At D: nonces whose heartbeats are to stop, unknown ones too. Their owners are
            not told: the leases are left to whoever takes over, or to expire.
        keeps: At P: nonces of leases that nobody can read yet, as their handoffs are still here.
        aborts: Requests whose load or reservation is to stop; each still ends in one report.
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
    ends: list[End] = []
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
    """What of a request that is handed over is complete in memory once this step has run.

    Attributes:
        nonce: The push's; empty if the KV will be pulled, under a nonce that is not drawn yet.
        block_ids: P's whole table so far.
        start_token: Tokens that were complete before; of a push they were announced already.
        end_token: Tokens that are complete after. Only whole blocks are worth writing before
            the last chunk, whose end is `num_tokens`. There is no last one of what is pulled.
        num_tokens: Of the prompt.
        num_step_tokens: Tokens that the step computes, of all requests.
        is_unproven: What was to be loaded inside the step may not have come. It is not written
            before the grant says so; a chunk that follows has its tokens, too.
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


class StepInstructions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What goes with one step: what it computes of prompts that are handed over."""

    chunks: list[Chunk] = []

    def to_metadata(self) -> ConnectorMetadata:
        """Encode."""
        return ConnectorMetadata(msgspec.msgpack.encode(self))

    @staticmethod
    def from_metadata(metadata: ConnectorMetadata) -> StepInstructions:
        """Decode what `to_metadata` made."""
        return _STEP_DECODER.decode(metadata.payload)


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """D has reserved blocks for the push `nonce`. Counts once every rank has it."""

    nonce: str


class Withdrawn(msgspec.Struct, frozen=True, kw_only=True):
    """There will be no push under `nonce`, or no more of it. One rank is enough.

    D gave it up or is gone. What is computed can still be leased and pulled.
    """

    nonce: str
    reason: str = ""


class PushNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank has seen of pushes since its last report; each fact once."""

    rank: int
    registered: list[Registered] = []
    withdrawn: list[Withdrawn] = []

    @staticmethod
    def from_payload(payload: bytes) -> PushNews:
        """Decode what `to_payloads` has encoded."""
        return _NEWS_DECODER.decode(payload)

    def to_payloads(self) -> list[bytes]:
        """Encode it for a report; nothing if there is none."""
        return [msgspec.msgpack.encode(self)] if self.registered or self.withdrawn else []


# Made here and not at the first use, which is in a transfer thread: when two threads of a
# process learn the same type at once, msgspec 0.22 crashes.
_DECODER = msgspec.msgpack.Decoder(Instructions)
_STEP_DECODER = msgspec.msgpack.Decoder(StepInstructions)
_NEWS_DECODER = msgspec.msgpack.Decoder(PushNews)
