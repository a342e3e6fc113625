"""`pdserve plan`: find the layout of engines that meets objectives, with the plan's own error.

Simulates layouts with the real policies and schedulers (`planner`), with times that flags give or a
running proxy has learned. `--check` also sends some of the workload there, and shows how far the
simulation is off. Exit code 0 if the best layout meets the objectives, else 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdserve.bench import calibration
from pdserve.bench.arrivals import schedule
from pdserve.bench.datasets.prompts import PromptMaker
from pdserve.bench.datasets.registry import make_plan
from pdserve.bench.endpoint import ServedModel, ask_served, reset_prefix_caches
from pdserve.bench.goodput import SloMetric, parse_goodput
from pdserve.bench.preparing import arrivals_of, tokenizer_of
from pdserve.bench.progress import ProgressLine
from pdserve.bench.runner import Options, run_plan
from pdserve.bench.target import ApiEndpoint, Target
from pdserve.commands.announce import given_lines, title
from pdserve.commands.exit_codes import EXIT_DONE, EXIT_FAILED
from pdserve.commands.plan_asking import ask_fleet
from pdserve.commands.plan_console import (
    checked,
    layout_table,
    moved,
    pace,
    sentences,
    start_command,
)
from pdserve.config.bench import ResultConfig, TrafficConfig
from pdserve.config.boxed import boxed_model_dir
from pdserve.config.checks import require
from pdserve.config.datasets import DatasetConfig
from pdserve.config.http import KVTransfer
from pdserve.config.load import Source, build
from pdserve.config.objectives import MIN_SLO_MS
from pdserve.config.plan import MAX_ENGINES, PlanConfig, milliseconds
from pdserve.config.policies import read_policy
from pdserve.config.sweep import SweepConfig
from pdserve.errors import ConfigError
from pdserve.planner.figures import compare, load_figures
from pdserve.planner.planning import MAX_GROWTH, Planner, PlanQuestion, TimesError
from pdserve.planner.work import FleetCosts, FleetLayout, parse_layout, workload_of
from pdserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.bench.goodput import Slo
    from pdserve.bench.records import Planned
    from pdserve.commands.plan_asking import RunningFleet
    from pdserve.config.load import Resolved, Table
    from pdserve.planner.figures import LoadFigures, PlanCheck

_USUAL_ERROR: Final = TimesError(prefill=0.1, step=0.1, wire=0.1)
_ITL_SLO_S: Final = 0.05
"""The default objective of a proxy."""
_SIZES: Final = ("max-model-len", "max-num-batched-tokens", "max-num-seqs")
"""Settings that engines have, too."""
_MAX_KV_TOKENS: Final = 5_000_000_000
"""Of all engines of a layout; they take about 2 bytes each."""
_MAX_SPAN_S: Final = 86_400.0
"""Longest workload; a simulated second takes time even if no request comes."""


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A workload and the deployment it is for.

    Attributes:
        model: Model in the printed commands; empty if unknown.
        target: Endpoint that the workload can be sent to; None if there is none.
        running: What that deployment reports.
    """

    requests: Sequence[Planned]
    description: str
    model: str
    question: PlanQuestion
    target: Target | None
    running: RunningFleet | None
    notes: Sequence[str]


def run(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve plan`.

    Raises:
        PdserveError: The workload cannot be read, or the proxy cannot be reached or knows too
            little.
    """
    config = build("plan", PlanConfig, table, resolved)
    words = [word for each in config.layout for word in each.split(",")]
    layouts = list(dict.fromkeys(parse_layout(word) for word in words))
    if not resolved["slo"].value:
        raise ConfigError(
            "--slo is missing: give the limits of a request in milliseconds and the share of "
            "requests that must keep them, such as --slo ttft:1000 tpot:30 p90",
            param="slo",
        )
    for each in layouts:
        require(
            each.num_engines <= MAX_ENGINES, "layout", str(each), f"use up to {MAX_ENGINES} engines"
        )
    objectives = build("sweep", SweepConfig, table, resolved)
    slos = parse_goodput(objectives.objectives, flag="slo")
    shows_progress = build("result", ResultConfig, table, resolved).progress
    if not config.json:
        print("\n".join([title("plan"), *given_lines(resolved)]), flush=True)
    begun_s = time.monotonic()
    line = ProgressLine(sys.stderr)

    def show(number: int, layout: str, figures: LoadFigures) -> None:
        if shows_progress:
            words = f"simulation {number}: {layout}, {figures.goodput:.1%} within objectives"
            line.draw(words, time.monotonic() - begun_s)

    with contextlib.closing(line):
        asked = _asked(config, slos, objectives.share, table, resolved)
        _check_memory(asked.question.size, config.num_engines, layouts)
        planner = Planner(asked.question, show)
        check = None
        if config.check:
            check = asyncio.run(_check(asked, config.check, line if shows_progress else None))
        plan = planner.plan(config.num_engines or 0, layouts)
    span_s = _span_s(asked.requests)
    per_s = len(asked.requests) / span_s if span_s else None
    given = {flag: resolved[flag] for flag in _SIZES if resolved[flag].source is not Source.DEFAULT}
    sizes = {flag: item.value for flag, item in given.items() if item.value is not None}
    command = start_command(plan.best, asked.model, asked.question.settings, sizes)
    if config.json:
        print(
            json.dumps(
                _as_json(asked, plan=plan, check=check, per_s=per_s, start=command), indent=1
            )
        )
    else:
        print(f"{asked.description}: {len(asked.requests)} requests, {pace(per_s)}")
        lines = [moved(asked.question.settings, config.url)]
        lines += [*(f"note: {each}" for each in asked.notes), ""]
        lines += [*checked(check), ""] if check else []
        lines += [*layout_table(plan.rows), ""]
        lines += [*sentences(plan, per_s=per_s, share=objectives.share), "", command]
        print("\n".join(lines))
    return EXIT_DONE if plan.rows[0].holds else EXIT_FAILED


def _asked(
    config: PlanConfig,
    slos: tuple[Slo, ...],
    share: float,
    table: Table,
    resolved: Mapping[str, Resolved],
) -> _Asked:
    """Read the workload, and query the deployment if one is named."""
    dataset = build("dataset", DatasetConfig, table, resolved)
    traffic = build("traffic", TrafficConfig, table, resolved)
    law = arrivals_of(traffic)
    if calibration.is_needed(dataset):
        raise ConfigError(
            "--dataset-name pd-interference measures its pace at an endpoint, and pdserve plan "
            "has none: give --interference-steady-output-len, --interference-steady-period and "
            "--interference-burst-period",
            param="dataset-name",
        )
    if dataset.name.has_own_times and not math.isinf(traffic.request_rate):
        raise ConfigError(
            f"--request-rate is {traffic.request_rate:g}, but --dataset-name {dataset.name.value} "
            "sets the times of its requests itself: leave it out (--trace-speedup makes a trace "
            "faster)",
            param="request-rate",
        )
    running = target = None
    served, notes = ServedModel(""), []
    if config.url:
        running = ask_fleet(config.url, config.api_keys)
        key = config.api_keys[0] if config.api_keys else ""
        served = asyncio.run(ask_served(Target(base_url=config.url, api_key=key)))
        target = Target(base_url=config.url, api_key=key, model=served.model)
        notes += running.notes
    costs, error, size = _known(config, running, served)
    tokenizer = tokenizer_of(config.tokenizer, served)
    if tokenizer is None and config.check:
        raise ConfigError(
            "--tokenizer is missing: --check sends prompts made from the model's tokens, and "
            f"{config.url} does not say where its tokenizer is",
            param="tokenizer",
        )
    tokenizer = tokenizer or Tokenizer.from_directory(boxed_model_dir())
    plan = make_plan(
        dataset,
        PromptMaker(tokenizer, endpoint=ApiEndpoint.COMPLETIONS, max_model_len=size.max_model_len),
    )
    requests = schedule(plan.requests, law, dataset.seed)
    _check_span(requests, dataset, traffic)
    question = PlanQuestion(
        workload=workload_of(requests, tokenizer),
        slos=slos,
        share=share,
        settings=_settings(config.policy, slos, pulls=running is not None and running.pulls),
        costs=costs,
        error=error,
        size=size,
    )
    return _Asked(
        requests=requests,
        description=plan.description,
        model=config.model or served.root or served.model,
        question=question,
        target=target,
        running=running,
        notes=[*notes, *plan.notes],
    )


def _known(
    config: PlanConfig, running: RunningFleet | None, served: ServedModel
) -> tuple[FleetCosts, TimesError, FleetLayout]:
    """Return times and sizes: from flags, else from the deployment, else usual ones."""
    costs = running.costs if running else FleetCosts()
    given: dict[str, float] = {}
    for words, flag, names in (
        (config.prompt_times, "prompt-times", ("prefill", "prefill_token", "prefill_pair")),
        (config.step_times, "step-times", ("decode", "decode_request", "decode_token")),
        (config.wire_times, "wire-times", ("wire", "wire_token")),
    ):
        times = milliseconds(words, len(names), flag, "")
        given |= {name: ms / 1e3 for name, ms in zip(names, times or (), strict=False)}
    if config.hop_ms is not None:
        given |= {"hop": config.hop_ms / 1e3, "handover": 2 * config.hop_ms / 1e3}
    error = running.error if running else _USUAL_ERROR
    if (off := config.times_error) is not None:
        error = TimesError(prefill=off, step=off, wire=off)
    usual = running.layout if running else FleetLayout(0, 0)
    kv_tokens = config.kv_tokens or usual.kv_tokens
    max_model_len = config.max_model_len or min(
        kv_tokens, served.max_model_len or usual.max_model_len
    )
    require(
        max_model_len <= kv_tokens,
        "max-model-len",
        max_model_len,
        f"an engine's cache has room for only {kv_tokens} tokens (--kv-tokens)",
    )
    size = FleetLayout(
        0,
        0,
        kv_tokens=kv_tokens,
        step_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
    )
    return dataclasses.replace(costs, **given), error, size


def _settings(policy: str, slos: Sequence[Slo], *, pulls: bool) -> dict[str, Any]:
    """Return the settings of a proxy that meets the objectives."""
    name, split = read_policy(policy)
    limits = {slo.metric: slo.limit_ms / 1e3 for slo in slos}
    itl_s = limits.get(SloMetric.TPOT, limits.get(SloMetric.ITL, _ITL_SLO_S))
    ttft_s, least_s = limits.get(SloMetric.TTFT), MIN_SLO_MS / 1e3
    return {
        "prefill_policy": name,
        "decode_policy": name,
        "split_policy": split,
        "kv_mode": KVTransfer.PULL if pulls else KVTransfer.AUTO,
        "ttft_slo_s": 0.0 if ttft_s is None else max(ttft_s, least_s),
        "itl_slo_s": max(itl_s, least_s),
    }


async def _check(asked: _Asked, number: int, line: ProgressLine | None) -> PlanCheck:
    """Send the first requests of the workload, and simulate them on the same layout."""
    assert asked.target is not None
    assert asked.running is not None
    played = list(asked.requests[:number])
    question = dataclasses.replace(asked.question, workload=asked.question.workload[:number])
    predicted = Planner(question).simulate(asked.running.layout)
    reason = await reset_prefix_caches(asked.target)
    played_run = await run_plan(played, asked.target, Options(ignore_eos=True), on_progress=line)
    notes = [] if reason is None else [f"the caches were not empty: {reason}"]
    if not played_run.health.valid:
        notes += played_run.health.why_not
    measured = load_figures(played_run.outcomes, question.slos)
    return compare(asked.target.base_url, asked.running.layout, predicted, measured, notes=notes)


def _check_span(
    requests: Sequence[Planned], dataset: DatasetConfig, traffic: TrafficConfig
) -> None:
    """Refuse a workload that takes longer than can be simulated."""
    flag, value, remedy = "request-rate", f"{traffic.request_rate:g}", "raise it"
    if dataset.name.has_own_times:
        flag, value, remedy = "dataset-path", dataset.path, "give --trace-duration"
    span_s = _span_s(requests)
    require(
        span_s <= _MAX_SPAN_S,
        flag,
        value,
        f"its {len(requests)} requests come within {span_s:.3g} s, and at most {_MAX_SPAN_S:.0f} s "
        f"are simulated: {remedy}, or lower --num-prompts",
    )


def _check_memory(
    size: FleetLayout, num_engines: int | None, layouts: Sequence[FleetLayout]
) -> None:
    """Refuse engines whose caches together need more memory than a simulation should."""
    counts = [each.num_engines for each in layouts]
    most = max(counts, default=(num_engines or 0) * MAX_GROWTH)
    require(
        size.kv_tokens * most <= _MAX_KV_TOKENS,
        "kv-tokens",
        size.kv_tokens,
        f"use up to {_MAX_KV_TOKENS // most} where up to {most} engines are tried",
    )


def _span_s(requests: Sequence[Planned]) -> float:
    times = [each.at_s for each in requests if each.at_s is not None]
    return max(times) - min(times)


def _as_json(asked: _Asked, **found: Any) -> dict[str, Any]:
    question = asked.question
    settings: dict[str, Any] = msgspec.to_builtins(
        {
            "workload": asked.description,
            "num_requests": len(asked.requests),
            "slo": [str(each) for each in question.slos],
            "share": question.share,
            "settings": question.settings,
            "costs": dataclasses.asdict(question.costs),
            "times_error": question.error,
            "notes": list(asked.notes),
            **found,
        }
    )
    return settings
