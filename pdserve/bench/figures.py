"""The figures of a run, under vLLM's JSON keys and definitions, plus those only pdserve has.

TTFT, TPOT and E2EL cover answered requests, ITL the pooled gaps between their chunks. Requests that
failed or were cancelled on purpose are only counted. Rates are per second of the whole run, from
its start to the last answer's end. Knows no console and no file.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

import pdserve
from pdserve.bench.goodput import Slo, is_within
from pdserve.bench.records import Outcome, Run

METRICS: Final = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
ALWAYS: Final = (50.0, 90.0, 95.0, 99.0)
"""Percentiles that every result has, so that any two can be compared."""


def figures(
    run: Run,
    goodput: Sequence[Slo] = (),
    *,
    percentiles: Sequence[float] = (),
    environment: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Return a run's figures.

    Args:
        run: The observed run.
        goodput: Objectives; `request_goodput` is None without any, as in vLLM.
        percentiles: Percentiles in addition to `ALWAYS`.
        environment: The result of `environment.describe`, for the record.

    Returns:
        vLLM's keys (`mean_ttft_ms`, `p99_itl_ms`, `request_throughput` ...), and under
        `pdserve`: `groups` (the same keys per group, and of cancelled ones), `prompts` (tokens
        that caches had, and that were computed), `stages`, `client`, `cores`, `valid`,
        `why_not`, `topology`, `environment`.
    """
    good = run.answered
    duration_s = run.duration_s or math.nan
    num_in = sum(each.num_prompt_tokens for each in good)
    num_out = sum(each.num_output_tokens for each in good)
    within = sum(is_within(each, goodput) for each in good)
    num_counted = sum(not each.is_cancelled for each in run.outcomes)
    peak_tokens, peak_requests = _peaks(good)
    result: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S", time.localtime(run.started_wall_s)),
        "label": run.label,
        "model_id": run.model,
        "num_prompts": len(run.outcomes),
        "duration": run.duration_s,
        "completed": len(good),
        "failed": sum(each.has_failed for each in run.outcomes),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(good) / duration_s,
        "request_goodput": within / duration_s if goodput else None,
        "output_throughput": num_out / duration_s,
        "total_token_throughput": (num_in + num_out) / duration_s,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
        **_latencies(good, percentiles),
    }
    result["pdserve"] = {
        "version": pdserve.__version__,
        "base_url": run.base_url,
        "dataset": run.dataset,
        "arrivals": run.arrivals,
        "sampling": run.sampling,
        "seed": run.seed,
        "started_wall_s": run.started_wall_s,
        "valid": run.health.valid,
        "why_not": run.health.why_not,
        "notes": run.health.notes,
        "cancelled": sum(each.is_cancelled for each in run.outcomes),
        "unfinished": run.num_unfinished,
        "max_in_flight": _max_in_flight(run.outcomes),
        "goodput": {
            "slos": [str(slo) for slo in goodput],
            "good": within,
            "share": within / num_counted if num_counted else math.nan,
        }
        if goodput
        else None,
        "client": {
            "processes": run.health.num_processes,
            "send_lag_p50_ms": run.health.send_lag_p50_s * 1e3,
            "send_lag_p99_ms": run.health.send_lag_p99_s * 1e3,
            "loop_lag_p99_ms": run.health.loop_lag_p99_s * 1e3,
            "cpu_share": run.health.cpu_share,
            "priority": run.health.priority,
        },
        "cores": msgspec.to_builtins(run.cores),
        "groups": _groups(run, goodput, percentiles),
        "prompts": prompt_figures(good),
        "stages": _stages(good),
        "topology": run.engines,
        "finish_reasons": dict(Counter(each.finish_reason or "none" for each in good)),
        "errors": dict(Counter(each.error for each in run.outcomes if each.error).most_common(10)),
        "environment": dict(environment or {}),
    }
    return result


def details(run: Run) -> dict[str, Any]:
    """Return the lists per request that `vllm bench serve --save-detailed` writes."""
    return {
        "input_lens": [each.num_prompt_tokens for each in run.outcomes],
        "output_lens": [each.num_output_tokens if each.is_good else 0 for each in run.outcomes],
        "ttfts": [each.ttft_s if each.is_good else 0.0 for each in run.outcomes],
        "itls": [each.itl_s for each in run.outcomes],
        "start_times": [each.sent_s for each in run.outcomes],
        "generated_texts": [each.text for each in run.outcomes],
        "errors": [each.error for each in run.outcomes],
    }


def percentile_word(percent: float) -> str:
    """Return a percentile as used in keys: `p99`, `p99.9`."""
    return f"p{percent:.12g}"


def _latencies(good: Sequence[Outcome], percentiles: Sequence[float]) -> dict[str, float]:
    values: dict[str, list[float]] = {
        "ttft": [each.ttft_s for each in good],
        "tpot": [tpot_s for each in good if (tpot_s := each.tpot_s) is not None],
        "itl": [gap_s for each in good for gap_s in each.itl_s],
        "e2el": [each.e2el_s for each in good],
    }
    found: dict[str, float] = {}
    for name, seconds in values.items():
        ms = np.asarray(seconds or [0.0]) * 1e3
        found[f"mean_{name}_ms"] = float(ms.mean())
        found[f"median_{name}_ms"] = float(np.median(ms))
        found[f"std_{name}_ms"] = float(ms.std())
        for percent in sorted({*ALWAYS, *percentiles}):
            found[f"{percentile_word(percent)}_{name}_ms"] = float(np.percentile(ms, percent))
    return found


def _groups(
    run: Run, goodput: Sequence[Slo], percentiles: Sequence[float]
) -> dict[str, dict[str, Any]]:
    """The figures of each group, if the data set has several."""
    names = sorted({each.group for each in run.outcomes})
    if len(names) < 2:
        return {}
    duration_s = run.duration_s or math.nan
    result = {}
    for name in names:
        members = [each for each in run.outcomes if each.group == name]
        good = [each for each in members if each.is_good]
        within = sum(is_within(each, goodput) for each in good)
        result[name] = {
            "num_prompts": len(members),
            "completed": len(good),
            "failed": sum(each.has_failed for each in members),
            "cancelled": sum(each.is_cancelled for each in members),
            "total_input_tokens": sum(each.num_prompt_tokens for each in good),
            "total_output_tokens": sum(each.num_output_tokens for each in good),
            "request_goodput": within / duration_s if goodput else None,
            "prompts": prompt_figures(good),
            **_latencies(good, percentiles),
        }
    return result


def prompt_figures(good: Sequence[Outcome]) -> dict[str, float] | None:
    """Computed and cached tokens of the prompts, over requests whose cached tokens are known."""
    reporting = [each for each in good if each.num_cached_tokens is not None]
    if not reporting:
        return None
    num_tokens = sum(each.num_prompt_tokens for each in reporting)
    num_cached = sum(each.num_cached_tokens or 0 for each in reporting)
    return {
        "told": len(reporting),
        "tokens": num_tokens,
        "cached_tokens": num_cached,
        "computed_tokens": num_tokens - num_cached,
        "hit_rate": num_cached / num_tokens if num_tokens else 0.0,
    }


def _stages(good: Sequence[Outcome]) -> dict[str, Any] | None:
    """The stages up to the first and the second token, as far as the server reports them."""
    reporting = [each for each in good if each.stages]
    if not reporting:
        return None
    outside_ms = [each.ttft_s * 1e3 - sum(each.stages.values()) for each in reporting]
    return {
        "told": len(reporting),
        "first_token": _terms([each.stages for each in reporting]),
        "second_token": _terms([each.second_stages for each in reporting if each.second_stages]),
        "outside_server": _spread(outside_ms),
        "kv_modes": dict(Counter(each.kv_mode or "none" for each in reporting)),
    }


def _terms(accounts: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Each term over all requests; a request that has none counts with 0."""
    names = dict.fromkeys(name for account in accounts for name in account)
    return {name: _spread([each.get(name, 0.0) for each in accounts]) for name in names}


def _spread(ms: Sequence[float]) -> dict[str, float]:
    return {
        "mean_ms": float(np.mean(ms)),
        "p50_ms": float(np.percentile(ms, 50)),
        "p99_ms": float(np.percentile(ms, 99)),
    }


def _max_in_flight(outcomes: Sequence[Outcome]) -> int:
    """The most requests at one moment; `max_concurrent_requests` counts by the second."""
    sent = [each for each in outcomes if each.status]
    # An end and a beginning at one moment do not overlap.
    edges = sorted([(each.sent_s, 1) for each in sent] + [(each.end_s, -1) for each in sent])
    return max(itertools.accumulate(step for _, step in edges), default=0)


def _peaks(good: Sequence[Outcome]) -> tuple[float, int]:
    """The most tokens, and the most requests, in one second since the first was sent."""
    if not good:
        return 0.0, 0
    begin_s = min(each.sent_s for each in good)
    num = math.ceil(max(each.chunk_s[-1] for each in good) - begin_s) + 1
    tokens, requests = np.zeros(num), np.zeros(num)
    for each in good:
        seconds = (np.asarray(each.chunk_s) - begin_s).astype(int)
        np.add.at(tokens, seconds, each.chunk_tokens)
        requests[int(each.sent_s - begin_s) : int(each.chunk_s[-1] - begin_s) + 1] += 1
    return float(tokens.max()), int(requests.max())
