"""Answers, from inside a process, how much of its memory is in use, and by what.

Python imports this module at the start of every process whose PYTHONPATH names this folder. With
`CENSUS_FOLDER` set, a thread answers on a socket there, named by the process's number: one JSON
object a connection. Resident memory cannot tell a leak from holes between what is in use; this can:

    bytes: what Python's own allocator and glibc's have given out and not got back.
    blocks: pieces of it that Python holds (`sys.getallocatedblocks`).
    types: objects that the collector knows, by type; only if the client sends `types`, as it takes
        a fraction of a second during which nothing else runs.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import json
import os
import re
import socket
import sys
import threading
from typing import Any

_PYTHONS_OWN = re.compile(rb"# bytes in allocated blocks\s+=\s+([\d,]+)")


class _Mallinfo2(ctypes.Structure):
    """mallinfo(3), of all arenas."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


class _Allocators:
    """Asks glibc's and Python's."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.mallinfo2.restype = _Mallinfo2
        self._libc.open_memstream.restype = ctypes.c_void_p
        self._libc.fclose.argtypes = [ctypes.c_void_p]
        self._libc.free.argtypes = [ctypes.c_void_p]
        self._print_pythons = ctypes.pythonapi._PyObject_DebugMallocStats
        self._print_pythons.argtypes = [ctypes.c_void_p]

    def bytes_in_use(self) -> int:
        info = self._libc.mallinfo2()
        return int(info.uordblks + info.hblkhd) + self._pythons_own()

    def _pythons_own(self) -> int:
        """Python prints what it knows into a file only: into one in memory."""
        text, size = ctypes.c_void_p(), ctypes.c_size_t()
        file = self._libc.open_memstream(ctypes.byref(text), ctypes.byref(size))
        self._print_pythons(file)
        self._libc.fclose(file)
        found = _PYTHONS_OWN.search(ctypes.string_at(text.value or 0, size.value))
        self._libc.free(text)
        assert found is not None
        return int(found.group(1).replace(b",", b""))


def _serve(listening: socket.socket) -> None:
    allocators = _Allocators()
    while True:
        client, _ = listening.accept()
        with client, contextlib.suppress(OSError):
            answer: dict[str, Any] = {"command": " ".join(sys.orig_argv[1:4])}
            if client.recv(16) == b"types":
                gc.collect()
                types = collections.Counter(type(each).__qualname__ for each in gc.get_objects())
                answer["types"] = dict(types)
            answer["blocks"] = sys.getallocatedblocks()
            answer["bytes"] = allocators.bytes_in_use()
            client.sendall(json.dumps(answer).encode())


if _folder := os.environ.get("CENSUS_FOLDER"):
    _listening = socket.socket(socket.AF_UNIX)
    _path = f"{_folder}/{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_path)  # of a process that had this number and was killed
    _listening.bind(_path)
    _listening.listen()
    threading.Thread(target=_serve, args=(_listening,), name="census", daemon=True).start()
