"""Removes shared-memory segments whose owners have ended, however they ended.

A segment is made under a name that is drawn here, by whoever is told it. Beside it lies a file that
its owner keeps locked: the kernel lets go of a lock when a process ends, so a segment whose file
can be locked has no owner any more. That also holds between containers that share the folder and
not their process ids.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SHARED_MEMORY: Final = Path("/dev/shm")
_PREFIX: Final = "lmcache_l1_pool_pdserve-"
"""LMCache tells engines names that begin like this one."""
_OWNER: Final = ".owner"


@contextlib.contextmanager
def owned_segment(folder: Path = SHARED_MEMORY) -> Iterator[Path]:
    """Give a path under which a segment may be made; it is removed when the block ends.

    What others have left behind is removed first.
    """
    remove_ownerless(folder)
    while True:
        segment = folder / f"{_PREFIX}{secrets.token_hex(8)}"
        owner = segment.with_name(segment.name + _OWNER)
        lock = os.open(owner, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if owner.exists():
            break
        os.close(lock)  # somebody who tidied up was faster
    try:
        yield segment
    finally:
        segment.unlink(missing_ok=True)
        owner.unlink(missing_ok=True)
        os.close(lock)


def remove_ownerless(folder: Path = SHARED_MEMORY) -> None:
    """Remove the segments whose owners have ended; other users' are left alone."""
    for owner in folder.glob(f"{_PREFIX}*{_OWNER}"):
        with contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError):
            lock = os.open(owner, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                owner.with_name(owner.name.removesuffix(_OWNER)).unlink(missing_ok=True)
                owner.unlink(missing_ok=True)
            finally:
                os.close(lock)
