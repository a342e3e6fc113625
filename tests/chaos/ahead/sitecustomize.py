"""Sets the wall clock of a process ahead by `AHEAD_S` seconds, as far as Python asks for it.

Python imports this module at the start of every process whose PYTHONPATH names this folder.
"""

from __future__ import annotations

import os
import time

if _ahead_s := int(os.environ.get("AHEAD_S", "0")):
    _time, _time_ns = time.time, time.time_ns
    time.time = lambda: _time() + _ahead_s
    time.time_ns = lambda: _time_ns() + _ahead_s * 10**9
