"""A real LMCache server on loopback: `pdserve kv-server`, as users run it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pdserve.commands.segments import SHARED_MEMORY, remove_ownerless

if TYPE_CHECKING:
    from collections.abc import Callable

_DISK_SIZE = "8GiB"
_START_S = 60.0


def free_port() -> int:
    """A TCP port of loopback that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def segments_of(pid: int) -> set[Path]:
    """The shared memory of a server that runs: one segment, once it has made it."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {Path(each) for each in re.findall(rf"{SHARED_MEMORY}/\S*pool_pdserve-\w+", maps)}


def memory_status(http_url: str) -> dict[str, Any]:
    """What a server says of its memory: objects and locks, by LMCache's names; and its sessions."""
    with urllib.request.urlopen(f"{http_url}/status", timeout=5) as got:
        status = json.loads(got.read())
    return {**_with_locks(status), "active_sessions": status["active_sessions"]}


def _with_locks(status: Any) -> dict[str, Any]:
    """The part of a status that tells of locks, wherever it is."""
    if isinstance(status, dict) and "read_locked_count" in status:
        return status
    parts = status.values() if isinstance(status, dict) else status
    for part in parts if isinstance(status, dict | list) else ():
        if isinstance(part, dict | list) and (found := _with_locks(part)):
            return found
    return {}


class LMCacheServer:
    """Started by `start`, ended by `close`; in between it may be killed and started again.

    Args:
        log: Where its output goes.
        disk: Folder of its disk tier, if it has one.
        redis_port: Of its Redis tier, if it has one.

    Attributes:
        url, http_url: What engines are told.
        shm: Its shared memory, once it has started.
    """

    def __init__(
        self,
        log: Path,
        *,
        chunk_tokens: int = 16,
        cpu_bytes: int = 100 << 20,
        disk: Path | None = None,
        redis_port: int | None = None,
    ) -> None:
        self._log = log
        port, http_port = free_port(), free_port()
        tiers = f"cpu:{cpu_bytes}"
        tiers += "" if disk is None else f",disk:{disk}:{_DISK_SIZE}"
        tiers += "" if redis_port is None else f",redis:redis://127.0.0.1:{redis_port}"
        self._arguments = [
            *("--kv-tiers", tiers, "--chunk-size", str(chunk_tokens)),
            *("--port", str(port), "--http-port", str(http_port)),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"tcp://127.0.0.1:{port}"
        self.http_url = f"http://127.0.0.1:{http_port}"
        self.shm = Path()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        """Start it, and return once it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pdserve", "kv-server", *self._arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        deadline_s = time.monotonic() + _START_S
        while not self._answers():
            has_ended = self._process.poll() is not None
            if has_ended or time.monotonic() > deadline_s:
                self.close()
                raise AssertionError(f"no LMCache server: {self._log.read_text()[-3000:]}")
            time.sleep(0.1)
        (self.shm,) = segments_of(self.pid)
        return self

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.http_url}/healthcheck", timeout=5).close()
        except OSError:
            return False
        return True

    def until(self, holds: Callable[[dict[str, Any]], object], timeout_s: float = 10.0) -> None:
        """Wait until something holds of its memory's status."""
        deadline_s = time.monotonic() + timeout_s
        while not holds(status := memory_status(self.http_url)):
            assert time.monotonic() < deadline_s, status
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        """Stop it (SIGSTOP), let it go on, or kill it."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """End it, and have removed what it leaves."""
        self.kill()
        remove_ownerless()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()
