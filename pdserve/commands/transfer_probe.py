"""Measures how fast NIXL moves memory between two processes here, beside a plain copy.

Reader and source are siblings, as a prefill and a decode engine are: between parent and
child the kernel permits more. `measure` starts both; run as a program, this module is one
of them.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
import time
from typing import IO, TYPE_CHECKING, Final

import msgspec
import numpy as np

from pdserve.connectors.nixl.agent import NixlAgent
from pdserve.connectors.transfer.protocol import Region
from pdserve.connectors.transfer.seams import Direction
from pdserve.errors import PdserveError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

NUM_BYTES: Final = 64 << 20
_UNIT_BYTES: Final = 256 << 10
_REPEATS: Final = 5
_POLL_S: Final = 0.0002


class ProbeError(Exception):
    """The transfer could not be measured; the message says why."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Best of some runs, in bytes per second."""

    transfer: float
    memcpy: float


def measure(*, backends: Sequence[str] = ("UCX",), timeout_s: float = 30.0) -> Rates:
    """Read `NUM_BYTES` from another process's memory, and copy as many within one.

    Raises:
        ProbeError: NIXL is not there, or does not move bytes between processes here.
    """
    with start(__name__, "source", *backends) as source:
        timer = threading.Timer(timeout_s, source.kill)
        timer.start()
        try:
            announcement = said_by(source, b"{")
            with start(__name__, "reader", *backends) as reader:
                try:
                    assert reader.stdin is not None
                    reader.stdin.write(announcement)
                    reader.stdin.close()
                    reader.stdin = None
                    output, errors = reader.communicate(timeout=timeout_s)
                except subprocess.TimeoutExpired:
                    reader.kill()
                    raise ProbeError(f"nothing arrived within {timeout_s:g} s") from None
                if reader.returncode:
                    raise ProbeError(_last_line(errors))
                return msgspec.json.decode(output.strip().rpartition(b"\n")[2], type=Rates)
        finally:
            timer.cancel()
            source.kill()


def start(module: str, part: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Run a probe's module as a program that is one part of it, with pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", module, part, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def said_by(process: subprocess.Popen[bytes], begin: bytes) -> bytes:
    """Return the line of a part's output that begins like this.

    Raises:
        ProbeError: It ended without one; the message is its last error.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    for line in process.stdout:
        if line.startswith(begin):  # UCX logs there too, if its variables say so
            return line
    raise ProbeError(_last_line(process.stderr.read()))


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "a process of the probe ended without a result"


def _source(backends: Sequence[str], stdin: IO[bytes]) -> None:
    """Offer memory until `stdin` ends."""
    memory, region = _memory()
    memory[:] = 7
    agent = NixlAgent(f"pdserve-probe-source-{os.getpid()}", backends, net_devices="lo")
    agent.register(region)
    metadata = base64.b64encode(agent.metadata()).decode()
    print(json.dumps({"metadata": metadata, "address": region.address}), flush=True)
    ended = threading.Event()

    def wait_for_end() -> None:
        stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    while not ended.is_set():
        agent.progress()
        time.sleep(_POLL_S)
    agent.close()


def _reader(backends: Sequence[str], stdin: IO[bytes]) -> None:
    """Read what a source announced on `stdin`; print the rates."""
    announcement = json.loads(stdin.read())
    memory, region = _memory()
    agent = NixlAgent(f"pdserve-probe-reader-{os.getpid()}", backends, net_devices="lo")
    agent.register(region)
    peer = agent.add_peer(base64.b64decode(announcement["metadata"]))
    there = msgspec.structs.replace(region, address=announcement["address"])
    local, remote = agent.prepare(region), agent.prepare(there, peer)
    units = np.arange(region.num_units, dtype=np.int32)
    best_s = memcpy_s = float("inf")
    for _ in range(_REPEATS):  # the first one connects the peers
        started_s = time.perf_counter()
        transfer, is_done = agent.post(Direction.READ, local, units, remote, units)
        while not is_done:
            time.sleep(_POLL_S)
            is_done = agent.poll(transfer)
        best_s = min(best_s, time.perf_counter() - started_s)
        agent.release(transfer)
    if not (memory == 7).all():
        sys.exit("NIXL reports that all bytes arrived, but they did not")
    target = np.empty_like(memory)
    for _ in range(_REPEATS):
        started_s = time.perf_counter()
        np.copyto(target, memory)
        memcpy_s = min(memcpy_s, time.perf_counter() - started_s)
    rates = Rates(transfer=NUM_BYTES / best_s, memcpy=NUM_BYTES / memcpy_s)
    print(msgspec.json.encode(rates).decode(), flush=True)
    agent.close()


def _memory() -> tuple[npt.NDArray[np.uint8], Region]:
    """Allocate and touch `NUM_BYTES`; return them as an array and as a region."""
    memory = np.zeros(NUM_BYTES, dtype=np.uint8)
    memory[:] = 1
    return memory, Region(
        address=memory.ctypes.data,
        stride_bytes=_UNIT_BYTES,
        num_units=NUM_BYTES // _UNIT_BYTES,
        memory="DRAM",
        device=0,
    )


def _import_nixl() -> None:
    """Import NIXL, without torch where torch is a build for CPUs.

    NIXL asks torch which CUDA it is for: it reads that from torch's files, and imports torch, which
    takes seconds, where no answer stands there.
    """
    if importlib.metadata.version("torch").endswith("+cpu"):
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes its import fail
        with contextlib.suppress(ImportError):  # an agent says it
            importlib.import_module("nixl")
        del sys.modules["torch"]


if __name__ == "__main__":
    _import_nixl()
    parts = {"source": _source, "reader": _reader}
    try:
        parts[sys.argv[1]](sys.argv[2:], sys.stdin.buffer)
    except PdserveError as failure:
        sys.exit(failure.message)
