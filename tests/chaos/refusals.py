"""Clients whose every request is refused, beside one good client, on a machine that is busy.

    python -m tests.chaos.refusals [--seconds 60]

One prefill engine, one decode engine and a proxy. Eight clients send what must be refused, one
request after the other, in all the ways that a request can be wrong; as many processes as there
are cores do nothing but compute; and one client sends good requests at a steady pace, whatever
becomes of the former ones. It is to be served as if it were alone, only later: each answer whole
and right, no 5xx, no breaker open, nothing held against an engine.

Prints one JSON object; the exit code is 0 if nothing speaks against it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np

from tests.e2e.conftest import pd_deployment
from tests.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.deployment import Deployment

NUM_BAD_CLIENTS = 8
GOOD_PER_S = 20.0
LOOK_EVERY_S = 0.5
"""Less than a breaker stays open."""
HANG_S = 60.0

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"prompt": "x", "temperature": -1}),
    (COMPLETIONS, {"prompt": "x", "temperature": -1, "stream": True}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}),
    (COMPLETIONS, {"prompt": "x", "top_p": 7}),
    (COMPLETIONS, {"prompt": "x", "model": "another"}),
    (COMPLETIONS, {"prompt": [999_999], "stream": True}),
    (COMPLETIONS, {"prompt": "x " * 20_000, "stream": True}),
    (COMPLETIONS, {"prompt": "x" * 400_000}),
    (COMPLETIONS, {}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"no": 1}}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 0, "stream": True}),
)
GOOD: dict[str, Any] = {
    "prompt": "A good client asks for eight tokens",
    "max_tokens": 8,
    "temperature": 0.0,
    "ignore_eos": True,
    "stream": True,
}


@dataclass
class Seen:
    """What the clients saw."""

    refusals: Counter[int] = field(default_factory=Counter)
    good: Counter[str] = field(default_factory=Counter)
    took_s: list[float] = field(default_factory=list)
    most_open: float = 0.0


async def bad_client(url: str, seen: Seen, until_s: float, number: int) -> None:
    """Send one refused request after the other; each client begins elsewhere in the list."""
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < until_s:
            path, body = REFUSED[number % len(REFUSED)]
            number += 1
            async with session.post(f"{url}{path}", json=body) as answer:
                await answer.read()
                seen.refusals[answer.status] += 1


async def ask(session: aiohttp.ClientSession, url: str) -> str:
    """Ask for a good stream; return its text, or what went wrong, in brackets."""
    async with session.post(f"{url}{COMPLETIONS}", json=GOOD) as answer:
        body = await answer.text()
        if answer.status != 200:
            return f"[{answer.status} {json.loads(body)['error']['code']}]"
    text = ""
    for line in body.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return f"[error event {event['error']['code']}]"
            text += "".join(choice["text"] for choice in event["choices"])
    return text


async def good_client(url: str, seen: Seen, until_s: float) -> None:
    """Send good requests at their pace, and wait for all of them."""

    async def one(session: aiohttp.ClientSession, right: str) -> None:
        began_s = time.monotonic()
        try:
            text = await asyncio.wait_for(ask(session, url), HANG_S)
        except TimeoutError:
            text = "[hangs]"
        except aiohttp.ClientError as error:
            text = f"[{type(error).__name__}]"
        seen.took_s.append(time.monotonic() - began_s)
        seen.good["right" if text == right else text if text[:1] == "[" else "[wrong]"] += 1

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        right = await ask(session, url)
        assert right[:1] != "[", right
        next_s = time.monotonic()
        while next_s < until_s:
            group.create_task(one(session, right))
            next_s += 1 / GOOD_PER_S
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))


async def watch(deployment: Deployment, seen: Seen) -> None:
    """See how many breakers are open, again and again."""
    while True:
        metrics = await asyncio.to_thread(deployment.metrics, "proxy")
        num_open = metrics["pdserve_open_edges"] + sum(
            value for series, value in metrics.items() if 'state="breaker_open"' in series
        )
        seen.most_open = max(seen.most_open, num_open)
        await asyncio.sleep(LOOK_EVERY_S)


async def load(deployment: Deployment, seconds: float) -> Seen:
    """All clients at once, for so long."""
    seen, until_s, url = Seen(), time.monotonic() + seconds, deployment.url("proxy")
    watching = asyncio.create_task(watch(deployment, seen))
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(good_client(url, seen, until_s))
            for number in range(NUM_BAD_CLIENTS):
                group.create_task(bad_client(url, seen, until_s, number))
    finally:
        watching.cancel()
    return seen


def _spin() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        sum(range(10_000))


@contextlib.contextmanager
def busy_cores() -> Iterator[int]:
    """Keep every core busy while the block runs; how many those are."""
    context = multiprocessing.get_context("spawn")
    num_cores = len(os.sched_getaffinity(0))
    processes = [context.Process(target=_spin, daemon=True) for _ in range(num_cores)]
    for process in processes:
        process.start()
    try:
        yield num_cores
    finally:
        for process in processes:
            process.kill()
            process.join()


def run(directory: Path, model: Path, seconds: float) -> dict[str, Any]:
    """Serve all of them for so long; return the figures."""
    with pd_deployment(directory, model, "--dtype", "float32") as deployment:
        with busy_cores() as num_cores:
            seen = asyncio.run(load(deployment, seconds))
        metrics = deployment.metrics("proxy")
        failures = {
            series: value
            for series, value in metrics.items()
            if series.startswith("pdserve_leg_failures_total") and value
        }
    took_ms = 1e3 * np.array(seen.took_s)
    return {
        "seconds": seconds,
        "busy_cores": num_cores,
        "load_1m": round(os.getloadavg()[0], 1),
        "refusals": {str(status): num for status, num in sorted(seen.refusals.items())},
        "good": dict(seen.good),
        "good_ms_p50": round(float(np.percentile(took_ms, 50)), 1),
        "good_ms_p99": round(float(np.percentile(took_ms, 99)), 1),
        "breakers_open_at_most": seen.most_open,
        "leg_failures": failures,
    }


def objections(result: dict[str, Any]) -> list[str]:
    """What speaks against a result; nothing if it is good."""
    found = [f"a good client got {end}: {num}" for end, num in result["good"].items() if "[" in end]
    found += [
        f"a bad client got {status}: {num}"
        for status, num in result["refusals"].items()
        if not status.startswith("4")
    ]
    if not result["good"].get("right"):
        found.append("no good request was served")
    if not result["refusals"]:
        found.append("nothing was refused")
    if result["breakers_open_at_most"]:
        found.append(f"{result['breakers_open_at_most']:g} breakers were open")
    found += [f"{series} {value:g}" for series, value in result["leg_failures"].items()]
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the load lasts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = write_tiny_model(Path(directory) / "model", "llama", tie_word_embeddings=True)
        result = run(Path(directory), model, arguments.seconds)
    print(json.dumps(result, indent=1))
    against = objections(result)
    print("; ".join(against) or "nothing speaks against it")
    sys.exit(bool(against))


if __name__ == "__main__":
    main()
