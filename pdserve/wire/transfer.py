"""What P gives, the proxy carries unread and D consumes; and what workers report back."""

from __future__ import annotations

import enum
import hashlib
import hmac

import msgspec

from pdserve.wire.ids import BlockId, EngineId, Incarnation, RequestId
from pdserve.wire.outputs import TokenLogprobs


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine's transfer side channel listens."""

    host: str
    port: int


class KVHandoff(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A leased, finished prefill: everything D needs to go on where P stopped.

    Signed, because a handoff travels through the proxy: whoever carries it can neither
    forge nor edit it. `signature` covers every other field.

    Attributes:
        engine_id: P's stable name.
        incarnation: P's life; a restarted P refuses handoffs of its earlier one.
        nonce: Unique per lease; a replayed or stale reference does not match it.
        request_id: P's id of the request.
        endpoints: The transfer side channels of P's ranks, in rank order; rank i of D reads
            from rank i of P.
        block_ids: P's blocks in token order.
        num_tokens: Leading prompt tokens whose KV the blocks hold (all of the prompt).
        block_size: Tokens per block at P.
        layout_digest: Digest of P's KV layout; D compares it to its own.
        lease_s: Length of the lease; heartbeats renew it.
        first_token_ids: Tokens P has sampled (one), which D starts from.
        first_logprobs: Their logprobs, if the request asked for any.
        prompt_digest: Digest of the prompt's token ids, so that a handoff can never be
            paired with another prompt.
    """

    engine_id: EngineId
    incarnation: Incarnation
    nonce: str
    request_id: RequestId
    endpoints: list[Endpoint]
    block_ids: list[BlockId]
    num_tokens: int
    block_size: int
    layout_digest: str
    lease_s: float
    prompt_digest: str
    first_token_ids: list[int] = []
    first_logprobs: list[TokenLogprobs] | None = None
    signature: str = ""

    def signed(self, secret: bytes) -> KVHandoff:
        """Return a copy that carries the deployment's HMAC-SHA256 (RFC 2104)."""
        return msgspec.structs.replace(self, signature=self._mac(secret))

    def is_authentic(self, secret: bytes) -> bool:
        """Whether this handoff was signed with `secret` and not edited since."""
        return hmac.compare_digest(self.signature, self._mac(secret))

    def _mac(self, secret: bytes) -> str:
        unsigned = msgspec.structs.replace(self, signature="")
        return hmac.new(secret, msgspec.msgpack.encode(unsigned), hashlib.sha256).hexdigest()


class ConnectorMetadata(msgspec.Struct, frozen=True):
    """One step's instructions from a connector's scheduler half to its worker half.

    The payload is the connector's own frozen struct, encoded: the engine carries it
    through whichever executor there is and does not read it.
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
        nonce: The lease's, which tells it from another one of the same request id; empty if
            the connector does not name its leases.
    """

    request_id: RequestId
    end: LeaseEnd
    nonce: str = ""


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A load is complete and verified; the blocks may be read.

    Attributes:
        num_bytes: Bytes that came over the wire.
        num_descriptors: Descriptors posted for them, after coalescing.
        wait_s: From the load's request to the first byte posted (handshake, queue).
        transfer_s: From the first byte posted to the last one confirmed.
        load_id: Tells the load from another one of the same request id: equal on all ranks,
            and never used again by this engine; 0 if the connector does not count its loads.
    """

    request_id: RequestId
    num_bytes: int
    num_descriptors: int
    wait_s: float
    transfer_s: float
    load_id: int = 0


class LoadFailure(enum.Enum):
    """Why a load did not arrive. Each is a value, a counter's label, never a crash."""

    PEER_LOST = "peer_lost"
    HANDSHAKE = "handshake"
    INCOMPATIBLE = "incompatible"
    LEASE_LOST = "lease_lost"
    TIMEOUT = "timeout"
    DIGEST = "digest"
    ABORTED = "aborted"


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """A load ended without usable KV, and nothing will write the blocks any more.

    Attributes:
        load_id: See `Received`.
    """

    request_id: RequestId
    reason: LoadFailure
    detail: str = ""
    load_id: int = 0


class ConnectorReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker's connector half saw since its last report; each fact once.

    Attributes:
        faults: Count by name of what should stay rare: refused frames, agent resets.
    """

    settled: list[Settled] = []
    received: list[Received] = []
    failed: list[Failed] = []
    faults: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self.settled or self.received or self.failed or self.faults)
