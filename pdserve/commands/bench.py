"""`pdserve bench serve`: send a data set to an endpoint and print what users would experience.

Exit code 0 if every request was answered and the run is valid; 1 if one failed, or if its figures
are not valid (unless `--allow-invalid`): the client was too slow, or other programs used the cores;
130 after Ctrl-C or SIGTERM. A run that they cut short is printed and saved as far as it went, as
not valid.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdserve.bench import calibration, environment
from pdserve.bench.console import block, further, verdict
from pdserve.bench.endpoint import ask_served
from pdserve.bench.figures import details, figures
from pdserve.bench.files import require_directory, save
from pdserve.bench.goodput import Slo, parse_goodput
from pdserve.bench.preparing import (
    arrivals_in_words,
    arrivals_of,
    options_of,
    plan_of,
    prompts_of,
    sampling_in_words,
    target_of,
    traffic_of,
)
from pdserve.bench.progress import ProgressLine
from pdserve.bench.records import Planned, Run
from pdserve.bench.runner import PlanOrigin, run_plan
from pdserve.bench.target import Target
from pdserve.commands.announce import given_lines, title
from pdserve.commands.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from pdserve.commands.running import run_until_signalled
from pdserve.config.bench import ResultConfig, TargetConfig, TrafficConfig
from pdserve.config.datasets import DatasetConfig
from pdserve.config.load import Resolved, Source, Table, build
from pdserve.errors import ConfigError


def run_serve(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve bench serve`."""
    target_config = build("target", TargetConfig, table, resolved)
    dataset = build("dataset", DatasetConfig, table, resolved)
    traffic = traffic_of(build("traffic", TrafficConfig, table, resolved), dataset)
    result = build("result", ResultConfig, table, resolved)
    slos = parse_goodput(result.goodput)
    arrivals_of(traffic)  # before anything is asked
    if result.save_result:
        require_directory(Path(result.result_dir))
    else:
        _require_saved(resolved)
    print("\n".join([title("bench serve"), *given_lines(resolved)]), flush=True)
    target = target_of(target_config, os.environ)
    ended: list[tuple[Run, list[Planned], list[str]]] = []

    async def work() -> int:
        served = await ask_served(target, traffic.ready_check_timeout_s)
        own, measured = dataset, []
        if calibration.is_needed(dataset):
            found = await calibration.calibrate(
                dataset,
                prompts_of(target, served, tokenizer=target_config.tokenizer),
                msgspec.structs.replace(target, model=served.model),
                options_of(traffic),
            )
            own, flags = found.dataset, " ".join(found.flags)
            print(f"Measured pace: {found.words}\n  {flags}", flush=True)
            measured = [f"The pace was measured before the run: {found.words}; {flags}"]
            measured += found.notes
        plan, requests = plan_of(
            own,
            arrivals_of(traffic),
            target,
            served,
            tokenizer=target_config.tokenizer,
            cancel_share=traffic.cancel_share,
        )
        words = arrivals_in_words(dataset, traffic)
        sampling = sampling_in_words(traffic)
        load = f"{plan.description}; {words}; {sampling}"
        print(f"{served.model} at {target.url}: {load}", flush=True)
        run = await run_plan(
            requests,
            msgspec.structs.replace(target, model=served.model),
            msgspec.structs.replace(
                options_of(traffic, keep_text=result.save_detailed), ends_early=True
            ),
            origin=PlanOrigin(plan.description, words, sampling, dataset.seed),
            on_progress=line if result.progress else None,
        )
        ended.append((run, requests, [*measured, *plan.notes]))
        return EXIT_DONE

    with contextlib.closing(ProgressLine(sys.stderr)) as line:
        code = run_until_signalled(work(), is_service=False)
    if not ended:
        return code
    run, requests, notes = ended[0]
    found = figures_of(run, slos, result, traffic, target)
    found["pdserve"]["notes"] = [*notes, *found["pdserve"]["notes"], *_short(run, requests)]
    print(
        block(
            found,
            request_rate=traffic.request_rate,
            max_concurrency=traffic.max_concurrency,
            metrics=result.metrics,
            percentiles=result.percentiles,
        )
    )
    for text in (further(found), verdict(found)):
        if text:
            print(text)
    if result.save_result:
        path = Path(result.result_dir) / (result.result_filename or _filename(found, target_config))
        detailed = {**found, **details(run)} if result.save_detailed else found
        save(run if result.save_detailed else None, detailed, path)
        print(f"Saved: {path}")
    if run.num_unfinished:
        return EXIT_INTERRUPTED
    if found["failed"] or not (run.health.valid or result.allow_invalid):
        return EXIT_FAILED
    return EXIT_DONE


def _require_saved(resolved: Mapping[str, Resolved]) -> None:
    """Refuse settings of a file where none is saved.

    Raises:
        ConfigError: One is given.
    """
    for flag in ("result-dir", "result-filename", "metadata"):
        if resolved[flag].source is Source.COMMAND_LINE:
            raise ConfigError(f"--{flag} needs --save-result: add it, or leave it out", param=flag)


def figures_of(
    run: Run, slos: Sequence[Slo], result: ResultConfig, traffic: TrafficConfig, target: Target
) -> dict[str, Any]:
    """Return a run's figures with its settings, as `vllm bench serve` saves them."""
    found = figures(run, slos, percentiles=result.percentiles, environment=environment.describe())
    rate = traffic.request_rate
    own = {
        "endpoint_type": "openai-chat" if target.endpoint.value == "chat" else "openai",
        "backend": "openai-chat" if target.endpoint.value == "chat" else "openai",
        "tokenizer_id": run.model,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": "inf" if math.isinf(traffic.burstiness) else traffic.burstiness,
        "max_concurrency": traffic.max_concurrency,
        **found,
    }
    taken = [name for name in result.further_entries if name in own]
    if taken:
        sentence = (
            f"--metadata {', '.join(taken)} is ignored: the result already has a value with that "
            "name."
        )
        found["pdserve"]["notes"] = [*found["pdserve"]["notes"], sentence]
    return {**result.further_entries, **own}


def _short(run: Run, requests: Sequence[Planned]) -> list[str]:
    """Note answers that were shorter than requested: such runs do not compare with others."""
    asked = {each.index: each.max_tokens for each in requests}
    good = run.answered
    short = sum(each.num_output_tokens < asked[each.index] for each in good)
    if not short:
        return []
    sentence = (
        f"{short} of {len(good)} answers ended before the requested number of tokens; "
        "--ignore-eos makes all of them equally long."
    )
    return [sentence]


def _filename(found: Mapping[str, Any], target: TargetConfig) -> str:
    """Return a name as vLLM's: label, rate, concurrency, model and date."""
    label = target.label or "pdserve"
    concurrency = found["max_concurrency"]
    places = f"-concurrency{concurrency}" if concurrency is not None else ""
    model = Path(found["model_id"]).name
    name = f"{label}-{found['request_rate']}qps{places}-{model}-{found['date']}.json"
    return re.sub(r"[^\w.+=-]", "_", name)
