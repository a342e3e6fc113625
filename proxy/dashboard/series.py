"""Prometheus' text format, read: the one source of every figure that the dashboard shows.

Knows the format of `/metrics` and which of an engine's series are shown; knows no engine.
"""

from __future__ import annotations

import math
import re

SHOWN_OF_ENGINES = frozenset(
    {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting_by_reason",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "pdserve_engine_steps_total",
        "pdserve_kv_blocks",
        "pdserve_kv_loads_total",
        "pdserve_kv_transfer_bytes_total",
        "pdserve_kv_transfer_failures_total",
        "pdserve_kv_lease_expired_total",
        "pdserve_recompute_tokens_total",
        "vllm:external_prefix_cache_queries_total",
        "vllm:external_prefix_cache_hits_total",
        "pdserve_kv_tier_loaded_bytes_total",
        "pdserve_kv_tier_load_seconds_total",
        "pdserve_kv_tier_saved_bytes_total",
        "pdserve_kv_tier_dropped_saves_total",
        "pdserve_kv_tier_digest_mismatches_total",
        "pdserve_kv_tier_lookup_timeouts_total",
        "pdserve_kv_tier_server_up",
    }
)
"""Names; an engine has several hundred series, of which its card draws these."""


SHOWN_OF_PROXY = re.compile(r"pdserve_|vllm:(?:prompt|generation)_tokens_total")
"""How names begin; what else it says of HTTP, itself and under vLLM's names is for Prometheus."""


def series_in(text: str, names: frozenset[str] | re.Pattern[str]) -> dict[str, float]:
    """Return the value of every series by its name with its labels, as they stand in `text`.

    Left out are those that have no finite value, which JSON cannot carry.

    Args:
        names: Only series of these names, labels apart, or whose names begin so.
    """
    found = {}
    for line in text.splitlines():
        if not line or line[0] == "#":
            continue
        series, _, value = line.rpartition(" ")
        name = series.partition("{")[0]
        is_shown = name in names if isinstance(names, frozenset) else names.match(name)
        if not is_shown:
            continue
        try:
            number = float(value)
        except ValueError:
            continue  # an engine of another make may say more than we read
        if math.isfinite(number):
            found[series] = number
    return found
