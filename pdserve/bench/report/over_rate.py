"""Charts of latency and throughput by request rate, with the bound from the engines' rates.

Knows what the figures mean; knows no page.
"""

from __future__ import annotations

from pdserve.bench.compare.result import Comparison
from pdserve.bench.compare.summary import Figure, Row, rows
from pdserve.bench.digits import number
from pdserve.bench.goodput import SloMetric
from pdserve.bench.report.charts import Chart, Marks, Rule, Scale, Series, Track, stacked
from pdserve.bench.report.picture import Picture, at_rate, colours


def latency_over_rate(comparison: Comparison) -> list[Picture]:
    """A picture for each latency; none if only one rate was measured."""
    rates = [rate for rate in comparison.request_rates if rate is not None]
    if len(rates) < 2:
        return []
    chosen = colours(comparison)
    tables = {rate: {row.label: row for row in rows(comparison, rate)} for rate in rates}
    found = []
    for figure, metric in (
        (Figure.TTFT_P50, SloMetric.TTFT),
        (Figure.TTFT_P99, SloMetric.TTFT),
        (Figure.ITL_P99, SloMetric.ITL),
        (Figure.TPOT_P50, SloMetric.TPOT),
    ):
        series = []
        for each in comparison.deployments:
            have = [
                (rate, tables[rate][each.label].values[figure])
                for rate in rates
                if each.label in tables[rate] and figure in tables[rate][each.label].values
            ]
            if have:
                series.append(
                    Series(
                        name=each.label,
                        colour=chosen[each.label],
                        points=[(rate, value.median) for rate, value in have],
                        marks=Marks.LINE_AND_DOTS,
                        tips=[
                            f"{each.label}: {number(value.median)} ms at {rate:g} requests/s "
                            f"({number(value.low)} to {number(value.high)})"
                            for rate, value in have
                        ],
                        bars=[(value.low, value.high) for _, value in have],
                    )
                )
        limits = [slo for slo in comparison.slos if slo.metric is metric]
        if series:
            found.append(
                Picture(
                    f"rate-{figure.name.lower().replace('_', '-')}",
                    f"{figure.title} over the request rate",
                    "Median of the runs, with the lowest and the highest."
                    + (" The line is the SLO." if limits else ""),
                    [
                        Chart(
                            title=f"{figure.title} over the request rate",
                            description=f"{figure.title} of each deployment at each rate.",
                            x=Scale("requests/s", ends=(0.0, max(rates) * 1.05)),
                            y=Scale(f"{figure.title}, ms", is_log=True),
                            series=series,
                            rules=[
                                Rule(slo.limit_ms, f"SLO {slo.limit_ms:g} ms") for slo in limits
                            ],
                        )
                    ],
                )
            )
    return found


def pareto(comparison: Comparison) -> Picture | None:
    """Speed for each user against the total throughput; a point for each rate."""
    chosen = colours(comparison)
    by_label: dict[str, list[Row]] = {}
    for rate in comparison.request_rates:
        for row in rows(comparison, rate):
            if Figure.TPOT_P50 in row.values and row.values[Figure.TPOT_P50].median > 0:
                by_label.setdefault(row.label, []).append(row)
    if not by_label:
        return None
    series = []
    for label, those in by_label.items():
        points = [
            (1e3 / row.values[Figure.TPOT_P50].median, row.values[Figure.THROUGHPUT].median)
            for row in those
        ]
        series.append(
            Series(
                name=label,
                colour=chosen[label],
                points=points,
                marks=Marks.LINE_AND_DOTS,
                tips=[
                    f"{label}{at_rate(row.rate)}: {number(x)} tok/s for each user, "
                    f"{number(y)} tok/s in all"
                    for row, (x, y) in zip(those, points, strict=True)
                ],
            )
        )
    return Picture(
        "pareto",
        "What a user gets against what all get",
        "Tokens per second of one request (1 / median TPOT) and of all together; further up and "
        "right is better. At a rate below their limits all deployments give the same in all.",
        [
            Chart(
                title="Throughput per user against throughput in all",
                description="One point per deployment and rate.",
                x=Scale("tok/s per user"),
                y=Scale("output tok/s in all"),
                series=series,
            )
        ],
    )


def rate_matched(comparison: Comparison, rate: float | None) -> Picture | None:
    """Measured output beside the bound from the engines' rates."""
    if comparison.rates is None:
        return None
    rates = comparison.rates
    cores = max(each.num_cores for each in comparison.deployments)
    tracks = [
        _flat(f"rate-matched bound, {cores} cores", "bound", rates.bound_per_core * cores),
        *(
            _flat(
                f"{each.label}, whole engines",
                "reach",
                rates.reach(each.num_prefill, each.num_decode),
            )
            for each in comparison.deployments
            if each.is_disaggregated and not each.is_crowded
        ),
        *(
            _flat(row.label, "measured", row.values[Figure.THROUGHPUT].median)
            for row in rows(comparison, rate)
            if Figure.THROUGHPUT in row.values
        ),
    ]
    return Picture(
        "rate-matched",
        "Output and its bound",
        "The bound is what the rates of one engine alone allow, prefill and decode cores in the "
        "best proportion; then what whole engines allow; then what was measured with this "
        f"schedule{at_rate(rate)}, which asks for no more.",
        [
            Chart(
                title="Output tokens per second",
                description="Bound, reach and measured.",
                x=Scale("tok/s"),
                tracks=tracks,
            )
        ],
        is_wide=True,
    )


def _flat(name: str, piece: str, value: float) -> Track:
    return stacked(name, [(piece, value)], note=f"{number(value)} tok/s")
