"""The request as the API server hands it to an engine, and the outputs that come back."""

from __future__ import annotations

import enum

import msgspec

from pdserve.wire.ids import EngineId, Incarnation, RequestId
from pdserve.wire.outputs import TokenLogprobs
from pdserve.wire.sampling import SamplingParams
from pdserve.wire.step import ExpertBalance
from pdserve.wire.transfer import Endpoint, KVHandoff


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt, one choice, fully resolved.

    Attributes:
        prompt_token_ids: At least one id, each below the vocabulary's size.
        arrival_s: Wall-clock seconds when the server took the request.
        deadline_s: Wall-clock seconds after which the answer is of no use, or None.
        priority: Lower runs first under the priority policy.
        cache_salt: Requests share cached prefixes only with requests of the same salt.
        remote_decode: Prefill only: stop after the first token and lease the KV out.
        handoff: Where another engine has prefilled this prompt, if one has.
    """

    request_id: RequestId
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_s: float
    deadline_s: float | None = None
    priority: int = 0
    cache_salt: str = ""
    remote_decode: bool = False
    handoff: KVHandoff | None = None


class FinishReason(enum.Enum):
    """Why a request ended at this engine."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    HANDOFF = "handoff"


class RequestStages(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a request's time went inside one engine, in seconds; they do not overlap.

    Attributes:
        queue_s: From arrival at the engine core to the first step that ran it (for a
            handed-over request: until its load began).
        prefill_s: From there to the step that sampled the first token.
        kv_wait_s: From the load's start to its first byte (handshake, transfer queue).
        kv_transfer_s: From the first byte to the last one confirmed.
        handover_s: From KV ready to the first step that ran the request.
        first_step_s: That step.
        kv_bytes: Bytes received.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    kv_wait_s: float = 0.0
    kv_transfer_s: float = 0.0
    handover_s: float = 0.0
    first_step_s: float = 0.0
    kv_bytes: int = 0


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What happened to one request since its last output.

    Attributes:
        new_token_ids: Tokens in order; the first token of a handed-over request comes
            from its handoff and is reported here like any other.
        logprobs: One entry per new token, if asked for.
        prompt_logprobs: One entry per prompt token (the first is None), once, if asked for.
        stop_reason: The stop token id that ended the request, if one of the user's did.
        num_cached_tokens: Prompt tokens not computed here: prefix hits and received KV.
        num_external_tokens: The part of them that another engine computed.
        stages: With the first token, and again with the last one.
        error: Human-readable reason when `finish_reason` is ERROR or ABORT.
        load_failures: Labels of failed KV loads that were recomputed, in order.
    """

    request_id: RequestId
    new_token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    handoff: KVHandoff | None = None
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    stages: RequestStages | None = None
    error: str | None = None
    load_failures: list[str] = []


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one engine core. Counters only grow; gauges are as of the snapshot.

    Attributes:
        blocks: Number of KV blocks by state: free, cached (free but findable by hash),
            held (by requests), leased (to a peer), receiving (being written by a load).
            They sum to `num_blocks`.
        prompt_tokens: Prompt tokens whose KV is here or being computed: the sum of the
            next three. What is aborted before it starts is in none of them.
        local_compute_tokens, local_cache_hit_tokens, external_kv_tokens: Prompt tokens
            by where their KV came from.
        kv_load_failures: Count by `LoadFailure` value.
        lease_ends: Count by `LeaseEnd` value.
        forward_s: Seconds in the model's forward, all steps together.
        kv_faults: Count by name of what should stay rare between connectors.
        experts: Of the last pipeline stage; None where no experts are balanced. Cores that
            share them say the same.
    """

    num_running: int
    num_waiting: int
    num_receiving: int
    blocks: dict[str, int]
    num_blocks: int
    num_preemptions: int
    num_steps: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    prompt_tokens: int
    generation_tokens: int
    local_compute_tokens: int
    local_cache_hit_tokens: int
    external_kv_tokens: int
    kv_bytes_received: int
    kv_descriptors: int
    kv_load_failures: dict[str, int]
    lease_ends: dict[str, int]
    forward_s: float = 0.0
    kv_faults: dict[str, int] = {}
    experts: ExpertBalance | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself once it is ready.

    Attributes:
        endpoints: The transfer side channels of its ranks, in rank order; none if its
            connector has none.
        layout_digest: Engines with equal digests can exchange KV.
        layout: What the digest was taken over, for messages that name both values.
    """

    engine_id: EngineId
    incarnation: Incarnation
    role: str
    model: str
    dtype: str
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    endpoints: list[Endpoint]
    layout_digest: str
    layout: dict[str, str]
