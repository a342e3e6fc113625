"""The pictures of a comparison, each made of its runs and of nothing else.

Which run and which rate a picture shows stands in its caption. Knows what the figures mean;
knows no page.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.bench.compare import bound
from pdserve.bench.compare.result import Comparison
from pdserve.bench.compare.summary import (
    Figure,
    Row,
    has_steady,
    others,
    percentiles,
    prefill_of,
    rows,
    steady,
    typical,
)
from pdserve.bench.goodput import SloMetric
from pdserve.bench.records import Outcome, Run
from pdserve.bench.report import charts
from pdserve.bench.report.charts import Axis, Frame, Marks, Series, Span
from pdserve.bench.report.scale import number

_MAX_LANES: Final = 120
_NUM_WORST: Final = 8
"""Longest gaps of a run that get a tooltip each."""
_LEAST_MS: Final = 0.05
_NUM_QUANTILES: Final = 160
_COLOURS: Final = (0, 1, 2, 3, 7, 6)
_COLOURS_OF_PD: Final = (4, 5)
WAIT: Final = "until first token"
"""Stage of a request whose server gives no account."""
LAG: Final = "client late"
DECODE: Final = "decode"


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of the report.

    Attributes:
        anchor: Unique in the page.
        caption: What one sees, and of which runs.
        drawings: One SVG, or several below one another.
        names: Above each drawing, if there are several.
        is_wide: It takes the page's whole width.
    """

    anchor: str
    title: str
    caption: str
    drawings: Sequence[str]
    names: Sequence[str] = ()
    is_wide: bool = False


def pictures(comparison: Comparison, rate: float | None) -> list[Picture]:
    """All pictures there is data for; those of single runs show `rate`."""
    found = [
        itl_over_time(comparison, rate),
        *cdfs(comparison, rate),
        *latency_over_rate(comparison),
        pareto(comparison),
        stages(comparison, rate),
        *timelines(comparison, rate),
        rate_matched(comparison, rate),
    ]
    return [picture for picture in found if picture is not None]


def colours(comparison: Comparison) -> dict[str, int]:
    """A colour for each deployment, the same in all pictures."""
    chosen = {}
    for kind, places in (
        ([each for each in comparison.deployments if each.is_disaggregated], _COLOURS_OF_PD),
        ([each for each in comparison.deployments if not each.is_disaggregated], _COLOURS),
    ):
        for index, each in enumerate(kind):
            chosen[each.label] = places[index % len(places)]
    return chosen


def _typical(comparison: Comparison, rate: float | None) -> dict[str, Run]:
    """The run that stands for each deployment; a deployment without runs is left out."""
    found = {}
    for each in comparison.deployments:
        runs = [run for run in comparison.runs(each.label, rate) if _good(run)]
        if runs:
            found[each.label] = typical(runs)
    return found


def _good(run: Run) -> list[Outcome]:
    return [one for one in run.outcomes if one.is_good]


def _at(rate: float | None) -> str:
    return "" if rate is None else f" at {rate:g} requests/s"


# --- gaps between tokens over time, with the prompts that came between


def itl_over_time(comparison: Comparison, rate: float | None) -> Picture | None:
    """A panel for each deployment: each gap a dot, each interfering prompt a shaded span."""
    runs = {label: run for label, run in _typical(comparison, rate).items() if _gaps(run)}
    if not runs:
        return None
    chosen = colours(comparison)
    all_ms = [ms for run in runs.values() for _, ms, _ in _gaps(run)]
    low, high = _ends(all_ms)
    end = max(run.duration_s for run in runs.values())
    drawings, names = [], []
    for label, run in runs.items():
        gaps = sorted(_gaps(run), key=lambda gap: gap[1])
        p99 = percentiles([ms for _, ms, _ in gaps], 99)[0]
        worst = gaps[-_NUM_WORST:]
        frame = Frame(
            title=f"Gaps between tokens over time: {label}",
            description=f"Each dot is a gap; p99 is {number(p99)} ms.",
            x=Axis("seconds since the start of the run", ends=(0.0, end)),
            y=Axis("ITL, ms", is_log=True, ends=(low, high)),
            width=charts.WIDTH * 2,
            height=216,
            has_legend=False,
        )
        drawings.append(
            charts.xy(
                frame,
                [
                    Series(label, chosen[label], [(at, ms) for at, ms, _ in gaps], Marks.CLOUD),
                    Series(
                        label,
                        chosen[label],
                        [(at, ms) for at, ms, _ in worst],
                        Marks.DOTS,
                        tips=[
                            f"{number(ms)} ms, {number(at)} s after the start, {name}"
                            for at, ms, name in worst
                        ],
                    ),
                ],
                spans=_prefills(run),
                rules=[charts.Rule(p99, f"p99 {number(p99)} ms")],
            )
        )
        names.append(label)
    if any(has_steady(run) for run in runs.values()):
        what = (
            "Each dot is a gap between two tokens of a steady decoder. Shaded: the long prompts of "
            "the bursts, from the start of their prefill to its end by the server's account, or "
            "from when they were sent to their first token where it gives none."
        )
    else:
        what = "Each dot is a gap between two tokens of a request."
    return Picture(
        "itl-over-time",
        "Gaps between tokens over time",
        f"{what} All panels have the same axes; the gaps' axis goes by powers of ten. Shown is the "
        f"run with the median ITL p99 of each deployment{_at(rate)}.",
        drawings,
        names,
        is_wide=True,
    )


def _ends(values_ms: Sequence[float]) -> tuple[float, float]:
    """Ends of an axis by powers of ten: but for the least 1 %, as of tokens that came together."""
    long = [ms for ms in values_ms if ms >= _LEAST_MS] or [_LEAST_MS]
    return percentiles(long, 1)[0], max(long)


def _gaps(run: Run) -> list[tuple[float, float, str]]:
    """When it ended (s), how long it was (ms), whose it is; of each gap."""
    return [
        (at, gap * 1e3, one.request_id)
        for one in steady(run)
        for at, gap in zip(one.chunk_s[1:], one.itl_s, strict=True)
    ]


def _prefills(run: Run) -> list[Span]:
    """The times in which at least one prompt of the other groups was computed."""
    spans: list[tuple[float, float, list[Outcome]]] = []
    for start, end, one in sorted(
        ((*prefill_of(one), one) for one in others(run)), key=lambda each: each[:2]
    ):
        if spans and start <= spans[-1][1]:
            first, last, those = spans[-1]
            spans[-1] = (first, max(last, end), [*those, one])
        else:
            spans.append((start, end, [one]))
    return [
        Span(
            start,
            end,
            f"{len(those)} {'prompt' if len(those) == 1 else 'prompts'} of "
            f"{sum(one.num_prompt_tokens for one in those)} tokens in all, "
            f"{number((end - start) * 1e3)} ms, from {number(start)} s on",
        )
        for start, end, those in spans
    ]


# --- distributions


def cdfs(comparison: Comparison, rate: float | None) -> list[Picture]:
    """TTFT and ITL: the share of values up to each; and the tail of ITL by powers of ten."""
    ttft, itl = {}, {}
    for each in comparison.deployments:
        runs = comparison.runs(each.label, rate)
        ttft[each.label] = [one.ttft_s * 1e3 for run in runs for one in _good(run)]
        itl[each.label] = [gap * 1e3 for run in runs for one in steady(run) for gap in one.itl_s]
    whose = (
        " of the steady decoders"
        if any(has_steady(each.run) for each in comparison.measured)
        else ""
    )
    pooled = f"All runs of each deployment together{_at(rate)}."
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
                    f"Share of values up to each; further left is better. {pooled}",
                    [
                        charts.xy(
                            Frame(
                                f"{name}: cumulative distribution",
                                f"Share of {name} values up to each value.",
                                Axis(f"{name}, ms", is_log=True, ends=_ends_of(values)),
                                Axis("share", ends=(0.0, 1.0)),
                            ),
                            series,
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
                    charts.xy(
                        Frame(
                            "ITL: tail",
                            "Share of gaps longer than each value.",
                            Axis("ITL, ms", is_log=True, ends=_ends_of(itl)),
                            Axis("share of longer gaps", is_log=True),
                        ),
                        tails,
                    )
                ],
            )
        )
    return found


def _ends_of(values: dict[str, list[float]]) -> tuple[float, float]:
    return _ends([ms for those in values.values() for ms in those])


def _curves(comparison: Comparison, values: dict[str, list[float]], curve: object) -> list[Series]:
    assert callable(curve)
    chosen = colours(comparison)
    return [
        Series(label, chosen[label], curve(sorted(those)))
        for label, those in values.items()
        if len(those) > 1
    ]


def _cdf(ordered: Sequence[float]) -> list[charts.Point]:
    return [(ordered[i], (i + 1) / len(ordered)) for i in _ranks(len(ordered))]


def _tail(ordered: Sequence[float]) -> list[charts.Point]:
    """Share of values above each; ranks get denser towards the longest."""
    num = len(ordered)
    steps = [num * 10 ** (-index * 0.06) for index in range(_NUM_QUANTILES)]
    above = sorted({max(1, round(step)) for step in steps if step >= 0.5}, reverse=True)
    return [(ordered[num - count], count / num) for count in above]


def _ranks(num: int) -> list[int]:
    wanted = min(num, _NUM_QUANTILES)
    return sorted({round(index * (num - 1) / max(1, wanted - 1)) for index in range(wanted)})


# --- over the rate


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
                        each.label,
                        chosen[each.label],
                        [(rate, value.median) for rate, value in have],
                        Marks.LINE_AND_DOTS,
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
                    "Median of the runs, with the least and the greatest."
                    + (" The line is the SLO." if limits else ""),
                    [
                        charts.xy(
                            Frame(
                                f"{figure.title} over the request rate",
                                f"{figure.title} of each deployment at each rate.",
                                Axis("requests/s", ends=(0.0, max(rates) * 1.05)),
                                Axis(f"{figure.title}, ms", is_log=True),
                            ),
                            series,
                            rules=[
                                charts.Rule(slo.limit_ms, f"SLO {slo.limit_ms:g} ms")
                                for slo in limits
                            ],
                        )
                    ],
                )
            )
    return found


def pareto(comparison: Comparison) -> Picture | None:
    """Speed that a user sees against what all get together; a point for each rate."""
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
                label,
                chosen[label],
                points,
                Marks.LINE_AND_DOTS,
                tips=[
                    f"{label}{_at(row.rate)}: {number(x)} tok/s for each user, {number(y)} tok/s "
                    "in all"
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
            charts.xy(
                Frame(
                    "Throughput per user against throughput in all",
                    "One point per deployment and rate.",
                    Axis("tok/s per user"),
                    Axis("output tok/s in all"),
                ),
                series,
            )
        ],
    )


# --- where the time goes


def stages(comparison: Comparison, rate: float | None) -> Picture | None:
    """Mean milliseconds of each stage up to the first, and from there to the second token."""
    first, second = [], []
    good = {
        each.label: [one for run in comparison.runs(each.label, rate) for one in _good(run)]
        for each in comparison.deployments
    }
    groups = list(dict.fromkeys(one.group for those in good.values() for one in those))
    for group in sorted(groups, reverse=True):  # steady before burst
        for label, outcomes in good.items():
            those = [one for one in outcomes if one.group == group]
            if not those:
                continue
            name = f"{label}, {group}" if len(groups) > 1 else label
            first.append(_mean_bar(name, those))
            told = [one for one in those if one.second_stages]
            if told:
                second.append(_bar(name, [one.second_stages for one in told]))
    if not first:
        return None
    drawings = [
        charts.stacked_bars(
            "Stages up to the first token", "Mean of all requests.", first, unit="ms"
        )
    ]
    names = ["up to the first token (TTFT)"]
    if second:
        drawings.append(
            charts.stacked_bars(
                "Stages from the first to the second token",
                "Mean of all requests.",
                second,
                unit="ms",
            )
        )
        names.append("from the first to the second token")
    return Picture(
        "stages",
        "Where the time goes",
        "Mean of each stage by the servers' own account; what lies between their account and what "
        f"the client saw is called “{_UNTOLD}”. All runs{_at(rate)}.",
        drawings,
        names,
        is_wide=True,
    )


_UNTOLD: Final = "client and network"


def _mean_bar(name: str, those: Sequence[Outcome]) -> charts.Bar:
    """Stages up to the first token; they add up to the mean TTFT that the client saw."""
    mean_ms = statistics.fmean(one.ttft_s * 1e3 for one in those)
    if not all(one.stages for one in those):
        return charts.Bar(name, [(WAIT, mean_ms)], f"{number(mean_ms)} ms")
    bar = _bar(name, [one.stages for one in those])
    told = sum(value for _, value in bar.pieces)
    pieces = [*bar.pieces, (_UNTOLD, max(0.0, mean_ms - told))]
    return charts.Bar(name, pieces, f"{number(mean_ms)} ms")


def _bar(name: str, accounts: Sequence[dict[str, float]]) -> charts.Bar:
    names = list(dict.fromkeys(stage for account in accounts for stage in account))
    pieces = [
        (stage, sum(account.get(stage, 0.0) for account in accounts) / len(accounts))
        for stage in names
    ]
    return charts.Bar(name, pieces, f"{number(sum(ms for _, ms in pieces))} ms")


def timelines(comparison: Comparison, rate: float | None) -> list[Picture]:
    """The requests of one run of each deployment as lanes: what each was waiting for, and when."""
    runs = _typical(comparison, rate)
    if not runs:
        return []
    end = max(one.end_s for run in runs.values() for one in _good(run))
    drawings, names, is_cut = [], [], False
    for label, run in runs.items():
        good = sorted(_good(run), key=lambda one: one.sent_s)
        is_cut |= len(good) > _MAX_LANES
        drawings.append(
            charts.timeline(
                f"Requests over time: {label}",
                "One lane for each request, in the order of their start.",
                [_lane(one) for one in good[:_MAX_LANES]],
                end=end,
            )
        )
        names.append(label)
    cut = f" The first {_MAX_LANES} requests of each." if is_cut else ""
    return [
        Picture(
            "timeline",
            "Requests over time",
            "A lane for each request, in the order in which they were sent; what it was waiting "
            f"for, and when it got its tokens. The same runs as in the first picture.{cut}",
            drawings,
            names,
            is_wide=True,
        )
    ]


def _lane(one: Outcome) -> charts.Lane:
    pieces: list[tuple[str, float, float]] = []
    if one.sent_s - one.scheduled_s > 1e-3:
        pieces.append((LAG, one.scheduled_s, one.sent_s))
    first = one.chunk_s[0]
    pieces += _pieces(one.stages or {WAIT: one.ttft_s * 1e3}, one.sent_s, first)
    at = first
    if one.second_stages and len(one.chunk_s) > 1:
        told = _pieces(one.second_stages, first, one.chunk_s[1])
        pieces += told
        at = told[-1][2] if told else first
    pieces.append((DECODE, at, one.chunk_s[-1]))
    group = f"{one.group}, " if one.group else ""
    tip = (
        f"{one.request_id}: {group}{one.num_prompt_tokens} in, {one.num_output_tokens} out, "
        f"TTFT {number(one.ttft_s * 1e3)} ms, in all {number(one.e2el_s * 1e3)} ms"
    )
    return charts.Lane(tip, pieces)


def _pieces(account: dict[str, float], start: float, end: float) -> list[tuple[str, float, float]]:
    """Stages one after the other from `start`, none beyond `end`."""
    pieces, at = [], start
    for name, ms in account.items():
        stop = min(end, at + ms / 1e3)
        if stop > at:
            pieces.append((name, at, stop))
        at = max(at, stop)
    return pieces


# --- the bound


def rate_matched(comparison: Comparison, rate: float | None) -> Picture | None:
    """Measured output beside what the engines' rates allow."""
    if comparison.rates is None:
        return None
    rates = comparison.rates
    cores = max(each.num_cores for each in comparison.deployments)
    bars = [
        _flat(f"rate-matched bound, {cores} cores", "bound", bound.per_core(rates) * cores),
        *(
            _flat(
                f"{each.label}, whole engines",
                "reach",
                bound.of_pair(rates, each.num_prefill, each.num_decode),
            )
            for each in comparison.deployments
            if each.is_disaggregated
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
        f"schedule{_at(rate)}, which asks for no more.",
        [
            charts.stacked_bars(
                "Output tokens per second", "Bound, reach and measured.", bars, unit="tok/s"
            )
        ],
        is_wide=True,
    )


def _flat(name: str, piece: str, value: float) -> charts.Bar:
    return charts.Bar(name, [(piece, value)], f"{number(value)} tok/s")
