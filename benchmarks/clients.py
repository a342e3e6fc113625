"""What the benchmark's own client adds and misses: against known times, and beside another client.

Prints one JSON object of three parts:

- `known`: against a scripted server that notes when it wrote each token: how far TTFT, ITL and TPOT
  are from the server's own times, token by token. Goal: 1 ms.
- `overhead`: at 200 requests/s against the same server with fixed delays: by how much the median
  TTFT is above what the server itself took. Goal: 2 %, or a run that says it is not valid.
- `aiperf`: the same prompts, one at a time, sent to one deployment (prefill, decode, proxy; the
  135M shape, whose prefill is long beside what a client adds) by us and by NVIDIA's aiperf in
  turns. Goal: medians within 5 % or 1 ms, equal token counts. The deployment has half of the cores
  and the clients have the others, so that neither client's own work slows what it measures.
  `above_server_ms` is by how much each client's TTFTs are above what the proxy itself took for the
  same requests. aiperf runs in an environment of its own, which is made for it in a temporary
  directory unless `--aiperf` names its program.

    python -m benchmarks.clients [--parts known,overhead,aiperf] [--aiperf PATH]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from benchmarks.deployments import processes, until_ready
from benchmarks.scripted_server import Script
from benchmarks.shapes import SMOLLM2_135M, write_model
from pdserve.bench import environment
from pdserve.bench.arrivals import ArrivalLaw, schedule
from pdserve.bench.records import Planned, Run
from pdserve.bench.runner import Options, run_plan
from pdserve.bench.target import Target
from pdserve.config.boxed import boxed_model_dir

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

AIPERF = "aiperf==0.13.0"
GOALS = {
    "known": "TTFT, ITL and TPOT within 1 ms of the server's own times (99 of 100)",
    "overhead": "under 2 % of the server's median TTFT at 200 requests/s, or not valid",
    "aiperf": "TTFT and ITL medians within 5 % or 1 ms, token counts equal",
}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="known,overhead,aiperf")
    parser.add_argument("--aiperf", default="", help="its program; empty installs it")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "clients",
        "environment": environment.describe(),
        "goals": GOALS,
    }
    parts = args.parts.split(",")
    if "known" in parts:
        result["known"] = _known()
    if "overhead" in parts:
        result["overhead"] = {f"{rate}_per_s": _overhead(rate) for rate in (50, 200, 400)}
    if "aiperf" in parts:
        with tempfile.TemporaryDirectory(prefix="pdserve-clients-") as name:
            result["aiperf"] = asyncio.run(_beside_aiperf(args, Path(name)))
    print(json.dumps(result, indent=1))


# --- against a server that knows


@contextlib.contextmanager
def _scripted() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.scripted_server"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def _times(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/times") as answer:
        content: dict[str, Any] = json.load(answer)
    return content["times"]


def _scripted_plan(number: int, rate: float, script: Script) -> list[Planned]:
    prompt = msgspec.json.encode(script).decode()
    tokens = len(script.gaps_s) + 1
    plan = [Planned(index=n, prompt=prompt, max_tokens=tokens) for n in range(number)]
    return schedule(plan, ArrivalLaw(rate=rate), seed=1)


def _run(url: str, plan: Sequence[Planned], options: Options | None = None) -> Run:
    return asyncio.run(run_plan(plan, Target(base_url=url), options or Options()))


def _known() -> dict[str, Any]:
    """How far our times are from the server's."""
    gaps_s = [0.004, 0.02, 0.007, 0.05, 0.01, 0.003, 0.015] * 4
    script = Script(first_s=0.08, gaps_s=gaps_s)
    with _scripted() as url:
        run = _run(url, _scripted_plan(200, 20.0, script))
        times = _times(url)
    ttft, itl, tpot, nominal = [], [], [], []
    for outcome in run.outcomes:
        theirs = times[outcome.request_id]
        token_s = theirs["token_s"]
        assert len(token_s) == len(outcome.chunk_s), outcome
        ttft.append(outcome.ttft_s - (token_s[0] - theirs["arrived_s"]))
        itl += [
            ours - (after - before)
            for ours, before, after in zip(outcome.itl_s, token_s, token_s[1:], strict=False)
        ]
        assert outcome.tpot_s is not None
        tpot.append(outcome.tpot_s - (token_s[-1] - token_s[0]) / (len(token_s) - 1))
        nominal.append(outcome.tpot_s - statistics.mean(gaps_s))
    return {
        "requests": len(run.outcomes),
        "tokens_each": len(gaps_s) + 1,
        "error_ms": {
            "ttft": _errors(ttft),
            "itl": _errors(itl),
            "tpot": _errors(tpot),
            "tpot_from_the_script": _errors(nominal),
        },
        **_health(run),
        "holds": max(_p99(ttft), _p99(itl), _p99(tpot)) < 1e-3,
    }


def _overhead(rate: float) -> dict[str, Any]:
    """What the client adds to TTFT at a rate."""
    script = Script(first_s=0.05, gaps_s=[0.005] * 15)
    with _scripted() as url:
        run = _run(url, _scripted_plan(round(rate * 8), rate, script))
        times = _times(url)
    server, client = [], []
    for outcome in run.outcomes:
        theirs = times[outcome.request_id]
        server.append(theirs["token_s"][0] - theirs["arrived_s"])
        client.append(outcome.ttft_s)
    share = statistics.median(client) / statistics.median(server) - 1
    return {
        "requests": len(client),
        "server_ttft_p50_ms": _ms(statistics.median(server)),
        "client_ttft_p50_ms": _ms(statistics.median(client)),
        "added_share": round(share, 4),
        "from_due_ttft_p50_ms": _ms(
            statistics.median(each.chunk_s[0] - each.scheduled_s for each in run.outcomes)
        ),
        **_health(run),
        "holds": share < 0.02 or not run.health.valid,
    }


def _health(run: Run) -> dict[str, Any]:
    health = run.health
    return {
        "valid": health.valid,
        "why_not": health.why_not,
        "client": {
            "processes": health.num_processes,
            "send_lag_p99_ms": _ms(health.send_lag_p99_s),
            "loop_lag_p99_ms": _ms(health.loop_lag_p99_s),
            "cpu_share": round(health.cpu_share, 3),
            "priority": health.priority,
        },
    }


def _errors(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "p50": _ms(float(np.percentile(np.abs(seconds), 50))),
        "p99": _ms(_p99(seconds)),
        "max": _ms(float(np.max(np.abs(seconds)))),
    }


def _p99(seconds: Sequence[float]) -> float:
    return float(np.percentile(np.abs(seconds), 99))


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


# --- beside another client

NUM_PROMPTS, NUM_WORDS, NUM_OUT = 24, 100, 24
NUM_WARMUPS = 4
"""Requests that each client sends before those that count."""
_TOKENIZER = "pdserve/smollm2-135m"


async def _beside_aiperf(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    program = args.aiperf or await asyncio.to_thread(_install, directory)
    words = (boxed_model_dir() / "corpus.txt").read_text(encoding="utf-8").split()
    model = write_model(directory / "model", SMOLLM2_135M)
    rounds: list[dict[str, Any]] = []
    async with _deployed(model, directory) as url:
        for number in range(args.rounds):
            begins = range(number * NUM_PROMPTS, (number + 1) * NUM_PROMPTS)
            prompts = [" ".join(words[begin * 7 : begin * 7 + NUM_WORDS]) for begin in begins]
            ours = await _ours(url, prompts)
            ours |= await asyncio.to_thread(_told, url, NUM_PROMPTS)
            theirs = await asyncio.to_thread(
                _theirs, program, url, model, prompts, directory / f"aiperf-{number}"
            )
            theirs |= await asyncio.to_thread(_told, url, NUM_PROMPTS)
            rounds.append({"ours": ours, "aiperf": theirs})
            print(f"round {number}: ours {_summary(ours)}", file=sys.stderr)
            print(f"round {number}: aiperf {_summary(theirs)}", file=sys.stderr)
    pooled = {
        name: {key: [v for each in rounds for v in each[name][key]] for key in rounds[0][name]}
        for name in ("ours", "aiperf")
    }
    summaries = {name: _summary(each) for name, each in pooled.items()}
    differences = {
        key: round(summaries["ours"][key] - summaries["aiperf"][key], 4)
        for key in ("ttft_p50_ms", "itl_p50_ms", "tpot_p50_ms")
    }
    is_close = all(
        abs(difference) <= max(1.0, 0.05 * summaries["aiperf"][key])
        for key, difference in differences.items()
    )
    counts = ("input_tokens", "output_tokens")
    are_equal = all(summaries["ours"][key] == summaries["aiperf"][key] for key in counts)
    return {
        "deployment": "prefill, decode, proxy; 135M shape, random weights; no prefix caching; "
        "one thread each, all on half of the cores",
        "load": f"{NUM_PROMPTS} prompts of {NUM_WORDS} words a round, {NUM_OUT} tokens each, one "
        f"request at a time; {args.rounds} rounds, we and aiperf in turns",
        "version": AIPERF,
        **summaries,
        "difference_ms": differences,
        "above_server_ms": {name: _above_server(each) for name, each in pooled.items()},
        "rounds": [{name: _summary(each) for name, each in pair.items()} for pair in rounds],
        "token_counts_equal": are_equal,
        "holds": is_close and are_equal,
    }


def _install(directory: Path) -> str:
    print(f"installing {AIPERF}", file=sys.stderr)
    place = directory / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    subprocess.run([str(place / "bin" / "pip"), "install", "--quiet", AIPERF], check=True)
    return str(place / "bin" / "aiperf")


@contextlib.asynccontextmanager
async def _deployed(model: Path, directory: Path) -> Any:
    flags = [str(model), "--load-format", "dummy", "--max-model-len", "2048", "--port", "0"]
    flags += ["--num-threads", "1", "--kv-cache-memory-bytes", "256MiB"]
    flags += ["--no-enable-prefix-caching"]
    cores = sorted(os.sched_getaffinity(0))
    middle = len(cores) // 2
    if not middle:
        raise SystemExit("the part aiperf needs two cores: one for the clients alone")
    async with processes(directory) as started:
        os.sched_setaffinity(0, cores[:middle])  # of this thread, and of what it starts
        url, _ = await started.start("proxy", "proxy", "--port", "0")
        for role in ("prefill", "decode"):
            await started.start(role, role, *flags, "--proxy", url)
        await until_ready([url])
        os.sched_setaffinity(0, cores[middle:])
        try:
            yield url
        finally:
            os.sched_setaffinity(0, cores)


async def _ours(url: str, prompts: Sequence[str]) -> dict[str, Any]:
    plan = [
        Planned(index=place, prompt=prompt, max_tokens=NUM_OUT, at_s=0.0)
        for place, prompt in enumerate(prompts)
    ]
    options = Options(max_concurrency=1, num_processes=1, ignore_eos=True, num_warmups=NUM_WARMUPS)
    run = await run_plan(plan, Target(base_url=url), options)
    failed = [each.error for each in run.outcomes if not each.is_good]
    if failed:
        raise SystemExit(f"our client: {failed[0]}")
    # As they were sent: one at a time, all due at once, the plan's order is not theirs.
    outcomes = sorted(run.outcomes, key=lambda each: each.sent_s)
    return {
        "ttft_ms": [each.ttft_s * 1e3 for each in outcomes],
        "itl_ms": [gap_s * 1e3 for each in outcomes for gap_s in each.itl_s],
        "tpot_ms": [(each.tpot_s or 0.0) * 1e3 for each in outcomes],
        "input_tokens": [each.num_prompt_tokens for each in outcomes],
        "output_tokens": [each.num_output_tokens for each in outcomes],
    }


def _theirs(
    program: str, url: str, model: Path, prompts: Sequence[str], place: Path
) -> dict[str, Any]:
    place.mkdir()
    prompts_file = place / "prompts.jsonl"
    lines = [json.dumps({"text": prompt}) + "\n" for prompt in prompts]
    prompts_file.write_text("".join(lines), encoding="utf-8")
    extra = {"ignore_eos": True, "temperature": 0, "max_tokens": NUM_OUT}
    arguments = {
        "model": str(model),
        "tokenizer": _TOKENIZER,
        "url": url,
        "endpoint-type": "completions",
        "input-file": str(prompts_file),
        "custom-dataset-type": "single_turn",
        "dataset-sampling-strategy": "sequential",
        "extra-inputs": json.dumps(extra),
        "concurrency": "1",
        "request-count": str(len(prompts)),
        "warmup-request-count": str(NUM_WARMUPS),
        "artifact-dir": str(place / "artifacts"),
        "max-workers": "1",
        "record-processors": "1",
        "ui": "none",
    }
    command = [program, "profile", "--streaming", "--use-server-token-count", "--no-gpu-telemetry"]
    command += [word for name, value in arguments.items() for word in (f"--{name}", value)]
    log = place / "log"
    with log.open("wb") as out:
        code = subprocess.run(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(_hub(model, place))},
            cwd=place,
            timeout=240,
            check=False,
        ).returncode
    records = place / "artifacts" / "profile_export.jsonl"
    if code or not records.is_file():
        raise SystemExit(f"aiperf ended with {code}:\n{log.read_text(errors='replace')[-4000:]}")
    found = [json.loads(line) for line in records.read_text().splitlines()]
    found = [each for each in found if each["metadata"]["benchmark_phase"] == "profiling"]
    found.sort(key=lambda each: each["metadata"]["request_start_ns"])
    rows = [each["metrics"] for each in found]
    return {
        "ttft_ms": [row["time_to_first_token"]["value"] for row in rows],
        "itl_ms": [gap for row in rows for gap in row["inter_chunk_latency"]["value"]],
        "tpot_ms": [row["inter_token_latency"]["value"] for row in rows],
        "input_tokens": [row["input_sequence_length"]["value"] for row in rows],
        "output_tokens": [row["output_sequence_length"]["value"] for row in rows],
    }


def _hub(model: Path, place: Path) -> Path:
    """A cache of the hub with the model's tokenizer: offline, aiperf reads no directory."""
    home = place / "hf"
    cached = home / "hub" / f"models--{_TOKENIZER.replace('/', '--')}"
    commit = "0" * 40
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    snapshot = cached / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(model / name, snapshot)
    return home


def _told(url: str, number: int) -> dict[str, list[float]]:
    """What the proxy itself took to the first token of the last requests."""
    with urllib.request.urlopen(f"{url}/debug/requests?finished={number}") as answer:
        content: dict[str, Any] = json.load(answer)
    # Newest first, and one at a time: turned round, they are in the clients' order.
    return {"server_ttft_ms": [each["ttft_ms"] for each in content["finished"]][::-1]}


def _above_server(found: dict[str, Any]) -> dict[str, float]:
    """By how much a client's TTFTs are above the proxy's own, request by request."""
    above = np.asarray(found["ttft_ms"]) - np.asarray(found["server_ttft_ms"])
    return {
        "p50": round(float(np.median(above)), 4),
        "p99": round(float(np.percentile(above, 99)), 4),
    }


def _summary(found: dict[str, Any]) -> dict[str, float]:
    return {
        **{
            f"{name}_p50_ms": round(statistics.median(found[f"{name}_ms"]), 3)
            for name in ("ttft", "server_ttft", "itl", "tpot")
            if f"{name}_ms" in found
        },
        "requests": len(found["ttft_ms"]),
        "input_tokens": sum(found["input_tokens"]),
        "output_tokens": sum(found["output_tokens"]),
    }


if __name__ == "__main__":
    main()
