"""Distinguishes a process that is stopped or hangs from one that is busy; says how one ended.

A late answer alone proves nothing: a long step on a slow machine, or an overloaded machine, is
late as well. So this asks the kernel (proc(5), `/proc/PID/stat`):

    stopped    state T or t: it does nothing until it is told to go on
    busy       it is on a CPU, waits for one (state R), or has used some since the last look
    asleep     neither; a mistake only if it owes an answer

It counts consecutive looks, not seconds: a watching process that was itself stopped, or had no CPU
for a while, has looked only once when it wakes, and so blames no other process.
"""

from __future__ import annotations

import enum
import signal
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_LOOKS = 5
"""Looks per time-out: the verdict comes at most one look later."""


class Activity(enum.Enum):
    """The activity of a process since the last look."""

    BUSY = "busy"
    ASLEEP = "asleep"
    STOPPED = "stopped"


class ProcessState(NamedTuple):
    """A process at one moment.

    Attributes:
        letter: State of the first thread: R, S, D, T, ... as in proc(5).
        cpu_ticks: Total CPU time of all its threads, in clock ticks.
    """

    letter: str
    cpu_ticks: int


def read_state(pid: int) -> ProcessState | None:
    """Return the state from the kernel; None if there is no such process, or no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # its name may hold anything
    return ProcessState(fields[0], int(fields[11]) + int(fields[12]))


class ProcessWatch:
    """Looks at one process at an interval that its caller keeps.

    Attributes:
        num_stopped: Number of the latest consecutive looks that found it stopped.
        num_idle: The same for looks that found it stopped or asleep.
    """

    def __init__(
        self, pid: int, *, read: Callable[[int], ProcessState | None] = read_state
    ) -> None:
        self._pid = pid
        self._read = read
        self._cpu_ticks: int | None = None
        self.num_stopped = 0
        self.num_idle = 0

    def look(self) -> Activity:
        """Look once. An unreadable process counts as busy: its end is detected elsewhere."""
        state = self._read(self._pid)
        activity = Activity.BUSY if state is None else self._judge(state)
        self.num_stopped = self.num_stopped + 1 if activity is Activity.STOPPED else 0
        self.num_idle = 0 if activity is Activity.BUSY else self.num_idle + 1
        return activity

    def _judge(self, state: ProcessState) -> Activity:
        before, self._cpu_ticks = self._cpu_ticks, state.cpu_ticks
        if state.letter in "Tt":
            return Activity.STOPPED
        if state.letter == "R" or before is None or state.cpu_ticks > before:
            return Activity.BUSY
        return Activity.ASLEEP


def how_it_ended(code: int) -> str:
    """Return how a child process ended, from its `subprocess` return code."""
    if code >= 0:
        return f"ended with code {code}"
    by = f"was killed by {signal.Signals(-code).name}"
    is_sudden = -code == signal.SIGKILL
    return f"{by}, as the kernel does when memory runs out: see dmesg" if is_sudden else by
