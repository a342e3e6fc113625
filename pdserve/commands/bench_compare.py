"""`pdserve bench compare`: the same requests on several deployments, a table and a report.

Deployments use the same cores, are started one at a time, anew for every run, and take turns, so
that a drift of the machine affects all of them. Exit code 0 if every request was answered and every
run is valid (or `--allow-invalid`), else 1. A comparison that is interrupted, or whose deployment
fails, still reports the runs that were measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import math
import os
import shlex
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import msgspec

from pdserve.bench import calibration, environment
from pdserve.bench.arrivals import ArrivalLaw
from pdserve.bench.compare import console, verdict
from pdserve.bench.compare.result import (
    Comparison,
    Deployment,
    EngineRates,
    Measured,
    compact,
    save,
)
from pdserve.bench.compare.summary import Figure, figures_of
from pdserve.bench.compare.topology import (
    Kind,
    Topology,
    baseline,
)
from pdserve.bench.digits import number
from pdserve.bench.endpoint import ServedModel, ask_served
from pdserve.bench.goodput import Slo, parse_goodput
from pdserve.bench.preparing import (
    arrivals_in_words,
    arrivals_of,
    options_of,
    plan_of,
    prompts_of,
    sampling_in_words,
    traffic_of,
)
from pdserve.bench.records import Planned, RequestPlan
from pdserve.bench.report.page import chosen_rate, render
from pdserve.bench.target import Target
from pdserve.commands.announce import given_lines, say, title
from pdserve.commands.bench_alone import measure_rates, one_engine, why_no_bound
from pdserve.commands.bench_chosen import paths_of, topologies_of
from pdserve.commands.bench_deployments import Running, Starter, commands_of
from pdserve.commands.bench_playing import Player
from pdserve.commands.exit_codes import EXIT_DONE, EXIT_FAILED
from pdserve.commands.model_directory import model_directory
from pdserve.commands.running import run_until_signalled
from pdserve.config.bench import ResultConfig, TrafficConfig
from pdserve.config.compare import CompareConfig
from pdserve.config.datasets import DatasetConfig
from pdserve.config.load import Resolved, Table, build
from pdserve.config.schema import Role
from pdserve.errors import ConfigError


def run_compare(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve bench compare`.

    Raises:
        ConfigError: A setting cannot be used.
        PdserveError: A deployment could not be started or died.
    """
    config = build("compare", CompareConfig, table, resolved)
    dataset = build("dataset", DatasetConfig, table, resolved)
    traffic = traffic_of(build("traffic", TrafficConfig, table, resolved), dataset)
    result = build("result", ResultConfig, table, resolved)
    slos = parse_goodput(result.goodput)
    law = arrivals_of(traffic)
    if dataset.name.has_own_times and (config.rates or law != ArrivalLaw()):
        raise ConfigError(
            f"--dataset-name {dataset.name.value} sets the times of its requests itself: leave "
            "out --request-rates, --request-rate, --burstiness and --ramp-up-strategy, or use "
            "another data set, such as --dataset-name random",
            param="request-rates",
        )
    topologies = topologies_of(config)
    report, data = paths_of(config)
    say("\n".join([title("bench compare"), *given_lines(resolved)]))
    session = _Session(config, traffic, dataset, topologies, slos, shows_progress=result.progress)

    def tell(comparison: Comparison) -> None:
        say("")
        say(console.tables(comparison))
        _say_verdict(comparison)
        if data is not None:
            facts = verdict.headline_facts(comparison, chosen_rate(comparison))
            save(comparison, data, headline=facts)
            say(f"Result: {data}")
        if report is not None:
            _write(render(comparison), report)
            say(f"Report: {report}")

    async def work() -> int:
        try:
            await session.run()
        finally:
            if session.measured:
                tell(comparison := session.comparison())
        has_failed = any(
            outcome.has_failed for each in comparison.measured for outcome in each.run.outcomes
        )
        is_valid = not any(comparison.why_not(m.deployment, m.rate) for m in comparison.measured)
        return EXIT_FAILED if has_failed or not (is_valid or result.allow_invalid) else EXIT_DONE

    return run_until_signalled(work(), on_second_signal=session.kill, is_service=False)


class _Session:
    """One comparison from the first deployment to the last.

    Attributes:
        measured: The runs so far, of whole visits to a deployment: each has all rates.
    """

    def __init__(
        self,
        config: CompareConfig,
        traffic: TrafficConfig,
        dataset: DatasetConfig,
        topologies: Sequence[Topology],
        slos: Sequence[Slo],
        *,
        shows_progress: bool,
    ) -> None:
        self._config = config
        self._traffic = traffic
        self._dataset = dataset
        self._topologies = topologies
        self._slos = slos
        self._model = str(model_directory(config.model))
        self._starter = Starter(config, self._model)
        self._about = _environment(config)
        self._sampling = sampling_in_words(traffic)
        self._player = Player(
            config,
            sampling=self._sampling,
            seed=dataset.seed,
            shows_progress=shows_progress,
        )
        self._plans: dict[float | None, tuple[RequestPlan, list[Planned]]] = {}
        self._ready_s: dict[str, list[float]] = {}
        self._flags: tuple[str, ...] = ()
        self._pace = ""
        self._rates_alone: EngineRates | None = None
        self.measured: list[Measured] = []

    def kill(self) -> None:
        """End every process at once."""
        self._starter.kill()

    async def run(self) -> None:
        """Measure everything."""
        self._player.note(*map(_crowd_words, (t for t in self._topologies if t.crowded)))
        self._rates_alone = await self._prepare()
        for repeat in range(self._config.num_runs):
            # Forwards and backwards: a machine that gets slower or faster affects all alike.
            order = self._topologies if repeat % 2 == 0 else self._topologies[::-1]
            for place, topology in enumerate(order):
                head = f"[{repeat * len(order) + place + 1}/{self._num_visits}]"
                say(f"{head} {topology.label}, run {repeat + 1} of {self._config.num_runs}")
                visit: list[Measured] = []
                # A store cannot be emptied, so it is started anew for each rate.
                one_by_one = [[rate] for rate in self._rates]
                for start_rates in one_by_one if topology.has_store else [self._rates]:
                    async with self._reachable(topology) as running:
                        for rate in start_rates:
                            visit.append(await self._measure(topology, running, rate, repeat))
                            await asyncio.sleep(self._config.pause_s)
                self.measured += visit

    def comparison(self) -> Comparison:
        """Return what was measured, which is less than planned if `run` has not returned."""
        about = {**self._about, **({"pace of the requests": self._pace} if self._pace else {})}
        num, total = len(self.measured) // len(self._rates), self._num_visits
        if num < total:
            self._player.note(f"The comparison ended early: {num} of {total} runs were measured.")
        labels = {each.deployment for each in self.measured}
        topologies = [each for each in self._topologies if each.label in labels]
        return Comparison(
            title=f"{_name(self._config.model)}, {self._dataset.name.value}: "
            + ("colocated against disaggregated" if self._has_both else "deployments compared"),
            model=self._config.model,
            baseline=baseline(topologies),
            deployments=[self._deployment(topology) for topology in topologies],
            measured=self.measured,
            rates=self._rates_alone,
            slos=list(self._slos),
            command=shlex.join(["pdserve", *_told(sys.argv[1:], self._config), *self._flags]),
            environment=about,
            notes=list(self._player.notes),
        )

    @property
    def _num_visits(self) -> int:
        return self._config.num_runs * len(self._topologies)

    @property
    def _has_both(self) -> bool:
        kinds = {topology.kind for topology in self._topologies}
        return Kind.DISAGGREGATED in kinds and bool(kinds - {Kind.DISAGGREGATED, Kind.PEER})

    @property
    def _rates(self) -> Sequence[float | None]:
        if self._config.rates:
            return self._config.rates
        rate = self._traffic.request_rate
        return [None if math.isinf(rate) or self._dataset.name.has_own_times else rate]

    @contextlib.asynccontextmanager
    async def _reachable(self, topology: Topology) -> AsyncIterator[Running]:
        """A deployment that answers: started here, or a peer."""
        if topology.kind is Kind.PEER:
            yield Running(topology.url, 0.0)
            return
        say(f"    starting {topology.words}: {_layout(topology, self._config)}")
        async with self._starter.started(topology) as running:
            say(f"    ready after {running.ready_s:.1f} s")
            self._ready_s.setdefault(topology.label, []).append(round(running.ready_s, 2))
            yield running
        say("    ended")

    def _plan(self, rate: float | None, target: Target, served: ServedModel) -> list[Planned]:
        """Return the requests at a rate, made once and the same for every deployment and run."""
        if rate not in self._plans:
            self._plans[rate] = plan_of(
                self._dataset,
                self._arrivals(rate),
                target,
                served,
                tokenizer=self._model,
                cancel_share=self._traffic.cancel_share,
            )
            self._player.note(*self._plans[rate][0].notes)
            say(f"    requests: {self._plans[rate][0].description}; {self._sampling}")
        return self._plans[rate][1]

    def _arrivals(self, rate: float | None) -> ArrivalLaw:
        law = arrivals_of(self._traffic)
        return msgspec.structs.replace(law, rate=rate) if rate is not None else law

    async def _measure(
        self, topology: Topology, running: Running, rate: float | None, repeat: int
    ) -> Measured:
        target = self._player.target(topology, running)
        served = await ask_served(target, self._traffic.ready_check_timeout_s)
        target = msgspec.structs.replace(target, model=served.model)
        requests = self._plan(rate, target, served)
        await self._player.reset(topology, target)
        words = (
            str(self._arrivals(rate))
            if rate is not None
            else arrivals_in_words(self._dataset, self._traffic)
        )
        description = self._plans[rate][0].description
        run = await self._player.play(
            running,
            requests,
            target,
            options_of(self._traffic),
            dataset=description,
            arrivals=words,
        )
        found = figures_of(run, self._slos)
        at = "" if rate is None else f"{rate:g} requests/s: "
        say(
            f"    {at}{len(run.outcomes)} requests in {run.duration_s:.1f} s, "
            + ", ".join(
                f"{figure.title} {number(found[figure])} {figure.unit}"
                for figure in (Figure.TTFT_P50, Figure.ITL_P99, Figure.THROUGHPUT, Figure.CACHED)
                if figure in found
            )
        )
        for reason in run.health.why_not:
            say(f"    NOT VALID: {reason}")
        return Measured(deployment=topology.label, rate=rate, repeat=repeat, run=compact(run))

    # --- before the first deployment

    async def _prepare(self) -> EngineRates | None:
        """Measure one engine alone: the pace, if it is left open, and the bound's rates.

        If every deployment is already running, the pace is measured at the first peer.
        """
        must_pace = calibration.is_needed(self._dataset)
        why_not = why_no_bound(self._topologies) if self._config.bound else ""
        if why_not:
            self._player.note(why_not)
        has_bound = why_not is None
        if not (must_pace or has_bound):
            return None
        alone = one_engine(self._topologies) or self._topologies[0]
        purposes = [
            *(["the pace of the requests"] if must_pace else []),
            *(["the rate-matched bound"] if has_bound else []),
        ]
        say(f"measuring {alone.label} alone for {' and '.join(purposes)}")
        async with self._reachable(alone) as running:
            target = self._player.target(alone, running)
            served = await ask_served(target, self._traffic.ready_check_timeout_s)
            target = msgspec.structs.replace(target, model=served.model)
            if must_pace:
                await self._set_pace(alone, running, target, served)
            if not has_bound:
                return None
            return await measure_rates(
                self._player,
                alone,
                running,
                target,
                options_of(self._traffic),
                self._plan(self._rates[0], target, served),
            )

    async def _set_pace(
        self, alone: Topology, running: Running, target: Target, served: ServedModel
    ) -> None:
        prompts = prompts_of(target, served, tokenizer=self._model)
        found = await running.while_alive(
            calibration.calibrate(self._dataset, prompts, target, options_of(self._traffic))
        )
        self._dataset, self._flags = found.dataset, found.flags
        what = "GPUs" if self._config.gpus else "cores"
        units = ",".join(str(core) for engine in alone.engines for core in engine.cores)
        where = f"one engine ({what} {units})" if alone.engines else target.base_url
        self._pace = f"measured on {where}: {found.words}"
        say(f"    pace {self._pace}")
        say(f"    {' '.join(found.flags)}")

    def _deployment(self, topology: Topology) -> Deployment:
        roles = [engine.role for engine in topology.engines]
        is_peer = topology.kind is Kind.PEER
        return Deployment(
            label=topology.label,
            words=topology.words,
            is_disaggregated=topology.kind is Kind.DISAGGREGATED,
            is_peer=is_peer,
            num_cores=len({core for engine in topology.engines for core in engine.cores}),
            num_prefill=roles.count(Role.PREFILL),
            num_decode=roles.count(Role.DECODE),
            is_crowded=bool(topology.crowded),
            commands=() if is_peer else commands_of(topology, self._config),
            ready_s=self._ready_s.get(topology.label, []),
        )


def _told(words: Sequence[str], config: CompareConfig) -> list[str]:
    """Return the words of a command line without the key, as files are for others to read."""
    key = config.api_key
    return [
        f"{word.removesuffix(key)}KEY" if key and f"={word}".endswith(f"={key}") else word
        for word in words
    ]


def _crowd_words(topology: Topology) -> str:
    """Say what a deployment with more engines than cores can and cannot show."""
    cores = {core for engine in topology.engines for core in engine.cores}
    places = "; ".join(
        f"{', '.join(names)} share core {core}" for core, names in topology.crowded.items()
    )
    return (
        f"{topology.label} has {len(topology.engines)} engines on {len(cores)} "
        f"core{'' if len(cores) == 1 else 's'}: {places}. This shows how it works, not how fast "
        "it is, because engines on one core slow one another down."
    )


def _layout(topology: Topology, config: CompareConfig) -> str:
    what = "GPUs" if config.gpus else "cores"
    return "; ".join(
        f"{engine.name} on {what} {','.join(map(str, engine.cores))}" for engine in topology.engines
    )


def _environment(config: CompareConfig) -> dict[str, str]:
    """Describe hardware and software in words."""
    found = environment.describe()
    own = sorted(os.sched_getaffinity(0))
    words = {
        "date": str(found["date"]),
        "cpu": str(found["cpu"]),
        "cores": f"{', '.join(map(str, config.cores or own))} of {os.cpu_count()}",
        "memory": f"{int(str(found['memory_bytes'])) / 2**30:.1f} GiB",
        verdict.LOAD: f"{float(str(found['load_average'])):.2f}",
        "system": str(found["system"]),
        "python": str(found["python"]),
        "pdserve": f"{found['pdserve']}, commit {found['git_commit'] or 'unknown'}",
    }
    if config.gpus:
        words["device"] = "cuda"
        words["GPUs"] = ", ".join(map(str, config.gpus))
    for package in ("torch", "nixl", "aiohttp"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            words[package] = importlib.metadata.version(package)
    return words


def _say_verdict(comparison: Comparison) -> None:
    """Print the sentences under the table."""
    rate = chosen_rate(comparison)
    best = verdict.headline(comparison, rate)
    if best is not None:
        say(f"\n{best.text}{verdict.goal_words(best)}.")
        if best.strictest is not None:
            say(verdict.strictest_words(best))
    say("")
    for sentence in verdict.caveats(comparison):
        say(f"- {sentence}")
    say("")


def _name(model: str) -> str:
    return Path(model).name or model


def _write(page: str, path: Path) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report {path} cannot be written: {error.strerror}") from error
