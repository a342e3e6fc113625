"""TTFT, ITL and throughput of one colocated engine and of P/D, on the same cores, over HTTP.

The workloads and the model's shape are those of the table in the design's field notes, so
that the figures can stand beside it. Each deployment runs all workloads, one deployment
at a time, in one run of this program; prints one JSON object.

    python -m benchmarks.serving [--deployments serve,pd] [--workloads one,poisson,short,burst]

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
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from benchmarks.engine import environment
from benchmarks.shapes import SMOLLM2_135M, write_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

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
_READY = re.compile(r"(?:ready url=|Listening on )(http://[^\s(]+)")
_STORY = re.compile(
    r"req .* ttft=(?P<ttft>[\d.]+)ms.*second token \+(?P<second>[\d.]+)ms = "
    r".*?kv (?P<kv>[\d.]+) .*handover (?P<handover>[\d.]+) \+ first step (?P<step>[\d.]+)"
)


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


@dataclass
class Sample:
    """Times of one stream, in seconds."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deployments", default="serve,pd")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        model = write_model(Path(directory) / "m", SMOLLM2_135M)
        result = asyncio.run(_run(args, model, Path(directory)))
    print(json.dumps(result, indent=1))


async def _run(args: argparse.Namespace, model: Path, directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for deployment in args.deployments.split(","):
        async with _deployed(deployment, model, directory) as (url, log):
            await _play(url, Workload(num_requests=4, num_in=64, num_out=8, concurrency=2))
            for name in args.workloads.split(","):
                print(f"{deployment}: {name}", file=sys.stderr)
                since = log.stat().st_size
                samples, wall_s = await _play(url, WORKLOADS[name])
                await asyncio.sleep(0.3)
                figures = _summarise(samples, wall_s)
                if deployment == "pd":
                    figures |= _handover(log.read_text()[since:])
                found.setdefault(name, {})[deployment] = figures
    return {
        "benchmark": "serving",
        "shape": "SmolLM2-135M, random weights, bf16",
        "environment": environment(len(os.sched_getaffinity(0))),
        "deployments": {
            "serve": "one engine on all cores, chunks of 512",
            "pd": "one prefill and one decode engine, half the cores each, and the proxy",
        },
        "goals": {"handover_without_wire_ms_p50": 5.0},
        "workloads": found,
        "field_notes": FIELD_NOTES,
    }


@contextlib.asynccontextmanager
async def _deployed(name: str, model: Path, directory: Path) -> AsyncIterator[tuple[str, Path]]:
    """Start the processes of a deployment; yields its URL and the log of its entrance."""
    cores = len(os.sched_getaffinity(0))
    flags = ["--load-format", "dummy", "--max-model-len", "2048", "--port", "0"]
    flags += ["--kv-cache-memory-bytes", "1GiB", "--no-enable-prefix-caching"]
    half = ["--num-threads", str(max(1, cores // 2))]
    processes: list[subprocess.Popen[bytes]] = []

    async def start(command: str, *arguments: str) -> tuple[str, Path]:
        log = directory / f"{name}-{command}.log"
        with log.open("wb") as out:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "pdserve", command, *arguments],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PDSERVE_SECRET": "benchmark"},
                    start_new_session=True,
                )
            )
        while not (ready := _READY.search(log.read_text())):
            if processes[-1].poll() is not None:
                raise SystemExit(f"pdserve {command} ended:\n{log.read_text()}")
            await asyncio.sleep(0.1)
        return ready.group(1), log

    try:
        if name == "serve":
            chunks = ["--max-num-batched-tokens", "512"]
            yield await start("serve", str(model), *flags, *chunks, "--num-threads", str(cores))
        else:
            url, log = await start("proxy", "--port", "0")
            for role in ("prefill", "decode"):
                await start(role, str(model), *flags, *half, "--proxy", url)
            async with aiohttp.ClientSession() as session:
                while (await session.get(f"{url}/readyz")).status != 200:
                    await asyncio.sleep(0.1)
                await asyncio.sleep(2.0)  # both engines are known and have met
            yield url, log
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(40)


async def _play(url: str, load: Workload) -> tuple[list[Sample], float]:
    rng = random.Random(7)
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        places = asyncio.Semaphore(load.concurrency)
        start = time.perf_counter()

        async def one(index: int, at_s: float) -> Sample:
            prompt = [300 + rng.randrange(40000) for _ in range(load.num_in)]
            if load.rate is not None:
                await asyncio.sleep(max(0.0, at_s - (time.perf_counter() - start)))
                return await _stream(session, url, prompt, load.num_out, index)
            async with places:
                return await _stream(session, url, prompt, load.num_out, index)

        at_s, tasks = 0.0, []
        for index in range(load.num_requests):
            tasks.append(asyncio.create_task(one(index, at_s)))
            if load.rate is not None:
                at_s += rng.expovariate(load.rate)
        samples = await asyncio.gather(*tasks)
        return samples, time.perf_counter() - start


async def _stream(
    session: aiohttp.ClientSession, url: str, prompt: list[int], num_out: int, seed: int
) -> Sample:
    body = {
        "prompt": prompt,
        "max_tokens": num_out,
        "temperature": 0.0,
        "ignore_eos": True,
        "seed": seed,
        "stream": True,
    }
    sample = Sample(time.perf_counter())
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                if b'"error"' in line[:40]:
                    raise SystemExit(f"the server says {line!r}")
                sample.token_s.append(time.perf_counter())
    if len(sample.token_s) != num_out:
        raise SystemExit(f"{len(sample.token_s)} chunks for {num_out} tokens")
    return sample


def _summarise(samples: list[Sample], wall_s: float) -> dict[str, float]:
    ttft = [s.token_s[0] - s.sent_s for s in samples]
    tpot = [(s.token_s[-1] - s.token_s[0]) / (len(s.token_s) - 1) for s in samples]
    itl = sorted(b - a for s in samples for a, b in zip(s.token_s, s.token_s[1:], strict=False))
    num_tokens = sum(len(s.token_s) for s in samples)

    def ms(value: float) -> float:
        return round(value * 1e3, 2)

    return {
        "ttft_ms": ms(statistics.median(ttft)),
        "tpot_ms": ms(statistics.median(tpot)),
        "itl_p50_ms": ms(itl[len(itl) // 2]),
        "itl_p99_ms": ms(itl[int(len(itl) * 0.99)]),
        "itl_max_ms": ms(itl[-1]),
        "tok_per_s": round(num_tokens / wall_s, 1),
    }


def _handover(log: str) -> dict[str, float]:
    rows = [
        {key: float(value) for key, value in match.groupdict().items()}
        for match in _STORY.finditer(log)
    ]
    if not rows:
        raise SystemExit("no request was handed over")
    beside = sorted(row["second"] - row["kv"] - row["step"] for row in rows)
    return {
        "handed_over": len(rows),
        "handover_without_wire_ms_p50": round(statistics.median(beside), 2),
        "handover_without_wire_ms_max": round(beside[-1], 2),
        "kv_transfer_ms_p50": round(statistics.median(row["kv"] for row in rows), 2),
        "first_step_ms_p50": round(statistics.median(row["step"] for row in rows), 2),
    }


if __name__ == "__main__":
    main()
