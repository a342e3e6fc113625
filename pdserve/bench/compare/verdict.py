"""States in sentences what the figures show and what they cannot show.

Every sentence is based on figures in the comparison, and claims no more than they support: a
difference within the spread of the repeats is reported as no clear difference. Knows no plot.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.compare.result import Comparison, Deployment
from pdserve.bench.compare.summary import (
    Figure,
    Ratio,
    Row,
    beside_prefills,
    fell_behind,
    has_steady,
    others,
    rows,
)
from pdserve.bench.digits import number
from pdserve.bench.records import Run

GOAL = 5.0
"""The design's goal for the improvement of ITL p99 under bursts of prompts, as a factor."""

_SEEN_BY_P99 = 0.02
LOAD = "load average before"
"""Key of the load average of the last minute before the first deployment was started."""
_BUSY_SHARE = 0.5
_FULL_SHARE = 0.85
"""Share of the cores: with this average use, all of them are busy at the times that matter."""

_SAME = 0.03
"""A smaller difference counts as none, even if the repeats happen to agree."""
_SAME_IN_ONE_RUN = 0.1


@dataclass(frozen=True, slots=True)
class Headline:
    """The figure that disaggregation should improve.

    Attributes:
        label: The P/D deployment with the best one.
        text: One sentence.
        ratio: Ratio to the baseline.
        has_goal: Whether the design has a goal for it, as with steady decoders.
        num_runs: Runs of each deployment.
        why_not: Sentences that say why the figure is not valid; empty if it is.
        strictest: Ratio to the best colocated deployment; None if there is just one.
    """

    label: str
    text: str
    ratio: Ratio
    has_goal: bool
    num_runs: int
    why_not: Sequence[str]
    strictest: float | None
    strictest_label: str = ""


def headline(comparison: Comparison, rate: float | None) -> Headline | None:
    """The ratio of ITL p99; None without a P/D deployment and a baseline that have one."""
    table = rows(comparison, rate)
    candidates = [
        row
        for row in table
        if comparison.deployment(row.label).is_disaggregated and Figure.ITL_P99 in row.ratios
    ]
    base = next((row for row in table if row.label == comparison.baseline), None)
    if not candidates or base is None:
        return None
    best = min(candidates, key=lambda row: row.values[Figure.ITL_P99].median)
    ratio, ours = best.ratios[Figure.ITL_P99], best.values[Figure.ITL_P99].median
    theirs = base.values[Figure.ITL_P99].median
    has_goal = _is_interference(comparison, rate)
    who = "of the steady decoders" if has_goal else "of all requests"
    text = (
        f"ITL p99 {who}: {number(ours)} ms with {best.label}, {number(theirs)} ms with "
        f"{base.label}: {_times(ratio.median)}"
    )
    why_not = [f"{row.label}: {' '.join(row.why_not)}" for row in (best, base) if row.why_not]
    if why_not:
        text += f" (NOT VALID: {' '.join(why_not)})"
    others = [
        row
        for row in table
        if not comparison.deployment(row.label).is_disaggregated
        and not comparison.deployment(row.label).is_peer
        and Figure.ITL_P99 in row.values
        and row.values[Figure.ITL_P99].median > 0  # else its tokens came at once: no ratio
    ]
    strictest, strictest_label = None, ""
    if len(others) > 1:
        rival = min(others, key=lambda row: row.values[Figure.ITL_P99].median)
        strictest = rival.values[Figure.ITL_P99].median / ours
        strictest_label = rival.label if rival.is_valid else f"{rival.label}, not valid"
    return Headline(
        best.label,
        text,
        ratio,
        has_goal,
        len(comparison.runs(best.label, rate)),
        why_not,
        strictest,
        strictest_label,
    )


def headline_facts(comparison: Comparison, rate: float | None) -> dict[str, object] | None:
    """The headline for the comparison's file: the figure, its validity and its context."""
    found = headline(comparison, rate)
    if found is None:
        return None
    return {
        "text": f"{found.text}{goal_words(found)}.",
        "itl_p99_ratio": found.ratio.median,
        "valid": not found.why_not,
        "why_not": list(found.why_not),
        "caveats": caveats(comparison),
    }


def _is_interference(comparison: Comparison, rate: float | None) -> bool:
    return any(
        has_steady(run)
        for each in comparison.deployments
        for run in comparison.runs(each.label, rate)
    )


def sentences(comparison: Comparison, rate: float | None) -> list[str]:
    """Sentences that compare each deployment with the baseline at one rate."""
    found = []
    for row in rows(comparison, rate):
        if not row.ratios:
            continue
        better, worse, same = [], [], []
        for figure, ratio in row.ratios.items():
            if figure is Figure.ITL_MAX:
                continue
            text = f"{figure.title} {number(max(ratio.median, 1 / ratio.median))} times"
            if is_within_noise(ratio):
                same.append(figure.title)
            elif ratio.median > 1:
                better.append(text)
            else:
                worse.append(text)
        parts = [
            f"{word} by {', '.join(texts)}"
            for word, texts in (("better", better), ("worse", worse))
            if texts
        ]
        if same:
            parts.append(f"no clear difference: {', '.join(same)}")
        found.append(f"{row.label} against {comparison.baseline}: {'; '.join(parts)}.")
    return found


def is_within_noise(ratio: Ratio) -> bool:
    """Whether the repeats disagree on which side is better, or hardly differ.

    A single run (its lowest ratio is its highest) does not show the spread of repeats.
    """
    least = _SAME if ratio.low < ratio.high else _SAME_IN_ONE_RUN
    return ratio.low <= 1.0 <= ratio.high or abs(ratio.median - 1.0) < least


def _times(ratio: float) -> str:
    if ratio >= 1:
        return f"{number(ratio)} times better"
    return f"{number(1 / ratio)} times worse"


def caveats(comparison: Comparison) -> list[str]:
    """Limits of the figures that readers must know."""
    found = []
    ours = [each for each in comparison.deployments if not each.is_peer]
    for rate in comparison.request_rates:
        found += _validity(rows(comparison, rate), rate)
        found += _schedule(comparison, rate)
    found += [*_repeats(comparison), *comparison.notes]
    if ours:
        found += _others_work(comparison)
        found += _sharing(comparison, ours)
    peers = [each.label for each in comparison.deployments if each.is_peer]
    if peers and ours:
        found.append(
            f"{', '.join(peers)} were already running: their resources, and whether their caches "
            "were empty, are unknown here."
        )
    return found


def _repeats(comparison: Comparison) -> list[str]:
    num = max((each.repeat for each in comparison.measured), default=0) + 1
    if num == 1:
        return [
            (
                "Each deployment was measured once, so the spread between runs is unknown and "
                "small differences mean nothing. --num-runs 3 measures it."
            )
        ]
    noises = [
        (row.values[Figure.ITL_P99].noise, row.label)
        for rate in comparison.request_rates
        for row in rows(comparison, rate)
        if Figure.ITL_P99 in row.values
    ]
    if not noises:
        return []
    share, label = max(noises)
    return [
        (
            f"Figures are medians over {num} runs, each in newly started processes; the runs of "
            "the deployments alternate. ITL p99 varies between the runs by up to "
            f"{share * 100:.0f} % of its median ({label}); small print in the table gives the "
            "lowest and the highest."
        )
    ]


def _validity(table: Sequence[Row], rate: float | None) -> list[str]:
    found = []
    at = "" if rate is None else f" at {rate:g} requests/s"
    for row in table:
        if row.why_not:
            found.append(f"{row.label}{at}: not valid. {' '.join(row.why_not)}")
        if row.num_failed:
            found.append(
                f"{row.label}{at}: {row.num_failed} of {row.num_requests} requests failed; the "
                "figures cover the others."
            )
    return found


def _schedule(comparison: Comparison, rate: float | None) -> list[str]:
    """Sentences on a schedule that is too much for a deployment, or too little to see an effect."""
    found = []
    at = "" if rate is None else f" at {rate:g} requests/s"
    for each in comparison.deployments:
        runs = [run for run in comparison.runs(each.label, rate) if run.outcomes]
        behind = [
            (run.duration_s, max(one.scheduled_s for one in run.outcomes))
            for run in runs
            if fell_behind(run)
        ]
        if behind:
            end, due = max(behind)
            found.append(
                f"{each.label}{at} fell behind: the last request was due after {number(due)} s, "
                f"and the last answer ended after {number(end)} s. Its TTFT shows how long the "
                "queue became, and would be longer in a longer run."
            )
        if each.label == comparison.baseline or not (each.is_disaggregated or each.is_peer):
            found += _interference(each.label, runs, at)
    return found


def _interference(label: str, runs: Sequence[Run], at: str) -> list[str]:
    """Whether a colocated deployment's steady decoders met prompts often enough."""
    met = total = 0
    for run in runs:
        if has_steady(run) and others(run):
            hits, num = beside_prefills(run)
            met, total = met + hits, total + num
    if not total or met / total >= _SEEN_BY_P99:
        return []
    return [
        (
            f"{label}{at}: {number(met / total * 100)} % of the steady decoders' gaps coincided "
            "with the prefill of another prompt. A p99 shows nothing that affects fewer than 1 % "
            "of the gaps, and little of what affects hardly more: look at ITL max and at the "
            "tail plot, or lower --interference-burst-input-len, so that bursts come more often."
        )
    ]


def _others_work(comparison: Comparison) -> list[str]:
    """Whether the machine was busy before anything was started here."""
    load = float(comparison.environment.get(LOAD, "0"))
    cores = max(each.num_cores for each in comparison.deployments)
    if load <= cores * _BUSY_SHARE:
        return []
    return [
        (
            f"The machine was busy with other work: it had a load average of {number(load)} on "
            f"{cores} cores before the start. Absolute figures are worse than on a quiet machine, "
            "and other programs may have slowed one deployment more than another."
        )
    ]


def _sharing(comparison: Comparison, ours: Sequence[Deployment]) -> list[str]:
    cores = max(each.num_cores for each in ours)
    if comparison.environment.get("device") == "cuda":
        return [
            (
                f"Every deployment had the same {cores} GPUs; the client, the proxy and the API "
                "servers shared the host's cores with them."
            )
        ]
    found = [
        (
            f"Every deployment had the same {cores} CPU cores. The client, the proxy and the API "
            "servers ran on these cores too, so reading or relaying a token takes time from an "
            "engine; this cost disappears if each engine has its own machine."
        ),
        *_cores_used(comparison),
        (
            "The cores share one memory bus and one last-level cache, so a prefill on one core "
            "slows the decode steps on another; separate machines or GPUs would not show this. "
            "On the other hand KV travels through shared memory here and through a network "
            "there. The ratios hold for this machine; for GPUs they demonstrate only the "
            "mechanism."
        ),
    ]
    if comparison.rates is not None:
        found += _bound_words(comparison)
    return found


def _cores_used(comparison: Comparison) -> list[str]:
    """Sentences on who used the cores, and which deployments had none to spare."""
    words, full, cores = [], [], 0
    for each in comparison.deployments:
        runs = [m.run for m in comparison.measured if m.deployment == each.label]
        used = [run.cores for run in runs if run.cores is not None]
        if not used:
            continue
        names = dict.fromkeys(name for one in used for name in one.by_name)
        parts = {
            name: statistics.fmean(one.by_name.get(name, 0.0) for one in used) for name in names
        }
        total, cores = sum(parts.values()), used[0].num_cores
        inner = ", ".join(f"{part} {share:.2f}" for part, share in parts.items())
        words.append(f"{each.label} {total:.2f} ({inner})")
        if total >= _FULL_SHARE * cores:
            full.append(each.label)
    if not words:
        return []
    found = [f"Cores in use on average: {'; '.join(words)}."]
    if full:
        found.append(
            f"The {cores} cores were fully used by {'; '.join(full)}: tokens wait for a core "
            "wherever an engine, an API server, the proxy or the client share one, and the "
            "measured gaps include that wait. A slower model, or fewer concurrent requests, "
            "would leave room."
        )
    return found


def _bound_words(comparison: Comparison) -> list[str]:
    rates = comparison.rates
    assert rates is not None
    cores = max((each.num_cores for each in comparison.deployments), default=0)
    top = rates.bound_per_core
    text = (
        f"Rate-matched bound: one engine on {rates.num_cores} core"
        f"{'' if rates.num_cores == 1 else 's'} prefills {number(rates.ctx_rate)} of these "
        f"prompts/s, or, with prompts cached, generates {number(rates.gen_rate)} of these "
        f"answers/s ({number(rates.out_tok_s)} tok/s). "
        f"{number(rates.out_tok_s)} / ({rates.num_cores} × {number(rates.gen_rate)} / "
        f"{number(rates.ctx_rate)} + {rates.num_cores}) = {number(top)} tok/s per core, "
        f"{number(top * cores)} tok/s on {cores}, would need {number(rates.best_share)} "
        "prefill engines per decode engine."
    )
    return [
        text,
        *(
            _reach_words(each.label, rates.reach(each.num_prefill, each.num_decode))
            for each in comparison.deployments
            if each.is_disaggregated and not each.is_crowded
        ),
    ]


def _reach_words(label: str, reach: float) -> str:
    return (
        f"{label} uses whole engines and can reach at most {number(reach)} tok/s with these "
        "requests; below that the schedule determines the throughput in the table."
    )


def goal_words(found: Headline) -> str:
    """Whether the goal was reached, if there is one."""
    if not found.has_goal:
        return ""
    if found.why_not:
        return "; whether the goal was reached is unknown"
    if found.num_runs == 1 and found.ratio.median >= GOAL:
        return f"; the goal of {GOAL:g} was reached in the one run"
    if found.ratio.low >= GOAL:
        return f"; the goal of {GOAL:g} was reached in every run"
    if found.ratio.median >= GOAL:
        return f"; the goal of {GOAL:g} was reached, but not in every run"
    return f"; the goal of {GOAL:g} was missed"


def strictest_words(found: Headline) -> str:
    """Sentence with the ratio to the best colocated deployment."""
    assert found.strictest is not None
    return (
        f"Against the colocated deployment with the best ITL p99 ({found.strictest_label}) it is "
        f"{_times(found.strictest)}."
    )
