"""Prints a plan: the table of layouts, a summary, and the commands that start the best one."""

from __future__ import annotations

import itertools
import shlex
from typing import TYPE_CHECKING, Final

from pdserve.config.http import KVTransfer
from pdserve.config.policies import looks_at_prefixes
from pdserve.observe.tables import aligned
from pdserve.planner.planning import MAX_LOAD
from pdserve.planner.work import parse_layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.planner.figures import LoadFigures, PlanCheck
    from pdserve.planner.planning import FleetPlan, LayoutFigures

_COLUMNS: Final = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
_PROXY: Final = "http://127.0.0.1:8000"
_EVENTS: Final = "--kv-events-config.enable-kv-cache-events"
_CONNECTOR: Final = "--kv-transfer-config.kv-connector nixl"
_POLICIES: Final = ("prefill_policy", "decode_policy", "split_policy")


def moved(settings: Mapping[str, object], url: str) -> str:
    """Return how the simulation moves KV between engines."""
    how = "pulled" if settings["kv_mode"] is KVTransfer.PULL else "pushed"
    return f"KV is {how}, as {f'at {url}' if url else 'by default'}."


def layout_table(rows: Sequence[LayoutFigures]) -> list[str]:
    """Return layouts, a line each."""
    head = ("layout", "engines", "goodput", "TTFT p50", "p99 ms", "TPOT p50", "p99 ms", "failed")
    table: list[Sequence[str]] = [head]
    for each in rows:
        figures = each.figures
        times = [f"{getattr(figures, name):.1f}" for name in _COLUMNS]
        share = f"{figures.goodput:.1%}{'' if each.holds else ' *'}"
        cells = (each.layout, str(each.num_engines), share, *times, str(figures.num_failed))
        table.append(cells)
    lines = aligned(table)
    if not all(each.holds for each in rows):
        lines.append("* fewer requests than required meet the objectives")
    return lines


def sentences(plan: FleetPlan, *, per_s: float, share: float) -> list[str]:
    """Return what a plan says, and how certain it is.

    Args:
        per_s: Requests per second of the workload.
        share: Of the requests, how many must meet the objectives.
    """
    low, high = plan.goodput_range
    best = plan.rows[0]
    lines = [
        (
            f"{plan.best} is best: {best.figures.goodput:.1%} of {per_s:.3g} requests/s meet the "
            f"objectives, or {low:.1%} to {high:.1%} if the times are off by their error."
        )
    ]
    if plan.close:
        lines.append(f"Within that error these are as good: {', '.join(plan.close)}.")
    if plan.highest_load is None:
        lines.append(f"No load was found at which {plan.best} reaches {share:.0%}.")
    else:
        least = "at least " if plan.highest_load == MAX_LOAD else ""
        lines.append(
            f"It reaches {share:.0%} up to {least}{plan.highest_load:.3g} times the load "
            f"({plan.highest_load * per_s:.3g} requests/s)."
        )
    fewest = plan.fewest
    if fewest is None:
        lines.append(
            "Even four times as many engines would not reach it: check whether the objectives "
            "are possible."
        )
    elif fewest.num_engines != best.num_engines:
        lines.append(
            f"The fewest engines that reach {share:.0%}: {fewest.num_engines}, as {fewest.layout} "
            f"({fewest.figures.goodput:.1%})."
        )
    return lines


def checked(check: PlanCheck) -> list[str]:
    """Return predicted and measured figures side by side."""
    both = (check.predicted, check.measured)
    title = f"{check.measured.num_requests} requests at {check.url}, {check.layout}"
    shares = [f"{each.goodput:.1%}" for each in both]
    table = [
        (title, "predicted", "measured", "off"),
        ("goodput", *shares, f"{100 * check.goodput_off:+.1f} points"),
        *(_compared(name, both, off) for name, off in check.off.items()),
    ]
    return [*aligned(table), *(f"note: {each}" for each in check.notes)]


def start_commands(layout_name: str, model: str, settings: Mapping[str, object]) -> list[str]:
    """Return the commands that start a layout: a single one on one host where possible.

    Args:
        settings: Fields of `ProxyConfig`, as the plan was made with.
    """
    layout = parse_layout(layout_name)
    model = shlex.quote(model or "MODEL")
    if layout.num_engines == 1:
        return [f"pdserve serve {model} --port 8000"]
    flags = {
        name.removesuffix("_s").replace("_", "-"): getattr(value, "value", value)
        for name, value in settings.items()
        if value is not KVTransfer.AUTO
    }
    if not layout.num_both:
        words = " ".join(f"--proxy.{flag} {value}" for flag, value in flags.items())
        replicas = f"--prefill-replicas {layout.num_prefill} --decode-replicas {layout.num_decode}"
        return [f"pdserve up {model} {replicas} {words}"]
    words = " ".join(f"--{flag} {value}" for flag, value in flags.items())
    events = reading = ""
    if looks_at_prefixes(*(str(settings[name]) for name in _POLICIES)):
        events, reading = f" {_EVENTS}", f" --tokenizer {model}"
    ports = itertools.count(8100)
    engines = [
        f"pdserve {command} {model} --port {next(ports)} --proxy {_PROXY}{further}{events}"
        for command, number, further in (
            ("prefill", layout.num_prefill, ""),
            ("decode", layout.num_decode, ""),
            ("serve", layout.num_both, f" {_CONNECTOR}"),
        )
        for _ in range(number)
    ]
    return [f"pdserve proxy --port 8000{reading} {words}", *engines]


def _compared(name: str, both: Sequence[LoadFigures], off: float) -> tuple[str, ...]:
    kind, percent, _ = name.split("_")
    values = (f"{getattr(each, name):.1f}" for each in both)
    return (f"{kind.upper()} {percent}, ms", *values, f"{off:+.0%}")
