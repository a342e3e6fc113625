"""The numbers that routing is to reach, one row each, in virtual time (see `routing`).

    python -m benchmarks.routing_acceptance --traces FOLDER [--workload NAME...] [--row N...]

Rates are those at which the best fixed layout holds about 90 % of requests within objectives. Rows:

1   predicted, as many P as D, against the best fixed layout with hindsight
2   predicted against each policy that chooses P and D one after the other, at the same roles
3   predicted against always split and always local, where the load is light
4   prompt tokens computed, against a cache that all share and that forgets nothing
5   how far predicted first tokens were off, and how many more than they should be
6   predicted where what it knows is wrong: times by 0.7 and 1.4, KV events late or lost, others'
    work as engines say once a second (two and four proxies, requests to each in turn)
9   early rejection at 1.5 times the rate
10  a tenant that sends ten times as much as the other
13  home roles where ten prompt tokens for an output token become ten output tokens for one
14  a plan by what a proxy has learned at half the rate, against the same by what engines take
16  decisions that follow from their records, bit for bit
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import routing_work
from benchmarks.routing import figures, settings_of, work_of
from pdserve.bench.goodput import parse_goodput
from pdserve.config.policies import POLICIES
from pdserve.planner.fleet import Fleet
from pdserve.planner.planning import Planner, PlanQuestion, TimesError
from pdserve.planner.proxy import FleetFaults
from pdserve.planner.work import FleetCosts, least_computed, parse_layout
from pdserve.proxy.brain.decision import repeated

if TYPE_CHECKING:
    from pdserve.planner.work import Work

RATES: Final = {
    "conv": 3.3,
    "azure-conv": 60.0,
    "azure-code": 8.0,
    "decode-heavy": 60.0,
    "turns": 100.0,
}
_EIGHT: Final = ("4P4D", "2P6D", "6P2D", "8B")
_FOUR: Final = ("2P2D", "1P3D", "3P1D", "4B")
LAYOUTS: Final = {
    "conv": _EIGHT,
    "azure-conv": _FOUR,
    "azure-code": _EIGHT,
    "decode-heavy": _FOUR,
    "turns": _FOUR,
}
"""Of engines enough for that rate: the even one, too few P, too few D, and engines for both."""
LIGHT: Final = 0.25
_PREDICTED: Final = "prefix_sticky/predicted"
_LEARNT_S: Final = 4.0
_OWN_WORKLOAD: Final = (10, 13)
_PROMPTS: Final = routing_work.Shape(2000, 200, per_s=20.0, seconds=90.0)
_TOKENS: Final = routing_work.Shape(200, 2000, per_s=10.5, seconds=150.0)
"""Ten prompt tokens for each of the answer, and one for ten: four engines are next to full."""
_SLOS: Final = ("ttft:1000", "tpot:30")
_NO_GATE: Final = {"early_rejection": False}
_OF_FLEET: Final = ("faults", "num_proxies", "report_s")


class Runs:
    """Runs of one workload.

    Args:
        find: Returns the workload at a rate.
        seed: Of workloads that are made up.
    """

    def __init__(self, name: str, find: Callable[[float], list[Work]], seed: int) -> None:
        self.seed = seed
        self._name = name
        self._find = find
        self.layouts = LAYOUTS[name]
        self._workloads: dict[float, list[Work]] = {}
        self.fleet: Fleet | None = None

    def run(
        self, policy: str, layout: str = "", *, factor: float = 1.0, **more: Any
    ) -> dict[str, Any]:
        """Return the figures of a policy; `more` are settings of `Fleet`, and of the proxy."""
        workload = self.workload(factor)
        fields = {name: more.pop(name) for name in _OF_FLEET if name in more}
        where = parse_layout(layout or self.layouts[0])
        self.fleet = Fleet(where, settings_of(policy) | more, **fields)
        outcomes = self.fleet.run(workload)
        return figures(outcomes, least_computed(workload))

    def workload(self, factor: float) -> list[Work]:
        """The same requests, so many times as fast."""
        if factor not in self._workloads:
            self._workloads[factor] = self._find(factor * RATES[self._name])
        return self._workloads[factor]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, default=Path("traces"))
    parser.add_argument("--workload", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--row", nargs="+", type=int, choices=sorted(ROWS), default=sorted(ROWS))
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--part", type=int, default=0, help="of a trace, if not its first requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file that the rows are added to")
    args = parser.parse_args()
    first = args.part * args.requests

    def find(per_s: float, name: str) -> list[Work]:
        work = work_of(name, per_s, first + args.requests, args.traces, args.seed)
        return routing_work.part_of(work, first, per_s) if first else work

    for name in args.workload:
        runs = Runs(name, partial(find, name=name), args.seed)
        for row in args.row:
            if row in _OWN_WORKLOAD and name != args.workload[0]:
                continue  # it has a workload of its own
            found = {"row": row, "workload": name, **ROWS[row](runs)}
            print(json.dumps(found), flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(found) + "\n")


def best_fixed(runs: Runs) -> dict[str, Any]:
    """Row 1: at least 0.98 of the best layout on each workload, 1.10 on the geometric mean."""
    fixed = {layout: runs.run("prefix_sticky", layout)["goodput"] for layout in runs.layouts}
    found = runs.run(_PREDICTED)["goodput"]
    best = max(fixed.values())
    return {"predicted": found, "fixed": fixed, "ratio": round(found / best, 3), "goal": 0.98}


def each_policy(runs: Runs) -> dict[str, Any]:
    """Row 2: at least 1.15 times each, twice where the roles' ratio is wrong."""
    told: dict[str, Any] = {"goal": [1.15, 2.0]}
    for layout in runs.layouts[:2]:
        others = {policy: runs.run(policy, layout)["goodput"] for policy in sorted(POLICIES)}
        found = runs.run(_PREDICTED, layout)["goodput"]
        ratio = round(found / max(0.1, *others.values()), 3)
        told[layout] = {"predicted": found, "others": others, "ratio": ratio}
    return told


def light_load(runs: Runs) -> dict[str, Any]:
    """Row 3: TTFT p50 and TPOT p99 at most 1.05 of the better of always split and always local."""
    names = (_PREDICTED, "prefix_sticky/always", "prefix_sticky/never")
    found = [runs.run(policy, factor=LIGHT) for policy in names]
    told: dict[str, Any] = {"goal": 1.05}
    for figure in ("ttft_p50_ms", "tpot_p99_ms"):
        predicted, always, never = (each[figure] for each in found)
        ratio = round(predicted / min(always, never), 3)
        told[figure] = {"predicted": predicted, "split": always, "local": never, "ratio": ratio}
    return told


def computed_again(runs: Runs) -> dict[str, Any]:
    """Row 4: at most 1.15 times what a cache without bounds would leave."""
    return {"ratio": runs.run(_PREDICTED)["computed"], "goal": 1.15}


def predicted_well(runs: Runs) -> dict[str, Any]:
    """Row 5: off by at most 10 % on average; first tokens, and what they are predicted by.

    And how many first tokens come within what 90 % should, going by the error of late.
    """
    found = runs.run(_PREDICTED)
    assert runs.fleet is not None
    assert runs.fleet.first.pairing is not None
    model = runs.fleet.first.pairing.model
    fits = {"prefill": model.prefill, "step": model.step, "wire": model.wire}
    errors = {name: round(100 * fit.error, 1) for name, fit in fits.items()}
    told = {"ttft_off": found["off"], "covered": found["covered"]}
    return {**told, **errors, "goal": [10.0, [85.0, 95.0]]}


def wrong_knowledge(runs: Runs) -> dict[str, Any]:
    """Row 6: at least 0.93 of the goodput."""
    right = runs.run(_PREDICTED)["goodput"]
    wrong: dict[str, dict[str, Any]] = {
        "times x 0.7": {"faults": FleetFaults(predicted=0.7)},
        "times x 1.4": {"faults": FleetFaults(predicted=1.4)},
        "events 100 ms late": {"faults": FleetFaults(event_s=0.1)},
        "1 % of events lost": {"faults": FleetFaults(lost_events=0.01)},
        "two proxies": {"num_proxies": 2},
        "four proxies": {"num_proxies": 4},
    }
    found = {
        name: round(runs.run(_PREDICTED, **more)["goodput"] / right, 3)
        for name, more in wrong.items()
    }
    return {"goodput": right, "ratios": found, "goal": 0.93}


def early_rejection(runs: Runs) -> dict[str, Any]:
    """Row 9: TTFT p99 of those taken at most 1.2 S_T, goodput at least 1.2 of that without."""
    with_it = runs.run(_PREDICTED, factor=1.5)
    without = runs.run(_PREDICTED, factor=1.5, **_NO_GATE)
    names = ("goodput", "ttft_p99_ms", "late_p99", "shed")
    return {
        "with": {name: with_it[name] for name in names},
        "without": {name: without[name] for name in names},
        "ratio": round(with_it["goodput"] / max(0.1, without["goodput"]), 3),
        "goal": 1.2,
    }


def greedy_tenant(runs: Runs) -> dict[str, Any]:
    """Row 10: the other's TTFT p99 at most 1.3 of what it is alone, once engines are known.

    `uninterrupted`: as if it always went first on two engines that are never idle.
    """
    both = routing_work.greedy(1100, 3.0, times=10.0, seed=runs.seed)
    alone = [each for each in both if each.tenant == "modest"]
    alike = [dataclasses.replace(each, tenant="") for each in both]
    found = {}
    for name, workload in (("alone", alone), ("beside", both), ("one queue", alike)):
        outcomes = Fleet(parse_layout("2P2D"), settings_of(_PREDICTED)).run(workload)
        named = alone if name == "alone" else both
        pairs = zip(outcomes, named, strict=True)
        modest = [each for each, work in pairs if work.tenant == "modest" and work.at_s > _LEARNT_S]
        all_figures = figures(modest, 1)
        found[name] = {each: all_figures[each] for each in ("ttft_p50_ms", "ttft_p99_ms", "shed")}
    ratio = found["beside"]["ttft_p99_ms"] / found["alone"]["ttft_p99_ms"]
    first_s, alone_s = (routing_work.always_first(10_000, 3.0, is_alone=x) for x in (False, True))
    uninterrupted = round(first_s / alone_s, 3)
    return found | {"ratio": round(ratio, 3), "uninterrupted": uninterrupted, "goal": 1.3}


def homes_follow(runs: Runs) -> dict[str, Any]:
    """Row 13: at most 2 changes, 0.9 of the best fixed homes' goodput from a minute after it on."""
    workload = routing_work.turned(_PROMPTS, _TOKENS)
    turn_s = _PROMPTS.seconds
    found: dict[str, Any] = {}
    for layout in ("4B", "1P3D", "2P2D", "3P1D"):
        fleet = Fleet(parse_layout(layout), settings_of(_PREDICTED))
        outcomes = fleet.run(workload)
        parts = {
            "before": (_LEARNT_S, turn_s),
            "first minute": (turn_s, turn_s + 60),
            "then": (turn_s + 60, float("inf")),
        }
        found[layout] = {
            name: figures(
                [
                    o
                    for o, work in zip(outcomes, workload, strict=True)
                    if start_s <= work.at_s < end_s
                ],
                1,
            )["goodput"]
            for name, (start_s, end_s) in parts.items()
        }
        if layout == "4B":
            assert fleet.first.homes is not None
            made = [each for each in fleet.first.homes.looks if each.is_made]
            found[layout]["changes after it"] = [
                (round(each.at_s - turn_s), each.better.in_words())
                for each in made
                if each.better is not None and each.at_s > turn_s
            ]
    best = max(found[each]["then"] for each in ("1P3D", "2P2D", "3P1D"))
    return found | {"ratio": round(found["4B"]["then"] / best, 3), "goal": 0.9}


def planned_well(runs: Runs) -> dict[str, Any]:
    """Row 14: the load that holds within 10 %, p50 and p90 of TTFT and ITL within 15 %."""
    runs.run(_PREDICTED, factor=0.5)
    assert runs.fleet is not None
    assert runs.fleet.first.pairing is not None
    model, true = runs.fleet.first.pairing.model, runs.fleet.costs
    a, b, c = model.prefill.weights
    d, e, f = model.step.weights
    learned = FleetCosts(a, b, c, d, e, f, true.hop, true.handover, *model.wire.weights)
    layout = parse_layout(runs.layouts[0])
    plans = [
        Planner(
            PlanQuestion(
                workload=runs.workload(1.0),
                slos=parse_goodput(_SLOS),
                share=0.9,
                settings=settings_of(_PREDICTED),
                costs=costs,
                error=TimesError(
                    prefill=model.prefill.error, step=model.step.error, wire=model.wire.error
                ),
                size=layout,
            )
        ).plan(0, [layout])
        for costs in (learned, true)
    ]
    found, is_so = (plan.rows[0].figures for plan in plans)
    off = {
        name: round(getattr(found, name) / getattr(is_so, name) - 1, 3)
        for name in ("ttft_p50_ms", "ttft_p90_ms", "itl_p50_ms", "itl_p90_ms")
    }
    return {
        "highest_load": [plan.highest_load for plan in plans],
        "goodput": [found.goodput, is_so.goodput],
        "range": plans[0].goodput_range,
        "off": off,
        "goal": [0.1, 0.15],
    }


def bit_equal(runs: Runs) -> dict[str, Any]:
    """Row 16: all of them."""
    runs.run(_PREDICTED)
    assert runs.fleet is not None
    assert runs.fleet.first.pairing is not None
    decisions = [each.decision for each in runs.fleet.first.pairing.log.newest()]
    equal = sum(repeated(each) == each for each in decisions)
    closing = sum(
        abs(sum(each.chosen.terms.values()) - each.chosen.total) < 1e-9 for each in decisions
    )
    return {"decisions": len(decisions), "equal": equal, "sums_close": closing}


ROWS: Final[dict[int, Callable[[Runs], dict[str, Any]]]] = {
    1: best_fixed,
    2: each_policy,
    3: light_load,
    4: computed_again,
    5: predicted_well,
    6: wrong_knowledge,
    9: early_rejection,
    10: greedy_tenant,
    13: homes_follow,
    14: planned_well,
    16: bit_equal,
}


if __name__ == "__main__":
    main()
