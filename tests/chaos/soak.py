"""Half an hour of load in which engines die: what is left behind, and what grows.

    python -m tests.chaos.soak [--minutes 30] [--report FILE]

Two prefill engines, two decode engines and a proxy serve a bounded load of streams, a fifth of
which hang up. Every minute one prefill and one decode engine are killed and started again; the
other two, and the proxy, live through all of it, and their resident memory is watched. Prints a
line a minute, and at the end one JSON object: wrong tokens, requests without a final state, blocks
not free, and the slope of each survivor's memory, in bytes for each request that ended, over the
second half of the run: what is remembered up to a number or for a time has reached its size then.
The last line is the verdict; the exit code is 0 if nothing speaks against it, else 1.

An engine that is slow to come back is waited for and reported: a busy machine is no fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from tests.chaos.stage import LEASE_S, QUARANTINE_S
from tests.e2e.deployment import Deployment
from tests.tiny_models import write_tiny_model

CONCURRENCY = 8
REQUESTS_PER_S = 30.0
"""At most; a busy machine of two cores does as much. What is in flight, and with it what memory is
needed at once, would otherwise follow whatever else the machine does."""
NUM_PROMPTS = 48
MAX_TOKENS = 60
LEAVE_SHARE = 0.2
KILL_EVERY_S = 60.0
SAMPLE_EVERY_S = 5.0
HANG_S = 90.0
START_S = 120.0
"""An engine that starts under this load, and others', takes what it takes; longer is reported."""
WARM_UP_S = 120.0
"""Memory counts from here on at the earliest: pools, caches and buffers have reached their size."""
FLAT_BYTES_PER_REQUEST = 100.0
"""Less is not told from the noise of resident memory: one MiB in ten thousand requests."""
MIN_SAMPLES = 12
"""A slope over fewer is none."""

SURVIVORS = ("proxy", "prefill1", "decode1")
VICTIMS = ("prefill", "decode")


@dataclass
class Soak:
    """What has been seen so far."""

    deployment: Deployment
    model: Path
    answers: dict[int, list[int]] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    num_wrong_tokens: int = 0
    num_kills: int = 0
    late_starts: list[str] = field(default_factory=list)
    rss: dict[str, list[tuple[float, int, float]]] = field(default_factory=dict)

    def prompt(self, index: int) -> list[int]:
        """One of a fixed set; some begin alike."""
        rng = random.Random(index // 3)
        shared = [3 + rng.randrange(300) for _ in range(64)]
        own = random.Random(1000 + index)
        return shared + [3 + own.randrange(300) for _ in range(own.randrange(1, 400))]

    def start_engine(self, name: str, port: int = 0) -> None:
        """Start an engine, where it was if `port` says so."""
        self.deployment.start(
            name,
            name.rstrip("1"),
            *(str(self.model), "--dtype", "float32", "--num-threads", "1", "--port", str(port)),
            *("--proxy", self.deployment.url("proxy"), "--max-num-seqs", "16"),
            *("--num-gpu-blocks-override", "512"),
            *("--kv-transfer-config.lease-s", str(LEASE_S)),
            *("--kv-transfer-config.quarantine-s", str(QUARANTINE_S)),
        )

    def sample(self, at_s: float) -> None:
        """Note the survivors' resident memory, in MiB, and how many requests have ended."""
        for name in SURVIVORS:
            total = sum(
                process.memory_info().rss for process in self.deployment.processes[name].family()
            )
            each = (at_s, self.ends.total(), total / (1 << 20))
            self.rss.setdefault(name, []).append(each)

    def slopes(self) -> dict[str, dict[str, float | bool | None]]:
        """What `slope` says of each survivor."""
        return {name: slope(samples) for name, samples in self.rss.items()}


def slope(samples: list[tuple[float, int, float]]) -> dict[str, float | bool | None]:
    """How memory grows over the second half of a run, by least squares.

    Args:
        samples: (seconds, requests so far, MiB), in order.

    Returns:
        `is_flat` is None, and there is no slope, if the run was too short to tell.
    """
    from_s = max(WARM_UP_S, samples[-1][0] / 2)
    settled = np.array([sample for sample in samples if sample[0] >= from_s])
    if len(settled) < MIN_SAMPLES or settled[0, 1] == settled[-1, 1]:
        return {"from_s": round(from_s, 1), "is_flat": None}
    at_s, requests, mib = settled.T
    bytes_per_request = float(np.polyfit(requests, mib, 1)[0]) * (1 << 20)
    return {
        "from_s": round(from_s, 1),
        "first_mib": round(float(mib[0]), 1),
        "last_mib": round(float(mib[-1]), 1),
        "requests": int(requests[-1] - requests[0]),
        "mib_per_minute": round(float(np.polyfit(at_s / 60.0, mib, 1)[0]), 3),
        "bytes_per_request": round(bytes_per_request, 1),
        "is_flat": bytes_per_request <= FLAT_BYTES_PER_REQUEST,
    }


def objections(result: dict[str, Any]) -> list[str]:
    """What speaks against a soak's result; nothing if it is good."""
    found = [
        f"{result[what]} {what.replace('_', ' ')}"
        for what in ("wrong_tokens", "without_final_state", "blocks_not_free", "engines_lost")
        if result[what]
    ]
    if not result["ends"].get("finished"):
        found.append("no request has finished")
    if not result["kv_bytes_to_survivor"]:
        found.append("no KV has moved")
    for name, each in result["rss"].items():
        if each["is_flat"] is None:
            found.append(f"{name}: too short a run for the slope of its memory")
        elif not each["is_flat"]:
            found.append(f"{name} grows by {each['bytes_per_request']} B per request")
    return found


async def one_request(soak: Soak, session: aiohttp.ClientSession, rng: random.Random) -> None:
    """One stream; its end is counted, whatever it is."""
    index = rng.randrange(NUM_PROMPTS)
    num_tokens = rng.randrange(2, MAX_TOKENS)
    leave_after = rng.randrange(0, num_tokens) if rng.random() < LEAVE_SHARE else None
    body: dict[str, Any] = {
        "prompt": soak.prompt(index),
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        # Half of them find no cached prefix, so that KV goes on moving.
        **({"cache_salt": str(rng.random())} if rng.random() < 0.5 else {}),
    }
    tokens: list[int] = []

    async def read() -> str:
        end = "cut off"
        async with session.post(
            f"{soak.deployment.url('proxy')}/v1/completions", json=body
        ) as answer:
            if answer.status != 200:
                return str((await answer.json())["error"]["code"])
            async for line in answer.content:
                if line.startswith(b"data: [DONE]"):
                    return end
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    end = str(event["error"]["code"])
                    continue
                for choice in event["choices"]:
                    tokens.extend(choice["token_ids"] or [])
                    if choice["finish_reason"] is not None:
                        end = "finished"
                if leave_after is not None and len(tokens) >= leave_after:
                    return "left"
        return end

    try:
        end = await asyncio.wait_for(read(), HANG_S)
    except TimeoutError:
        end = "hung"
    except aiohttp.ClientError as error:
        end = f"connection: {type(error).__name__}"
    right = soak.answers[index][:num_tokens]
    soak.num_wrong_tokens += sum(a != b for a, b in zip(tokens, right, strict=False))
    soak.num_wrong_tokens += max(0, len(tokens) - len(right))
    if end == "finished" and len(tokens) != len(right):
        soak.num_wrong_tokens += 1
    soak.ends[end] += 1


async def load(soak: Soak, until_s: float, seed: int) -> None:
    """One request after the other, this client's share of the pace at most."""
    rng = random.Random(seed)
    period_s = CONCURRENCY / REQUESTS_PER_S
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.sleep(rng.random() * period_s)
        while (began_s := time.monotonic()) < until_s:
            await one_request(soak, session, rng)
            await asyncio.sleep(max(0.0, began_s + period_s - time.monotonic()))


async def faults(soak: Soak, started_s: float, until_s: float) -> None:
    """Kill and restart, once a minute; sample memory in between."""
    next_kill_s = started_s + KILL_EVERY_S / 2
    while time.monotonic() < until_s - KILL_EVERY_S / 4:
        now_s = time.monotonic()
        if now_s >= next_kill_s:
            next_kill_s += KILL_EVERY_S
            for name in VICTIMS:
                process = soak.deployment.processes[name]
                port = int(process.url.rsplit(":", 1)[1])
                process.kill()
                soak.num_kills += 1
                soak.start_engine(name, port)
            for name in VICTIMS:
                await until_ready(soak, name, until_s + START_S)
            minutes = (time.monotonic() - started_s) / 60.0
            print(
                f"{minutes:5.1f} min: {dict(soak.ends)}, {soak.num_wrong_tokens} wrong tokens, "
                f"{ {n: round(v[-1][2], 1) for n, v in soak.rss.items()} } MiB",
                file=sys.stderr,
                flush=True,
            )
        soak.sample(time.monotonic() - started_s)
        await asyncio.sleep(SAMPLE_EVERY_S)


async def until_ready(soak: Soak, name: str, until_s: float) -> None:
    """Wait for an engine that was started again; one that takes long is noted, not given up.

    Raises:
        AssertionError: It ended by itself, or is not ready at `until_s`.
    """
    process, began_s = soak.deployment.processes[name], time.monotonic()
    while True:
        try:
            await asyncio.to_thread(soak.deployment.wait, name, timeout_s=START_S)
            break
        except AssertionError:
            if process.popen.poll() is not None or time.monotonic() > until_s:
                raise
    took_s = time.monotonic() - began_s
    if took_s > START_S:
        load_1m = os.getloadavg()[0]
        soak.late_starts.append(f"{name}: ready after {took_s:.0f} s, load {load_1m:.1f}")


def still_held(deployment: Deployment, names: tuple[str, ...]) -> dict[str, int]:
    """Blocks that are not free half a minute after the last request, by state; blocks."""
    try:
        deployment.wait_nothing_held(*names, timeout_s=30.0)
    except AssertionError:
        counts: Counter[str] = Counter()
        for name in names:
            counts.update(deployment.held_blocks(name))
        return dict(counts)
    return {}


async def run(minutes: float) -> dict[str, Any]:
    """Play it, and say what was seen."""
    with tempfile.TemporaryDirectory(prefix="pdserve-soak-") as folder:
        directory = Path(folder)
        model = write_tiny_model(directory / "model", "llama", tie_word_embeddings=True)
        soak = Soak(Deployment(directory), model)
        deployment = soak.deployment
        try:
            deployment.start("proxy", "proxy", "--port", "0")
            deployment.wait("proxy")
            for name in (*VICTIMS, *SURVIVORS[1:]):
                soak.start_engine(name)
            deployment.wait()
            deployment.wait_routable(2, 2)
            async with aiohttp.ClientSession() as session:
                for index in range(NUM_PROMPTS):
                    body = {
                        "prompt": soak.prompt(index),
                        "max_tokens": MAX_TOKENS,
                        "temperature": 0.0,
                        "ignore_eos": True,
                        "return_token_ids": True,
                        "cache_salt": "the right answer",
                    }
                    url = f"{deployment.url('decode1')}/v1/completions"
                    async with session.post(url, json=body) as answer:
                        soak.answers[index] = (await answer.json())["choices"][0]["token_ids"]
            started_s = time.monotonic()
            until_s = started_s + 60.0 * minutes
            await asyncio.gather(
                faults(soak, started_s, until_s),
                *(load(soak, until_s, seed) for seed in range(CONCURRENCY)),
            )
            everybody = (*VICTIMS, *SURVIVORS[1:])
            freed_s = time.monotonic()
            held = await asyncio.to_thread(still_held, deployment, everybody)
            freed_s = time.monotonic() - freed_s
            stats = {name: deployment.info(name)["stats"] for name in SURVIVORS[1:]}
            moved = sum(each["kv_bytes_received"] for each in stats.values())
            running = deployment.metric("proxy", "pdserve_requests_running")
            lost = sum(
                process.popen.poll() is not None for process in deployment.processes.values()
            )
        finally:
            deployment.end()
    return {
        "benchmark": "soak",
        "environment": {
            "machine": platform.machine(),
            "cpus": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
        },
        "minutes": minutes,
        "requests": soak.ends.total(),
        "ends": dict(soak.ends),
        "kills": soak.num_kills,
        "wrong_tokens": soak.num_wrong_tokens,
        "without_final_state": soak.ends["hung"] + soak.ends["cut off"] + int(running),
        "blocks_not_free": sum(held.values()),
        "all_free_after_s": round(freed_s, 2),
        "late_starts": soak.late_starts,
        "engines_lost": lost,
        "kv_bytes_to_survivor": moved,
        "rss": soak.slopes(),
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--report", type=Path, help="also write the JSON object here")
    arguments = parser.parse_args()
    result = asyncio.run(run(arguments.minutes))
    against = result["objections"] = objections(result)
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.report is not None:
        arguments.report.write_text(text + "\n")
    for name, each in result["rss"].items():
        if each["is_flat"] is not None:
            verdict = "flat" if each["is_flat"] else "GROWS"
            print(
                f"{name}: {verdict}, {each['bytes_per_request']:+.1f} B per request over "
                f"{each['requests']} requests ({each['first_mib']} to {each['last_mib']} MiB)"
            )
    print("soak: PASSED" if not against else f"soak: FAILED: {'; '.join(against)}")
    sys.exit(1 if against else 0)


if __name__ == "__main__":
    main()
