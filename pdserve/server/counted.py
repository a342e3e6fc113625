"""Series of what an engine's cores count, read from their newest snapshots at each scrape.

Zeros before the first snapshot. What only the server sees is in `metrics`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pdserve.observe.engine_series import cache_family, counts_of, engine_families
from pdserve.wire.request import EngineStats, KVStoreStats
from pdserve.wire.transfer import KVMode, LeaseEnd, LoadFailure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from pdserve.config.schema import CacheConfig
    from pdserve.engine.client import EngineClient
    from pdserve.wire.step import ExpertBalance

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
            yield _counter(name, documentation, getattr(stats, counter))
        yield from _kv_families(stats)
        yield from _store_families(stats.kv_store or KVStoreStats())
        yield from _expert_families(stats.experts)
        yield _gauge(
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
    yield _counter(
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
        yield _counter(name, documentation, stats.kv_events.get(count, 0))
    yield _gauge(
        "pdserve_kv_events_queued",
        "Steps whose KV events wait to be published.",
        stats.kv_events.get("queued", 0),
    )
    ends = stats.lease_ends
    yield _counter(
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
    yield _gauge(
        "pdserve_expert_balance_ratio",
        "Busiest rank's expert load to the mean in the last window; NaN before the first.",
        experts.ratio_before if experts and experts.num_rebalancings else math.nan,
    )
    for name, documentation, counter in _EXPERT_COUNTERS:
        yield _counter(name, documentation, getattr(experts, counter, 0))


def _store_families(store: KVStoreStats) -> Iterator[Metric]:
    for name, documentation, counter in _STORE_COUNTERS:
        yield _counter(name, documentation, getattr(store, counter))
    yield _gauge(
        "pdserve_kv_tier_server_up",
        "1 while the store's server answers all engine cores.",
        store.is_up,
    )


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value=value)


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(name, documentation, value=value)


def _counters(name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, documentation, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
