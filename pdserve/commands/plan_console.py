"""Prints a plan: the table of layouts, a summary, and the command that starts the best one."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

from pdserve.config.http import KVTransfer
from pdserve.observe.tables import aligned
from pdserve.planner.planning import MAX_LOAD
from pdserve.planner.work import parse_layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.planner.figures import LoadFigures, PlanCheck
    from pdserve.planner.planning import FleetPlan, LayoutFigures

_COLUMNS: Final = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")


def rate(per_s: float) -> str:
    """Return three digits of a rate, without an exponent."""
    return f"{float(f'{per_s:.3g}'):,g}"


def pace(per_s: float | None) -> str:
    """Return how often requests come; None: all at once, or there is only one."""
    return "at once" if per_s is None else f"{rate(per_s)}/s"


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
        is_answered = figures.num_failed < figures.num_requests
        times = [f"{getattr(figures, name):.1f}" if is_answered else "-" for name in _COLUMNS]
        share = f"{figures.goodput:.1%}{'' if each.holds else ' *'}"
        cells = (each.layout, str(each.num_engines), share, *times, str(figures.num_failed))
        table.append(cells)
    lines = aligned(table)
    if not all(each.holds for each in rows):
        lines.append("* fewer requests than required meet the objectives")
    return lines


def sentences(plan: FleetPlan, *, per_s: float | None, share: float) -> list[str]:
    """Return what a plan says, and how certain it is.

    Args:
        per_s: Requests per second of the workload; None if all come at once.
        share: Of the requests, how many must meet the objectives.
    """
    low, high = plan.goodput_range
    best = plan.rows[0]
    lines = [
        (
            f"{plan.best} is best: {best.figures.goodput:.1%} of {_requests(per_s)} meet the "
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
            f"It reaches {share:.0%} up to {least}{plan.highest_load:.3g} times the load"
            + ("." if per_s is None else f" ({_requests(plan.highest_load * per_s)}).")
        )
    fewest = plan.fewest
    if fewest is None:
        lines.append(
            f"No layout that was tried reaches it, of up to {plan.most_engines} engines: check "
            "whether the objectives are possible."
        )
    elif fewest.num_engines != best.num_engines:
        lines.append(
            f"The fewest engines that reach {share:.0%}: {fewest.num_engines}, as {fewest.layout} "
            f"({fewest.figures.goodput:.1%})."
        )
    return lines


def _requests(per_s: float | None) -> str:
    return "the requests" if per_s is None else f"{rate(per_s)} requests/s"


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


def start_command(
    layout_name: str, model: str, settings: Mapping[str, object], sizes: Mapping[str, object]
) -> str:
    """Return the command that starts a layout on one host.

    Args:
        settings: Fields of `ProxyConfig`, as the plan was made with.
        sizes: Settings of the engines by flag, where they are not the default.
    """
    layout = parse_layout(layout_name)
    words = [shlex.quote(model or "MODEL"), *(f"--{flag} {size}" for flag, size in sizes.items())]
    if layout.num_engines == 1:
        return " ".join(("pdserve serve", *words, "--port 8000"))
    words += [f"--prefill-replicas {layout.num_prefill}", f"--decode-replicas {layout.num_decode}"]
    if layout.num_both:
        words.append(f"--both-replicas {layout.num_both}")
    for name, value in settings.items():
        if value is not KVTransfer.AUTO:
            flag = name.removesuffix("_s").replace("_", "-")
            words.append(f"--proxy.{flag} {getattr(value, 'value', value)}")
    return " ".join(("pdserve up", *words))


def _compared(name: str, both: Sequence[LoadFigures], off: float) -> tuple[str, ...]:
    kind, percent, _ = name.split("_")
    values = (f"{getattr(each, name):.1f}" for each in both)
    return (f"{kind.upper()} {percent}, ms", *values, f"{off:+.0%}")
