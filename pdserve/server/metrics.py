"""An engine's Prometheus metrics, as its server observes them.

Names are vLLM's where the meaning is the same, `pdserve_*` otherwise. Counts of the engine cores
are read from their newest snapshots at each scrape, zeros before the first; values that only the
server sees (latencies, outcomes) are observed as they occur. Every series exists from the start.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pdserve.http.series import HttpSeries
from pdserve.observe.engine_series import cache_family, counts_of, engine_families
from pdserve.observe.metrics import (
    STAGE_BUCKETS_S,
    HistogramFamily,
    counter_of,
    exposition,
    loop_lag_histogram,
)
from pdserve.observe.processes import ProcessSeries
from pdserve.observe.request_series import RequestSeries
from pdserve.observe.vllm_series import meaning
from pdserve.wire.request import EngineStats, KVStoreStats
from pdserve.wire.transfer import KVMode, LeaseEnd, LoadFailure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from pdserve.config.schema import CacheConfig
    from pdserve.engine.client import EngineClient
    from pdserve.observe.request_series import EndedRequest
    from pdserve.wire.step import ExpertBalance

STAGES = ("server", "queue", "prefill", "kv_wait", "kv_transfer", "handover", "first_step")
"""Parts of the time to an engine's first own token, in order; together they are all of it."""

DISCONNECT_STAGES = ("queue", "decode")
PREFILL_LEGS = ("handed_over", "ended", "refused", "failed")
_EVENT_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
_PARSED = "vllm:tool_call_parser_invocations"
_PARSING_MODES = ("streaming", "non_streaming")
_PARSING_OUTCOMES = ("tool_call", "no_tool_call")
_REQUEST_TYPES = ("chat_completions", "responses", "other")
_TYPE_OF_PATH = {"/v1/chat/completions": "chat_completions", "/v1/responses": "responses"}
_CHILDREN = {
    "pdserve.engine.process": "core",
    "pdserve.engine.coordinator": "coordinator",
    "pdserve.executor.rank": "rank",
}
"""By their modules."""
LADDER_RUNGS = ("retry", "recompute", "report", "shed")
BLOCK_STATES = ("free", "cached", "held", "leased", "receiving", "quarantined")
KV_FAULTS = (
    "agent_not_made",
    "agent_reset",
    "block_reused",
    "descriptors_over_budget",
    "digest_mismatch",
    "frame_magic",
    "frame_malformed",
    "frame_oversize",
    "frame_slow",
    "frame_unauthentic",
    "frame_unexpected",
    "grant_repeated",
    "push_digest_mismatch",
    "push_fenced",
    "push_refused",
    "push_repeated",
    "push_unexpected",
    "push_write_failed",
    "report_incomplete",
    "report_of_unknown_rank",
    "report_repeated",
    "report_unknown",
    "reserve_repeated",
    "ticket_expired",
    "ticket_replayed",
    "write_not_exposed",
)
"""Those of the connectors between processes; a connector of another package may have its own."""

_COUNTERS = (
    ("pdserve_engine_steps", "Engine steps.", "num_steps"),
    ("pdserve_kv_transfer_bytes", "KV bytes received.", "kv_bytes_received"),
    ("pdserve_kv_transfer_descriptors", "Descriptors posted.", "kv_descriptors"),
    (
        "pdserve_recompute_tokens",
        "Prompt tokens computed here because KV or a prefill engine failed.",
        "recompute_tokens",
    ),
    (
        "pdserve_grammar_rows_sat_out",
        "Rows that a step left out, as it was not known yet what their grammars allow.",
        "num_sat_out",
    ),
)
_EXPERT_COUNTERS = (
    ("pdserve_expert_rebalancings", "Expert placements reviewed.", "num_rebalancings"),
    ("pdserve_expert_moves", "Copies of experts moved.", "num_moved"),
    ("pdserve_expert_moved_bytes", "Their weights, in bytes.", "moved_bytes"),
    ("pdserve_expert_rebalancing_seconds", "Seconds spent on that.", "rebalancing_s"),
)
_STORE_COUNTERS = (
    ("pdserve_kv_tier_loaded_bytes", "KV from the store.", "loaded_bytes"),
    ("pdserve_kv_tier_load_seconds", "Seconds of copying it.", "load_s"),
    ("pdserve_kv_tier_saved_bytes", "KV to the store.", "saved_bytes"),
    ("pdserve_kv_tier_save_seconds", "Seconds of copying it.", "save_s"),
    (
        "pdserve_kv_tier_dropped_saves",
        "Chunks of KV that were not offered to the store: it was gone, or behind.",
        "num_dropped_chunks",
    ),
    (
        "pdserve_kv_tier_refused_saves",
        "Chunks of KV that the store did not take: it had them by then, or had no room.",
        "num_refused_chunks",
    ),
    (
        "pdserve_kv_tier_digest_mismatches",
        "Chunks from the store that were not what was saved; they were not used.",
        "num_wrong_chunks",
    ),
    (
        "pdserve_kv_tier_lookup_timeouts",
        "Prompts that the store was asked for, and did not answer in time.",
        "num_late_lookups",
    ),
)


class ServerMetrics:
    """The series of one engine.

    Args:
        model_name: Label of every `vllm:` series.
        client: The engine; it need not be ready.
        cache: Its settings.

    Attributes:
        of_core: Observers of requests, by the engine core that serves them.
    """

    def __init__(self, model_name: str, client: EngineClient, cache: CacheConfig) -> None:
        self.registry = CollectorRegistry()
        self._processes = ProcessSeries(_CHILDREN)
        self._model_name = model_name
        self.registry.register(EngineCollector(model_name, client, cache))
        self.http = HttpSeries(self.registry)
        self.loop_lag = loop_lag_histogram(self.registry)
        self._requests = RequestSeries(self.registry)
        self.of_core = [
            self._requests.of(model_name, str(core)) for core in range(len(client.core_stats))
        ]
        stage = Histogram(
            "pdserve_stage_duration_seconds",
            "Parts of the time to this engine's first own token; they sum to it.",
            ["stage"],
            buckets=STAGE_BUCKETS_S,
            registry=self.registry,
        )
        self._stages = {name: stage.labels(name) for name in STAGES}
        self._kv_transfer = Histogram(
            "pdserve_kv_transfer_seconds",
            "First to last byte of a KV load.",
            buckets=STAGE_BUCKETS_S,
            registry=self.registry,
        )
        wait = Histogram(
            "pdserve_kv_transfer_wait_seconds",
            "Time around a KV load in which no bytes moved.",
            ["kind"],
            buckets=STAGE_BUCKETS_S,
            registry=self.registry,
        )
        self._kv_wait = {kind: wait.labels(kind) for kind in ("load", "handover", "step")}
        self._event_tokens = HistogramFamily(
            "pdserve_event_tokens",
            "Tokens of an output: one, and one for each token of a draft that was right.",
            buckets=_EVENT_TOKENS,
            registry=self.registry,
        ).of()
        self._disconnects = counter_of(
            self.registry,
            "pdserve_client_disconnects",
            "Connections closed before the answer was complete.",
            stage=DISCONNECT_STAGES,
        )
        self._prefill_legs = counter_of(
            self.registry,
            "pdserve_prefill_legs",
            "Prompts that this engine had prefilled elsewhere itself, by how that ended.",
            outcome=PREFILL_LEGS,
        )
        parsed = Counter(
            _PARSED,
            meaning(_PARSED),
            ["model_name", "mode", "outcome", "request_type"],
            registry=self.registry,
        )
        self._parsed = {
            each: parsed.labels(model_name, *each)
            for each in product(_PARSING_MODES, _PARSING_OUTCOMES, _REQUEST_TYPES)
        }

    async def render(self) -> bytes:
        """Return the exposition."""
        return exposition(self.registry) + await self._processes.exposition()

    def event(self, num_tokens: int) -> None:
        """Observe `num_tokens` that an engine core gave a choice at once."""
        self._event_tokens.observe(num_tokens)

    def stages(
        self, core: int, seconds: Mapping[str, float], *, kv_bytes: int, step_wait_s: float = 0.0
    ) -> None:
        """Observe a request's time to its first own token, by stage (a key of `STAGES`).

        Args:
            core: The engine core that served it.
            kv_bytes: Bytes of KV that it loaded.
            step_wait_s: The part of the handover in which KV lay ready while a step ran.
        """
        for name, value in seconds.items():
            self._stages[name].observe(value)
        observer = self.of_core[core]
        observer.began(queue_s=seconds["queue"], prefill_s=seconds["prefill"])
        if kv_bytes:
            observer.loaded(seconds=seconds["kv_transfer"], num_bytes=kv_bytes)
            self._kv_transfer.observe(seconds["kv_transfer"])
            self._kv_wait["load"].observe(seconds["kv_wait"])
            self._kv_wait["handover"].observe(max(0.0, seconds["handover"] - step_wait_s))
            self._kv_wait["step"].observe(step_wait_s)

    def choice_ended(self, core: int, reason: str, choice: EndedRequest) -> None:
        """Count a choice that ended for `reason`, one of `FINISHED_REASONS`."""
        self._requests.count_ends(self._model_name, str(core), (reason,))
        self.of_core[core].ended(choice)

    def parsed(self, path: str, *, is_streamed: bool, has_calls: bool) -> None:
        """Count a parsed piece of an answer to a request with tools.

        Args:
            path: Path of the endpoint.
            has_calls: Whether it contributed to a call.
        """
        mode = _PARSING_MODES[0 if is_streamed else 1]
        outcome = _PARSING_OUTCOMES[0 if has_calls else 1]
        self._parsed[mode, outcome, _TYPE_OF_PATH.get(path, _REQUEST_TYPES[-1])].inc()

    def disconnected(self, stage: str) -> None:
        """Count a client that left in `stage`, one of `DISCONNECT_STAGES`."""
        self._disconnects.labels(stage).inc()

    def prefill_leg(self, outcome: str) -> None:
        """Count a prefill leg of this engine by `outcome`, one of `PREFILL_LEGS`."""
        self._prefill_legs.labels(outcome).inc()


class EngineCollector(Collector):
    """The engine cores' own counts.

    Args:
        model_name: Label of every `vllm:` series.
        cache: The engine's settings.
    """

    def __init__(self, model_name: str, client: EngineClient, cache: CacheConfig) -> None:
        self._model_name = model_name
        self._client = client
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """Yield the families; called by the registry at each scrape."""
        cores = {
            str(core): stats or EngineStats() for core, stats in enumerate(self._client.core_stats)
        }
        counts = {core: counts_of(stats) for core, stats in cores.items()}
        yield from engine_families(self._model_name, counts, cores)
        yield cache_family({core: self._cache_labels(stats) for core, stats in cores.items()})
        stats = self._client.stats or EngineStats()
        for name, documentation, counter in _COUNTERS:
            yield CounterMetricFamily(name, documentation, getattr(stats, counter))
        yield from _kv_families(stats)
        yield from _store_families(stats.kv_store or KVStoreStats())
        yield from _expert_families(stats.experts)
        yield GaugeMetricFamily(
            "pdserve_engine_ready",
            "1 once the weights are loaded.",
            self._client.info is not None,
        )

    def _cache_labels(self, stats: EngineStats) -> dict[str, str]:
        """Return settings as `vllm:cache_config_info` spells them."""
        cache, info = self._cache, self._client.info
        return {
            "block_size": "auto" if info is None else str(info.block_size),
            "cache_dtype": "auto" if info is None else info.dtype,
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
            "kv_cache_memory_bytes": str(cache.kv_cache_memory_bytes),
            "num_gpu_blocks": str(stats.num_blocks),
            "num_gpu_blocks_override": str(cache.num_gpu_blocks_override),
        }


def _kv_families(stats: EngineStats) -> Iterator[Metric]:
    failures = stats.kv_load_failures
    yield _counters(
        "pdserve_kv_transfer_failures",
        "KV loads that did not arrive.",
        "reason",
        {failure.value: failures.get(failure.value, 0) for failure in LoadFailure},
    )
    yield _counters(
        "pdserve_kv_loads",
        "KV loads that arrived, by who moved the bytes.",
        "mode",
        {mode.value: stats.kv_loads.get(mode.value, 0) for mode in KVMode},
    )
    yield _counters(
        "pdserve_kv_source_tokens",
        "Prompt tokens by the connector that loads them, of engines with several.",
        "source",
        stats.kv_source_tokens,
    )
    yield _counters(
        "pdserve_kv_ladder",
        "What was done about KV that did not arrive.",
        "rung",
        {rung: stats.kv_ladder.get(rung, 0) for rung in LADDER_RUNGS},
    )
    yield CounterMetricFamily(
        "pdserve_kv_digest_seconds",
        "Seconds spent on digests of KV.",
        stats.kv_seconds.get("digest", 0.0),
    )
    yield _counters(
        "pdserve_kv_transfer_faults",
        "What should stay rare between engines: refused frames, agent resets.",
        "fault",
        {**dict.fromkeys(KV_FAULTS, 0), **stats.kv_faults},
    )
    for name, documentation, count in (
        ("pdserve_kv_events_published", "KV events told to routers.", "published"),
        ("pdserve_kv_events_dropped", "KV events lost, for the queue was full.", "dropped"),
    ):
        yield CounterMetricFamily(name, documentation, stats.kv_events.get(count, 0))
    yield GaugeMetricFamily(
        "pdserve_kv_events_queued",
        "Steps whose KV events wait to be published.",
        stats.kv_events.get("queued", 0),
    )
    ends = stats.lease_ends
    yield CounterMetricFamily(
        "pdserve_kv_lease_expired",
        "Leases that nobody read in time.",
        ends.get(LeaseEnd.EXPIRED.value, 0),
    )
    yield _counters(
        "pdserve_kv_lease_ended",
        "Leases that ended in another way.",
        "end",
        {end.value: ends.get(end.value, 0) for end in LeaseEnd if end is not LeaseEnd.EXPIRED},
    )
    kv_blocks = GaugeMetricFamily("pdserve_kv_blocks", "KV blocks by state.", labels=["state"])
    for state in BLOCK_STATES:
        kv_blocks.add_metric([state], stats.blocks.get(state, 0))
    yield kv_blocks


def _expert_families(experts: ExpertBalance | None) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "pdserve_expert_balance_ratio",
        "Busiest rank's expert load to the mean in the last window; NaN before the first.",
        experts.ratio_before if experts and experts.num_rebalancings else math.nan,
    )
    for name, documentation, counter in _EXPERT_COUNTERS:
        yield CounterMetricFamily(name, documentation, getattr(experts, counter, 0))


def _store_families(store: KVStoreStats) -> Iterator[Metric]:
    for name, documentation, counter in _STORE_COUNTERS:
        yield CounterMetricFamily(name, documentation, getattr(store, counter))
    yield GaugeMetricFamily(
        "pdserve_kv_tier_server_up",
        "1 while the store's server answers all engine cores.",
        store.is_up,
    )


def _counters(name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, documentation, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
