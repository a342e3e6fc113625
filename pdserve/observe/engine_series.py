"""vLLM's series of what engine cores count, from their snapshots.

A server reports them for each of its cores, a proxy for all engines of a role together, so counts
are a flat mapping that can be added up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from pdserve.observe.metrics import add_histogram
from pdserve.observe.vllm_series import meaning
from pdserve.wire.request import STEP_TOKEN_BOUNDS, EngineLoad, EngineStats, KVStoreStats
from pdserve.wire.transfer import LeaseEnd

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.metrics_core import Metric

_STEP_TOKENS = "vllm:iteration_tokens_total"
_SUM = "sum"
_OWN_LABEL = {
    "vllm:num_requests_waiting_by_reason": "reason",
    "vllm:prompt_tokens_by_source": "source",
    "vllm:prompt_tokens_cached_by_source": "source",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "position",
}
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos"
_LABELS = ("model_name", "engine")

SeriesCounts = dict[tuple[str, str], float]
"""Values by a series' name and the value of its own label, empty if it has none. For the histogram
of step tokens, the label is a bucket's index, or `sum`."""


def counts_of(stats: EngineStats) -> SeriesCounts:
    """Return the counts that only grow during the life of an engine core."""
    store = stats.kv_store or KVStoreStats()
    cached, external = stats.local_cache_hit_tokens, stats.external_kv_tokens
    by_source = "vllm:prompt_tokens_by_source"
    cached_by_source = "vllm:prompt_tokens_cached_by_source"
    accepted = stats.accepted_by_position or [0]
    steps = stats.steps_by_tokens or [0] * (len(STEP_TOKEN_BOUNDS) + 1)
    return {
        ("vllm:prefix_cache_queries", ""): stats.prefix_cache_queries,
        ("vllm:prefix_cache_hits", ""): stats.prefix_cache_hits,
        ("vllm:external_prefix_cache_queries", ""): store.num_queried_tokens,
        ("vllm:external_prefix_cache_hits", ""): store.num_hit_tokens,
        ("vllm:num_preemptions", ""): stats.num_preemptions,
        ("vllm:prompt_tokens", ""): stats.prompt_tokens,
        ("vllm:generation_tokens", ""): stats.generation_tokens,
        (by_source, "local_compute"): stats.local_compute_tokens,
        (by_source, "local_cache_hit"): cached,
        (by_source, "external_kv_transfer"): external,
        ("vllm:prompt_tokens_cached", ""): cached + external,
        (cached_by_source, "device"): cached,
        (cached_by_source, "p2p"): stats.peer_kv_tokens,
        (cached_by_source, "external_unspecified"): external - stats.peer_kv_tokens,
        ("vllm:corrupted_requests", ""): stats.num_corrupted,
        ("vllm:spec_decode_num_drafts", ""): stats.num_drafts,
        ("vllm:spec_decode_num_draft_tokens", ""): stats.num_draft_tokens,
        ("vllm:spec_decode_num_accepted_tokens", ""): sum(accepted),
        **{(_ACCEPTED, str(position)): number for position, number in enumerate(accepted)},
        ("vllm:nixl_num_failed_transfers", ""): sum(stats.kv_load_failures.values()),
        ("vllm:nixl_num_kv_expired_reqs", ""): stats.lease_ends.get(LeaseEnd.EXPIRED.value, 0),
        **{(_STEP_TOKENS, str(index)): number for index, number in enumerate(steps)},
        (_STEP_TOKENS, _SUM): stats.num_step_tokens,
    }


def _levels_of(load: EngineLoad) -> SeriesCounts:
    by_reason = "vllm:num_requests_waiting_by_reason"
    return {
        ("vllm:num_requests_running", ""): load.num_running,
        ("vllm:num_requests_waiting", ""): load.num_waiting + load.num_receiving,
        (by_reason, "capacity"): load.num_waiting,
        (by_reason, "deferred"): load.num_receiving,
        ("vllm:kv_cache_usage_perc", ""): load.kv_usage,
    }


def engine_families(
    model_name: str, counts: Mapping[str, SeriesCounts], loads: Mapping[str, EngineLoad]
) -> Iterator[Metric]:
    """Yield the families of `counts_of` and of the engines' load.

    Args:
        counts, loads: Values by the label `engine`; the same keys.
    """
    families: dict[str, Metric] = {}
    levels = {engine: _levels_of(load) for engine, load in loads.items()}
    for kind, by_engine in ((GaugeMetricFamily, levels), (CounterMetricFamily, counts)):
        for engine, values in by_engine.items():
            for (name, value), number in values.items():
                if name == _STEP_TOKENS:
                    continue
                own = _OWN_LABEL.get(name)
                if name not in families:
                    labels = _LABELS if own is None else (*_LABELS, own)
                    families[name] = kind(name, meaning(name), labels=labels)
                suffix = "_total" if kind is CounterMetricFamily else ""
                labelled = {"model_name": model_name, "engine": engine}
                if own is not None:
                    labelled[own] = value
                families[name].add_sample(name + suffix, labelled, number)
    yield from families.values()
    yield _step_tokens(model_name, counts)


def _step_tokens(model_name: str, counts: Mapping[str, SeriesCounts]) -> Metric:
    family = HistogramMetricFamily(_STEP_TOKENS, meaning(_STEP_TOKENS), labels=_LABELS)
    for engine, values in counts.items():
        add_histogram(
            family,
            (model_name, engine),
            STEP_TOKEN_BOUNDS,
            [values[_STEP_TOKENS, str(index)] for index in range(len(STEP_TOKEN_BOUNDS) + 1)],
            values[_STEP_TOKENS, _SUM],
        )
    return family


def cache_family(settings: Mapping[str, Mapping[str, str]]) -> Metric:
    """Return `vllm:cache_config_info`.

    Args:
        settings: The other labels by the label `engine`; the same names for all engines.
    """
    name = "vllm:cache_config_info"
    family = GaugeMetricFamily(name, meaning(name))
    for engine, labels in settings.items():
        family.add_sample(name, {**labels, "engine": engine}, 1)
    return family
