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


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_threads_of_an_engine_share_two_arenas() -> None:
    def num_arenas(mode: str) -> int:
        command = [sys.executable, "-c", ARENAS_OF_EIGHT_THREADS, mode]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return len(re.findall(r"<heap nr=", done.stdout))

    assert num_arenas("own") > 2
    assert num_arenas("shared") <= 2
