"""Clocks of one process, and of all that it starts, that are ahead of others on the same machine.

The wall clock is Python's (`ahead/sitecustomize.py`); the monotonic one, and the one since boot,
are the kernel's, in a time namespace (needs root and util-linux).
"""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = Path(__file__).parent / "ahead"


def environment(ahead_s: int) -> dict[str, str]:
    """What such a process's environment has beside this process's."""
    if not ahead_s:
        return {}
    path = os.pathsep.join(filter(None, (str(_FOLDER), os.environ.get("PYTHONPATH"))))
    return {"AHEAD_S": str(ahead_s), "PYTHONPATH": path}


def command(ahead_s: int) -> tuple[str, ...]:
    """What it is started with, in front of its own command."""
    if not ahead_s:
        return ()
    return ("unshare", "--time", "--monotonic", str(ahead_s), "--boottime", str(ahead_s))
