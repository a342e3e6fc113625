"""Formats a run's figures: the block of `vllm bench serve` line by line, then pdserve's own."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from pdserve.bench.figures import METRICS, percentile_word
from pdserve.bench.records import CoresUsed

_WIDTH: Final = 50
_NONE: Final = "none"
"""In place of a latency that no request has."""
_HEADINGS: Final = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def block(
    figures: Mapping[str, Any],
    *,
    request_rate: float = math.inf,
    max_concurrency: int | None = None,
    metrics: Sequence[str] = ("ttft", "tpot", "itl"),
    percentiles: Sequence[float] = (99.0,),
) -> str:
    """Return the block that `vllm bench serve` prints.

    Args:
        figures: The result of `figures.figures`.
        request_rate, max_concurrency: The configured values.
        metrics: Latencies to show: keys of `METRICS`.
        percentiles: Percentiles to show, which `figures` must have.
    """
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines.append(_count("Successful requests:", figures["completed"]))
    lines.append(_count("Failed requests:", figures["failed"]))
    if max_concurrency is not None:
        lines.append(_count("Maximum request concurrency:", max_concurrency))
    if not math.isinf(request_rate):
        lines.append(_number("Request rate configured (RPS):", request_rate))
    lines.append(_number("Benchmark duration (s):", figures["duration"]))
    lines.append(_count("Total input tokens:", figures["total_input_tokens"]))
    lines.append(_count("Total generated tokens:", figures["total_output_tokens"]))
    lines.append(_number("Request throughput (req/s):", figures["request_throughput"]))
    if figures["request_goodput"] is not None:
        lines.append(_number("Request goodput (req/s):", figures["request_goodput"]))
    for label, key in (
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
        ("Peak concurrent requests:", "max_concurrent_requests"),
        ("Total token throughput (tok/s):", "total_token_throughput"),
    ):
        lines.append(_number(label, figures[key]))
    for name in METRICS:
        if name in metrics:
            lines.append(_HEADINGS[name].center(_WIDTH, "-"))
            lines += _latency_lines(figures, name, percentiles)
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def further(figures: Mapping[str, Any]) -> str:
    """Return the lines that vLLM's block lacks: groups, stages, errors, the client's health."""
    own = figures["pdserve"]
    parts = [
        _groups(own["groups"]),
        _prompts(own["prompts"]),
        _stages(own["stages"]),
        _errors(own["errors"]),
    ]
    if own["cancelled"]:
        parts.append(f"{own['cancelled']} requests were cancelled on purpose (--cancel-share)")
    if own["max_in_flight"] != figures["max_concurrent_requests"]:
        parts.append(
            f"At most {own['max_in_flight']} requests were in flight at once (the peak above "
            "counts all within one second, as vLLM does)"
        )
    parts += [_client(own), _cores(own["cores"])]
    return "\n".join(part for part in parts if part)


def verdict(figures: Mapping[str, Any], width: int = 100) -> str:
    """Return whether the figures are valid, in words that cannot be overlooked."""
    own = figures["pdserve"]
    lines: list[str] = []
    for note in own["notes"]:
        lines += textwrap.wrap(f"Note: {note}", width)
    if not own["valid"]:
        lines.append(" NOT VALID: DO NOT USE THESE FIGURES ".center(width, "!"))
        for sentence in own["why_not"]:
            lines += textwrap.wrap(sentence, width)
        lines.append("!" * width)
    return "\n".join(lines)


def _count(label: str, value: int) -> str:
    return f"{label:<40} {value:<10}"


def _number(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}"


def _latency_lines(
    figures: Mapping[str, Any], name: str, percentiles: Sequence[float]
) -> list[str]:
    title = METRICS[name]
    rows = [("Mean", f"mean_{name}_ms"), ("Median", f"median_{name}_ms")]
    for percent in percentiles:
        word = percentile_word(percent)
        rows.append((word.upper(), f"{word}_{name}_ms"))
    labels = [(f"{word} {title} (ms):", key) for word, key in rows]
    if not figures[f"mean_{name}_ms"]:
        return [f"{label:<40} {_NONE:<10}" for label, _ in labels]
    return [_number(label, figures[key]) for label, key in labels]


def _groups(groups: Mapping[str, Mapping[str, Any]]) -> str:
    if not groups:
        return ""
    width = max(len("group"), *(len(name or "-") for name in groups))
    columns = [(name, word) for name in ("ttft", "itl") for word in ("median", "p99")]
    titles = [f"{METRICS[name]} {word.replace('median', 'p50')}" for name, word in columns]
    head = "".join(f"{title:>10}" for title in titles)
    has_prompts = any(each["prompts"] for each in groups.values())
    reuse = f"{'computed':>12}{'cached':>10}" if has_prompts else ""
    lines = [f"{'group':<{width}}{'done':>6}{'failed':>8}{head}  (ms){reuse}"]
    for name, each in groups.items():
        cells = "".join(
            f"{each[f'{word}_{name}_ms']:>10.2f}" if each[f"mean_{name}_ms"] else f"{_NONE:>10}"
            for name, word in columns
        )
        if has_prompts:
            prompts = each["prompts"] or {"computed_tokens": 0, "hit_rate": 0.0}
            cells += f"{prompts['computed_tokens']:>18}{prompts['hit_rate']:>10.1%}"
        lines.append(f"{name or '-':<{width}}{each['completed']:>6}{each['failed']:>8}{cells}")
    return "\n".join(lines)


def _prompts(prompts: Mapping[str, Any] | None) -> str:
    if prompts is None:
        return ""
    return (
        f"Prompts: {prompts['computed_tokens']} of {prompts['tokens']} tokens computed, "
        f"{prompts['cached_tokens']} ({prompts['hit_rate']:.1%}) cached"
    )


def _stages(stages: Mapping[str, Any] | None) -> str:
    if stages is None:
        return ""
    lines = [
        f"Where the time went, as the server reports for {stages['told']} requests (p50|p99, ms):"
    ]
    for title, key in (("first token", "first_token"), ("second token", "second_token")):
        if stages[key]:
            terms = " + ".join(
                f"{name.replace('_', ' ')} {each['p50_ms']:.1f}|{each['p99_ms']:.1f}"
                for name, each in stages[key].items()
            )
            lines += textwrap.wrap(
                f"  {title}: {terms}", 100, subsequent_indent="    ", break_on_hyphens=False
            )
    outside = stages["outside_server"]
    lines.append(f"  between client and server: {outside['p50_ms']:.2f}|{outside['p99_ms']:.2f}")
    return "\n".join(lines)


def _errors(errors: Mapping[str, int]) -> str:
    return "\n".join(
        ["Errors:", *(f"  {count} x {message}" for message, count in errors.items())]
        if errors
        else []
    )


def _cores(used: Mapping[str, Any] | None) -> str:
    if used is None:
        return ""
    cores = msgspec.convert(used, CoresUsed)
    parts = ", ".join(f"{name} {share:.2f}" for name, share in cores.by_name.items())
    return f"Cores in use on average: {cores.total:.2f} of {cores.num_cores} ({parts})"


def _client(own: Mapping[str, Any]) -> str:
    client = own["client"]
    number = client["processes"]
    return (
        f"Client: {number} process{'es' if number > 1 else ''}, sent late by "
        f"{client['send_lag_p50_ms']:.2f} ms (p50), {client['send_lag_p99_ms']:.2f} ms (p99); "
        f"timers late by {client['loop_lag_p99_ms']:.2f} ms (p99); "
        f"{client['cpu_share']:.0%} of a core at {client['priority']} priority"
    )
