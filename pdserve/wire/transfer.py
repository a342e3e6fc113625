"""Handoffs from P to D, which the proxy carries unread, and the reports of workers."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from pdserve.wire.ids import BlockId, EngineId, Incarnation, RequestId
from pdserve.wire.sampling import TokenLogprobs
from pdserve.wire.seal import Purpose, Seal
from pdserve.wire.trace import RankSlice

if TYPE_CHECKING:
    from collections.abc import Iterator

TICKET_S: Final = 120.0
"""A ticket is sent as soon as it is drawn; this allows for how long an engine may be stuck."""
MAX_TICKET_S: Final = 3600.0
MIN_LEASE_S: Final = 0.01
MAX_LEASE_S: Final = 3600.0
"""Heartbeats follow from a lease's length, so a shorter one would cause constant work."""
MAX_NAME_CHARS: Final = 512
"""Of engines, hosts and nonces, which are kept, and sent in every message."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine's transfer side channel listens."""

    host: str
    port: int


class BlockOrder(enum.Enum):
    """Order of the vectors in a block's layer and plane: heads first (HND) or tokens (NHD)."""

    HND = "HND"
    NHD = "NHD"


class KVShape(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine's KV is distributed over its ranks, so that any other engine can address it.

    Each rank has one tensor `[num_blocks, layers, num_planes, heads, block_size, head_dim]`
    (heads and block_size swapped in NHD) of its own layers and heads. Rank r is the
    (r % tp_size)-th of stage r // tp_size. With fewer KV heads than TP ranks, each head is on
    several of them: rank i of a stage has only head `i * num_kv_heads // tp_size`.

    Attributes:
        num_layers, num_kv_heads: Counts for the whole model; MLA has one latent head, on every
            rank.
        num_planes: 2 (K and V), or 1 for MLA's latent.
        stages: First layer and end of each pipeline stage, in order.
    """

    num_blocks: int
    num_layers: int
    num_planes: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    block_size: int
    tp_size: int = 1
    stages: tuple[tuple[int, int], ...] = ()
    order: BlockOrder = BlockOrder.HND

    @property
    def num_ranks(self) -> int:
        """Number of the engine's ranks."""
        return self.tp_size * max(1, len(self.stages))


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """Facts besides the model that determine an engine's rounding: its numerics id.

    Engines of exact numerics with equal ids write the same text for a request, no matter which of
    them computed which part of its KV. Other engines may still exchange KV.

    Attributes:
        device: Device type and its multiplication units, as in "cuda sm_90".
        kernels: The kernel backend, and a hash of its sources.
        compiler: The kernels' compiler and the libraries they call, with versions.
        tp_size: Number of ranks that share a layer: each sums a part.
        experts: Where whole experts lie, and how their results come together: each rank sums those
            of its own. Empty if ranks have no whole ones.
    """

    device: str
    kernels: str
    compiler: str
    tp_size: int
    experts: str = ""

    def __str__(self) -> str:
        parts = [self.device, f"kernels {self.kernels} by {self.compiler}", f"TP {self.tp_size}"]
        if self.experts:
            parts.append(f"experts {self.experts}")
        return ", ".join(parts)


class EngineRef(msgspec.Struct, frozen=True, kw_only=True):
    """One life of one engine: where its ranks listen (in rank order), and its KV's shape."""

    engine_id: EngineId
    incarnation: Incarnation
    endpoints: tuple[Endpoint, ...]
    shape: KVShape


class PushTicket(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A transfer that is planned before its KV exists: `prefill` will write into `decode`.

    The proxy draws it and sends it to both at once. D reserves slots and blocks and registers
    them at P under `nonce`; P does not start before that, and writes as it computes. Sealed
    like a handoff, because block ids that a peer may write follow from it.

    Attributes:
        nonce: Never reused; becomes the nonce of the lease at P.
        valid_s: Seconds from its arrival at P after which no push begins under it. P also rejects
            a ticket that it remembers having seen.
    """

    nonce: str
    prefill: EngineRef
    decode: EngineRef
    valid_s: float = TICKET_S


class KVHandoff(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A leased prefill, or a request that is moved: all that D needs to continue it.

    It travels sealed through the proxy: a carrier can neither forge nor edit it.

    Attributes:
        engine_id: P's stable name.
        incarnation: P's life; a restarted P refuses handoffs of its earlier one.
        nonce: Unique per lease; a replayed or stale reference does not match it.
        request_id: P's id of the request.
        endpoints: The transfer side channels of P's ranks, in rank order.
        shape: How P's KV is distributed over them.
        block_ids: P's blocks in token order.
        generations: How often each block had been allocated when it was leased: a block
            allocated again since then holds other data.
        num_tokens: Tokens whose KV the blocks hold: the prompt's, and all but the last of
            `first_token_ids`.
        layout_digest: Digest of the KV's meaning (model, weights, dtype), not of its
            distribution over ranks; D compares it to its own.
        lease_s: Length of the lease; heartbeats renew it.
        first_token_ids: Sampled tokens from which D starts: one, unless the request is moved.
        first_logprobs: Logprobs of the first token, if the request asked for any.
        prompt_digest: Digest of the prompt's token ids, so that a handoff can never be
            paired with another prompt.
        num_cached_tokens: Prompt tokens that P's prefix cache had.
    """

    engine_id: EngineId
    incarnation: Incarnation
    nonce: str
    request_id: RequestId
    endpoints: list[Endpoint]
    block_ids: list[BlockId]
    shape: KVShape
    num_tokens: int
    layout_digest: str
    lease_s: float
    prompt_digest: str
    first_token_ids: list[int] = []
    first_logprobs: list[TokenLogprobs] | None = None
    generations: list[int] = []
    num_cached_tokens: int = 0

    @property
    def owner(self) -> EngineRef:
        """The engine that created the handoff."""
        return EngineRef(
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            endpoints=tuple(self.endpoints),
            shape=self.shape,
        )


HANDOFFS: Final = Seal(KVHandoff, Purpose.HANDOFF, what="handoff")
TICKETS: Final = Seal(PushTicket, Purpose.TICKET, what="ticket")


class KVMode(enum.Enum):
    """Who moves the bytes: D reads (PULL), or P writes (PUSH)."""

    PULL = "pull"
    PUSH = "push"


class ConnectorMetadata(msgspec.Struct, frozen=True):
    """Instructions from a connector's scheduler half to its worker halves.

    The payload is the connector's own frozen struct, encoded: the engine passes it
    through any executor without reading it.
    """

    payload: bytes


class LeaseEnd(enum.Enum):
    """How a lease at P ended."""

    READ = "read"
    RELEASED = "released"
    EXPIRED = "expired"
    ABORTED = "aborted"


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """P's blocks of a request have no reader left; they may be freed.

    Attributes:
        nonce: The lease's nonce, which distinguishes leases of the same request id; empty if
            the connector does not name its leases.
        connector: Which of an engine's several connectors reports this; empty if it has one.
    """

    request_id: RequestId
    end: LeaseEnd
    nonce: str = ""
    connector: str = ""


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A load is complete and verified; the blocks may be read.

    Attributes:
        num_bytes: Bytes received over the wire.
        num_descriptors: Descriptors posted for them, after coalescing.
        wait_s: From the load's request to the first byte posted (handshake, queue).
        transfer_s: From the first byte posted to the last one confirmed; of a push, from P's
            last computed chunk to its confirmation here.
        load_id: Distinguishes loads of the same request id: equal on all ranks, and never
            used again by this engine; 0 if the connector does not count its loads.
        mode: Who moved the bytes.
        handoff: Sent with the last byte of a push: the first token, and the lease under which
            its KV may be pulled. None after a pull, where the request came with it.
        digest_s: Seconds of `transfer_s` spent on checking digests.
        elapsed_s: From the load's request to the end of `transfer_s`; 0 if not measured.
            It gives the KV's arrival time, however late this report is read.
        connector: See `Settled`.
    """

    request_id: RequestId
    num_bytes: int
    num_descriptors: int
    wait_s: float
    transfer_s: float
    load_id: int = 0
    mode: KVMode = KVMode.PULL
    handoff: KVHandoff | None = None
    digest_s: float = 0.0
    elapsed_s: float = 0.0
    connector: str = ""


class LoadFailure(enum.Enum):
    """Why a load did not arrive. Each reason is a counter's label, never a crash."""

    PEER_LOST = "peer_lost"
    HANDSHAKE = "handshake"
    INCOMPATIBLE = "incompatible"
    LEASE_LOST = "lease_lost"
    TIMEOUT = "timeout"
    DIGEST = "digest"
    ABORTED = "aborted"
    WITHDRAWN = "withdrawn"


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """A load ended without usable KV, and nothing will write the blocks any more.

    Attributes:
        load_id: See `Received`.
        num_valid_tokens: Leading tokens of the prompt whose KV is in the blocks and was
            confirmed and checked; the first bad block begins after them.
        connector: See `Settled`.
    """

    request_id: RequestId
    reason: LoadFailure
    detail: str = ""
    load_id: int = 0
    num_valid_tokens: int = 0
    connector: str = ""


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a prompt came from a store; reported in its request's log line.

    Attributes:
        num_tokens: Leading prompt tokens, without those that blocks had.
        num_bytes: Bytes of all ranks together.
        seconds: From the first to the last byte copied by the slowest rank.
    """

    request_id: RequestId
    num_tokens: int
    num_bytes: int
    seconds: float


Fact: TypeAlias = Settled | Received | Failed


class ConnectorReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The events of a worker's connector half since its last report; each fact once.

    Attributes:
        faults: Count by name of events that should stay rare: refused frames, agent resets.
        failing: Loads that failed on one rank before all others have reported; set by the
            quorum, once each. They move to `failed` when all ranks have reported.
        given_up: Ids of holds that will not be read because their clients have left. Set by the
            engine, for any id, and not by workers.
        kept: Ids of holds whose handoffs the engine has not passed on yet: the lack of a reader
            does not end them. Set by the engine, at an interval.
        payloads: Further messages from the connector's worker halves to its scheduler half, which
            alone can read them: each from a single rank, unchanged.
        slices: What the rank and its connector's threads did, for traces; no fact, so a report of
            nothing else is false.
        clock_id: The monotonic clock of `slices` (see `wire.trace.TracedProcess`).
    """

    settled: list[Settled] = []
    received: list[Received] = []
    failed: list[Failed] = []
    faults: dict[str, int] = {}
    failing: list[Failed] = []
    given_up: list[str] = []
    kept: list[str] = []
    payloads: list[bytes] = []
    slices: list[RankSlice] = []
    clock_id: str = ""

    def __bool__(self) -> bool:
        return bool(
            self.settled
            or self.received
            or self.failed
            or self.faults
            or self.failing
            or self.given_up
            or self.kept
            or self.payloads
        )

    def one_by_one(self) -> Iterator[tuple[Fact | None, ConnectorReport]]:
        """Yield each fact about a request with a report of it alone; for a payload, None."""
        for payload in self.payloads:
            yield None, msgspec.structs.replace(_NOTHING, payloads=[payload])
        for field in ("settled", "failing", "received", "failed"):
            for fact in getattr(self, field):
                yield fact, msgspec.structs.replace(_NOTHING, **{field: [fact]})


_NOTHING: Final = ConnectorReport()
