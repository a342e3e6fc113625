"""Which routing policy serves a workload best: a table, in virtual time.

Real router, policies, schedulers, prefix caches and KV events; modelled steps and transfers
(`pdserve/planner`). Goodput is the share of requests whose first token came within max(1 s, three
times what its prompt takes alone) and whose further tokens took 30 ms each on average, the
hand-over included. `computed` are prompt tokens computed for each that had to be (each prefix once,
kept for ever, by whoever).

    python -m benchmarks.routing [--workload NAME RATE] [--layout 4P4D 8B]
        [--policy NAME[+DECODE][/SPLIT]] [--dynamo .venv-readers/bin/python]

With `--dynamo`, a Python that has `ai-dynamo-runtime` (as `make readers` makes one), Dynamo's own
selector can choose the prefill engines, and least_loaded the others (`routing_dynamo`): the policy
selection_service, or, without the blocks of running requests, selection_service_tokens.

Workloads: turns (conversations), conv (Mooncake), azure-conv, azure-code, decode-heavy (azure-conv
with prompts of a quarter and answers four times as long); all but the first need `--traces FOLDER`.
Prints a table, and with --json one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import routing_dynamo, routing_work
from pdserve.config.policies import POLICIES
from pdserve.planner.fleet import Fleet
from pdserve.planner.work import FleetCosts, least_computed, parse_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.planner.work import FleetOutcome, Work

_TPOT_S = 0.030
_SELECTORS = {"selection_service": True, "selection_service_tokens": False}
"""Policies of Dynamo's selector, and whether it counts blocks."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", action="append", nargs=2, metavar=("NAME", "RATE"))
    parser.add_argument("--layout", nargs="+", default=["2P2D"])
    parser.add_argument("--policy", nargs="+", default=sorted(POLICIES))
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", type=Path, default=Path("traces"))
    parser.add_argument("--dynamo", type=Path, metavar="PYTHON")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.dynamo and (lacking := _SELECTORS.keys() & args.policy):
        parser.error(f"--policy {min(lacking)} needs --dynamo")
    rows = []
    for name, rate in args.workload or [("turns", "4")]:
        workload = work_of(name, float(rate), args.requests, args.traces, args.seed)
        least = least_computed(workload)
        for layout in args.layout:
            for policy in args.policy:
                start_s = time.perf_counter()
                outcomes = served(workload, layout, policy, args.dynamo)
                row = {"workload": name, "per_s": float(rate), "layout": layout, "policy": policy}
                row |= figures(outcomes, least) | {"cpu_s": round(time.perf_counter() - start_s, 1)}
                rows.append(row)
                if not args.json:
                    print(line(row, has_head=len(rows) == 1), flush=True)
    if args.json:
        json.dump(
            {"benchmark": "routing", "requests": args.requests, "rows": rows}, sys.stdout, indent=1
        )


def work_of(name: str, per_s: float, num: int, traces: Path, seed: int) -> list[Work]:
    """Return the workload of a name."""
    match name:
        case "turns":
            return routing_work.conversations(num, per_s, seed=seed)
        case "conv":
            return routing_work.mooncake(traces / "mooncake_conversation.jsonl", num, per_s)
        case "azure-conv":
            return routing_work.azure(traces / "azure_2023_conversation.csv", num, per_s)
        case "decode-heavy":
            return routing_work.decode_heavy(traces / "azure_2023_conversation.csv", num, per_s)
        case "azure-code":
            return routing_work.azure(traces / "azure_2023_code.csv", num, per_s)
    raise SystemExit(f"--workload {name}: use turns, conv, azure-conv, azure-code or decode-heavy")


def served(
    workload: Sequence[Work], layout: str, policy: str, dynamo: Path | None
) -> list[FleetOutcome]:
    """Serve a workload under a policy."""
    if policy not in _SELECTORS:
        return Fleet(parse_layout(layout), settings_of(policy)).run(workload)
    assert dynamo is not None
    fleet = Fleet(parse_layout(layout), settings_of("least_loaded"))
    if fleet.layout.num_both:
        raise SystemExit(f"--layout {layout}: {policy} chooses among engines that only prefill")
    command = [dynamo, routing_dynamo.SIDE]
    return routing_dynamo.serve(fleet, workload, command, counts_blocks=_SELECTORS[policy])


def settings_of(policy: str) -> dict[str, Any]:
    """Return what a proxy is told.

    Of `prefix_sticky+least_loaded/isl_bounding` the policies for prefill and for decode engines,
    which are one if one is named, and the split policy.
    """
    names, _, split = policy.partition("/")
    prefill, _, decode = names.partition("+")
    return {
        "prefill_policy": prefill,
        "decode_policy": decode or prefill,
        "split_policy": split or "always",
        "itl_slo_s": _TPOT_S,
    }


def figures(outcomes: Sequence[FleetOutcome], least: int) -> dict[str, Any]:
    """Return what is measured of a run."""
    costs = FleetCosts()
    good = sum(
        each.end_s is not None
        and each.ttft_s is not None
        and each.ttft_s <= max(1.0, 3 * costs.of_prompt(each.num_prompt))
        and each.tpot_s <= _TPOT_S
        for each in outcomes
    )
    admitted = [each for each in outcomes if not each.is_rejected]
    ttfts = sorted(each.ttft_s if each.ttft_s is not None else 600.0 for each in admitted)
    lates = sorted(
        (each.ttft_s if each.ttft_s is not None else 600.0)
        / max(1.0, 3 * costs.of_prompt(each.num_prompt))
        for each in admitted
    )
    computed = sum(each.num_prompt - each.num_cached for each in admitted)
    return {
        "goodput": round(100 * good / len(outcomes), 1),
        "ttft_p50_ms": round(1e3 * statistics.median(ttfts), 1),
        "ttft_p99_ms": round(1e3 * ttfts[int(0.99 * (len(ttfts) - 1))], 1),
        "late_p99": round(lates[int(0.99 * (len(lates) - 1))], 2),
        "tpot_p50_ms": round(1e3 * statistics.median(each.tpot_s for each in admitted), 2),
        "tpot_p99_ms": round(
            1e3 * sorted(each.tpot_s for each in admitted)[int(0.99 * (len(admitted) - 1))], 2
        ),
        "computed": round(computed / least, 3),
        "computed_tokens": computed,
        "split": round(100 * sum(each.was_split for each in outcomes) / len(outcomes), 1),
        "shed": round(100 * (len(outcomes) - len(admitted)) / len(outcomes), 1),
        "off": off_by(admitted),
        "covered": covered(admitted),
        "unfinished": sum(each.end_s is None for each in admitted),
    }


def off_by(outcomes: Sequence[FleetOutcome]) -> float | None:
    """Mean error of predicted first tokens over what they were, in percent; after the first 200."""
    errors = [
        abs(predicted_s - served_s) / served_s for _, predicted_s, served_s in _predicted(outcomes)
    ]
    return round(100 * statistics.mean(errors), 1) if errors else None


def covered(outcomes: Sequence[FleetOutcome]) -> float | None:
    """Percent of the same within the band around each that 90 % should be in."""
    are_within = [
        abs(predicted_s - served_s) <= band * predicted_s
        for band, predicted_s, served_s in _predicted(outcomes)
    ]
    return round(100 * statistics.mean(are_within), 1) if are_within else None


def _predicted(outcomes: Sequence[FleetOutcome]) -> list[tuple[float, float, float]]:
    """Of each after the first 200 the band, the predicted and the real first token."""
    return [
        (each.times.first_band, each.predicted_s, each.ttft_s - each.sent_s)
        for each in outcomes[200:]
        if each.predicted_s is not None and each.times is not None and each.ttft_s is not None
    ]


def line(row: dict[str, Any], *, has_head: bool) -> str:
    """Return a row of the table; with its head, if it is the first."""
    names = [name for name in row if name != "computed_tokens"]
    cells = "  ".join(f"{row[name]!s:>{max(len(name), 9)}}" for name in names)
    head = "  ".join(f"{name:>{max(len(name), 9)}}" for name in names)
    return f"{head}\n{cells}" if has_head else cells


if __name__ == "__main__":
    main()
