"""Runs this interpreter as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def run_python(
    *arguments: str, timeout_s: float = 60.0, is_to_succeed: bool = True, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run it to its end; its words are kept.

    Args:
        is_to_succeed: Any exit code but 0 is an assertion.
        options: Of `subprocess.run`.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        **options,
    )
    assert done.returncode == 0 or not is_to_succeed, done.stdout[-4000:] + done.stderr[-4000:]
    return done
