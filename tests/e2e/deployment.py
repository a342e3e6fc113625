"""Real processes on loopback: engines and a proxy, started by the commands users start.

Every process takes a free port by itself (`--port 0`) and says in its log where it
listens. A deployment ends all of them by pid, and then looks for what they left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of a dozen ranks on two busy cores; a quiet machine takes a few seconds.
READY_TIMEOUT_S = 180.0
END_TIMEOUT_S = 60.0
# A proxy says the same of its engines.
_READY = re.compile(r"(?:(?<!engine )(?<!not )ready url=|Listening on )(https?://[^\s(]+)")


@dataclass
class Process:
    """One `pdserve` command that runs."""

    name: str
    arguments: list[str]
    log_path: Path
    popen: subprocess.Popen[bytes]
    url: str = ""

    @property
    def log(self) -> str:
        """All it has logged."""
        return self.log_path.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """It and all it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.popen.pid)
            return [top, *top.children(recursive=True)]
        return []

    def kill(self) -> None:
        """SIGKILL, as a crash would be; what it started ends by itself."""
        self.popen.kill()
        self.popen.wait()


@dataclass
class Deployment:
    """Engines, and maybe a proxy, that share a secret and end together."""

    directory: Path
    secret: str = field(default_factory=lambda: secrets.token_hex(8))
    processes: dict[str, Process] = field(default_factory=dict)

    def start(
        self,
        name: str,
        *arguments: str,
        env: dict[str, str] | None = None,
        namespace: str | None = None,
        tree: Path | None = None,
        under: Sequence[str] = (),
    ) -> Process:
        """Start `pdserve ARGUMENTS` under `name`; `wait` says when it is ready.

        Args:
            namespace: Name of the network namespace to start it in.
            under: A command that runs the rest of its line in its own place.
            tree: Where another version's sources are.
        """
        where = [] if namespace is None else ["ip", "netns", "exec", namespace]
        log_path = self.directory / f"{name}-{len(list(self.directory.glob('*.log')))}.log"
        with log_path.open("wb") as log:
            popen = subprocess.Popen(
                [*where, *under, sys.executable, "-m", "pdserve", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "PDSERVE_SECRET": self.secret,
                    "PDSERVE_DRAIN_DELAY": "0",
                    "OMP_NUM_THREADS": "1",
                    **({} if tree is None else {"PYTHONPATH": str(tree)}),
                    **(env or {}),
                },
                cwd=tree,
                start_new_session=True,
            )
        process = self.processes[name] = Process(name, list(arguments), log_path, popen)
        return process

    def wait(self, *names: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until the named processes (all, if none is named) are ready."""
        deadline = time.monotonic() + timeout_s
        for name in names or tuple(self.processes):
            process = self.processes[name]
            while not (found := _READY.search(process.log)):
                assert process.popen.poll() is None, f"{name} ended:\n{process.log}"
                assert time.monotonic() < deadline, f"{name} is not ready:\n{process.log}"
                time.sleep(0.05)
            process.url = found.group(1)

    def wait_routable(
        self, num_prefill: int = 1, num_decode: int = 1, *, proxy: str = "proxy"
    ) -> None:
        """Wait until a proxy sees so many ready engines."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            backends = self.metrics(proxy)
            ready = {
                role: sum(
                    value
                    for key, value in backends.items()
                    if key.startswith("pdserve_backends{")
                    and f'role="{role}"' in key
                    and 'state="ready"' in key
                )
                for role in ("prefill", "decode")
            }
            if ready["prefill"] >= num_prefill and ready["decode"] >= num_decode:
                return
            time.sleep(0.05)
        raise AssertionError(f"the proxy sees too few engines:\n{self.processes[proxy].log}")

    def url(self, name: str) -> str:
        """Base URL of a process."""
        return self.processes[name].url

    def metrics(self, name: str) -> dict[str, float]:
        """The series of a process's /metrics."""
        text = _get(f"{self.url(name)}/metrics").text
        return {
            line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line and not line.startswith("#")
        }

    def metric(self, name: str, series: str) -> float:
        """One series, which must exist; labels in braces are part of its name."""
        found = self.metrics(name)
        assert series in found, f"{series} is not among {sorted(found)}"
        return found[series]

    def info(self, name: str) -> dict[str, Any]:
        """An engine's own description and snapshot."""
        answer = _get(f"{self.url(name)}/pdserve/info")
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def held_blocks(self, name: str) -> dict[str, int]:
        """Blocks of an engine that are neither free nor merely cached, by state."""
        blocks: dict[str, int] = self.info(name)["stats"]["blocks"]
        return {
            state: num for state, num in blocks.items() if num and state not in ("free", "cached")
        }

    def wait_nothing_held(self, *names: str, timeout_s: float) -> None:
        """Wait until no engine of `names` holds a block or a request."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = {name: held for name in names if (held := self.held_blocks(name))}
            if not left:
                return
            assert time.monotonic() < deadline, f"blocks are held after {timeout_s} s: {left}"
            time.sleep(0.02)

    def end(self) -> None:
        """SIGTERM to all, proxy first; then assert that nothing is left."""
        family = [child for process in self.processes.values() for child in process.family()]
        order = sorted(self.processes.values(), key=lambda process: "proxy" not in process.name)
        for process in order:
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + END_TIMEOUT_S
        late = []
        for process in order:
            try:
                process.popen.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(process)
                process.kill()
        _, alive = psutil.wait_procs(family, timeout=30)
        for child in alive:
            child.kill()
        assert not late, f"did not end: {[p.name for p in late]}\n{late[0].log}"
        assert not alive, f"left processes: {[child.cmdline() for child in alive]}"


def _get(url: str) -> httpx.Response:
    """Ask; without certificates, whose loading takes longer than all the rest."""
    return httpx.get(url, timeout=30, verify=False)
