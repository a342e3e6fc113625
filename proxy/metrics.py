"""The proxy's metrics. Every series exists from the start, at 0.

One registry per `Metrics`, so that two proxies in one process do not share counters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdserve.http.series import HttpSeries
from pdserve.observe.metrics import (
    LATENCY_BUCKETS_S,
    STAGE_BUCKETS_S,
    HistogramFamily,
    counter_of,
    exposition,
    loop_lag_histogram,
)
from pdserve.observe.processes import ProcessSeries
from pdserve.observe.request_series import EndedRequest, RequestSeries
from pdserve.proxy.brain.metrics import PrefixMetrics, RouteMetrics
from pdserve.proxy.brain.question import REASONS
from pdserve.proxy.errors import CAUSES
from pdserve.proxy.story import SECOND_TERMS, TTFT_TERMS, LadderRung, Mode, NotPushed, Stage
from pdserve.proxy.totals import ALL, Totals
from pdserve.wire.transfer import KVMode

if TYPE_CHECKING:
    import enum
    from collections.abc import Iterable

    from pdserve.observe.request_series import RequestObserver
    from pdserve.proxy.story import Story

OUTCOMES = ("ok", "client_error", "shed", "error", "disconnected")
LEGS = ("prefill", "decode", "local", "forward")
FAILURES = tuple(CAUSES)
DECISIONS = (
    ("disaggregated", "default"),
    ("disaggregated", "cold"),
    ("local", "no_prefill"),
    ("local", "no_decode"),
    ("local", "no_pair"),
    ("local", "colocated"),
    ("local", "prompt_only"),
    ("local", "never_split"),
    *((way, reason) for way in ("disaggregated", "local") for reason in REASONS),
    ("local", "prefill_failed"),
    ("local", "decode_failed"),
    ("local", "kv_failed"),
    ("local", "stream_lost"),
    ("local", "drained"),
)
_LEG_REASONS = (*FAILURES, "busy")
RUNG_REASONS: Mapping[LadderRung, tuple[str, ...]] = {
    LadderRung.RETRY_DECODE: _LEG_REASONS,
    LadderRung.OTHER_DECODE: _LEG_REASONS,
    LadderRung.OTHER_PREFILL: _LEG_REASONS,
    LadderRung.LOCAL: tuple(reason for decision, reason in DECISIONS if decision == "local"),
    LadderRung.SHED: ("budget", "no_engine"),
}

_REASONS = {"disconnected": ("abort",), "error": ("error",)}
"""Of requests that did not end well, what vLLM calls that; it does not count those it refused."""


_MAX_TENANTS: Final = 32
_OTHERS, _NOBODY = "others", "unnamed"
_NUM_JUDGED: Final = 1000
_SLO_TERMS: Final = ("ttft", "itl")


class Metrics:
    """The proxy's counters, in one registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.process = ProcessSeries({})
        self.totals = Totals()
        registry.register(self.totals)
        self._of_clients = RequestSeries(registry)
        self.http = HttpSeries(registry)
        self.ttft = Histogram(
            "pdserve_time_to_first_token_seconds",
            "From a request's arrival to its first streamed bytes, by how it was served.",
            ["mode"],
            registry=registry,
            buckets=LATENCY_BUCKETS_S,
        )
        self.stage_duration = Histogram(
            "pdserve_stage_duration_seconds",
            "Parts of the time to first token (admission, proxy, retry, queue, reserve, prefill, "
            "relay: they add up to it) and of the second token's wait (decode_queue, kv, "
            "recompute, handover, first_step).",
            ["stage"],
            registry=registry,
            buckets=STAGE_BUCKETS_S,
        )
        self.inter_token = HistogramFamily(
            "pdserve_inter_token_latency_seconds",
            "Gaps between streamed chunks after the second token.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._gaps = self.inter_token.of()
        counter = partial(counter_of, registry)
        self.requests = counter("pdserve_requests", "Requests ended, by outcome.", outcome=OUTCOMES)
        self.decisions = Counter(
            "pdserve_disagg_decisions",
            "How requests were sent, and why.",
            ["decision", "reason"],
            registry=registry,
        )
        self.disconnects = counter(
            "pdserve_client_disconnects",
            "Clients that left, by where their request was.",
            stage=_values(Stage),
        )
        self.leg_failures = counter(
            "pdserve_leg_failures",
            "Exchanges with an engine that failed, by leg and reason.",
            leg=LEGS,
            reason=FAILURES,
        )
        self.retries = counter(
            "pdserve_retries",
            "Exchanges tried again, by leg.",
            leg=LEGS,
        )
        self.replays = counter(
            "pdserve_replays",
            "Streams begun again on another engine, by how that went.",
            result=("resumed", "diverged"),
        )
        self.drains = counter(
            "pdserve_drains",
            "Engines that were left: empty before the deadline, at it, or taken back.",
            outcome=("empty", "deadline", "resumed"),
        )
        self.migrations = counter(
            "pdserve_migrations",
            "Exchanges that were taken from an engine that was well, by why: moved with their KV, "
            "failed to be (and replayed then), or replayed at once.",
            why=("drain",),
            outcome=("moved", "failed", "replayed"),
        )
        self.stalls = Histogram(
            "pdserve_migration_stall_seconds",
            "Gaps in streams that were moved with their KV, from engine to engine.",
            registry=registry,
            buckets=STAGE_BUCKETS_S,
        )
        self.kv_load_failures = Counter(
            "pdserve_kv_load_failures_reported",
            "KV loads that decode engines say failed.",
            registry=registry,
        )
        self.kv_mode = counter(
            "pdserve_kv_mode",
            "Hand-overs begun, by who was to move the KV.",
            mode=_values(KVMode),
        )
        self.not_pushed = counter(
            "pdserve_kv_not_pushed",
            "Hand-overs begun by pull although --kv-mode allows a push, by why.",
            reason=_values(NotPushed),
        )
        self.ladder = Counter(
            "pdserve_kv_ladder",
            "What was done about hand-overs that failed or could not begin, and why.",
            ["rung", "reason"],
            registry=registry,
        )
        self.releases = Counter(
            "pdserve_handoffs_released",
            "Handoffs given back because nobody will read them.",
            registry=registry,
        )
        self.running = Gauge(
            "pdserve_requests_running", "Requests that hold a place.", registry=registry
        )
        self.waiting = Gauge(
            "pdserve_requests_waiting", "Requests in the admission queue.", registry=registry
        )
        self.in_flight = Gauge(
            "pdserve_requests_in_flight",
            "Requests that have not ended, by where they are.",
            ["stage"],
            registry=registry,
        )
        self.backends = Gauge(
            "pdserve_backends", "Engines, by role and state.", ["role", "state"], registry=registry
        )
        self.open_edges = Gauge(
            "pdserve_open_edges",
            "Pairs of a prefill and a decode engine whose breaker is not closed.",
            registry=registry,
        )
        self.loop_lag = loop_lag_histogram(registry)
        self.prefixes = PrefixMetrics(registry)
        self.route = RouteMetrics(registry)
        self.gate = GateMetrics(registry)
        self._create_series()

    def _create_series(self) -> None:
        for served in Mode:
            self.ttft.labels(served.value)
        for stage in (*TTFT_TERMS, *SECOND_TERMS):
            self.stage_duration.labels(stage)
        for decision in DECISIONS:
            self.decisions.labels(*decision)
        for where in Stage:
            self.in_flight.labels(where.value)
        for rung in LadderRung:
            for reason in RUNG_REASONS[rung]:
                self.ladder.labels(rung.value, reason)

    def ended(self, story: Story, outcome: str) -> None:
        """Count a request that is over, with its measurements if all went well.

        Args:
            outcome: One of `OUTCOMES`.
        """
        self.requests.labels(outcome).inc()
        self.totals.ended(story)
        model_name = self.totals.model_name
        if outcome == "ok":
            self._observe(story)
        if model_name:
            reasons = story.finish_reasons if outcome == "ok" else _REASONS.get(outcome, ())
            self._of_clients.count_ends(model_name, ALL, reasons)
            if outcome == "ok":
                _observe_as_vllm(self._of_clients.of(model_name, ALL), story)

    def _observe(self, story: Story) -> None:
        for stage, seconds in story.second_token_terms().items():
            self.stage_duration.labels(stage).observe(seconds)
        for gap_s, number in story.token_gaps:
            self._gaps.observe(gap_s, number)
        terms = story.ttft_terms()
        if story.streamed and terms:
            self.ttft.labels(story.mode.value).observe(sum(terms.values()))
            for stage, seconds in terms.items():
                self.stage_duration.labels(stage).observe(seconds)

    def exposition(self) -> bytes:
        """Return all series in Prometheus' text format."""
        if self.totals.model_name:
            self._of_clients.of(self.totals.model_name, ALL)
        return exposition(self.registry)


def _observe_as_vllm(observer: RequestObserver, story: Story) -> None:
    """Observe a request that succeeded, as its client saw it.

    An answer in one piece arrives all at once: the time of its first token is the one reported by
    the engine that sampled it.
    """
    now_s, first_s = story.clock.monotonic_s(), story.first_token_s
    accounts, stages = story.accounts, story.prefill_stages
    if not story.streamed:
        if stages is None or story.leg_s is None:
            first_s = None
        else:
            first_s = story.leg_s + stages.ttft_s
    terms = story.ttft_terms()
    prefill_s = terms.get("prefill", 0.0)
    if terms:
        observer.began(queue_s=terms["admission"] + terms["queue"], prefill_s=prefill_s)
    if first_s is not None:
        observer.first_token(first_s - story.arrived_s)
    if story.second_token_s is not None and first_s is not None:
        observer.token_gap(story.second_token_s - first_s)
    for gap_s, number in story.token_gaps:
        observer.token_gap(gap_s, number)
    last_s = story.last_chunk_s if story.streamed else now_s
    observer.ended(
        EndedRequest(
            num_prompt_tokens=story.num_known_prompt_tokens,
            num_output_tokens=story.num_output_tokens,
            num_computed_tokens=sum(each.computed_tokens for each in accounts),
            max_tokens=max((each.max_tokens for each in accounts), default=0),
            num_preemptions=sum(each.num_preemptions for each in accounts),
            e2e_s=now_s - story.arrived_s,
            prefill_s=prefill_s,
            decode_s=None if first_s is None else max(0.0, last_s - first_s),
        )
    )
    if accounts:
        observer.ended_together(
            num_choices=max(each.num_choices for each in accounts),
            num_longest=story.num_output_tokens,
        )
    decode = story.decode_stages
    if decode is not None and decode.kv_bytes:
        observer.loaded(seconds=decode.kv_transfer_s, num_bytes=decode.kv_bytes)


class GateMetrics:
    """The series for admission: requests let in, tenants' use, and objectives kept."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(counter_of, registry)
        self.rejected = counter(
            "pdserve_rejected",
            "Requests turned away as they came: they would have missed their objective for the "
            "first token or for further ones (ttft, itl).",
            reason=_SLO_TERMS,
        )
        self.shadow_rejected = counter(
            "pdserve_shadow_rejected",
            "Requests that would have been turned away as they came, with --split-policy shadow.",
            reason=_SLO_TERMS,
        )
        self._tokens = counter(
            "pdserve_tenant_tokens",
            "What tenants have taken: prompt tokens that were computed, and output tokens. The "
            "first that are seen have a label of their own.",
            tenant=(_NOBODY, _OTHERS),
            kind=("prompt", "output"),
        )
        self._slo = counter(
            "pdserve_slo_requests",
            "Streams that ended well, by whose objectives they had (their own, or the default) and "
            "which of them they kept.",
            slo=("own", "default"),
            kept=("both", "ttft", "itl", "none"),
        )
        self._goodput = Gauge(
            "pdserve_goodput_ratio",
            "Share of the last streams that met both objectives.",
            registry=registry,
        )
        self._tenants: set[str] = set()
        self._are_good: deque[bool] = deque(maxlen=_NUM_JUDGED)

    def took(self, tenant: str, num_computed: float, num_output: int) -> None:
        """Count a request's cost."""
        if tenant not in self._tenants and len(self._tenants) < _MAX_TENANTS:
            self._tenants.add(tenant)
        label = (tenant or _NOBODY) if tenant in self._tenants else _OTHERS
        self._tokens.labels(label, "prompt").inc(num_computed)
        self._tokens.labels(label, "output").inc(num_output)

    def compare(self, *, has_own: bool, keeps_ttft: bool, keeps_itl: bool) -> None:
        """Count whether a stream met its objectives."""
        kept = {(True, True): "both", (True, False): "ttft", (False, True): "itl"}
        name = kept.get((keeps_ttft, keeps_itl), "none")
        self._slo.labels("own" if has_own else "default", name).inc()
        self._are_good.append(keeps_ttft and keeps_itl)
        self._goodput.set(sum(self._are_good) / len(self._are_good))


def _values(kinds: Iterable[enum.Enum]) -> list[str]:
    return [each.value for each in kinds]
