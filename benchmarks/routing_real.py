"""Routing policies before two real engines, a core each: goodput in blocks, and TTFT when idle.

Two engines for both, between which KV can move, and before them a proxy for each arm; all are alive
at once. Blocks of the same requests go to one arm after the other, there and back again, each from
empty prefix caches, so that noise hits all alike. Prints one JSON object.

    python -m benchmarks.routing_real [--model 135m|boxed] [--data multi-turn,pd-interference]
                                      [--rounds N] [--load SHARE] [--quick]

Objectives are stated before anything is compared, and every request brings them (`slo`): the first
token within three times what the longest prompt takes alone, the others, on average, within twice
what they take alone. `multi-turn` comes at a share (`--load`) of the turns that the two engines
answer in a closed loop of eight users; the pace of `pd-interference` is that of `pdserve bench`.

`goodput` is good requests per second of the schedule. Intervals: 95 % of 10,000 resamples of the
rounds. `idle`: the first token of one text prompt after the other, by the boxed model, and what of
it was the proxy's own; `predicted` less the other arm, pair by pair. `others`: cores that other
programs had meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
import numpy as np

from benchmarks.deployments import Asker, processes, told
from benchmarks.engine import environment
from benchmarks.routing_stage import ARMS, PREDICTED, prompts_in_turn, staged
from pdserve.bench import calibration
from pdserve.bench.arrivals import ArrivalLaw
from pdserve.bench.cores import SERVERS, Watched, read_cpu, used_cores
from pdserve.bench.datasets.prompts import Segment
from pdserve.bench.goodput import Slo, SloMetric, is_within
from pdserve.bench.preparing import prompts_of
from pdserve.bench.records import Planned
from pdserve.bench.runner import Options
from pdserve.bench.target import ApiEndpoint, Target
from pdserve.config.boxed import BOXED
from pdserve.config.datasets import DatasetConfig, DatasetName, InterferenceConfig, MultiTurnConfig
from pdserve.proxy.brain.record import DecisionsShown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.deployments import Processes
    from benchmarks.routing_stage import Stage
    from pdserve.bench.records import Outcome

BEST_OF: Final = ("always_split", "always_local", "least_loaded")
MULTI_TURN: Final = MultiTurnConfig(output_len=32, think_time_s=0.2)
NUM_USERS: Final = 8
NUM_RESAMPLES: Final = 10_000
TTFT_TIMES, TPOT_TIMES = 3.0, 2.0
"""What a request may take, in parts of what it takes alone."""
_NUM_IDLE_IN: Final = (512, 2048)


@dataclass(frozen=True)
class Length:
    """How long it takes.

    Attributes:
        rounds: Blocks of each arm and data set.
        block_s: For how long requests come in a block.
        idle: Pairs of requests.
    """

    rounds: int
    block_s: float
    idle: int


FULL, QUICK = Length(6, 6.0, 60), Length(2, 4.0, 15)


# --- under load


async def under_load(
    stage: Stage, started: Processes, name: str, length: Length, load: float
) -> dict[str, Any]:
    """Measure one data set on every arm."""
    dataset, law, pace = await _paced(stage, name, length, load)
    is_turns = dataset.name is DatasetName.MULTI_TURN
    longest = MULTI_TURN.input_len if is_turns else dataset.interference.burst_input_len
    alone = await stage.play(
        "least_loaded", prompts_in_turn(stage.prompts, f"{name}/alone", 5, (longest,), 32), places=1
    )
    slos = (
        Slo(SloMetric.TTFT, round(TTFT_TIMES * _median_ms(each.ttft_s for each in alone), 1)),
        Slo(
            SloMetric.TPOT, round(TPOT_TIMES * _median_ms(each.tpot_s or 0.0 for each in alone), 2)
        ),
    )
    own = {"ttft_ms": slos[0].limit_ms, "itl_ms": slos[1].limit_ms}
    watched = Watched(dict.fromkeys(started.pids, SERVERS), os.sched_getaffinity(0))
    before = await _decided(stage)
    blocks: list[dict[str, Any]] = []
    for number in range(length.rounds):
        seeded = msgspec.structs.replace(dataset, seed=100 + number)
        plan = stage.plan(seeded, law)
        print(f"{name}: round {number + 1} of {length.rounds}", file=sys.stderr)
        for arm in list(ARMS) if number % 2 == 0 else reversed(ARMS):
            begun = read_cpu()
            outcomes = await stage.play(arm, plan, slo=own)
            used = used_cores(begun, read_cpu(), watched)
            blocks.append(
                {
                    "round": number,
                    "arm": arm,
                    **_summary(outcomes, slos, length.block_s),
                    "others": used.others if used else None,
                }
            )
    return {
        "objectives": [str(slo) for slo in slos],
        "pace": pace,
        "arms": {arm: _arm(blocks, arm) for arm in ARMS},
        "predicted_over_best": _over_best(blocks),
        "decisions": _between(before, await _decided(stage)),
        "blocks": blocks,
    }


async def _paced(
    stage: Stage, name: str, length: Length, load: float
) -> tuple[DatasetConfig, ArrivalLaw, str]:
    """The data set as this machine can bear it."""
    if name == DatasetName.PD_INTERFERENCE.value:
        dataset = DatasetConfig(
            name=DatasetName.PD_INTERFERENCE,
            interference=InterferenceConfig(duration_s=length.block_s),
        )
        target = Target(base_url=stage.engines[0], model=stage.served.model)
        found = await calibration.calibrate(dataset, stage.prompts, target, Options())
        return found.dataset, ArrivalLaw(), found.words
    dataset = DatasetConfig(
        name=DatasetName.MULTI_TURN, num_prompts=NUM_USERS * 8, multi_turn=MULTI_TURN
    )
    closed = msgspec.structs.replace(
        dataset, multi_turn=msgspec.structs.replace(MULTI_TURN, think_time_s=0.0)
    )
    outcomes = await stage.play("least_loaded", stage.plan(closed, ArrivalLaw()), places=NUM_USERS)
    most = len(outcomes) / max(each.end_s for each in outcomes)
    law = ArrivalLaw(rate=load * most / MULTI_TURN.num_turns)
    num = max(1, round(law.rate * length.block_s)) * MULTI_TURN.num_turns
    words = f"{law.rate:.2f} conversations/s, {load:g} of the {most:.2f} turns/s that are possible"
    return msgspec.structs.replace(dataset, num_prompts=num), law, words


def _summary(outcomes: Sequence[Outcome], slos: Sequence[Slo], seconds: float) -> dict[str, Any]:
    good = [each for each in outcomes if each.is_good]
    kept = sum(is_within(each, slos) for each in good)
    return {
        "requests": len(outcomes),
        "rejected": sum(each.status == 429 for each in outcomes),
        "failed": sum(bool(each.error) and each.status != 429 for each in outcomes),
        "good": kept,
        "goodput": round(kept / seconds, 3),
        "kept": {str(slo): sum(is_within(each, (slo,)) for each in good) for slo in slos},
        "ttft_ms": sorted(round(each.ttft_s * 1e3, 1) for each in good),
        "tpot_ms": sorted(round((each.tpot_s or 0.0) * 1e3, 2) for each in good),
    }


def _arm(blocks: Sequence[dict[str, Any]], arm: str) -> dict[str, Any]:
    own = [each for each in blocks if each["arm"] == arm]
    ttft, tpot = ([ms for each in own for ms in each[name]] for name in ("ttft_ms", "tpot_ms"))
    return {
        "goodput": round(statistics.mean(each["goodput"] for each in own), 3),
        "share": round(
            sum(each["good"] for each in own) / sum(each["requests"] for each in own), 3
        ),
        "rejected": sum(each["rejected"] for each in own),
        "failed": sum(each["failed"] for each in own),
        **{
            f"{name}_ms_p{percent}": round(float(np.percentile(values, percent)), 1)
            for name, values in (("ttft", ttft), ("tpot", tpot))
            for percent in (50, 99)
            if values
        },
    }


def _over_best(blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Goodput of `predicted` over that of whichever of the three does best in a resample."""
    good = {
        arm: np.array([each["good"] for each in blocks if each["arm"] == arm])[
            np.argsort([each["round"] for each in blocks if each["arm"] == arm])
        ]
        for arm in (PREDICTED, *BEST_OF)
    }
    num = len(good[PREDICTED])
    drawn = np.random.default_rng(0).integers(0, num, (NUM_RESAMPLES, num))
    sums = {arm: numbers[drawn].sum(axis=1) for arm, numbers in good.items()}
    best = np.maximum.reduce([sums[arm] for arm in BEST_OF])
    low, high = np.percentile(sums[PREDICTED] / np.maximum(best, 1), (2.5, 97.5))
    totals = {arm: int(numbers.sum()) for arm, numbers in good.items()}
    best_arm = max(BEST_OF, key=lambda arm: totals[arm])
    return {
        "best": best_arm,
        "ratio": round(totals[PREDICTED] / max(1, totals[best_arm]), 3),
        "interval": [round(float(low), 3), round(float(high), 3)],
        "goal": 1.1,
    }


# --- what `predicted` thought


async def _decided(stage: Stage) -> DecisionsShown:
    url = f"{stage.arms[PREDICTED]}/debug/decisions"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return msgspec.json.decode(await response.read(), type=DecisionsShown)


def _between(before: DecisionsShown, after: DecisionsShown) -> dict[str, Any]:
    """Reasons, and how far off predictions were, of the decisions since then."""
    since = max((each.seq for each in before.decisions), default=0)
    reasons: dict[str, int] = {}
    off: dict[str, list[float]] = {"ttft": [], "itl": [], "wire": []}
    for each in after.decisions:
        if each.seq <= since:
            continue
        chosen, measured = each.decision.chosen, each.measured
        reason = f"{'local' if chosen.is_local else 'split'}: {each.decision.reason}"
        reasons[reason] = reasons.get(reason, 0) + 1
        if measured is None:
            continue
        for name, thought, was in (
            ("ttft", chosen.ttft_s, measured.ttft_s),
            ("itl", chosen.itl_s, measured.itl_s),
            ("wire", chosen.wire_s, measured.wire_s),
        ):
            if was:
                off[name].append(thought / was)
    return {
        "reasons": dict(sorted(reasons.items(), key=lambda item: -item[1])),
        "predicted_over_measured": {
            name: {
                "num": len(ratios),
                "median": round(statistics.median(ratios), 3),
                "off_by": round(statistics.mean(abs(each - 1) for each in ratios), 3),
            }
            for name, ratios in off.items()
            if ratios
        },
        "model": {name: msgspec.to_builtins(fit) for name, fit in after.model.items()},
    }


# --- when idle


async def when_idle(stage: Stage, num: int) -> dict[str, Any]:
    """Ask the arms in turn, one request at a time, for text that no engine has seen."""
    rng, found = random.Random(5), {}
    target = Target(base_url="", endpoint=ApiEndpoint.CHAT)  # of it there is text
    chat = prompts_of(target, stage.served, tokenizer=stage.model)
    for num_in in _NUM_IDLE_IN:
        ttft_ms: dict[str, list[float]] = {arm: [] for arm in (PREDICTED, *BEST_OF)}
        names = {arm: f"idle-{num_in}-{arm}-" for arm in ttft_ms}
        askers = {arm: Asker(stage.arms[arm], names[arm], may_merge=True) for arm in ttft_ms}
        order = list(askers)
        for number in range(num):
            rng.shuffle(order)
            for arm in order:
                text = chat.make([Segment(names[arm] + str(number), num_in)])[0]["content"]
                plan = [Planned(index=number, prompt=text, max_tokens=4, at_s=0.0)]
                ttft_ms[arm].append((await askers[arm].ask(plan))[0].ttft_s * 1e3)
        for asker in askers.values():
            asker.close()
        await asyncio.sleep(0.3)
        own_ms = {arm: _own_ms(stage.logs[arm], names[arm]) for arm in ttft_ms}
        found[f"{num_in}_tokens"] = {
            what: {
                "p50": {arm: round(statistics.median(each), 2) for arm, each in ms.items()},
                "predicted_less": {arm: _difference(ms[PREDICTED], ms[arm]) for arm in BEST_OF},
            }
            for what, ms in (("ttft_ms", ttft_ms), ("proxy_ms", own_ms))
        }
    return {**found, "goal_ms": 1.0}


def _own_ms(log: Path, name: str) -> list[float]:
    """What a proxy itself took of its requests' first tokens: reading, letting in, choosing."""
    lines = told(log.read_text())
    own = [line.first for request_id, line in lines.items() if request_id.startswith(name)]
    return [terms["admission"] + terms["proxy"] for terms in own]


def _difference(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Median difference of pairs, and where 95 % of its resamples lie."""
    each = np.array(ours) - np.array(theirs)
    drawn = np.random.default_rng(0).integers(0, len(each), (NUM_RESAMPLES, len(each)))
    low, high = np.percentile(np.median(each[drawn], axis=1), (2.5, 97.5))
    return {
        "median": round(float(np.median(each)), 2),
        "interval": [round(float(low), 2), round(float(high), 2)],
    }


def _median_ms(seconds: Iterable[float]) -> float:
    return statistics.median(seconds) * 1e3


async def _run(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    length = QUICK if args.quick else FULL
    if args.rounds:
        length = dataclasses.replace(length, rounds=args.rounds)
    result: dict[str, Any] = {
        "benchmark": "routing_real",
        "environment": environment(1),
        "model": args.model,
        "rounds": length.rounds,
        "block_s": length.block_s,
    }
    async with processes(directory) as started, staged(started, BOXED, directory) as stage:
        result["idle"] = await when_idle(stage, length.idle)
    async with processes(directory) as started, staged(started, args.model, directory) as stage:
        result["load"] = {
            name: await under_load(stage, started, name, length, args.load)
            for name in args.data.split(",")
        }
    result["load_average_at_end"] = os.getloadavg()[0]
    return result


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=("135m", BOXED), default="135m")
    parser.add_argument("--data", default="multi-turn,pd-interference")
    parser.add_argument("--rounds", type=int, default=0, help="blocks of each arm and data set")
    parser.add_argument("--load", type=float, default=0.8, help="of what the engines can do")
    parser.add_argument("--quick", action="store_true", help="three minutes instead of ten")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        print(json.dumps(asyncio.run(_run(args, Path(directory))), indent=1))


if __name__ == "__main__":
    main()
