"""A stage whose engines have a store of KV, and that store's process, which can fail as well."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import httpx
import psutil

from pdserve.commands.segments import SHARED_MEMORY, remove_ownerless
from tests.chaos.stage import ENGINES, Stage
from tests.cli.process import free_ports
from tests.lmcache_server import segments_of
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

CHUNK_TOKENS = 64
READY_S = 180.0
STARTED_AGAIN_S = 90.0


class Store:
    """`pdserve kv-server` as a process.

    Attributes:
        folder: Of its disk tier.
        segments: The shared memory of its lives that are over.
    """

    def __init__(self, directory: Path, more_tiers: str = "") -> None:
        self.port, self.http_port = free_ports(2)
        self.folder = directory / "kv"
        self.tiers = f"cpu:64MiB,disk:{self.folder}:1GiB{more_tiers}"
        self._log = directory / "kv-server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.segments: set[Path] = set()

    @property
    def url(self) -> str:
        """What engines are told."""
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def http_url(self) -> str:
        """Its HTTP side."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def log(self) -> str:
        """All it has said."""
        return self._log.read_text(errors="replace")

    @property
    def process(self) -> psutil.Process:
        """As long as it runs."""
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def start(self, *, waits: bool = True) -> None:
        """Start it, and wait until it listens."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pdserve", "kv-server", "--kv-tiers", self.tiers),
                    *("--port", str(self.port), "--http-port", str(self.http_port)),
                    *("--chunk-size", str(CHUNK_TOKENS)),
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        if waits:
            wait_until(self._listens, READY_S)

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self.segments |= segments_of(self._process.pid)
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """SIGTERM; the exit code."""
        if self._process is None or self._process.poll() is not None:
            return 0
        self.segments |= segments_of(self._process.pid)
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            return self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the store did not end:\n{self.log}") from None

    def files(self) -> list[Path]:
        """What lies on its disk, in no order."""
        return list(self.folder.glob("*.data"))

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the store ended:\n{self.log}"
        return listens(self.port)


class StoreStage(Stage):
    """A proxy, one prefill and two decode engines over shared memory, all with one store."""

    def __init__(self, directory: Path, model: Path, store: Store) -> None:
        super().__init__(directory, model, None, "push")
        self.store = store

    def connector(self, name: str) -> str:
        """Both."""
        return "nixl,lmcache"

    def environment(self, name: str) -> dict[str, str]:
        """Where the store is; answers are kept as well."""
        prefix = "PDSERVE_KV_TRANSFER_CONFIG_LMCACHE"
        return {
            f"{prefix}_URL": self.store.url,
            f"{prefix}_HTTP_URL": self.store.http_url,
            f"{prefix}_SAVE": "all",
            f"{prefix}_HEARTBEAT_S": "1",
        }

    def count(self, series: str) -> float:
        """A series of all engines, labels apart."""
        return sum(
            value
            for name in ENGINES
            for found, value in self.deployment.metrics(name).items()
            if found.partition("{")[0] == series
        )

    def hits(self) -> float:
        """Prompt tokens that have come from the store."""
        return self.count("vllm:external_prefix_cache_hits_total")

    def forget(self) -> None:
        """Engines forget their prefixes; the store does not."""
        for name in ENGINES:
            url = f"{self.deployment.url(name)}/reset_prefix_cache"
            httpx.post(url, timeout=30, verify=False).raise_for_status()

    def wait_store(self, *, is_up: bool, timeout_s: float = 90.0) -> None:
        """Wait until all engines say so of the store."""
        wanted = len(ENGINES) if is_up else 0
        wait_until(lambda: self.count("pdserve_kv_tier_server_up") == wanted, timeout_s)

    def ask(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Answers to prompts, one behind the other."""
        found = []
        for prompt in prompts:
            stream = self.stream(prompt)
            stream.join(60.0)
            assert stream.end == "finished", stream.end
            found.append(stream.tokens)
        return found

    def keep(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Answer prompts, and wait until all of their KV is on the store's disk."""
        answers = self.ask(prompts)
        self.wait_written()
        self.forget()
        return answers

    def wait_written(self) -> None:
        """Wait until nothing is written to the store any more."""
        seen, since = -1.0, time.monotonic()
        while time.monotonic() - since < 1.0:
            now = self.count("pdserve_kv_tier_saved_bytes_total") + len(self.store.files())
            if now != seen:
                seen, since = now, time.monotonic()
            time.sleep(0.1)

    def restart_store(self) -> None:
        """What it has in memory is lost; what is on its disk is not."""
        self.store.end()
        self.wait_store(is_up=False)
        self.store.start()
        self.wait_store(is_up=True)


def listens(port: int) -> bool:
    """Whether somebody does, on loopback."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def segments() -> set[str]:
    """Shared memory of stores of ours."""
    return {path.name for path in SHARED_MEMORY.iterdir() if re.search("pool_pdserve-", path.name)}


@contextmanager
def started_with_store(directory: Path, model: Path, more_tiers: str = "") -> Iterator[StoreStage]:
    """The deployment; when it has ended, none of its shared memory is left."""
    store = Store(directory, more_tiers)
    stage = StoreStage(directory, model, store)
    try:
        store.start()
        stage.start()
        stage.wait_store(is_up=True)
        yield stage
    finally:
        stage.deployment.end()
        store.end()
    remove_ownerless()
    assert store.segments
    assert not any(each.exists() for each in store.segments)
