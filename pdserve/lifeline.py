"""Child processes that never outlive the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
SUPERVISOR_VARIABLE: Final = "PDSERVE_SUPERVISOR_PID"
"""Names the supervisor's process id to a child."""


def end_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send `number` to this process when its parent ends (Linux, prctl(2)).

    The parent's id is compared, not only asked for: it may have gone before the kernel was
    told, and in a container it may well be 1. Elsewhere than on Linux an orphan ends when
    its channel closes.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(1)


def end_with_supervisor() -> None:
    """If a supervisor started this process, drain and end when it does."""
    supervisor = os.environ.pop(SUPERVISOR_VARIABLE, None)
    if supervisor is not None:
        end_with_parent(int(supervisor), signal.SIGTERM)
