"""Charts of single runs over time: gaps between tokens, and a track for each request.

Knows what the figures mean; knows no page.
"""

from __future__ import annotations

from typing import Final

from pdserve.bench.compare.result import Comparison
from pdserve.bench.compare.summary import has_steady, others, percentiles, prefill_of, steady
from pdserve.bench.digits import number
from pdserve.bench.records import Outcome, Run
from pdserve.bench.report.charts import Band, Chart, Marks, Rule, Scale, Series, Track
from pdserve.bench.report.picture import Picture, at_rate, colours, ends_of, typical_runs
from pdserve.bench.report.stages import WAIT

_MAX_TRACKS: Final = 120
_NUM_WORST: Final = 8
"""Longest gaps of a run that get a tooltip each."""
LAG: Final = "client late"
DECODE: Final = "decode"


# --- gaps between tokens, with the prompts that came between


def itl_over_time(comparison: Comparison, rate: float | None) -> Picture | None:
    """A panel for each deployment: each gap a dot, each interfering prompt a shaded span."""
    runs = {label: run for label, run in typical_runs(comparison, rate).items() if _gaps(run)}
    if not runs:
        return None
    chosen = colours(comparison)
    all_ms = [ms for run in runs.values() for _, ms, _ in _gaps(run)]
    low, high = ends_of(all_ms)
    end = max(run.duration_s for run in runs.values())
    charts, names = [], []
    for label, run in runs.items():
        gaps = sorted(_gaps(run), key=lambda gap: gap[1])
        p99 = percentiles([ms for _, ms, _ in gaps], 99)[0]
        worst = gaps[-_NUM_WORST:]
        charts.append(
            Chart(
                title=f"Gaps between tokens over time: {label}",
                description=f"Each dot is a gap; p99 is {number(p99)} ms.",
                x=Scale("seconds since the start of the run", ends=(0.0, end)),
                y=Scale("ITL, ms", is_log=True, ends=(low, high)),
                height=216,
                has_legend=False,
                series=[
                    Series(
                        name=label,
                        colour=chosen[label],
                        points=[(at, ms) for at, ms, _ in gaps],
                        marks=Marks.CLOUD,
                    ),
                    Series(
                        name=label,
                        colour=chosen[label],
                        points=[(at, ms) for at, ms, _ in worst],
                        marks=Marks.DOTS,
                        tips=[
                            f"{number(ms)} ms, {number(at)} s after the start, {name}"
                            for at, ms, name in worst
                        ],
                    ),
                ],
                bands=_prefills(run),
                rules=[Rule(p99, f"p99 {number(p99)} ms")],
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
        f"run with the median ITL p99 of each deployment{at_rate(rate)}.",
        charts,
        names,
        is_wide=True,
    )


def _gaps(run: Run) -> list[tuple[float, float, str]]:
    """When it ended (s), how long it was (ms), whose it is; of each gap."""
    return [
        (at, gap * 1e3, one.request_id)
        for one in steady(run)
        for at, gap in zip(one.chunk_s[1:], one.itl_s, strict=True)
    ]


def _prefills(run: Run) -> list[Band]:
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
        Band(
            start,
            end,
            f"{len(those)} {'prompt' if len(those) == 1 else 'prompts'} of "
            f"{sum(one.num_prompt_tokens for one in those)} tokens in all, "
            f"{number((end - start) * 1e3)} ms, from {number(start)} s on",
        )
        for start, end, those in spans
    ]


# --- requests as tracks


def timelines(comparison: Comparison, rate: float | None) -> list[Picture]:
    """The requests of one run of each deployment as tracks: what each was waiting for, and when."""
    runs = typical_runs(comparison, rate)
    if not runs:
        return []
    end = max(one.end_s for run in runs.values() for one in run.answered)
    charts, names, is_cut = [], [], False
    for label, run in runs.items():
        good = sorted(run.answered, key=lambda one: one.sent_s)
        is_cut |= len(good) > _MAX_TRACKS
        charts.append(
            Chart(
                title=f"Requests over time: {label}",
                description="One track for each request, in the order of their start.",
                x=Scale("s", ends=(0.0, end)),
                tracks=[_track(one) for one in good[:_MAX_TRACKS]],
            )
        )
        names.append(label)
    cut = f" The first {_MAX_TRACKS} requests of each." if is_cut else ""
    return [
        Picture(
            "timeline",
            "Requests over time",
            "A track for each request, in the order in which they were sent; what it was waiting "
            "for, and when it got its tokens. Shown is the run with the median ITL p99 of each "
            f"deployment{at_rate(rate)}.{cut}",
            charts,
            names,
            is_wide=True,
        )
    ]


def _track(one: Outcome) -> Track:
    pieces: list[tuple[str, float, float]] = []
    if one.sent_s - one.scheduled_s > 1e-3:
        pieces.append((LAG, one.scheduled_s, one.sent_s))
    first = one.chunk_s[0]
    pieces += _pieces(one.stages or {WAIT: one.ttft_s * 1e3}, one.sent_s, first)
    at = first
    if one.second_stages and len(one.chunk_s) > 1:
        later = _pieces(one.second_stages, first, one.chunk_s[1])
        pieces += later
        at = later[-1][2] if later else first
    pieces.append((DECODE, at, one.chunk_s[-1]))
    group = f"{one.group}, " if one.group else ""
    tip = (
        f"{one.request_id}: {group}{one.num_prompt_tokens} in, {one.num_output_tokens} out, "
        f"TTFT {number(one.ttft_s * 1e3)} ms, in all {number(one.e2el_s * 1e3)} ms"
    )
    return Track(pieces=pieces, tip=tip)


def _pieces(account: dict[str, float], start: float, end: float) -> list[tuple[str, float, float]]:
    """Stages one after the other from `start`, none beyond `end`."""
    pieces, at = [], start
    for name, ms in account.items():
        stop = min(end, at + ms / 1e3)
        if stop > at:
            pieces.append((name, at, stop))
        at = max(at, stop)
    return pieces
