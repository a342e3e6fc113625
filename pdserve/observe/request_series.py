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
    """What is known of a request, or of one of its choices, when it is over.

    Attributes:
        num_computed_tokens: Of its prompt, those whose KV was computed.
        max_tokens: The limit that applied; 0 if it is not known.
        prefill_s: 0 where another engine has prefilled.
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
        """A first token came `seconds` after its request."""
        self._ttft.observe(seconds)

    def token_gap(self, seconds: float, number: int = 1) -> None:
        """A token came `seconds` after the one before it, `number` times."""
        self._itl.observe(seconds, number)

    def began(self, *, queue_s: float, prefill_s: float) -> None:
        """A request has its first token, after so long in queues and in prefill."""
        self._queue.observe(queue_s)
        self._prefill.observe(prefill_s)

    def loaded(self, *, seconds: float, num_bytes: int) -> None:
        """KV of a request came from another engine, `seconds` from its first to its last byte."""
        self._kv_s.observe(seconds)
        self._kv_bytes.observe(num_bytes)

    def ended(self, request: EndedRequest) -> None:
        """A request, or a choice, is over."""
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
        """All choices of a prompt are over; the longest has so many tokens."""
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
        """Return the observer of these labels; its series exist from the first time on."""
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
