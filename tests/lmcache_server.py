"""A real LMCache server on loopback, for tests: its own ports, shared memory and disk tier."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_START_S = 60.0


def free_port() -> int:
    """A TCP port of loopback that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _memory_status(status: Any) -> dict[str, Any]:
    """The part of its status that tells of locks, wherever it is."""
    if isinstance(status, dict) and "read_locked_count" in status:
        return status
    parts = status.values() if isinstance(status, dict) else status
    for part in parts if isinstance(status, dict | list) else ():
        if isinstance(part, dict | list) and (found := _memory_status(part)):
            return found
    return {}


class LMCacheServer:
    """Started by `start`, ended by `close`; in between it may be killed and started again.

    Args:
        log: Where its output goes.
        chunk_tokens: `--chunk-size`.
        arguments: Further ones, as `--l2-adapter`.

    Attributes:
        url, http_url: What engines are told.
    """

    def __init__(
        self,
        log: Path,
        *,
        chunk_tokens: int = 16,
        l1_size_gb: float = 0.1,
        arguments: Sequence[str] = (),
    ) -> None:
        self._log = log
        self._port, self._http_port = free_port(), free_port()
        self._shm_name = f"lmcache_l1_pool_test_{secrets.token_hex(6)}"
        self._arguments = [
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--http-host", "127.0.0.1", "--http-port", str(self._http_port)),
            *("--chunk-size", str(chunk_tokens), "--l1-size-gb", str(l1_size_gb)),
            *("--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven"),
            *("--shm-name", self._shm_name),
            *arguments,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"tcp://127.0.0.1:{self._port}"
        self.http_url = f"http://127.0.0.1:{self._http_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def shm(self) -> Path:
        """Its shared memory."""
        return Path("/dev/shm") / self._shm_name

    def start(self) -> Self:
        """Start it, and return once it answers."""
        quiet = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_LOG_LEVEL": "INFO"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lmcache.cli.main", "server", *self._arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **quiet, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        deadline_s = time.monotonic() + _START_S
        while not self._answers():
            has_ended = self._process.poll() is not None
            if has_ended or time.monotonic() > deadline_s:
                self.close()
                raise AssertionError(f"no LMCache server: {self._log.read_text()[-3000:]}")
            time.sleep(0.1)
        return self

    def _answers(self) -> bool:
        try:
            self.ask("/healthcheck")
        except OSError:
            return False
        return True

    def ask(self, path: str) -> bytes:
        """What its HTTP side says."""
        with urllib.request.urlopen(f"{self.http_url}{path}", timeout=5) as got:
            answer: bytes = got.read()
        return answer

    def until(self, holds: Callable[[dict[str, Any]], object], timeout_s: float = 10.0) -> None:
        """Wait until something holds of its memory's status."""
        deadline_s = time.monotonic() + timeout_s
        while not holds(status := _memory_status(json.loads(self.ask("/status")))):
            assert time.monotonic() < deadline_s, status
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        """Stop it (SIGSTOP), let it go on, or kill it."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it as a crash does; its shared memory stays behind."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """End it, and remove what it leaves."""
        self.kill()
        self.shm.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()
