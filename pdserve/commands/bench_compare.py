"""`pdserve bench compare`: the same requests on several deployments, a table and a report.

Deployments use the same cores, are started one at a time, each anew for every run, and take
turns, so that whatever drifts on the machine meets all of them. Exit code 0 if every request
was answered and the client kept up (or `--allow-invalid`), else 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import math
import os
import shlex
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from pdserve.bench import environment
from pdserve.bench.arrivals import Arrivals
from pdserve.bench.caches import reset_prefix_caches
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
    STARTED,
    EnginePlace,
    Kind,
    Topology,
    baseline,
    pairs,
    peers,
    plan,
)
from pdserve.bench.datasets.plan import Plan
from pdserve.bench.endpoint import Served, ask_served
from pdserve.bench.goodput import Slo, parse_goodput
from pdserve.bench.preparing import arrivals_in_words, arrivals_of, options_of, plan_of
from pdserve.bench.progress import ProgressLine
from pdserve.bench.records import Planned, Run
from pdserve.bench.report.page import chosen_rate, render
from pdserve.bench.report.scale import number
from pdserve.bench.runner import Options, run_plan
from pdserve.bench.target import Endpoint, Target
from pdserve.commands.announce import given_lines, title
from pdserve.commands.bench_deployments import Running, Starter, commands_of
from pdserve.commands.exit_codes import EXIT_DONE, EXIT_FAILED
from pdserve.commands.model_directory import model_directory
from pdserve.commands.running import run_until_signalled
from pdserve.config.bench import ResultConfig, TrafficConfig
from pdserve.config.compare import CompareConfig
from pdserve.config.datasets import DatasetConfig
from pdserve.config.load import Resolved, Table, build, nearest
from pdserve.config.schema import Role
from pdserve.errors import ConfigError, PeerError

_NUM_BOUND_REQUESTS: Final = 48
_MAX_BOUND_TOKENS: Final = 24_000
"""Prompts of so many tokens fit the cache of the engine that is measured alone."""
_BOUND_CONCURRENCY: Final = 16
_RESET_TRIES: Final = 20
_RESET_AGAIN_S: Final = 0.1


def run_compare(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve bench compare`.

    Raises:
        ConfigError: A setting cannot be used.
        PdserveError: A deployment could not be started or died.
    """
    config = build("compare", CompareConfig, table, resolved)
    traffic = build("traffic", TrafficConfig, table, resolved)
    dataset = build("dataset", DatasetConfig, table, resolved)
    result = build("result", ResultConfig, table, resolved)
    slos = parse_goodput(result.goodput)
    arrivals_of(traffic)
    topologies = _topologies(config)
    report, data = _paths(config)
    say("\n".join([title("bench compare"), *given_lines(resolved)]))
    session = _Session(config, traffic, dataset, topologies, slos, shows_progress=result.progress)

    async def work() -> int:
        comparison = await session.run()
        say("")
        say(console.tables(comparison))
        _tell(comparison)
        if data is not None:
            save(comparison, data)
            say(f"Result: {data}")
        if report is not None:
            _write(render(comparison), report)
            say(f"Report: {report}")
        has_failed = any(
            not outcome.is_good and not outcome.is_cancelled
            for each in comparison.measured
            for outcome in each.run.outcomes
        )
        is_valid = all(each.run.health.valid for each in comparison.measured)
        return EXIT_FAILED if has_failed or not (is_valid or result.allow_invalid) else EXIT_DONE

    return run_until_signalled(work(), on_second_signal=session.kill)


def _topologies(config: CompareConfig) -> list[Topology]:
    known = {kind.value: kind for kind in STARTED}
    kinds = []
    for word in config.kinds:
        if word not in known:
            raise ConfigError(
                f"--topologies {word}: use some of {', '.join(known)}; {nearest(word, known)}",
                param="topologies",
            )
        kinds.append(known[word])
    own = os.sched_getaffinity(0)
    for core in config.cores:
        if core not in own:
            raise ConfigError(
                f"--cores {core}: this process may use {', '.join(map(str, sorted(own)))}",
                param="cores",
            )
    units = config.gpus or config.cores or tuple(sorted(own))
    what = "GPUs" if config.gpus else "cores"
    ratios = pairs(tuple(w for word in config.pd for w in word.split(",") if w))
    found = plan(kinds, ratios, units, chunk_tokens=config.chunk_tokens, what=what)
    found += peers(config.peer)
    if not found:
        raise ConfigError("nothing is compared: give --topologies or --peer", param="topologies")
    return found


def _paths(config: CompareConfig) -> tuple[Path | None, Path | None]:
    """Where the report and the JSON go; checked before anything slow begins."""
    report = Path(config.report) if config.report else None
    data = Path(config.result) if config.result else None
    if data is None and report is not None:
        data = report.with_suffix(".json")
    for flag, path in (("report", report), ("result", data)):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(
                f"--{flag} {path}: there is no directory {path.resolve().parent}", param=flag
            )
    return report, data


class _Session:
    """One comparison from the first deployment to the last."""

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
        self._shows_progress = shows_progress
        self._model = str(model_directory(config.model))
        self._starter = Starter(config, self._model, say)
        self._endpoint = Endpoint(config.endpoint)
        self._plans: dict[float | None, tuple[Plan, list[Planned]]] = {}
        self._ready_s: dict[str, list[float]] = {}
        self._notes: dict[str, None] = {}

    def kill(self) -> None:
        """End every process at once."""
        self._starter.kill()

    async def run(self) -> Comparison:
        """Measure everything."""
        about = _environment(self._config)
        measured: list[Measured] = []
        total = self._config.num_runs * len(self._topologies)
        for repeat in range(self._config.num_runs):
            # There and back again: a machine that gets slower or faster treats all alike.
            order = self._topologies if repeat % 2 == 0 else self._topologies[::-1]
            for place, topology in enumerate(order):
                head = f"[{repeat * len(order) + place + 1}/{total}]"
                say(f"{head} {topology.label}, run {repeat + 1} of {self._config.num_runs}")
                async with self._reachable(topology) as running:
                    for rate in self._rates:
                        measured.append(await self._measure(topology, running, rate, repeat))
                        await asyncio.sleep(self._config.pause_s)
        rates = await self._measure_bound() if self._config.bound else None
        return Comparison(
            title=f"{_name(self._config.model)}, {self._dataset.name.value}: "
            + ("colocated against disaggregated" if self._has_both else "deployments compared"),
            model=self._config.model,
            baseline=baseline(self._topologies),
            deployments=[self._deployment(topology) for topology in self._topologies],
            measured=measured,
            rates=rates,
            slos=list(self._slos),
            command=shlex.join(["pdserve", *sys.argv[1:]]),
            environment=about,
            notes=list(self._notes),
        )

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

    def _target(self, topology: Topology, running: Running) -> Target:
        is_peer = topology.kind is Kind.PEER
        return Target(
            base_url=running.url,
            model="" if is_peer else self._config.model,
            endpoint=self._endpoint,
            api_key=self._config.api_key if is_peer else "",
            label=topology.label,
        )

    def _plan(self, rate: float | None, target: Target, served: Served) -> list[Planned]:
        """The requests at a rate: made once, the same for every deployment and run."""
        if rate not in self._plans:
            self._plans[rate] = plan_of(
                self._dataset,
                self._arrivals(rate),
                target,
                served,
                tokenizer=self._model,
                cancel_share=self._traffic.cancel_share,
            )
            self._notes.update(dict.fromkeys(self._plans[rate][0].notes))
        return self._plans[rate][1]

    def _arrivals(self, rate: float | None) -> Arrivals:
        law = arrivals_of(self._traffic)
        return msgspec.structs.replace(law, rate=rate) if rate is not None else law

    async def _measure(
        self, topology: Topology, running: Running, rate: float | None, repeat: int
    ) -> Measured:
        target = self._target(topology, running)
        served = await ask_served(target, self._traffic.ready_check_timeout_s)
        target = msgspec.structs.replace(target, model=served.model)
        requests = self._plan(rate, target, served)
        await self._reset(topology, target)
        words = (
            str(self._arrivals(rate))
            if rate is not None
            else arrivals_in_words(self._dataset, self._traffic)
        )
        description = self._plans[rate][0].description
        run = await self._play(
            running, requests, target, options_of(self._traffic), description, words
        )
        found = figures_of(run, self._slos)
        at = "" if rate is None else f"{rate:g} requests/s: "
        say(
            f"    {at}{len(run.outcomes)} requests in {run.duration_s:.1f} s, "
            + ", ".join(
                f"{figure.title} {number(found[figure])} {figure.unit}"
                for figure in (Figure.TTFT_P50, Figure.ITL_P99, Figure.THROUGHPUT)
                if figure in found
            )
        )
        return Measured(deployment=topology.label, rate=rate, repeat=repeat, run=compact(run))

    async def _play(
        self,
        running: Running,
        requests: Sequence[Planned],
        target: Target,
        options: Options,
        dataset: str,
        arrivals: str,
    ) -> Run:
        line = ProgressLine(sys.stderr, width=shutil.get_terminal_size((100, 24)).columns)
        try:
            return await running.while_alive(
                run_plan(
                    requests,
                    target,
                    options,
                    dataset=dataset,
                    arrivals=arrivals,
                    seed=self._dataset.seed,
                    on_progress=line if self._shows_progress else None,
                )
            )
        finally:
            line.end()

    async def _reset(self, topology: Topology, target: Target) -> None:
        """Empty the prefix caches; what a peer cannot do is said in the report.

        Raises:
            PeerError: A deployment of ours does not do it.
        """
        for _ in range(_RESET_TRIES):
            reason = await reset_prefix_caches(target)
            if reason is None:
                return
            if topology.kind is Kind.PEER:
                break
            await asyncio.sleep(_RESET_AGAIN_S)
        if topology.kind is not Kind.PEER:
            raise PeerError(f"{topology.label} did not forget its prefixes: {reason}")
        note = f"{topology.label} kept its cached prefixes between runs ({reason})."
        self._notes[note] = None

    # --- one engine alone

    async def _measure_bound(self) -> EngineRates | None:
        """Prompts per second and tokens per second of one engine of a P/D deployment.

        None if there is none, or if its engines have different numbers of cores.
        """
        places = [
            engine
            for topology in self._topologies
            if topology.kind is Kind.DISAGGREGATED
            for engine in topology.engines
        ]
        if not places:
            return None
        if len({len(place.cores) for place in places}) > 1:
            self._notes[
                "The rate-matched bound was not measured: engines have different numbers of cores."
            ] = None
            return None
        cores = places[0].cores
        alone = Topology("one engine", Kind.REPLICAS, (EnginePlace("engine", Role.BOTH, cores),))
        _, requests = self._plans[self._rates[0]]
        sample = _sample(requests)
        say("one engine alone, for the rate-matched bound")
        async with self._reachable(alone) as running:
            target = self._target(alone, running)
            quick = msgspec.structs.replace(
                options_of(self._traffic),
                max_concurrency=_BOUND_CONCURRENCY,
                with_stages=False,
                ignore_eos=True,
            )
            await self._reset(alone, target)
            asked = [msgspec.structs.replace(each, max_tokens=1) for each in sample]
            ctx = await self._play(running, asked, target, quick, "", "")
            gen = await self._play(
                running, sample, target, msgspec.structs.replace(quick, num_warmups=0), "", ""
            )
        good = [each for each in gen.outcomes if each.is_good]
        if len(good) < len(sample) or not all(each.is_good for each in ctx.outcomes):
            self._notes["The rate-matched bound was not measured: requests failed."] = None
            return None
        tokens = sum(each.num_output_tokens for each in good)
        return EngineRates(
            num_cores=len(cores),
            ctx_rate=len(ctx.outcomes) / ctx.duration_s,
            gen_rate=len(good) / gen.duration_s,
            out_tok_s=tokens / gen.duration_s,
        )

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
            commands=() if is_peer else commands_of(topology, self._config),
            ready_s=self._ready_s.get(topology.label, []),
        )


def _sample(requests: Sequence[Planned]) -> list[Planned]:
    """Some requests in the plan's proportions, all due at once; none follows another."""
    able = [each for each in requests if each.after is None]
    step = max(1, math.ceil(len(able) / _NUM_BOUND_REQUESTS))
    chosen: list[Planned] = []
    tokens = 0
    for each in able[::step]:
        tokens += (each.num_prompt_tokens or 0) + each.max_tokens
        if chosen and tokens > _MAX_BOUND_TOKENS:
            break
        chosen.append(msgspec.structs.replace(each, at_s=0.0, cancel_after_tokens=None))
    return chosen


def _layout(topology: Topology, config: CompareConfig) -> str:
    what = "GPUs" if config.gpus else "cores"
    return "; ".join(
        f"{engine.name} on {what} {','.join(map(str, engine.cores))}" for engine in topology.engines
    )


def _environment(config: CompareConfig) -> dict[str, str]:
    """Hardware and software, in words."""
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


def _tell(comparison: Comparison) -> None:
    """The sentences under the table."""
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


def say(text: str) -> None:
    """Write to the person who started all this."""
    print(text, flush=True)
