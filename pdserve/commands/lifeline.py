"""A process that ends with the supervisor that started it, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

SUPERVISOR_VARIABLE: Final = "PDSERVE_SUPERVISOR_PID"
"""Names the supervisor's process id to a child."""
_PR_SET_PDEATHSIG: Final = 1


def end_with_supervisor() -> None:
    """If a supervisor started this process, let the kernel send SIGTERM when it ends.

    The process id is compared, not only asked for: the supervisor may have gone before the
    kernel was told (prctl(2)), and in a container a supervisor's id may well be 1.
    """
    supervisor = os.environ.pop(SUPERVISOR_VARIABLE, None)
    if supervisor is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(supervisor):
        sys.exit(1)
