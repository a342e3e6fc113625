"""Half an hour of load in which engines die or stop: what is left behind, and what grows.

    python -m tests.chaos.soak [--minutes 30] [--report FILE]

Two prefill engines, two decode engines and a proxy serve a bounded load of streams, a fifth of
which hang up. Every minute one prefill and one decode engine are killed and started again, and
one process (the proxy, a server, a core or a rank, in turn) is stopped for a while; the other
two engines, and the proxy, live through all of it, and their own memory (unique set size) and
descriptors are watched. Every second minute there are hostile clients beside the load
(`tests.chaos.hostile`); the gaps between tokens that the others see then are compared with those
of the minutes between.

Prints a line a minute, and at the end one JSON object: wrong tokens, requests without a final
state, blocks not free, and how each survivor's memory grows over the second half of the run: what
it has in use, in bytes for each request that ended, and its unique set size. At the half and at
the end clients rest for a while, and what is in use is counted by type. Before the run there are
two minutes of as much load as the machine takes, hostile clients included, half of that time on
the survivors alone: what is remembered up to a number or for a time (finished requests, the trace)
has had more than its later size then, and allocators keep what they once had.
The last line is the verdict; the exit code is 0 if nothing speaks against it. Logs are kept if
something does, or if a request ended in another way than by being served or hanging up.

An engine that is slow to come back is waited for and reported: a busy machine is no fault.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil

from tests.chaos import memory
from tests.chaos.hostile import HostileClients
from tests.chaos.stage import LEASE_S, QUARANTINE_S
from tests.e2e.deployment import Deployment
from tests.tiny_models import write_tiny_model

CONCURRENCY = 8
REQUESTS_PER_S = 15.0
"""At most; half of what two cores do. What is in flight, and with it what memory is needed at once,
would otherwise follow whatever else the machine does, and every hostile client would be felt."""
NUM_PROMPTS = 48
MAX_TOKENS = 60
LEAVE_SHARE = 0.2
VOCAB_SIZE = 8192
PHASE_S = 60.0
"""Without hostile clients, then with them, in turn; each with the same faults."""
SETTLE_S = 5.0
"""A phase's first seconds are neither's."""
KILL_AT_S = 8.0
STOP_AT_S = 30.0
STOPPED_S = 12.0
PROXY_STOPPED_S = 3.0
"""Nobody can serve a client whose proxy stands still."""
MAX_ITL_RATIO = 2.0
MAX_NEW_DESCRIPTORS = 40
"""At most in the run's last quarter over its third: peers are met and lost again."""
SAMPLE_EVERY_S = 5.0
HANG_S = 90.0
START_S = 120.0
"""An engine that starts under this load, and others', takes what it takes; longer is reported."""
WARM_UP_S = 120.0
"""Before the run: pools, caches and buffers reach their size."""
REST_S = 30.0
"""Without load, at the half of the run and at its end: what is in use is counted then."""

SURVIVORS = ("proxy", "prefill1", "decode1")
VICTIMS = ("prefill", "decode")
STOPS = (
    ("decode", "pdserve.engine.process"),
    ("prefill", "pdserve.executor.rank"),
    ("decode", "pdserve"),
    ("proxy", "pdserve"),
    ("prefill", "pdserve.engine.process"),
    ("prefill", "pdserve"),
)
"""Which process is stopped: of whom, and the module it runs."""


@dataclass
class Soak:
    """What has been seen so far."""

    deployment: Deployment
    model: Path
    answers: dict[int, list[int]] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    num_wrong_tokens: int = 0
    num_kills: int = 0
    num_stops: int = 0
    num_starts: int = 0
    given_up: list[str] = field(default_factory=list)
    late_starts: list[str] = field(default_factory=list)
    odd_ends: list[str] = field(default_factory=list)
    samples: dict[str, list[memory.Sample]] = field(default_factory=dict)
    counts: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)
    descriptors: dict[str, list[int]] = field(default_factory=dict)
    itl_s: dict[str, list[float]] = field(default_factory=lambda: {"plain": [], "hostile": []})
    started_s: float = float("inf")
    rest_s: float = float("inf")

    @property
    def folder(self) -> Path:
        """Where processes answer what memory they use."""
        return self.model.parent / "census"

    def prompt(self, index: int) -> list[int]:
        """One of a fixed set; some begin alike."""
        rng = random.Random(index // 3)
        shared = [3 + rng.randrange(300) for _ in range(64)]
        own = random.Random(1000 + index)
        return shared + [3 + own.randrange(300) for _ in range(own.randrange(1, 400))]

    def start_engine(self, name: str, port: int = 0) -> None:
        """Start an engine, where it was if `port` says so."""
        self.num_starts += 1
        self.deployment.start(
            name,
            name.rstrip("1"),
            *(str(self.model), "--dtype", "float32", "--num-threads", "1", "--port", str(port)),
            *("--proxy", self.deployment.url("proxy"), "--max-num-seqs", "16"),
            *("--num-gpu-blocks-override", "512"),
            *(("-tp", "2") if name == "prefill" else ()),
            *("--kv-transfer-config.lease-s", str(LEASE_S)),
            *("--kv-transfer-config.quarantine-s", str(QUARANTINE_S)),
            env=self.counted(),
        )

    def counted(self) -> dict[str, str]:
        """Environment of a process that can be asked what memory it uses."""
        path = [str(memory.CENSUS), os.getcwd(), os.environ.get("PYTHONPATH", "")]
        return {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "CENSUS_FOLDER": str(self.folder),
        }

    def phase(self, at_s: float) -> str | None:
        """Whether hostile clients are there; None amid a change, and before the run."""
        if at_s < self.started_s:
            return None
        into_s = (at_s - self.started_s) % (2 * PHASE_S)
        if into_s % PHASE_S < SETTLE_S:
            return None
        return "plain" if into_s < PHASE_S else "hostile"

    def is_resting(self) -> bool:
        """Whether clients wait, so that what is in use can be counted."""
        return 0.0 <= time.monotonic() - self.rest_s < REST_S

    def is_hostile(self) -> bool:
        """Whether hostile clients are at work."""
        return (time.monotonic() - self.started_s) % (2 * PHASE_S) >= PHASE_S

    def sample(self, at_s: float) -> None:
        """Note the survivors' own memory, in MiB, descriptors, and requests that ended.

        Their own: without pages of files, which come and go with what else the machine does.
        """
        for name in SURVIVORS:
            family = self.deployment.processes[name].family()
            seen = memory.look(family, self.folder, at_s, self.ends.total())
            self.samples.setdefault(name, []).append(seen)
            self.descriptors.setdefault(name, []).append(sum(p.num_fds() for p in family))

    def count(self) -> None:
        """Count what the survivors have in use while there is no load."""
        families = {name: self.deployment.processes[name].family() for name in SURVIVORS}
        found = {name: memory.census(each, self.folder) for name, each in families.items()}
        self.counts.append((self.ends.total(), self.num_starts, found))

    def memory(self) -> dict[str, dict[str, Any]]:
        """How each survivor's memory has grown."""
        (requests_before, starts_before, before), (requests, starts, after) = self.counts
        return {
            name: {
                **memory.slope(samples),
                "idle": memory.grown(
                    before[name],
                    after[name],
                    requests=requests - requests_before,
                    lives=starts - starts_before,
                ),
            }
            for name, samples in self.samples.items()
        }

    def gaps(self) -> dict[str, Any]:
        """Gaps between tokens with and without hostile clients, in ms, and their ratio."""
        found: dict[str, Any] = {
            phase: {
                "gaps": len(each),
                "p50_ms": round(1e3 * float(np.percentile(each, 50)), 2),
                "p99_ms": round(1e3 * float(np.percentile(each, 99)), 2),
            }
            for phase, each in self.itl_s.items()
            if each
        }
        if len(found) == len(self.itl_s):
            ratio = found["hostile"]["p99_ms"] / found["plain"]["p99_ms"]
            found["p99_ratio"] = round(ratio, 2)
        return found


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
    for name, each in result["memory"].items():
        if each["is_flat"] is None:
            found.append(f"{name}: too short a run for the slope of its memory")
        elif not each["is_flat"]:
            found.append(f"{name}'s own memory grows by {each['own_growth']:.1%}")
        if not (idle := each["idle"])["is_flat"]:
            found.append(
                f"{name} has {idle['bytes']} B more in use after {idle['requests']} requests, and "
                f"{idle['blocks_per_request']} objects more for each"
            )
    for name, counts in result["descriptors"].items():
        more = counts["last_quarter"] - counts["third_quarter"]
        if more > MAX_NEW_DESCRIPTORS:
            found.append(f"{name} has {more} descriptors more")
    ratio = result["itl"].get("p99_ratio")
    if ratio is None:
        found.append("too short a run to compare with and without hostile clients")
    elif ratio > MAX_ITL_RATIO:
        found.append(f"hostile clients make others' ITL p99 {ratio} times as long")
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
    name = f"soak-{rng.getrandbits(48):x}"

    async def read() -> str:
        end, last_s = "cut off", 0.0
        url = f"{soak.deployment.url('proxy')}/v1/completions"
        async with session.post(url, json=body, headers={"X-Request-Id": name}) as answer:
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
                    now_s, before_s = time.monotonic(), last_s
                    phase = soak.phase(now_s)
                    if before_s and phase is not None and soak.phase(before_s) == phase:
                        soak.itl_s[phase].append(now_s - before_s)
                    last_s = now_s
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
    if end not in {"finished", "left"}:
        soak.odd_ends.append(f"{(time.monotonic() - soak.started_s) / 60.0:.2f} min: {end}, {name}")


async def warm_up(soak: Soak) -> None:
    """Load without a pace, with hostile clients beside it, in the middle on the survivors alone."""
    until_s = time.monotonic() + WARM_UP_S

    async def leave_the_survivors_alone() -> None:
        await asyncio.sleep(WARM_UP_S / 4)
        for name in VICTIMS:
            soak.deployment.processes[name].kill()
        await asyncio.sleep(WARM_UP_S / 2)
        for name in VICTIMS:
            restart(soak, name)
        for name in VICTIMS:
            await until_ready(soak, name, until_s + START_S)

    hostile = HostileClients(soak.deployment.url("proxy"), VOCAB_SIZE)
    await asyncio.gather(
        leave_the_survivors_alone(),
        hostile.run(lambda: True, lambda: time.monotonic() > until_s),
        *(load(soak, until_s, seed, requests_per_s=float("inf")) for seed in range(CONCURRENCY)),
    )


async def load(
    soak: Soak, until_s: float, seed: int, *, requests_per_s: float = REQUESTS_PER_S
) -> None:
    """One request after the other, this client's share of the pace at most."""
    rng = random.Random(seed)
    period_s = CONCURRENCY / requests_per_s
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.sleep(rng.random() * period_s)
        while (began_s := time.monotonic()) < until_s:
            if not soak.is_resting():
                await one_request(soak, session, rng)
            await asyncio.sleep(max(0.0, began_s + period_s - time.monotonic()))


async def faults(soak: Soak, until_s: float) -> None:
    """Kill and restart, stop and wake, once a phase each; sample memory in between."""
    kill_s, stop_s = soak.started_s + KILL_AT_S, soak.started_s + STOP_AT_S
    while (now_s := time.monotonic()) < until_s - PHASE_S / 4:
        if now_s >= kill_s:
            kill_s += PHASE_S
            await kill(soak, until_s)
        if now_s >= stop_s:
            stop_s += PHASE_S
            # The same twice: once beside hostile clients, and once without.
            owner, module = STOPS[soak.num_stops // 2 % len(STOPS)]
            await stop(soak, owner, module, until_s)
        # What hostile clients make it hold for a moment is no growth.
        if soak.phase(time.monotonic()) == "plain" and not soak.is_resting():
            soak.sample(time.monotonic() - soak.started_s)
        if not soak.counts and now_s >= soak.rest_s + REST_S - 2.0 * SAMPLE_EVERY_S:
            soak.count()
        await asyncio.sleep(SAMPLE_EVERY_S)


async def kill(soak: Soak, until_s: float) -> None:
    """Kill the victims, start them again where they were, and say how things stand."""
    for name in VICTIMS:
        soak.deployment.processes[name].kill()
        soak.num_kills += 1
        restart(soak, name)
    for name in VICTIMS:
        await until_ready(soak, name, until_s + START_S)
    minutes = (time.monotonic() - soak.started_s) / 60.0
    own = {name: round(samples[-1].own_mib, 1) for name, samples in soak.samples.items()}
    print(
        f"{minutes:5.1f} min: {dict(soak.ends)}, {soak.num_wrong_tokens} wrong tokens, {own} MiB",
        file=sys.stderr,
        flush=True,
    )


async def stop(soak: Soak, owner: str, module: str, until_s: float) -> None:
    """Stop one process for a while; an engine that ended over it is started again."""
    engine = soak.deployment.processes[owner]
    process = next(p for p in engine.family() if module in p.cmdline())
    soak.num_stops += 1
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(PROXY_STOPPED_S if owner == "proxy" else STOPPED_S)
    # Its parent may have ended it.
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)
    await asyncio.sleep(1.0)
    if engine.popen.poll() is not None:
        soak.given_up.append(f"{owner}: {module}")
        restart(soak, owner)
        await until_ready(soak, owner, until_s + START_S)


def restart(soak: Soak, name: str) -> None:
    """Start an engine again on its port."""
    soak.start_engine(name, int(soak.deployment.processes[name].url.rsplit(":", 1)[1]))


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


async def learn_answers(soak: Soak) -> None:
    """Ask one engine alone for what is right."""
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
            url = f"{soak.deployment.url('decode1')}/v1/completions"
            async with session.post(url, json=body) as answer:
                soak.answers[index] = (await answer.json())["choices"][0]["token_ids"]


async def run(minutes: float, directory: Path) -> dict[str, Any]:
    """Play it, and say what was seen; logs are left in the directory."""
    model = write_tiny_model(
        directory / "model", "llama", tie_word_embeddings=True, vocab_size=VOCAB_SIZE
    )
    soak = Soak(Deployment(directory), model)
    soak.folder.mkdir()
    deployment = soak.deployment
    try:
        deployment.start("proxy", "proxy", "--port", "0", env=soak.counted())
        deployment.wait("proxy")
        for name in (*VICTIMS, *SURVIVORS[1:]):
            soak.start_engine(name)
        deployment.wait()
        deployment.wait_routable(2, 2)
        await learn_answers(soak)
        await warm_up(soak)
        soak.started_s = time.monotonic()
        until_s = soak.started_s + 60.0 * minutes
        # With a phase without hostile clients.
        soak.rest_s = soak.started_s + 2 * PHASE_S * int(60.0 * minutes / (4 * PHASE_S))
        hostile = HostileClients(deployment.url("proxy"), VOCAB_SIZE)
        await asyncio.gather(
            faults(soak, until_s),
            hostile.run(soak.is_hostile, lambda: time.monotonic() > until_s),
            *(load(soak, until_s, seed) for seed in range(CONCURRENCY)),
        )
        everybody = (*VICTIMS, *SURVIVORS[1:])
        freed_s = time.monotonic()
        held = await asyncio.to_thread(still_held, deployment, everybody)
        freed_s = time.monotonic() - freed_s
        await asyncio.sleep(REST_S - 2.0 * SAMPLE_EVERY_S)
        soak.count()
        stats = {name: deployment.info(name)["stats"] for name in SURVIVORS[1:]}
        moved = sum(each["kv_bytes_received"] for each in stats.values())
        running = deployment.metric("proxy", "pdserve_requests_running")
        lost = sum(process.popen.poll() is not None for process in deployment.processes.values())
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
        "odd_ends": soak.odd_ends,
        "hostile": dict(sorted(hostile.answers.items())),
        "kills": soak.num_kills,
        "stops": soak.num_stops,
        "given_up": soak.given_up,
        "wrong_tokens": soak.num_wrong_tokens,
        "without_final_state": soak.ends["hung"] + soak.ends["cut off"] + int(running),
        "blocks_not_free": sum(held.values()),
        "all_free_after_s": round(freed_s, 2),
        "late_starts": soak.late_starts,
        "engines_lost": lost,
        "kv_bytes_to_survivor": moved,
        "itl": soak.gaps(),
        "descriptors": {
            name: {
                "third_quarter": max(counts[len(counts) // 2 : -len(counts) // 4]),
                "last_quarter": max(counts[-len(counts) // 4 :]),
            }
            for name, counts in soak.descriptors.items()
        },
        "memory": soak.memory(),
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--report", type=Path, help="also write the JSON object here")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="pdserve-soak-"))
    result = asyncio.run(run(arguments.minutes, directory))
    against = result["objections"] = objections(result)
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.report is not None:
        arguments.report.write_text(text + "\n")
    for name, each in result["memory"].items():
        if each["is_flat"] is not None:
            idle = each["idle"]
            verdict = "flat" if each["is_flat"] and idle["is_flat"] else "GROWS"
            print(
                f"{name}: {verdict}, {idle['bytes']:+} B in use of {each['used_mib']} MiB and "
                f"{idle['blocks_per_request']:+} objects a request over {idle['requests']} "
                f"requests and {idle['lives_of_peers']} lives of others; its own memory "
                f"{each['first_mib']} to {each['last_mib']} MiB ({each['own_growth']:+.1%})"
            )
    if against or result["odd_ends"]:
        print(f"logs: {directory}")
    else:
        shutil.rmtree(directory)
    print("soak: PASSED" if not against else f"soak: FAILED: {'; '.join(against)}")
    sys.exit(1 if against else 0)


if __name__ == "__main__":
    main()
