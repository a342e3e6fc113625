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
    with the error code `kv_transfer_failed`, because whoever sent it has other ways first.
    """

    RECOMPUTE = "recompute"
    REPORT = "report"


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt, one choice, fully resolved.

    Attributes:
        prompt_token_ids: At least one id, each below the vocabulary's size.
        arrival_s: When the server took the request, in seconds of this host's monotonic clock.
        prediction_token_ids: What the answer may be much like: drafts are made of it.
        deadline_s: From when on the answer is of no use, by the same clock; or None.
        priority: Lower runs first under the priority policy.
        cache_salt: Requests share cached prefixes only with requests of the same salt.
        remote_decode: Prefill only: stop after the first token and lease the KV out.
        handoff: Where another engine has prefilled this prompt, if one has.
        ticket: At P (with `remote_decode`) and at D: the push that this request is part of.
        on_load_failure: At D.
        is_fallback: It is served here in place of another engine: its prompt counts
            against `SchedulerConfig.recompute_tokens_per_s`.
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

    @property
    def is_computed_here(self) -> bool:
        """Whether the engine that gets it computes the prompt."""
        return self.remote_decode or not (self.handoff or self.ticket)


class Sibling(msgspec.Struct, frozen=True, array_like=True):
    """A further choice for the prompt of a `GenerateRequest`: what the two do not share.

    Attributes:
        seed, handoff: In place of the request's own.
    """

    request_id: RequestId
    seed: int
    handoff: KVHandoff | None = None


def sibling_of(request: GenerateRequest) -> Sibling:
    """Return what `request` does not share with others for its prompt."""
    return Sibling(request.request_id, request.sampling.seed, request.handoff)


def with_siblings(
    request: GenerateRequest, siblings: Iterable[Sibling]
) -> Iterator[GenerateRequest]:
    """Yield `request`, and one for each sibling, with the same prompt (the object) in all."""
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
    """What kind of error ended a request, for programs: `EngineOutput.error_code`.

    KV_TRANSFER_FAILED: its KV did not arrive, and it was not to be computed here.
    RECOMPUTE_BUDGET_EXHAUSTED: it would have been, but that is limited; to be tried again.
    HANDOFF_REFUSED: its handoff or its ticket is not to be trusted, or not for this engine.
    BAD_REQUEST: no engine could serve it as it is.
    NON_FINITE_LOGITS: the model made NaN or infinite values of it, and of no other request.
    GRAMMAR_DEAD_END: its grammar, with what else it asks for, allows no further token.
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
        queue_s: In the queue, from arrival at the engine core on: until the first step that
            ran it, or (for a handed-over request) until its blocks were taken.
        prefill_s: From there to the step that sampled the first token.
        kv_wait_s: Waiting for a peer. Of a pull: from the load's start to its first byte
            (handshake, transfer queue, loads that failed). At D of a push: from its blocks'
            reservation until P had computed the last chunk. At P of one: until D had
            reserved.
        kv_transfer_s: Of a pull: from the first byte to the last one confirmed; of a push:
            what came after the last chunk's computation.
        handover_s: From KV ready to the first step that ran the request.
        first_step_s: That step.
        kv_bytes: Bytes received.
        kv_digest_s: The part of `kv_transfer_s` spent on digests.
        step_wait_s: The part of `handover_s` in which the step that ran already was finished.
        store_tokens, store_bytes, store_s: Of the prompt, what came from a store, and how long that
            took beside the rest.
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
    """What happened to one request since its last output.

    Attributes:
        new_token_ids: Tokens in order; the first token of a handed-over request comes
            from its handoff and is reported here like any other.
        logprobs: One entry per new token, if asked for.
        prompt_logprobs: One entry per prompt token (the first is None), once, if asked for.
        pooled: The prompt's vector, with the first token, if asked for; fp32, little endian.
        stop_reason: The stop token id that ended the request, if one of the user's did.
        num_cached_tokens: With tokens: prompt tokens that a prefix cache or a store had when the
            prompt was prefilled, at the engine that did; the same for all choices of a prompt.
        stages: With the first token, and again with the last one.
        error: Human-readable reason when `finish_reason` is ERROR or ABORT.
        load_failures: Labels of failed KV loads, in order; with the first tokens, and the last.
        error_code: An `ErrorCode` value; empty for an error of no kind.
        retry_after_s: With an error that will pass: when to try again.
        kv_mode: "push" or "pull" if KV came from another engine, else empty.
        num_preemptions: With the last token: how often it was preempted.
        num_drafted, num_accepted: Draft tokens of it that were verified here so far; of these,
            right.
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
        num_prompts: Of all three, requests that have no token yet, and whose prompt no other engine
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
        """Return what is told with KV events."""
        free = self.blocks.get("free", 0) + self.blocks.get("cached", 0)
        return RoutingLoad(
            num_requests=self.num_running + self.num_waiting + self.num_receiving,
            num_prompts=self.num_prompts,
            num_used_blocks=self.num_blocks - free,
            num_blocks=self.num_blocks,
        )


class KVStoreStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What an engine has had of a store of KV, and brought there. Counters only grow.

    A chunk is what the store keeps under one name: some tokens' KV, or a rank's share of it.

    Attributes:
        is_up: The store answers.
        num_lookups, num_late_lookups: Prompts that were asked for; without an answer in time.
        num_queried_tokens: Prompt tokens that were asked for: whole chunks.
        num_hit_tokens: Of these, loaded and found right.
        num_loads, num_failed_loads: Ranks' loads; of which a part did not come, or was wrong.
        num_wrong_chunks: Chunks whose bytes were not what was saved.
        loaded_bytes, load_s: Copied from the store, and in how many seconds of copying.
        saved_bytes, save_s: Copied to it.
        num_saved_chunks: That it took.
        num_refused_chunks: That it did not: it had them by then, or no room.
        num_dropped_chunks: That were not offered: the store was gone, or too many waited.
        num_replaced_chunks: Wrong ones that were written anew.
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
        """Sums of the counters; `is_up` is this one's."""
        found = msgspec.structs.asdict(self)
        for other in others:
            for name, value in msgspec.structs.asdict(other).items():
                found[name] += value
        return KVStoreStats(**{**found, "is_up": self.is_up})


class EngineStats(EngineLoad, frozen=True, kw_only=True):
    """A snapshot of one engine core. Counters only grow; gauges are as of the snapshot.

    Attributes:
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
        kv_loads: Loads that arrived, by `KVMode` value.
        kv_ladder: Count by rung: what was done about loads that failed, and fallbacks
            (retry, recompute, report, shed).
        recompute_tokens: Prompt tokens computed here because a load or a prefill engine failed.
        kv_seconds: Sums over loads, by name (wait, transfer, digest).
        kv_store: Of the store of KV; None where there is none.
        kv_source_tokens: Prompt tokens by the connector that loads them, where there are several.
        kv_events: Told of this core's KV, by name: events published and dropped, and steps queued
            now. Empty: nobody is told.
        steps_by_tokens: Steps by the number of tokens that they computed: one count for each of
            `STEP_TOKEN_BOUNDS`, and one for more. Empty where that is not said.
        num_step_tokens: Tokens computed, all steps together.
        num_corrupted: Requests that ended because their logits were not finite.
        num_drafts, num_draft_tokens: Drafts that were verified, and their tokens.
        accepted_by_position: Of those tokens the right ones, by their position in the draft. Empty
            where nothing is drafted.
        num_sat_out: Tokens that waited for a further step, because it was not known yet what their
            grammars allow.
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
    """What an engine says of itself once it is ready.

    Attributes:
        endpoints: The transfer side channels of its ranks, in rank order; none if its
            connector has none.
        layout_digest: Engines with equal digests can exchange KV.
        layout: What the digest was taken over, for messages that name both values.
        can_push: Its connector can write into a peer's blocks, and have its own written.
        kv_shape: How its KV is shared out over its ranks.
        protocol: `wire.seal.PROTOCOL` of its version; the first one did not say.
        kv_events: Where each of its cores tells of its KV, in order; none if it does not.
        text_digest: `Text.digest` of its server; empty where that is not said. Requests with a
            grammar or with tools are shared by engines of equal ones.
        numerics: How it rounds; None where a version does not say.
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
