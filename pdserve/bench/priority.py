"""Raises a process's scheduling priority, so that it runs as soon as it has work.

A client that waits for a core records times too late. On a machine shared with the servers, it
takes precedence over them if the system allows it; the cost to them is its CPU share, which is
reported.
"""

from __future__ import annotations

import enum
import os
from typing import Final

_NICE: Final = -5


class Priority(enum.Enum):
    """How a process is scheduled.

    REAL_TIME: before all usual processes (SCHED_RR; root, or RLIMIT_RTPRIO). RAISED: with more
    weight than usual processes. USUAL: like them.
    """

    REAL_TIME = "real-time"
    RAISED = "raised"
    USUAL = "usual"


def raise_priority() -> Priority:
    """Set the best priority that this process may have, and return it."""
    if hasattr(os, "sched_setscheduler"):
        try:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        except OSError:
            pass
        else:
            return Priority.REAL_TIME
    try:
        os.nice(_NICE)
    except OSError:
        return Priority.USUAL
    return Priority.RAISED
