"""Table of vLLM's V1 metrics: meaning here, value at a proxy, or the reason for absence.

Whoever makes such a series takes its name's documentation from here, and docs/metrics.md is written
from it (`python -m tools.metric_table`). Facts of vLLM's public source and documentation.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SeriesScope(enum.Enum):
    """Who has a series, and how a proxy comes by it.

    SUMMED: of engine cores; a proxy has the sums over the engines of each role.
    OBSERVED: of requests; a proxy observes those of its clients itself.
    SERVED: of the servers of engines alone, which take answers apart.
    PROCESS: of each process, engine or proxy, its own.
    ABSENT: no process has it.
    """

    SUMMED = "of engine cores; on the proxy summed by role"
    OBSERVED = "of requests; on the proxy of its clients' requests"
    SERVED = "of the servers of engines"
    PROCESS = "of each process"
    ABSENT = "not reported"


@dataclass(frozen=True, slots=True)
class VllmSeries:
    """One of vLLM's series.

    Attributes:
        name: As vLLM names it; a counter's samples end in `_total`. A star stands for any end.
        kind: counter, gauge, histogram or summary.
        meaning: What it says here; for an absent one, why it is not reported.
    """

    name: str
    kind: str
    scope: SeriesScope
    meaning: str


def _rows(scope: SeriesScope, *rows: tuple[str, str, str]) -> tuple[VllmSeries, ...]:
    return tuple(VllmSeries(name, kind, scope, meaning) for name, kind, meaning in rows)


VLLM_SERIES = (
    *_rows(
        SeriesScope.SUMMED,
        ("vllm:num_requests_running", "gauge", "Requests in the running batch."),
        (
            "vllm:num_requests_waiting",
            "gauge",
            "Requests that wait to run, for room or for their KV.",
        ),
        (
            "vllm:num_requests_waiting_by_reason",
            "gauge",
            "The same by reason: for room (capacity), or for KV on its way (deferred).",
        ),
        ("vllm:kv_cache_usage_perc", "gauge", "Share of KV blocks in use; 1 is all of them."),
        ("vllm:prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache."),
        ("vllm:prefix_cache_hits", "counter", "Prompt tokens found there."),
        (
            "vllm:external_prefix_cache_queries",
            "counter",
            "Prompt tokens that the store of KV was asked for.",
        ),
        (
            "vllm:external_prefix_cache_hits",
            "counter",
            "Prompt tokens that came from the store of KV.",
        ),
        ("vllm:num_preemptions", "counter", "Requests preempted."),
        (
            "vllm:prompt_tokens_by_source",
            "counter",
            "Prompt tokens by where their KV came from.",
        ),
        (
            "vllm:prompt_tokens_cached",
            "counter",
            "Prompt tokens that were not computed: from the cache, a store or another engine.",
        ),
        (
            "vllm:prompt_tokens_cached_by_source",
            "counter",
            "The same: of this engine (device), another one (p2p), a store (external_unspecified).",
        ),
        ("vllm:iteration_tokens_total", "histogram", "Tokens computed in a step."),
        (
            "vllm:corrupted_requests",
            "counter",
            "Requests of which the model made NaN or infinite logits; each of them was ended.",
        ),
        (
            "vllm:nixl_num_failed_transfers",
            "counter",
            "KV loads that did not arrive, whatever moves the bytes.",
        ),
        (
            "vllm:nixl_num_kv_expired_reqs",
            "counter",
            "Leases of KV that nobody read in time; counted where the prompt was prefilled.",
        ),
        (
            "vllm:spec_decode_num_drafts",
            "counter",
            "Drafts that were verified, each of some tokens of one request.",
        ),
        ("vllm:spec_decode_num_draft_tokens", "counter", "Tokens of these drafts."),
        (
            "vllm:spec_decode_num_accepted_tokens",
            "counter",
            "Of these tokens, those that proved right.",
        ),
        (
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "counter",
            "The same by their position in the draft, from 0 on.",
        ),
        ("vllm:cache_config_info", "gauge", "1; its labels are settings of the KV cache."),
    ),
    *_rows(
        SeriesScope.OBSERVED,
        ("vllm:prompt_tokens", "counter", "Prompt tokens processed."),
        ("vllm:generation_tokens", "counter", "Tokens generated."),
        ("vllm:request_success", "counter", "Choices that ended, by why."),
        ("vllm:time_to_first_token_seconds", "histogram", "Arrival to first token."),
        (
            "vllm:inter_token_latency_seconds",
            "histogram",
            "Token to token; on the proxy of streams.",
        ),
        (
            "vllm:request_time_per_output_token_seconds",
            "histogram",
            "Mean time per token behind the first, of each request.",
        ),
        ("vllm:e2e_request_latency_seconds", "histogram", "Arrival to last token."),
        ("vllm:request_queue_time_seconds", "histogram", "Time in waiting queues."),
        ("vllm:request_prefill_time_seconds", "histogram", "Time in prefill."),
        ("vllm:request_decode_time_seconds", "histogram", "First to last token."),
        (
            "vllm:request_inference_time_seconds",
            "histogram",
            "Time in prefill and from the first to the last token.",
        ),
        ("vllm:request_prompt_tokens", "histogram", "Prompt tokens of a request."),
        ("vllm:request_generation_tokens", "histogram", "Output tokens of a request."),
        (
            "vllm:request_max_num_generation_tokens",
            "histogram",
            "Output tokens of the longest choice; on the proxy of all choices.",
        ),
        ("vllm:request_params_n", "histogram", "The parameter n."),
        ("vllm:request_params_max_tokens", "histogram", "The parameter max_tokens, as it applies."),
        ("vllm:request_num_preemptions", "histogram", "How often a request was preempted."),
        (
            "vllm:request_prefill_kv_computed_tokens",
            "histogram",
            "Prompt tokens of a request whose KV was computed rather than found or received.",
        ),
        (
            "vllm:nixl_xfer_time_seconds",
            "histogram",
            "First to last byte of a KV load, whatever moves the bytes.",
        ),
        ("vllm:nixl_bytes_transferred", "histogram", "Bytes of a KV load."),
    ),
    *_rows(
        SeriesScope.SERVED,
        (
            "vllm:tool_call_parser_invocations",
            "counter",
            "Uses of the parser of tool calls: each event of a stream, or the whole choice.",
        ),
    ),
    *_rows(
        SeriesScope.PROCESS,
        ("http_requests", "counter", "HTTP requests, by path, method and class of status."),
        (
            "http_request_duration_seconds",
            "histogram",
            "Time to the end of the answer, streams included, by path and method.",
        ),
        (
            "http_request_duration_highr_seconds",
            "histogram",
            "The same over all paths, in more buckets.",
        ),
        ("http_request_size_bytes", "summary", "Content-Length of requests, by path."),
        ("http_response_size_bytes", "summary", "Content-Length of answers; 0 for streams."),
        (
            "process_*",
            "gauge",
            'CPU, memory, descriptors, start; with `process="core 0"` of those it has started.',
        ),
        ("python_*", "gauge", "The interpreter's version and its garbage collections."),
    ),
    *_rows(
        SeriesScope.ABSENT,
        ("vllm:engine_sleep_state", "gauge", "Engines do not sleep."),
        ("vllm:engine_healthy", "gauge", "`/readyz`, and `pdserve_engine_ready`."),
        ("vllm:lora_requests_info", "gauge", "There are no LoRA adapters."),
        (
            "vllm:admission_rejections",
            "counter",
            'The proxy\'s `pdserve_requests_total{outcome="shed"}`.',
        ),
        (
            "vllm:num_requests_kv_fetch_by_stage",
            "gauge",
            '`vllm:num_requests_waiting_by_reason{reason="deferred"}` is their sum.',
        ),
        ("vllm:watermark_requests", "counter", "Output has no watermark."),
        ("vllm:mooncake_*", "histogram", "There is no Mooncake connector."),
        ("vllm:hf3fs_*", "histogram", "There is no HF3FS connector."),
        ("vllm:umbp_*", "counter", "There is no UMBP connector."),
        ("vllm:diffusion_*", "counter", "There are no diffusion models."),
        ("vllm:rl_*", "histogram", "Weights are not updated in place."),
        ("vllm:sleep_mode_*", "histogram", "Engines do not sleep."),
        ("vllm:websocket_*", "counter", "There are no WebSockets."),
        ("vllm:mm_cache_*", "counter", "Models take text only."),
        (
            "vllm:kv_block_*",
            "histogram",
            "Ages of blocks are not sampled; `pdserve_kv_blocks` has their states.",
        ),
        (
            "vllm:kv_offload_*",
            "counter",
            "KV beyond the engine is kept by LMCache: `pdserve_kv_tier_*`.",
        ),
        ("vllm:simple_kv_offload_*", "counter", "As before: `pdserve_kv_tier_*`."),
        ("vllm:hisparse_*", "gauge", "There is no HiSparse connector."),
        ("vllm:estimated_*_per_gpu", "counter", "The model's FLOPs are not estimated."),
        (
            "vllm:nixl_post_time_seconds",
            "histogram",
            "Posting is not timed by itself: it is in `vllm:nixl_xfer_time_seconds`.",
        ),
        (
            "vllm:nixl_num_descriptors",
            "histogram",
            "Counted over all loads: `pdserve_kv_transfer_descriptors_total`.",
        ),
        ("vllm:nixl_num_notifications_after_expiry", "counter", "As the next one."),
        (
            "vllm:nixl_num_failed_notifications",
            "counter",
            "A load whose end is not confirmed is one that failed.",
        ),
        ("vllm:prompt_tokens_recomputed", "counter", "Such a token counts as computed."),
        ("vllm:time_per_output_token_seconds", "histogram", "vLLM has dropped it."),
        ("vllm:gpu_cache_usage_perc", "gauge", "vLLM has dropped it."),
        ("vllm:gpu_prefix_cache_*", "counter", "vLLM has dropped them."),
        ("vllm:num_requests_swapped", "gauge", "Nothing is swapped here, nor by vLLM's V1."),
    ),
)

_MEANINGS = {series.name: series.meaning for series in VLLM_SERIES}


def meaning(name: str) -> str:
    """Return the documentation of one of vLLM's series that is here."""
    return _MEANINGS[name]
