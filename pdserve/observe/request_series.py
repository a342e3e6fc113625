"""vLLM's series of requests: a server observes those of its engine, a proxy those of its clients.

One observation for each request, or each token's gap; knows nothing of how they were served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import Counter

from pdserve.observe.metrics import LATENCY_BUCKETS_S, SIZE_BUCKETS, HistogramFamily
from pdserve.observe.vllm_series import meaning

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client import CollectorRegistry

FINISHED_REASONS = ("stop", "length", "abort", "error", "handoff")

_LABELS = ("model_name", "engine")
_NUM_CHOICES = (1, 2, 5, 10, 20)
_NUM_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_KV_BYTES = tuple(1 << exponent for exponent in range(11, 37, 2))
_BUCKETS: dict[str, Sequence[float]] = {
    "vllm:time_to_first_token_seconds": LATENCY_BUCKETS_S,
    "vllm:inter_token_latency_seconds": LATENCY_BUCKETS_S,
    "vllm:request_time_per_output_token_seconds": LATENCY_BUCKETS_S,
    "vllm:e2e_request_latency_seconds": LATENCY_BUCKETS_S,
    "vllm:request_queue_time_seconds": LATENCY_BUCKETS_S,
    "vllm:request_prefill_time_seconds": LATENCY_BUCKETS_S,
    "vllm:request_decode_time_seconds": LATENCY_BUCKETS_S,
    "vllm:request_inference_time_seconds": LATENCY_BUCKETS_S,
    "vllm:request_prompt_tokens": SIZE_BUCKETS,
    "vllm:request_generation_tokens": SIZE_BUCKETS,
    "vllm:request_max_num_generation_tokens": SIZE_BUCKETS,
    "vllm:request_params_n": _NUM_CHOICES,
    "vllm:request_params_max_tokens": SIZE_BUCKETS,
    "vllm:request_num_preemptions": _NUM_PREEMPTIONS,
    "vllm:request_prefill_kv_computed_tokens": SIZE_BUCKETS,
    "vllm:nixl_xfer_time_seconds": LATENCY_BUCKETS_S,
    "vllm:nixl_bytes_transferred": _KV_BYTES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """The figures of a request, or of one of its choices, when it is over.

    Attributes:
        num_computed_tokens: Prompt tokens whose KV was computed.
        max_tokens: The limit that applied; 0 if unknown.
        prefill_s: Prefill time; 0 if another engine prefilled.
        decode_s: From its first token to its last one; None without a token.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    max_tokens: int
    num_preemptions: int
    e2e_s: float
    prefill_s: float
    decode_s: float | None


class RequestObserver:
    """The series of one model and one value of the label `engine`."""

    def __init__(self, families: dict[str, HistogramFamily], labels: tuple[str, str]) -> None:
        histogram = {name: family.of(*labels) for name, family in families.items()}
        self._ttft = histogram["vllm:time_to_first_token_seconds"]
        self._itl = histogram["vllm:inter_token_latency_seconds"]
        self._tpot = histogram["vllm:request_time_per_output_token_seconds"]
        self._e2e = histogram["vllm:e2e_request_latency_seconds"]
        self._queue = histogram["vllm:request_queue_time_seconds"]
        self._prefill = histogram["vllm:request_prefill_time_seconds"]
        self._decode = histogram["vllm:request_decode_time_seconds"]
        self._inference = histogram["vllm:request_inference_time_seconds"]
        self._num_prompt = histogram["vllm:request_prompt_tokens"]
        self._num_output = histogram["vllm:request_generation_tokens"]
        self._longest = histogram["vllm:request_max_num_generation_tokens"]
        self._num_choices = histogram["vllm:request_params_n"]
        self._max_tokens = histogram["vllm:request_params_max_tokens"]
        self._num_preemptions = histogram["vllm:request_num_preemptions"]
        self._num_computed = histogram["vllm:request_prefill_kv_computed_tokens"]
        self._kv_s = histogram["vllm:nixl_xfer_time_seconds"]
        self._kv_bytes = histogram["vllm:nixl_bytes_transferred"]

    def first_token(self, seconds: float) -> None:
        """Observe a first token, `seconds` after its request."""
        self._ttft.observe(seconds)

    def token_gap(self, seconds: float, number: int = 1) -> None:
        """Observe `number` tokens, each `seconds` after the one before it."""
        self._itl.observe(seconds, number)

    def began(self, *, queue_s: float, prefill_s: float) -> None:
        """Observe the queue and prefill times of a request that has its first token."""
        self._queue.observe(queue_s)
        self._prefill.observe(prefill_s)

    def loaded(self, *, seconds: float, num_bytes: int) -> None:
        """Observe KV from another engine; `seconds` run from its first to its last byte."""
        self._kv_s.observe(seconds)
        self._kv_bytes.observe(num_bytes)

    def ended(self, request: EndedRequest) -> None:
        """Observe the end of a request or a choice."""
        num_output, decode_s = request.num_output_tokens, request.decode_s
        self._num_prompt.observe(request.num_prompt_tokens)
        self._num_output.observe(num_output)
        self._num_computed.observe(request.num_computed_tokens)
        self._num_preemptions.observe(request.num_preemptions)
        self._e2e.observe(request.e2e_s)
        if request.max_tokens:
            self._max_tokens.observe(request.max_tokens)
        if decode_s is not None:
            self._decode.observe(decode_s)
            self._inference.observe(request.prefill_s + decode_s)
            if num_output > 1:
                self._tpot.observe(decode_s / (num_output - 1))

    def ended_together(self, *, num_choices: int, num_longest: int) -> None:
        """Observe the end of all choices of a prompt; the longest has `num_longest` tokens."""
        self._num_choices.observe(num_choices)
        self._longest.observe(num_longest)


class RequestSeries:
    """The families, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._families = {
            name: HistogramFamily(
                name, meaning(name), labels=_LABELS, buckets=buckets, registry=registry
            )
            for name, buckets in _BUCKETS.items()
        }
        name = "vllm:request_success"
        self._success = Counter(
            name, meaning(name), [*_LABELS, "finished_reason"], registry=registry
        )
        self._observers: dict[tuple[str, str], RequestObserver] = {}

    def of(self, model_name: str, engine: str) -> RequestObserver:
        """Return the observer of these labels; its series exist from the first call on."""
        labels = (model_name, engine)
        if labels not in self._observers:
            self._observers[labels] = RequestObserver(self._families, labels)
            for reason in FINISHED_REASONS:
                self._success.labels(*labels, reason)
        return self._observers[labels]

    def count_ends(self, model_name: str, engine: str, reasons: Iterable[str]) -> None:
        """Count choices that ended, each for one of `FINISHED_REASONS`."""
        for reason in reasons:
            self._success.labels(model_name, engine, reason).inc()
