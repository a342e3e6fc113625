"""What must hold on a device before figures mean anything: its tests, and NVIDIA's sanitizer.

``compute-sanitizer`` runs the operations' small cases twice: *memcheck* looks for accesses out of
bounds, *racecheck* for two threads of a program that use shared memory without a barrier between.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 900
_OVER = 124
"""The exit code of ``timeout`` where the time was over."""
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider")
_SANITIZER = "compute-sanitizer"
_TOOLS = ("memcheck", "racecheck")
_SMALL = (
    "tests/gpu/test_operations.py",
    "-k",
    "bfloat16 and not (chunk or many or mixtral or deepseek or width)",
)


class Ended(NamedTuple):
    """How a command ended: its exit code, and its last line."""

    code: int
    told: str


Run = Callable[[tuple[str, ...], dict[str, str]], Ended]
"""Runs a command with more in its environment."""


def run_command(command: tuple[str, ...], environment: dict[str, str]) -> Ended:
    """Run a command, show what it says, and keep its last line."""
    last = ""
    with subprocess.Popen(
        ("timeout", str(_LIMIT_S), *command),
        cwd=_ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return Ended(process.returncode, last)


def check(
    run: Run = run_command, which: Callable[[str], str | None] = shutil.which
) -> dict[str, Any]:
    """Run the tests that need a device, then each tool of the sanitizer.

    Returns:
        Name -> ``{"passed": ..., "told": ..., "seconds": ...}``, or ``{"skipped": why}``.
    """
    found = {"tests": _checked(run, _PYTEST, {})}
    sanitizer = which(_SANITIZER)
    for tool in _TOOLS:
        if sanitizer is None:
            found[tool] = {"skipped": f"{_SANITIZER}, of CUDA's toolkit, is not on PATH"}
            continue
        command = (sanitizer, "--tool", tool, "--error-exitcode", "9", *_PYTEST, *_SMALL)
        # torch's allocator keeps memory that it was given back, and hides accesses behind a tensor.
        found[tool] = _checked(run, command, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    return found


def _checked(run: Run, command: tuple[str, ...], environment: dict[str, str]) -> dict[str, Any]:
    began = time.monotonic()
    code, told = run(command, environment)
    if code == _OVER:
        told = f"ended after {_LIMIT_S} s: {told}"
    seconds = round(time.monotonic() - began, 1)
    return {"passed": code == 0, "told": told, "seconds": seconds}


def in_words(name: str, found: dict[str, Any]) -> str:
    """Return one result of `check` as a line."""
    if "skipped" in found:
        return f"skipped: {name}: {found['skipped']}"
    return f"{'passed' if found['passed'] else 'failed'}: {name}: {found['told']}"
