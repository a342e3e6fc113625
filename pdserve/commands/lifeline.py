"""Ends a command with the supervisor that started it, however the supervisor ends."""

from __future__ import annotations

import os
import signal
from typing import Final

from pdserve.lifeline import end_with_parent

SUPERVISOR_VARIABLE: Final = "PDSERVE_SUPERVISOR_PID"
"""Names the supervisor's process id to a child."""


def end_with_supervisor() -> None:
    """If a supervisor started this process, drain and end when it does."""
    supervisor = os.environ.pop(SUPERVISOR_VARIABLE, None)
    if supervisor is not None:
        end_with_parent(int(supervisor), signal.SIGTERM)
