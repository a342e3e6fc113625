"""What the settings of the heap do to a process's memory."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

ARENAS_OF_EIGHT_THREADS = """
import ctypes, sys, threading
from pdserve.observe.heap import share_arenas

if sys.argv[1] == "shared":
    share_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
together = threading.Barrier(8)

def allocate():
    together.wait()
    libc.malloc(100_000)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
stream = libc.fdopen(1, b"w")
libc.malloc_info(0, stream)
libc.fflush(None)
"""

LEFT_BY_A_BURST = """
import psutil, sys
from pdserve.observe.heap import BurstTrim

def mib():
    return psutil.Process().memory_full_info().uss / (1 << 20)

num_most = int(sys.argv[1])
trim = BurstTrim()
before = mib()
each = [bytes(1000) for _ in range(40_000)]
trim.note(num_most, 100.0)
of_others = each[::100]
del each
trim.note(5, 109.9)
held = mib()
trim.note(5, 110.1)
print(held - before, mib() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize(("num_most", "is_burst"), [(1024, True), (255, False)])
def test_holes_that_a_burst_leaves_in_the_heap_are_given_back(num_most: int, is_burst: bool):
    command = [sys.executable, "-c", LEFT_BY_A_BURST, str(num_most)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    held, left = map(float, done.stdout.split())
    assert held > 30
    assert (left < 6) == is_burst


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_threads_of_an_engine_share_two_arenas() -> None:
    def num_arenas(mode: str) -> int:
        command = [sys.executable, "-c", ARENAS_OF_EIGHT_THREADS, mode]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return len(re.findall(r"<heap nr=", done.stdout))

    assert num_arenas("own") > 2
    assert num_arenas("shared") <= 2
