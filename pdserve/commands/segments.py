"""Removes shared-memory segments whose owners have ended, however they ended.

A segment is made under a name that is drawn here, by whoever is told it. A process that starts
before anything is made waits until the owner has ended, and only then removes it: so it misses
nothing, whether the owner ends while it still starts or while it makes the segment.

That process can be killed as well. So beside the segment lies a file that its owner keeps locked:
the kernel lets go of a lock when a process ends, so a segment whose file can be locked has no owner
any more. That also holds between containers that share the folder and not their process ids.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Final

SHARED_MEMORY: Final = Path("/dev/shm")
_PREFIX: Final = "lmcache_l1_pool_pdserve-"
"""LMCache tells engines names that begin like this one."""
_OWNER: Final = ".owner"


def own_segment(folder: Path = SHARED_MEMORY) -> Path:
    """Return a path under which this process may make a segment; it is removed at its end.

    What others have left behind is removed first.
    """
    remove_ownerless(folder)
    while True:
        segment = folder / f"{_PREFIX}{secrets.token_hex(8)}"
        owner = segment.with_name(segment.name + _OWNER)
        _have_removed(segment, owner)
        lock = os.open(owner, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if owner.exists():
            return segment
        os.close(lock)  # somebody who tidied up was faster


def _have_removed(*paths: Path) -> None:
    """Start the process that removes `paths` once this one has ended.

    It has a session of its own and blocks signals, so that what ends this process' group or its
    service spares it.
    """
    end, _ = os.pipe()  # the other end stays open as long as this process lives
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "pdserve.commands.segments", *map(str, paths)],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, end, 0)],
        setsid=True,
        setsigmask=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    )
    os.close(end)


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


def main() -> None:
    """Remove the files that are named as arguments once stdin ends."""
    sys.stdin.buffer.read()
    for path in sys.argv[1:]:
        Path(path).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
