"""`pdserve bench sweep`: measure several loads and find the highest that meets the objectives.

Prints a line per run as it goes, then the table, then what it means; saves one JSON file with the
figures of every run. Exit code 0 if the sweep came to its end and every run is valid, whatever it
found: requests that fail under overload are a finding. Else 1, unless `--allow-invalid` accepts
runs that are not valid; measurements are saved in any case. 130 if Ctrl-C or SIGTERM cut it short.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pdserve.bench import environment
from pdserve.bench.arrivals import ArrivalLaw, cancel_some, schedule
from pdserve.bench.datasets.prompts import PromptMaker
from pdserve.bench.datasets.registry import make_plan
from pdserve.bench.endpoint import ask_served, reset_prefix_caches
from pdserve.bench.figures import figures
from pdserve.bench.files import require_directory
from pdserve.bench.goodput import Slo, parse_goodput
from pdserve.bench.preparing import (
    arrivals_of,
    options_of,
    prompts_of,
    sampling_in_words,
    target_of,
    traffic_of,
)
from pdserve.bench.progress import ProgressLine
from pdserve.bench.records import RequestPlan
from pdserve.bench.runner import PlanOrigin, run_plan
from pdserve.bench.search import LoadAxis, Search
from pdserve.bench.sweep import Point, Sweep, carry_out, heading, run_line, save, summary
from pdserve.bench.target import Target
from pdserve.commands.announce import given_lines, title
from pdserve.commands.exit_codes import EXIT_DONE, EXIT_FAILED
from pdserve.commands.running import run_until_signalled
from pdserve.config.bench import ResultConfig, TargetConfig, TrafficConfig
from pdserve.config.datasets import DatasetConfig, DatasetName
from pdserve.config.load import Resolved, Table, build
from pdserve.config.sweep import SweepConfig
from pdserve.errors import ConfigError


def run_sweep(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve bench sweep`."""
    target_config = build("target", TargetConfig, table, resolved)
    dataset = build("dataset", DatasetConfig, table, resolved)
    traffic = traffic_of(build("traffic", TrafficConfig, table, resolved), dataset)
    config = build("sweep", SweepConfig, table, resolved)
    result = build("result", ResultConfig, table, resolved)
    slos = parse_goodput(config.objectives, flag="slo")
    if dataset.name.has_own_times:
        raise ConfigError(
            f"--dataset-name {dataset.name.value} sets the times of its requests itself, so there "
            "is no load to vary: use another data set, or bench serve",
            param="dataset-name",
        )
    arrivals_of(traffic)  # before anything is asked
    require_directory(Path(result.result_dir))
    print("\n".join([title("bench sweep"), *given_lines(resolved)]), flush=True)
    target = target_of(target_config, os.environ)
    work = _run(target, config, dataset, traffic, result, slos, tokenizer=target_config.tokenizer)
    return run_until_signalled(work, is_service=False)


async def _run(
    target: Target,
    config: SweepConfig,
    dataset: DatasetConfig,
    traffic: TrafficConfig,
    result: ResultConfig,
    slos: tuple[Slo, ...],
    *,
    tokenizer: str,
) -> int:
    served = await ask_served(target, traffic.ready_check_timeout_s)
    target = msgspec.structs.replace(target, model=served.model)
    prompts = prompts_of(target, served, tokenizer=tokenizer)
    runs = _Runs(
        target, prompts, config, dataset, traffic, slos=slos, shows_progress=result.progress
    )
    sweep = Sweep(
        label=target.label or target.base_url,
        base_url=target.base_url,
        model=served.model,
        dataset=runs.plan(dataset.seed, dataset.num_prompts).description,
        slo={slo.metric.value: slo.limit_ms for slo in slos},
        share=config.share,
        axis=(LoadAxis.CONCURRENCY if config.is_over_concurrency else LoadAxis.RATE).value,
        seed=dataset.seed,
        num_runs=config.num_runs,
        started_wall_s=time.time(),
        environment=environment.describe(),
    )
    runs.sweep = sweep
    if dataset.name is DatasetName.MULTI_TURN:
        sweep.statements.append(
            "The rate counts conversations that start; later turns follow their answers."
        )
    load = f"{sweep.dataset}; {sampling_in_words(traffic)}"
    print(f"{served.model} at {target.url}: {load}; times in ms")
    print(heading(sweep), flush=True)

    def on_run(point: Point, repeat: int) -> None:
        print(run_line(point, repeat), flush=True)

    try:
        await carry_out(
            sweep, search_of(config), runs.measure, num_runs=config.num_runs, on_run=on_run
        )
    except asyncio.CancelledError:
        sweep.statements.append("The sweep was interrupted.")
        raise
    finally:
        if sweep.points:
            path = Path(result.result_dir) / (result.result_filename or _filename(sweep))
            save(sweep, path)
            print(f"\n{summary(sweep)}\nSaved: {path}", flush=True)
    is_late = any(point.why_not for point in sweep.points)
    return EXIT_FAILED if is_late and not result.allow_invalid else EXIT_DONE


def search_of(config: SweepConfig) -> Search:
    """Return the search that the settings describe."""
    is_narrowing = config.bisect and bool(config.objectives)
    if config.is_over_concurrency:
        return Search(
            axis=LoadAxis.CONCURRENCY,
            loads=tuple(sorted(float(load) for load in config.max_concurrencies)),
            start=float(config.start_concurrency or 1),
            highest=float(config.max_concurrency_limit),
            is_narrowing=is_narrowing,
            tolerance=config.tolerance,
        )
    return Search(
        axis=LoadAxis.RATE,
        loads=tuple(sorted(config.rates)),
        start=config.start_rate or 1.0,
        highest=config.max_rate,
        is_narrowing=is_narrowing,
        tolerance=config.tolerance,
    )


class _Runs:
    """Measures loads, one run at a time."""

    def __init__(
        self,
        target: Target,
        prompts: PromptMaker,
        config: SweepConfig,
        dataset: DatasetConfig,
        traffic: TrafficConfig,
        *,
        slos: tuple[Slo, ...],
        shows_progress: bool,
    ) -> None:
        self._target = target
        self._config = config
        self._dataset = dataset
        self._traffic = traffic
        self._slos = slos
        self._shows_progress = shows_progress
        self._prompts = prompts
        self._plans: dict[tuple[int, int], RequestPlan] = {}
        self._num_done = 0
        self._can_reset = config.reset_caches
        self.sweep: Sweep | None = None

    def plan(self, seed: int, num_prompts: int) -> RequestPlan:
        """Return the requests of a run; the last few plans are kept."""
        key = seed, num_prompts
        if key not in self._plans:
            while len(self._plans) >= self._config.num_runs:
                del self._plans[next(iter(self._plans))]
            own = msgspec.structs.replace(self._dataset, seed=seed, num_prompts=num_prompts)
            self._plans[key] = make_plan(own, self._prompts)
        return self._plans[key]

    async def measure(self, load: float, repeat: int) -> dict[str, Any]:
        """Run one load."""
        if self._can_reset:
            await self._reset()
        # Where caches cannot be reset, no prompt is sent twice.
        seed = self._dataset.seed + (repeat if self._can_reset else self._num_done)
        self._num_done += 1
        options = options_of(self._traffic)
        arrivals = ArrivalLaw(burstiness=self._traffic.burstiness)
        if self._config.is_over_concurrency:
            options = msgspec.structs.replace(options, max_concurrency=int(load))
            words = f"closed loop concurrency={load:g}"
        else:
            arrivals = msgspec.structs.replace(arrivals, rate=load)
            words = str(arrivals)
        plan = self.plan(seed, self._num_prompts(load))
        requests = schedule(plan.requests, arrivals, seed)
        requests = cancel_some(requests, self._traffic.cancel_share, seed)
        with contextlib.closing(ProgressLine(sys.stderr)) as line:
            run = await run_plan(
                requests,
                self._target,
                options,
                origin=PlanOrigin(plan.description, words, sampling_in_words(self._traffic), seed),
                on_progress=line if self._shows_progress else None,
            )
        self._tell(plan.notes)
        return figures(run, self._slos)

    def _num_prompts(self, load: float) -> int:
        if self._config.seconds_per_run is None:
            return self._dataset.num_prompts
        per_request = self._dataset.multi_turn.num_turns if self._is_multi_turn else 1
        return max(1, round(load * self._config.seconds_per_run)) * per_request

    @property
    def _is_multi_turn(self) -> bool:
        return self._dataset.name is DatasetName.MULTI_TURN

    async def _reset(self) -> None:
        why_not = await reset_prefix_caches(self._target)
        if why_not is None:
            return
        self._can_reset = False
        again = (
            "the runs may send the same entries of the file again"
            if self._dataset.name.reads_a_file
            else "each run sends other prompts, with its own seed"
        )
        self._tell([f"The endpoint did not reset its prefix cache ({why_not}); {again}."])

    def _tell(self, sentences: list[str]) -> None:
        assert self.sweep is not None
        for each in sentences:
            if each not in self.sweep.statements:
                self.sweep.statements.append(each)


def _filename(sweep: Sweep) -> str:
    date = time.strftime("%Y%m%d-%H%M%S", time.localtime(sweep.started_wall_s))
    name = f"sweep-{sweep.label}-{Path(sweep.model).name}-{date}.json"
    return re.sub(r"[^\w.+=-]+", "_", name)
