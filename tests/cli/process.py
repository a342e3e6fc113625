"""Run the command line as a user does: as a process, with none of our variables set."""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

from pdserve.cli import main
from tests.logs import unchanged_logging
from tests.python import run_python

ROOT = Path(__file__).parents[2]


def environment(**variables: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PDSERVE_")}
    return {**inherited, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}


def pdserve(
    *arguments: str, variables: Mapping[str, str] | None = None, timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    return run_python(
        *("-m", "pdserve", *arguments),
        timeout_s=timeout_s,
        is_to_succeed=False,
        cwd=ROOT,
        env=environment(**(variables or {})),
    )


def pdserve_here(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The same in this process, for what needs none of its own."""
    out, err = io.StringIO(), io.StringIO()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        unchanged_logging(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ, environment(**variables), clear=True),
    ):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def free_neighbours(count: int) -> int:
    """The first of so many ports in a row, of those that the kernel gives nobody by itself."""
    while True:
        first = random.randrange(20_000, 32_000)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; all of them are held until each is known."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
