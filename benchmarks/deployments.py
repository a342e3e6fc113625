"""Servers as processes, requests to them, and what their logs say of each request.

For the benchmarks that ask over HTTP. The client is that of `pdserve bench`; what is here and not
in `pdserve bench compare` is a vLLM that is started, and deployments that live side by side. Knows
commands and log lines; knows no figure.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from pdserve.bench.bodies import Asking
from pdserve.bench.client import Client, Sending
from pdserve.bench.target import Target

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from pathlib import Path

    from pdserve.bench.records import Outcome, Planned

# A proxy says the same of its engines.
_READY = re.compile(r"(?:(?<!engine )ready url=|Listening on )(http://[^\s(]+)")
_LINE = re.compile(r"\breq (?P<id>\S+) (?P<rest>\S+ status=.*)")
_TTFT = re.compile(r"ttft=([\d.]+)ms = ([^|]*)")
_SECOND = re.compile(r"second token \+([\d.]+)ms = ([^|]*)")
_TERM = re.compile(r"(?P<name>[a-z][a-z ]*?) (?P<ms>[\d.]+)(?: \((?P<parts>[^)]*)\))?(?: \+ |\s*$)")
_PART = re.compile(r"([a-z]+) ([\d.]+)")


@dataclass
class Told:
    """The line that a process wrote about one request, in milliseconds.

    Attributes:
        ttft_ms, second_ms: Up to the first token, and from there to the second.
        first, second: Their terms, which add up to them; parts of a term as `term.part`.
    """

    ttft_ms: float = 0.0
    second_ms: float = 0.0
    first: dict[str, float] = field(default_factory=dict)
    second: dict[str, float] = field(default_factory=dict)


class Processes:
    """Commands that were started; each has a log in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._all: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> list[int]:
        """Of all that were started."""
        return [process.pid for process in self._all]

    async def start(
        self, name: str, command: str, *arguments: str, core: int | None = None
    ) -> tuple[str, Path]:
        """Start one of pdserve's; returns its URL, once it serves, and its log.

        Args:
            core: It may run there only; None: on any.

        Raises:
            SystemExit: It ended.
        """
        argv = [sys.executable, "-m", "pdserve", command, *arguments]
        if core is not None:
            argv = ["taskset", "--cpu-list", str(core), *argv]
        settings = {"PDSERVE_SECRET": "benchmark", "PDSERVE_DRAIN_DELAY": "0"}
        process, log = self._run(name, argv, settings)
        while not (ready := _READY.search(log.read_text())):
            await _still_runs(process, f"pdserve {command}", log)
        return ready.group(1), log

    async def start_vllm(self, name: str, program: str, *arguments: str) -> tuple[str, Path]:
        """Start vLLM's server on the cores that this process may use; else as `start`.

        Args:
            program: The `vllm` command of the environment that it is installed in.

        Raises:
            SystemExit: It ended.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        argv = [program, "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
        # Without the last two it keeps a core free for its server, where there is more than one.
        settings = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        }
        process, log = self._run(name, argv, settings)
        url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    if (await session.get(f"{url}/health")).status == 200:
                        return url, log
                await _still_runs(process, "vllm serve", log)

    def _run(
        self, name: str, argv: list[str], settings: dict[str, str]
    ) -> tuple[subprocess.Popen[bytes], Path]:
        log = self._directory / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                argv,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **settings},
                start_new_session=True,
            )
        self._all.append(process)
        return process, log

    def end(self) -> None:
        """End all, the newest first."""
        for process in reversed(self._all):
            process.send_signal(signal.SIGTERM)
        for process in self._all:
            process.wait(40)


async def _still_runs(process: subprocess.Popen[bytes], what: str, log: Path) -> None:
    if process.poll() is not None:
        raise SystemExit(f"{what} ended:\n{log.read_text()}")
    await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def processes(directory: Path) -> AsyncIterator[Processes]:
    """Processes that end with the block, which SIGTERM ends as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = Processes(directory)
    try:
        yield started
    finally:
        started.end()


async def until_ready(urls: Iterable[str]) -> None:
    """Wait until these proxies know engines, and those have met."""
    async with aiohttp.ClientSession() as session:
        for url in urls:
            while (await session.get(f"{url}/readyz")).status != 200:
                await asyncio.sleep(0.1)
    await asyncio.sleep(2.0)


class Asker:
    """Sends requests to one place with the benchmark's client, from this process.

    Args:
        url: Whom to ask.
        id_prefix: Of the requests' ids; a plan's indexes follow.
        max_concurrency: Requests in flight at most; None sets no limit.
        may_merge: Tokens may come together: where half a character is one, or steps are so short
            that a server has several at once.
        schema: That outputs follow; none may come to its end.
        extra_body: Further fields of each request.
    """

    def __init__(
        self,
        url: str,
        id_prefix: str,
        *,
        max_concurrency: int | None = None,
        may_merge: bool = False,
        schema: dict[str, Any] | None = None,
        extra_body: dict[str, Any] | None = None,
    ) -> None:
        self._may_merge = may_merge
        bound = {"ignore_eos": False, "structured_outputs": {"json": schema}}
        self._outcomes: list[Outcome] = []
        self._client = Client(
            Asking(
                target=Target(base_url=url),
                ignore_eos=True,
                temperature=0.0,
                extra_body=(bound if schema else {}) | (extra_body or {}),
            ),
            Sending(id_prefix=id_prefix, max_concurrency=max_concurrency),
            on_outcome=self._outcomes.append,
        )

    async def ask(self, plan: Sequence[Planned]) -> list[Outcome]:
        """Send a plan from now on; returns what came of it, by index.

        Raises:
            SystemExit: A request failed, or another number of tokens came than was asked for.
        """
        outcomes = await self.play(plan)
        for planned, outcome in zip(plan, outcomes, strict=True):
            if not outcome.is_good:
                raise SystemExit(f"a request failed: {outcome.error}")
            num = outcome.num_output_tokens if self._may_merge else len(outcome.chunk_s)
            if num != planned.max_tokens or len(outcome.chunk_s) < 2:
                chunks = f"in {len(outcome.chunk_s)} chunks"
                raise SystemExit(f"{num} tokens {chunks} for {planned.max_tokens}")
        return outcomes

    async def play(self, plan: Sequence[Planned]) -> list[Outcome]:
        """Send a plan from now on; returns what came of it, by index, whatever that is."""
        await self._client.connect(plan)
        await self._client.run(plan, time.monotonic())
        outcomes = sorted(self._outcomes, key=lambda each: each.index)
        self._outcomes.clear()
        return outcomes

    def close(self) -> None:
        """Close its connections."""
        self._client.close()


def told(log: str) -> dict[str, Told]:
    """What a proxy's or an engine's log says of each request, by id."""
    found: dict[str, Told] = {}
    for match in _LINE.finditer(log):
        line = Told()
        if ttft := _TTFT.search(match["rest"]):
            line.ttft_ms, line.first = float(ttft[1]), _terms(ttft[2])
        if second := _SECOND.search(match["rest"]):
            line.second_ms, line.second = float(second[1]), _terms(second[2])
        found[match["id"]] = line
    return found


def _terms(text: str) -> dict[str, float]:
    terms = {}
    for match in _TERM.finditer(text):
        name = match["name"].replace(" ", "_")
        terms[name] = float(match["ms"])
        for part, ms in _PART.findall(match["parts"] or ""):
            terms[f"{name}.{part}"] = float(ms)
    return terms
