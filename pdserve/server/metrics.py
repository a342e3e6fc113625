"""An engine's Prometheus series.

Names are vLLM's where the meaning is the same, `pdserve_*` otherwise, never both for one
fact. What the engine cores count is read from their newest snapshots when somebody scrapes, as
sums; what only the server sees (latencies, outcomes) is observed as it happens. Every series
exists from the start.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pdserve.observe.metrics import (
    LATENCY_BUCKETS_S,
    SIZE_BUCKETS,
    STAGE_BUCKETS_S,
    TokenHistogram,
    exposition,
    loop_lag_histogram,
)
from pdserve.wire.transfer import KVMode, LeaseEnd, LoadFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric

    from pdserve.wire.request import EngineInfo, EngineStats, KVStoreStats
    from pdserve.wire.step import ExpertBalance

STAGES = ("server", "queue", "prefill", "kv_wait", "kv_transfer", "handover", "first_step")
"""Parts of the time to an engine's first own token, in order; together they are all of it."""

FINISHED_REASONS = ("stop", "length", "abort", "error", "handoff")
DISCONNECT_STAGES = ("queue", "decode")
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


class ServerMetrics:
    """The series of one engine.

    Args:
        model_name: Label of every `vllm:` series.
        stats: Returns the engine's newest snapshot.
        core_stats: Returns each engine core's own.
        info: Returns the engine's description once it is ready.
    """

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats | None],
        core_stats: Callable[[], Sequence[EngineStats | None]],
        info: Callable[[], EngineInfo | None],
    ) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self.registry.register(_EngineCollector(model_name, stats, core_stats, info))
        self.loop_lag = loop_lag_histogram(self.registry)
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", LATENCY_BUCKETS_S
        )
        self._itl = TokenHistogram(
            "vllm:inter_token_latency_seconds",
            "Token to token.",
            labels={"model_name": model_name},
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token.", LATENCY_BUCKETS_S
        )
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Time in the waiting queue.", LATENCY_BUCKETS_S
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "Time in prefill.", LATENCY_BUCKETS_S
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "First to last token.", LATENCY_BUCKETS_S
        )
        self._num_prompt = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", SIZE_BUCKETS
        )
        self._num_output = self._histogram(
            "vllm:request_generation_tokens", "Output tokens of a request.", SIZE_BUCKETS
        )
        success = Counter(
            "vllm:request_success",
            "Finished requests.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._finished = {reason: success.labels(model_name, reason) for reason in FINISHED_REASONS}
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
        disconnects = Counter(
            "pdserve_client_disconnects",
            "Connections closed before the answer was complete.",
            ["stage"],
            registry=self.registry,
        )
        self._disconnects = {stage: disconnects.labels(stage) for stage in DISCONNECT_STAGES}

    def render(self) -> bytes:
        """Return the exposition."""
        return exposition(self.registry)

    def first_token(self, seconds: float) -> None:
        """A choice's first token came `seconds` after its request."""
        self._ttft.observe(seconds)

    def token_gap(self, seconds: float) -> None:
        """A choice's next token came `seconds` after the one before it."""
        self._itl.observe(seconds)

    def stages(
        self, seconds: Mapping[str, float], *, loaded_kv: bool, step_wait_s: float = 0.0
    ) -> None:
        """A request's time to its first own token, by stage (a key of `STAGES`).

        Args:
            step_wait_s: The part of the handover in which KV lay ready while a step ran.
        """
        for name, value in seconds.items():
            self._stages[name].observe(value)
        self._queue.observe(seconds["queue"])
        self._prefill.observe(seconds["prefill"])
        if loaded_kv:
            self._kv_transfer.observe(seconds["kv_transfer"])
            self._kv_wait["load"].observe(seconds["kv_wait"])
            self._kv_wait["handover"].observe(max(0.0, seconds["handover"] - step_wait_s))
            self._kv_wait["step"].observe(step_wait_s)

    def finished(
        self,
        reason: str,
        *,
        num_prompt_tokens: int,
        num_output_tokens: int,
        e2e_s: float,
        decode_s: float | None,
    ) -> None:
        """A choice ended for `reason`, one of `FINISHED_REASONS`."""
        self._finished[reason].inc()
        self._num_prompt.observe(num_prompt_tokens)
        self._num_output.observe(num_output_tokens)
        self._e2e.observe(e2e_s)
        if decode_s is not None:
            self._decode.observe(decode_s)

    def disconnected(self, stage: str) -> None:
        """A client left in `stage`, one of `DISCONNECT_STAGES`."""
        self._disconnects[stage].inc()

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(
            name, documentation, ["model_name"], buckets=buckets, registry=self.registry
        )
        return family.labels(self._model_name)


class _EngineCollector(Collector):
    """The engine cores' own counts, as of their newest snapshots; zeros before the first."""

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats | None],
        core_stats: Callable[[], Sequence[EngineStats | None]],
        info: Callable[[], EngineInfo | None],
    ) -> None:
        self._model_name = model_name
        self._stats = stats
        self._core_stats = core_stats
        self._info = info

    def collect(self) -> Iterator[Metric]:
        """Yield the families; called by the registry at each scrape."""
        stats = self._stats()
        for name, documentation, gauge in (
            ("vllm:num_requests_running", "Requests in the running batch.", "num_running"),
            ("vllm:num_requests_waiting", "Requests that wait to run.", "num_waiting"),
            ("pdserve_num_requests_receiving", "Requests whose KV is on its way.", "num_receiving"),
        ):
            yield self._gauge(name, documentation, getattr(stats, gauge, 0))
        per_core = GaugeMetricFamily(
            "pdserve_core_requests",
            "Requests of each engine core, by state.",
            labels=["engine", "state"],
        )
        for index, core in enumerate(self._core_stats()):
            for state in ("running", "waiting", "receiving"):
                per_core.add_metric([str(index), state], getattr(core, f"num_{state}", 0))
        yield per_core
        blocks = stats.blocks if stats is not None else {}
        num_blocks = stats.num_blocks if stats is not None else 0
        in_use = num_blocks - blocks.get("free", 0) - blocks.get("cached", 0)
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Share of KV blocks in use; 1 is all of them.",
            in_use / num_blocks if num_blocks else 0.0,
        )
        for name, documentation, counter in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", "prefix_cache_queries"),
            ("vllm:prefix_cache_hits", "Prompt tokens found.", "prefix_cache_hits"),
            ("vllm:num_preemptions", "Requests preempted.", "num_preemptions"),
            ("vllm:prompt_tokens", "Prompt tokens processed.", "prompt_tokens"),
            ("vllm:generation_tokens", "Tokens generated.", "generation_tokens"),
            ("pdserve_engine_steps", "Engine steps.", "num_steps"),
            ("pdserve_kv_transfer_bytes", "KV bytes received.", "kv_bytes_received"),
            ("pdserve_kv_transfer_descriptors", "Descriptors posted.", "kv_descriptors"),
            (
                "pdserve_recompute_tokens",
                "Prompt tokens computed here because KV or a prefill engine failed.",
                "recompute_tokens",
            ),
        ):
            yield self._counter(name, documentation, getattr(stats, counter, 0))
        yield self._counters(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their KV came from.",
            "source",
            {
                "local_compute": stats.local_compute_tokens if stats else 0,
                "local_cache_hit": stats.local_cache_hit_tokens if stats else 0,
                "external_kv_transfer": stats.external_kv_tokens if stats else 0,
            },
        )
        failures = stats.kv_load_failures if stats is not None else {}
        yield self._counters(
            "pdserve_kv_transfer_failures",
            "KV loads that did not arrive.",
            "reason",
            {failure.value: failures.get(failure.value, 0) for failure in LoadFailure},
        )
        loads = stats.kv_loads if stats is not None else {}
        yield self._counters(
            "pdserve_kv_loads",
            "KV loads that arrived, by who moved the bytes.",
            "mode",
            {mode.value: loads.get(mode.value, 0) for mode in KVMode},
        )
        yield self._counters(
            "pdserve_kv_source_tokens",
            "Prompt tokens by the connector that loads them, of engines with several.",
            "source",
            stats.kv_source_tokens if stats is not None else {},
        )
        yield from self._store_families(stats.kv_store if stats is not None else None)
        rungs = stats.kv_ladder if stats is not None else {}
        yield self._counters(
            "pdserve_kv_ladder",
            "What was done about KV that did not arrive.",
            "rung",
            {rung: rungs.get(rung, 0) for rung in LADDER_RUNGS},
        )
        spent = stats.kv_seconds if stats is not None else {}
        yield self._counter(
            "pdserve_kv_digest_seconds", "Seconds spent on digests of KV.", spent.get("digest", 0.0)
        )
        faults = stats.kv_faults if stats is not None else {}
        yield self._counters(
            "pdserve_kv_transfer_faults",
            "What should stay rare between engines: refused frames, agent resets.",
            "fault",
            {**dict.fromkeys(KV_FAULTS, 0), **faults},
        )
        told = stats.kv_events if stats is not None else {}
        for name, documentation, count in (
            ("pdserve_kv_events_published", "KV events told to routers.", "published"),
            ("pdserve_kv_events_dropped", "KV events lost, for the queue was full.", "dropped"),
        ):
            yield self._counter(name, documentation, told.get(count, 0))
        yield self._gauge(
            "pdserve_kv_events_queued",
            "Steps whose KV events wait to be published.",
            told.get("queued", 0),
        )
        yield from self._expert_families(stats.experts if stats is not None else None)
        ends = stats.lease_ends if stats is not None else {}
        yield self._counter(
            "pdserve_kv_lease_expired",
            "Leases that nobody read in time.",
            ends.get(LeaseEnd.EXPIRED.value, 0),
        )
        yield self._counters(
            "pdserve_kv_lease_ended",
            "Leases that ended in another way.",
            "end",
            {end.value: ends.get(end.value, 0) for end in LeaseEnd if end is not LeaseEnd.EXPIRED},
        )
        kv_blocks = GaugeMetricFamily("pdserve_kv_blocks", "KV blocks by state.", labels=["state"])
        for state in BLOCK_STATES:
            kv_blocks.add_metric([state], blocks.get(state, 0))
        yield kv_blocks
        ready = GaugeMetricFamily("pdserve_engine_ready", "1 once the weights are loaded.")
        ready.add_metric([], self._info() is not None)
        yield ready

    def _expert_families(self, experts: ExpertBalance | None) -> Iterator[Metric]:
        yield self._gauge(
            "pdserve_expert_balance_ratio",
            "Busiest rank's expert load to the mean in the last window; NaN before the first.",
            experts.ratio_before if experts and experts.num_rebalancings else math.nan,
        )
        for name, documentation, counter in (
            ("pdserve_expert_rebalancings", "Expert placements reviewed.", "num_rebalancings"),
            ("pdserve_expert_moves", "Copies of experts moved.", "num_moved"),
            ("pdserve_expert_moved_bytes", "Their weights, in bytes.", "moved_bytes"),
            ("pdserve_expert_rebalancing_seconds", "Seconds spent on that.", "rebalancing_s"),
        ):
            yield self._counter(name, documentation, getattr(experts, counter, 0))

    def _store_families(self, store: KVStoreStats | None) -> Iterator[Metric]:
        for name, documentation, counter in (
            (
                "vllm:external_prefix_cache_queries",
                "Prompt tokens that the store of KV was asked for.",
                "num_queried_tokens",
            ),
            (
                "vllm:external_prefix_cache_hits",
                "Prompt tokens that came from the store of KV.",
                "num_hit_tokens",
            ),
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
                "pdserve_kv_tier_digest_mismatches",
                "Chunks from the store that were not what was saved; they were not used.",
                "num_wrong_chunks",
            ),
            (
                "pdserve_kv_tier_lookup_timeouts",
                "Prompts that the store was asked for, and did not answer in time.",
                "num_late_lookups",
            ),
        ):
            yield self._counter(name, documentation, getattr(store, counter, 0))
        yield self._gauge(
            "pdserve_kv_tier_server_up",
            "1 while the store's server answers all engine cores.",
            float(store is not None and store.is_up),
        )

    def _labels(self, name: str) -> dict[str, str]:
        return {"model_name": self._model_name} if name.startswith("vllm:") else {}

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        labels = self._labels(name)
        family = GaugeMetricFamily(name, documentation, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        labels = self._labels(name)
        family = CounterMetricFamily(name, documentation, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def _counters(
        self, name: str, documentation: str, label: str, values: Mapping[str, float]
    ) -> Metric:
        labels = self._labels(name)
        family = CounterMetricFamily(name, documentation, labels=[*labels, label])
        for key, value in values.items():
            family.add_metric([*labels.values(), key], value)
        return family
