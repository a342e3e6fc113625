"""How processes are asked to end, and child processes that never outlive who started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ask a process to end; the last one comes when its terminal closes."""
_PR_SET_PDEATHSIG: Final = 1
SUPERVISOR_VARIABLE: Final = "PDSERVE_SUPERVISOR_PID"
"""Names the supervisor's process id to a child."""


def heeded_signals() -> list[signal.Signals]:
    """Return the stop signals that this process obeys: `nohup` has it ignore SIGHUP."""
    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [each for each in STOP_SIGNALS if each is not signal.SIGHUP or not is_kept]


def ignore_stop_signals() -> None:
    """Leave the end of this process to the one that started it.

    Signals reach the whole process group.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


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
