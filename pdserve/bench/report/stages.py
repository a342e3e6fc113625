"""Charts of where a request's time goes, as the servers report it.

Knows what the figures mean; knows no page.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from pdserve.bench.compare.result import Comparison
from pdserve.bench.digits import number
from pdserve.bench.records import Outcome
from pdserve.bench.report.charts import Chart, Scale, Track, stacked
from pdserve.bench.report.picture import Picture, at_rate

WAIT: Final = "until first token"
"""Stage for the time that the server does not report."""
_UNREPORTED: Final = "client and network"


def stages(comparison: Comparison, rate: float | None) -> Picture | None:
    """Mean milliseconds of each stage up to the first, and from there to the second token."""
    first, second = [], []
    good = {
        each.label: [one for run in comparison.runs(each.label, rate) for one in run.answered]
        for each in comparison.deployments
    }
    groups = list(dict.fromkeys(one.group for those in good.values() for one in those))
    for group in sorted(groups, reverse=True):  # steady before burst
        for label, outcomes in good.items():
            those = [one for one in outcomes if one.group == group]
            if not those:
                continue
            name = f"{label}, {group}" if len(groups) > 1 else label
            first.append(_mean_track(name, those))
            reporting = [one for one in those if one.second_stages]
            if reporting:
                second.append(_track(name, [one.second_stages for one in reporting]))
    if not first:
        return None
    charts = [_chart("Stages up to the first token", first)]
    names = ["up to the first token (TTFT)"]
    if second:
        charts.append(_chart("Stages from the first to the second token", second))
        names.append("from the first to the second token")
    return Picture(
        "stages",
        "Where the time goes",
        "Mean of each stage as the servers report it; the time between their report and what the "
        f"client saw is called “{_UNREPORTED}”. All runs{at_rate(rate)}.",
        charts,
        names,
        is_wide=True,
    )


def _chart(title: str, tracks: Sequence[Track]) -> Chart:
    return Chart(title=title, description="Mean of all requests.", x=Scale("ms"), tracks=tracks)


def _mean_track(name: str, those: Sequence[Outcome]) -> Track:
    """Stages up to the first token; they add up to the mean TTFT that the client saw."""
    mean_ms = statistics.fmean(one.ttft_s * 1e3 for one in those)
    pieces = [(WAIT, mean_ms)]
    if all(one.stages for one in those):
        pieces = _means([one.stages for one in those])
        reported_ms = sum(ms for _, ms in pieces)
        pieces.append((_UNREPORTED, max(0.0, mean_ms - reported_ms)))
    return stacked(name, pieces, note=f"{number(mean_ms)} ms")


def _track(name: str, accounts: Sequence[dict[str, float]]) -> Track:
    pieces = _means(accounts)
    return stacked(name, pieces, note=f"{number(sum(ms for _, ms in pieces))} ms")


def _means(accounts: Sequence[dict[str, float]]) -> list[tuple[str, float]]:
    names = list(dict.fromkeys(stage for account in accounts for stage in account))
    return [
        (stage, sum(account.get(stage, 0.0) for account in accounts) / len(accounts))
        for stage in names
    ]
