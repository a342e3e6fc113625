"""`python -m tests.sim --lives 10000 --seed 0`: simulate until so many requests have ended."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable

from tests.sim.scenario import (
    Scenario,
    draw,
    with_brain,
    with_drafts,
    with_grammars,
    with_moves,
    with_restarts,
    with_store,
    with_tools,
)
from tests.sim.world import Broken, Result, World


class Summary:
    """Runs, added up."""

    def __init__(self) -> None:
        self.lives = 0
        self.runs = 0
        self.kv_bytes = 0
        self.virtual_s = 0.0
        self.outcomes: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.rungs: Counter[str] = Counter()
        self.broken: Counter[Broken] = Counter()
        self.failing: dict[int, list[tuple[Broken, str]]] = {}
        self._digests = hashlib.blake2b(digest_size=8)

    def add(self, result: Result) -> None:
        """Add one."""
        self.runs += 1
        self.lives += result.lives
        self.kv_bytes += result.kv_bytes
        self.virtual_s += result.virtual_s
        self._digests.update(result.digest.encode())
        for name in ("outcomes", "reached", "faults", "rungs"):
            getattr(self, name).update(getattr(result, name))
        if result.violations:
            self.failing[result.seed] = result.violations
            self.broken.update(kind for kind, _ in result.violations)

    def as_json(self, wall_s: float, cpu_s: float) -> dict[str, object]:
        """What is printed."""
        return {
            "lives": self.lives,
            "lives_per_s": round(self.lives / wall_s, 1),
            "wall_s": round(wall_s, 1),
            "cpu_s": round(cpu_s, 1),
            "virtual_s": round(self.virtual_s, 1),
            "runs": self.runs,
            "outcomes": dict(self.outcomes.most_common()),
            "deaths": self.reached["deaths"],
            "reached": dict(sorted(self.reached.items())),
            "faults": dict(sorted(self.faults.items())),
            "ladder": {name: n for name, n in sorted(self.rungs.items()) if n},
            "kv_moved_bytes": self.kv_bytes,
            "zeros": {kind.value: self.broken[kind] for kind in Broken},
            "failing_seeds": sorted(self.failing),
            "digest": self._digests.hexdigest(),
        }


def simulate(
    seeds: Iterable[int],
    *,
    max_lives: float = math.inf,
    max_failing: int = 5,
    change: Callable[[Scenario], Scenario] = lambda scenario: scenario,
) -> Summary:
    """Run seeds until all are done, so many requests have ended, or too many runs have failed.

    Args:
        change: Makes another scenario of what was drawn.
    """
    summary = Summary()
    for seed in seeds:
        if summary.lives >= max_lives or len(summary.failing) >= max_failing:
            break
        summary.add(World(change(draw(seed))).run())
    return summary


def fix_hashes() -> None:
    """Start over with the hash seed fixed, if it is not: sets of strings are ordered by it."""
    if sys.flags.hash_randomization:
        argv = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, argv, {**os.environ, "PYTHONHASHSEED": "0"})


def cover(arguments: list[str]) -> int:
    """Run it once more, and print which lines of the transfer protocol that goes through."""
    coverage = [sys.executable, "-m", "coverage"]
    with tempfile.TemporaryDirectory() as directory:
        files = [f"--data-file={directory}/lines", f"--rcfile={os.devnull}"]
        sources = "--source=connectors/transfer,pdserve/connectors/transfer"
        run = [*coverage, "run", *files, sources, "-m", "tests.sim", *arguments]
        status = subprocess.run(run, check=False).returncode
        subprocess.run([*coverage, "report", "-m", *files], check=True)
    return status


def main() -> int:
    """Print what came of it; 1 if anything broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lives", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-failing", type=int, default=5, help="stop after so many")
    parser.add_argument("--store", action="store_true", help="with a store behind all engines")
    parser.add_argument("--drafts", action="store_true", help="with engines that draft")
    parser.add_argument("--grammars", action="store_true", help="with outputs that are bound")
    parser.add_argument("--tools", action="store_true", help="with chats that offer a tool")
    parser.add_argument("--brain", action="store_true", help="with pairs chosen by predictions")
    parser.add_argument("--restarts", action="store_true", help="with engines that are drained")
    parser.add_argument("--moves", action="store_true", help="with streams that are moved")
    parser.add_argument(
        "--cover", action="store_true", help="and of connectors/transfer, the lines"
    )
    args = parser.parse_args()
    if args.cover:
        return cover([each for each in sys.argv[1:] if each != "--cover"])
    changes = [with_store] * args.store + [with_drafts] * args.drafts
    changes += [with_grammars] * args.grammars + [with_tools] * args.tools
    changes += [with_brain] * args.brain
    changes += [with_restarts] * args.restarts + [with_moves] * args.moves

    def change(scenario: Scenario) -> Scenario:
        for each in changes:
            scenario = each(scenario)
        return scenario

    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    summary = simulate(
        itertools.count(args.seed),
        max_lives=args.lives,
        max_failing=args.max_failing,
        change=change,
    )
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    print(json.dumps(summary.as_json(wall_s, cpu_s), indent=2))
    for seed, violations in summary.failing.items():
        for kind, said in violations[:3]:
            print(f"seed {seed}: {kind.value}: {said}", file=sys.stderr)
    return 1 if summary.failing else 0


if __name__ == "__main__":
    fix_hashes()
    sys.exit(main())
