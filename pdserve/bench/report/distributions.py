"""Charts of latency distributions: the cumulative share, and the tail.

Knows what the figures mean; knows no page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from pdserve.bench.compare.result import Comparison
from pdserve.bench.compare.summary import has_steady, steady
from pdserve.bench.report.charts import Chart, Place, Scale, Series
from pdserve.bench.report.picture import Picture, at_rate, colours, ends_of

_NUM_QUANTILES: Final = 160


def cdfs(comparison: Comparison, rate: float | None) -> list[Picture]:
    """TTFT and ITL: the share of values up to each, and the tail of ITL on a log scale."""
    ttft, itl = {}, {}
    for each in comparison.deployments:
        runs = comparison.runs(each.label, rate)
        ttft[each.label] = [one.ttft_s * 1e3 for run in runs for one in run.answered]
        itl[each.label] = [gap * 1e3 for run in runs for one in steady(run) for gap in one.itl_s]
    whose = (
        " of the steady decoders"
        if any(has_steady(each.run) for each in comparison.measured)
        else ""
    )
    pooled = f"All runs of each deployment together{at_rate(rate)}."
    found = []
    for anchor, name, values, who in (
        ("ttft-cdf", "TTFT", ttft, ""),
        ("itl-cdf", "ITL", itl, whose),
    ):
        series = _curves(comparison, values, _cdf)
        if series:
            found.append(
                Picture(
                    anchor,
                    f"{name}{who}: distribution",
                    f"Share of values up to each value; further left is better. {pooled}",
                    [
                        Chart(
                            title=f"{name}: cumulative distribution",
                            description=f"Share of {name} values up to each value.",
                            x=Scale(f"{name}, ms", is_log=True, ends=_ends_of(values)),
                            y=Scale("share", ends=(0.0, 1.0)),
                            series=series,
                        )
                    ],
                )
            )
    tails = _curves(comparison, itl, _tail)
    if tails:
        found.append(
            Picture(
                "itl-tail",
                f"ITL{whose}: how often a gap is longer",
                "Share of gaps longer than each value, by powers of ten: 0.01 is p99, 0.001 is "
                f"p99.9; further left is better. {pooled}",
                [
                    Chart(
                        title="ITL: tail",
                        description="Share of gaps longer than each value.",
                        x=Scale("ITL, ms", is_log=True, ends=_ends_of(itl)),
                        y=Scale("share of longer gaps", is_log=True),
                        series=tails,
                    )
                ],
            )
        )
    return found


def _ends_of(values: dict[str, list[float]]) -> tuple[float, float]:
    return ends_of([ms for those in values.values() for ms in those])


def _curves(
    comparison: Comparison,
    values: dict[str, list[float]],
    curve: Callable[[Sequence[float]], list[Place]],
) -> list[Series]:
    chosen = colours(comparison)
    return [
        Series(name=label, colour=chosen[label], points=curve(sorted(those)))
        for label, those in values.items()
        if len(those) > 1
    ]


def _cdf(ordered: Sequence[float]) -> list[Place]:
    return [(ordered[i], (i + 1) / len(ordered)) for i in _ranks(len(ordered))]


def _tail(ordered: Sequence[float]) -> list[Place]:
    """Share of values above each; ranks get denser towards the longest."""
    num = len(ordered)
    steps = [num * 10 ** (-index * 0.06) for index in range(_NUM_QUANTILES)]
    above = sorted({max(1, round(step)) for step in steps if step >= 0.5}, reverse=True)
    return [(ordered[num - count], count / num) for count in above]


def _ranks(num: int) -> list[int]:
    wanted = min(num, _NUM_QUANTILES)
    return sorted({round(index * (num - 1) / max(1, wanted - 1)) for index in range(wanted)})
