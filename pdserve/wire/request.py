"""The request as the API server hands it to an engine, and the outputs that come back."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator

import msgspec

from pdserve.wire.events import EventEndpoint, RoutingLoad
from pdserve.wire.ids import EngineId, Incarnation, RequestId
from pdserve.wire.sampling import SamplingParams, TokenLogprobs
from pdserve.wire.step import ExpertBalance
from pdserve.wire.transfer import Endpoint, KVHandoff, KVShape, Numerics, PushTicket

STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets in which steps are counted by their number of tokens; vLLM's."""


class OnLoadFailure(enum.Enum):
    """What D does with a request whose KV did not arrive, after its own retries.

    RECOMPUTE: it prefills the prompt itself, within its budget. REPORT: it ends the request
    with the error code `kv_transfer_failed`, because the sender tries other ways first.
    """

    RECOMPUTE = "recompute"
    REPORT = "report"


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt, one choice, fully resolved.

    Attributes:
        prompt_token_ids: At least one id, each below the vocabulary's size.
        arrival_s: When the server took the request, in seconds of this host's monotonic clock.
        prediction_token_ids: Text that the answer may resemble; drafts are made from it.
        deadline_s: Time after which the answer is useless, by the same clock; or None.
        priority: Lower runs first under the priority policy.
        yields_s: Its tenant has had more than its share: prompts of other tenants that arrive up to
            so many seconds later go first, even if this one is begun. 0 for all others.
        cache_salt: Requests share cached prefixes only with requests of the same salt.
        remote_decode: Prefill only: stop after the first token and lease the KV out.
        handoff: The prefill of this prompt by another engine, if there was one.
        ticket: At P (with `remote_decode`) and at D: the push that this request is part of.
        on_load_failure: What D does if a load fails; used only at D.
        is_fallback: Whether it is served here in place of another engine; if so, its prompt
            counts against `SchedulerConfig.recompute_tokens_per_s`.
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
    ticket: PushTicket | None = None
    on_load_failure: OnLoadFailure = OnLoadFailure.RECOMPUTE
    is_fallback: bool = False
    prediction_token_ids: list[int] = []
    yields_s: float = 0.0

    @property
    def is_computed_here(self) -> bool:
        """Whether the engine that receives the request computes the prompt."""
        return self.remote_decode or not (self.handoff or self.ticket)


class Sibling(msgspec.Struct, frozen=True, array_like=True):
    """A further choice for the prompt of a `GenerateRequest`: only the fields that differ.

    Attributes:
        seed, handoff: Values that replace the request's own.
    """

    request_id: RequestId
    seed: int
    handoff: KVHandoff | None = None


def sibling_of(request: GenerateRequest) -> Sibling:
    """Return the fields of `request` that it does not share with others for its prompt."""
    return Sibling(request.request_id, request.sampling.seed, request.handoff)


def with_siblings(
    request: GenerateRequest, siblings: Iterable[Sibling]
) -> Iterator[GenerateRequest]:
    """Yield `request` and one request per sibling; all share the same prompt object."""
    yield request
    for sibling in siblings:
        yield msgspec.structs.replace(
            request,
            request_id=sibling.request_id,
            sampling=msgspec.structs.replace(request.sampling, seed=sibling.seed),
            handoff=sibling.handoff,
        )


class FinishReason(enum.Enum):
    """Why a request ended at this engine."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    HANDOFF = "handoff"


class ErrorCode(enum.Enum):
    """The kind of error that ended a request, for programs: `EngineOutput.error_code`.

    KV_TRANSFER_FAILED: its KV did not arrive, and this engine was not allowed to recompute it.
    RECOMPUTE_BUDGET_EXHAUSTED: the budget for recomputing its KV is used up; try again later.
    HANDOFF_REFUSED: its handoff or ticket cannot be trusted, or is not for this engine.
    BAD_REQUEST: no engine could serve it as it is.
    NON_FINITE_LOGITS: the model produced NaN or infinite values for this request only.
    GRAMMAR_DEAD_END: its grammar and its other constraints together allow no further token.
    """

    KV_TRANSFER_FAILED = "kv_transfer_failed"
    RECOMPUTE_BUDGET_EXHAUSTED = "recompute_budget_exhausted"
    HANDOFF_REFUSED = "handoff_refused"
    BAD_REQUEST = "bad_request"
    NON_FINITE_LOGITS = "non_finite_logits"
    GRAMMAR_DEAD_END = "grammar_dead_end"


class RequestStages(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a request's time went inside one engine, in seconds; they do not overlap.

    All but the last ones, from `kv_digest_s` on, sum to the time from the arrival to the end of the
    step that gave the first token computed here.

    Attributes:
        queue_s: Time in the queue, from arrival at the engine core to the first step that
            ran it, or (for a handed-over request) until its blocks were taken.
        prefill_s: From there to the step that sampled the first token.
        kv_wait_s: Waiting for a peer. For a pull: from the load's start to its first byte
            (handshake, transfer queue, loads that failed). For a push, at D: from its blocks'
            reservation until P had computed the last chunk; at P: until D had reserved them.
        kv_transfer_s: For a pull: from the first byte to the last one confirmed; for a push:
            the time after the last chunk's computation.
        handover_s: From KV ready to the first step that ran the request.
        first_step_s: Duration of that step.
        kv_bytes: Bytes received.
        kv_digest_s: The part of `kv_transfer_s` spent on digests.
        step_wait_s: The part of `handover_s` spent waiting for the step already running.
        store_tokens, store_bytes: The part of the prompt that came from a store.
        store_s: Time in which that was copied, on the slowest rank; part of the stages above.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    kv_wait_s: float = 0.0
    kv_transfer_s: float = 0.0
    handover_s: float = 0.0
    first_step_s: float = 0.0
    kv_bytes: int = 0
    kv_digest_s: float = 0.0
    step_wait_s: float = 0.0
    store_tokens: int = 0
    store_bytes: int = 0
    store_s: float = 0.0


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The changes to one request since its last output.

    Attributes:
        new_token_ids: Tokens in order; the first token of a handed-over request comes
            from its handoff and is reported here like any other.
        logprobs: One entry per new token, if asked for.
        prompt_logprobs: One entry per prompt token (the first is None), once, if asked for.
        pooled: The prompt's vector, with the first token, if asked for; fp32, little endian.
        stop_reason: The stop token id that ended the request, if one of the user's did.
        num_cached_tokens: With tokens: prompt tokens that a prefix cache or a store had when the
            prompt was prefilled, at the engine that did; the same for all choices of a prompt.
        num_computed_tokens: With `stages`: prompt tokens whose KV was computed here.
        stages: With the first token, and again with the last one.
        error: Human-readable reason when `finish_reason` is ERROR or ABORT.
        load_failures: Labels of failed KV loads, in order; with the first tokens, and the last.
        error_code: An `ErrorCode` value; empty for errors without a code.
        retry_after_s: With a temporary error: seconds until a retry makes sense.
        kv_mode: "push" or "pull" if KV came from another engine, else empty.
        num_preemptions: With the last token: how often it was preempted.
        num_drafted, num_accepted: The request's draft tokens verified here so far; of these, the
            number accepted.
        core: With its first output: index of the engine core that serves it.
    """

    request_id: RequestId
    new_token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    pooled: bytes | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    handoff: KVHandoff | None = None
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    stages: RequestStages | None = None
    error: str | None = None
    load_failures: list[str] = []
    error_code: str = ""
    retry_after_s: float | None = None
    kv_mode: str = ""
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    core: int = 0


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How busy one engine core is: the part of its statistics that routing uses.

    Attributes:
        num_prompts: Of all three, requests without a token so far whose prompt no other engine
            computes.
        blocks: Number of KV blocks by state: free, cached (free but findable by hash),
            held (by requests), leased (to a peer), receiving (being written by a load or
            a push), quarantined (their request is over, a transfer has not settled).
            They sum to `num_blocks`.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_receiving: int = 0
    num_prompts: int = 0
    blocks: dict[str, int] = {}
    num_blocks: int = 0

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that are held, leased or receiving."""
        return self.in_brief().kv_usage

    def in_brief(self) -> RoutingLoad:
        """Return the load that is sent with KV events."""
        free = self.blocks.get("free", 0) + self.blocks.get("cached", 0)
        return RoutingLoad(
            num_requests=self.num_running + self.num_waiting + self.num_receiving,
            num_prompts=self.num_prompts,
            num_used_blocks=self.num_blocks - free,
            num_blocks=self.num_blocks,
        )


class KVStoreStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An engine's traffic with a store of KV. Counters only grow.

    A chunk is what the store keeps under one name: some tokens' KV, or a rank's share of it.

    Attributes:
        is_up: Whether the store answers.
        num_lookups, num_late_lookups: Prompts looked up; those without an answer in time.
        num_queried_tokens: Prompt tokens looked up: whole chunks.
        num_hit_tokens: Of these, tokens loaded and found correct.
        num_loads, num_failed_loads: Ranks' loads; those with a missing or wrong part.
        num_wrong_chunks: Chunks whose bytes differed from those saved.
        loaded_bytes, load_s: Bytes copied from the store, and seconds spent copying.
        saved_bytes, save_s: The same for copies to the store.
        num_saved_chunks: Chunks that the store took.
        num_refused_chunks: Chunks that it refused: it had them by then, or had no room.
        num_dropped_chunks: Chunks never offered: the store was gone, or too many waited.
        num_replaced_chunks: Wrong chunks that were rewritten.
    """

    is_up: bool = False
    num_lookups: int = 0
    num_late_lookups: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_loads: int = 0
    num_failed_loads: int = 0
    num_wrong_chunks: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    saved_bytes: int = 0
    save_s: float = 0.0
    num_saved_chunks: int = 0
    num_refused_chunks: int = 0
    num_dropped_chunks: int = 0
    num_replaced_chunks: int = 0

    def plus(self, others: Iterable[KVStoreStats]) -> KVStoreStats:
        """Return the sums of the counters, with this one's `is_up`."""
        found = msgspec.structs.asdict(self)
        for other in others:
            for name, value in msgspec.structs.asdict(other).items():
                found[name] += value
        return KVStoreStats(**{**found, "is_up": self.is_up})


class EngineStats(EngineLoad, frozen=True, kw_only=True):
    """A snapshot of one engine core. Counters only grow; gauges are as of the snapshot.

    Attributes:
        prompt_tokens: Prompt tokens whose KV is here or being computed: the sum of the
            next three. Requests aborted before they start count in none of them.
        local_compute_tokens, local_cache_hit_tokens, external_kv_tokens: Prompt tokens
            by where their KV came from.
        peer_kv_tokens: The external ones that another engine had; a store had the others.
        kv_load_failures: Count by `LoadFailure` value.
        lease_ends: Count by `LeaseEnd` value.
        forward_s: Seconds in the model's forward, all steps together.
        kv_faults: Count by name of events between connectors that should stay rare.
        experts: Balance of the last pipeline stage; None where no experts are balanced. Cores
            that share experts report the same.
        kv_loads: Loads that arrived, by `KVMode` value.
        kv_ladder: Count by rung: reactions to failed loads, and fallbacks (retry, recompute,
            report, shed).
        recompute_tokens: Prompt tokens computed here because a load or a prefill engine failed.
        kv_seconds: Sums over loads, by name (wait, transfer, digest).
        kv_store: Traffic with the store of KV; None where there is none.
        kv_source_tokens: Prompt tokens by the connector that loads them, where there are several.
        kv_events: KV event counts by name: events published and dropped, and steps queued now.
            Empty if KV events are off.
        steps_by_tokens: Steps by the number of tokens that they computed: one count for each of
            `STEP_TOKEN_BOUNDS`, and one for more. Empty if not reported.
        num_step_tokens: Tokens computed, all steps together.
        num_corrupted: Requests that ended because their logits were not finite.
        num_drafts, num_draft_tokens: Drafts that were verified, and their tokens.
        accepted_by_position: Accepted draft tokens by their position in the draft. Empty where
            nothing is drafted.
        num_sat_out: Tokens that waited for a further step because their grammars' masks were not
            ready.
    """

    num_preemptions: int = 0
    num_steps: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    local_compute_tokens: int = 0
    local_cache_hit_tokens: int = 0
    external_kv_tokens: int = 0
    peer_kv_tokens: int = 0
    kv_bytes_received: int = 0
    kv_descriptors: int = 0
    kv_load_failures: dict[str, int] = {}
    lease_ends: dict[str, int] = {}
    forward_s: float = 0.0
    kv_faults: dict[str, int] = {}
    experts: ExpertBalance | None = None
    kv_loads: dict[str, int] = {}
    kv_ladder: dict[str, int] = {}
    recompute_tokens: int = 0
    kv_seconds: dict[str, float] = {}
    kv_store: KVStoreStats | None = None
    kv_source_tokens: dict[str, int] = {}
    kv_events: dict[str, int] = {}
    steps_by_tokens: list[int] = []
    num_step_tokens: int = 0
    num_corrupted: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_by_position: list[int] = []
    num_sat_out: int = 0


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's description of itself once it is ready.

    Attributes:
        endpoints: The transfer side channels of its ranks, in rank order; none if its
            connector has none.
        layout_digest: Engines with equal digests can exchange KV.
        layout: The values behind the digest, for messages that name both engines' values.
        can_push: Whether its connector can write a peer's blocks, and let a peer write its own.
        kv_shape: How its KV is distributed over its ranks.
        protocol: `wire.seal.PROTOCOL` of its version; the first version did not report it.
        kv_events: Where each of its cores publishes KV events, in order; empty if off.
        text_digest: `Text.digest` of its server; empty if not reported. Only engines with equal
            digests share requests with a grammar or with tools.
        numerics: How it rounds; None if its version does not report it.
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
    can_push: bool = False
    kv_shape: KVShape | None = None
    protocol: int = 1
    kv_events: list[EventEndpoint] = []
    text_digest: str = ""
    numerics: Numerics | None = None
