"""Whether a process is stopped, asleep or busy: by what the kernel says of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from pdserve.observe.liveness import Activity, ProcessState, ProcessWatch, read_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def looks(*states: tuple[str, int] | None) -> list[Activity]:
    """What a watch makes of what the kernel says, look by look."""
    script = iter([None if state is None else ProcessState(*state) for state in states])
    watch = ProcessWatch(1, read=lambda pid: next(script))
    return [watch.look() for _ in states]


@pytest.mark.parametrize(
    ("states", "last"),
    [
        pytest.param([("S", 7), ("S", 7)], Activity.ASLEEP, id="no thread of it had a CPU"),
        pytest.param([("D", 7), ("D", 7)], Activity.ASLEEP, id="it waits for a device"),
        pytest.param([("S", 7), ("S", 8)], Activity.BUSY, id="another thread had one"),
        pytest.param([("R", 7), ("R", 7)], Activity.BUSY, id="it wants one, and gets none"),
        pytest.param([("T", 7), ("T", 8)], Activity.STOPPED, id="stopped, a moment ago"),
        pytest.param([("t", 7), ("t", 7)], Activity.STOPPED, id="a debugger has it"),
        pytest.param([("S", 7)], Activity.BUSY, id="seen once: nobody knows"),
        pytest.param([None, None], Activity.BUSY, id="it has ended, and that is noticed"),
    ],
)
def test_what_a_process_does_follows_from_its_state_and_its_cpu_time(
    states: list[tuple[str, int] | None], last: Activity
) -> None:
    assert looks(*states)[-1] is last


def test_only_looks_in_a_row_count() -> None:
    letters = iter("TTTSTT")
    watch = ProcessWatch(1, read=lambda pid: ProcessState(next(letters), 0))
    counts = []
    for _ in range(6):
        watch.look()
        counts.append((watch.num_stopped, watch.num_idle))
    assert counts == [(1, 1), (2, 2), (3, 3), (0, 4), (1, 5), (2, 6)]


@pytest.fixture
def child() -> Iterator[Callable[[str], int]]:
    """Starts a Python process that says when it is there, and ends it."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", f"print(flush=True)\n{code}"], stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_kernel_tells_stopped_busy_and_asleep_apart(child: Callable[[str], int]) -> None:
    pids = [child(code) for code in ("while True: pass", "import time; time.sleep(60)")]
    pids.append(child("while True: pass"))
    os.kill(pids[2], signal.SIGSTOP)
    watches = [ProcessWatch(pid) for pid in pids]
    found = []
    deadline = time.monotonic() + 30
    while found != [Activity.BUSY, Activity.ASLEEP, Activity.STOPPED]:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
        found = [watch.look() for watch in watches]


def test_a_name_with_brackets_and_spaces_is_no_state(child: Callable[[str], int]) -> None:
    pid = child(
        "import ctypes, time\n"
        "ctypes.CDLL(None).prctl(15, b'a) T (1 2', 0, 0, 0)  # PR_SET_NAME\n"
        "time.sleep(60)"
    )
    deadline = time.monotonic() + 30
    while (state := read_state(pid)) is None or state.letter not in "SD":
        assert time.monotonic() < deadline, state
        time.sleep(0.01)
    assert read_state(2**22 + 1) is None
