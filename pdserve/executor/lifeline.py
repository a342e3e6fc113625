"""A child process that never outlives the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux, prctl(2)).

    If the parent has already gone, this process ends now. Elsewhere than on Linux there
    is no such call, and an orphan ends when its channel closes.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)
