"""Measures how fast UCX moves messages between two processes of this machine.

`measure` starts both; run as a program, this module is one of them.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import threading
import time
from typing import Final

from pdserve.commands.transfer_probe import said_by, start
from pdserve.errors import PdserveError

MESSAGE_BYTES: Final = 8 << 20
_NUM_MESSAGES: Final = 8
_POLL_S: Final = 0.1
_TIMEOUT_S: Final = 30.0


def measure() -> float:
    """Send messages from one process to another; return the best rate, in bytes per second.

    Raises:
        ProbeError: ucxx cannot be loaded, or moves no messages between processes here.
    """
    with contextlib.ExitStack() as stack:
        parts = [stack.enter_context(start(__name__, name)) for name in ("sender", "receiver")]
        for part in parts:
            stack.callback(part.kill)
        timer = threading.Timer(_TIMEOUT_S, _kill, [parts])
        timer.start()
        stack.callback(timer.cancel)
        addresses = [said_by(part, b"address ").split()[1] for part in parts]
        for part, address in zip(parts, reversed(addresses), strict=True):
            assert part.stdin is not None
            part.stdin.write(address + b"\n")
            part.stdin.flush()
        return float(said_by(parts[1], b"rate ").split()[1])


def _kill(parts: list[subprocess.Popen[bytes]]) -> None:
    for part in parts:
        part.kill()


def _run(part: str) -> None:
    """Run the sender or the receiver: print its address, read the other's, exchange messages."""
    import torch

    from pdserve.connectors.ucx.library import UcxWorker

    worker = UcxWorker({"NET_DEVICES": "lo"})
    print("address", worker.address.hex(), flush=True)
    endpoint = worker.connect(bytes.fromhex(sys.stdin.readline()))
    post = endpoint.send if part == "sender" else endpoint.receive
    memory = torch.full((MESSAGE_BYTES,), 7 if part == "sender" else 0, dtype=torch.uint8)
    best_s = float("inf")
    for tag in range(_NUM_MESSAGES):  # the first one connects the two
        started_s = time.perf_counter()
        request = post(memory, tag)
        worker.progress()
        while not request.is_over:
            if worker.arm():
                select.select([worker.descriptor], [], [], _POLL_S)
            worker.progress()
        best_s = min(best_s, time.perf_counter() - started_s)
        failure = request.failure()
        if failure is not None:
            sys.exit(failure)
    if not bool((memory == 7).all()):
        sys.exit("UCX reports that all bytes arrived, but they did not")
    print("rate", MESSAGE_BYTES / best_s, flush=True)
    if part == "sender":  # it ends with whoever started it, after the last byte has left
        sys.stdin.read()


if __name__ == "__main__":
    try:
        _run(sys.argv[1])
    except PdserveError as error:
        sys.exit(error.message)
