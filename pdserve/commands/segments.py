"""Removes shared-memory segments whose owners have ended, however they ended.

The name of a segment is drawn here, and its owner makes the segment. A process that is started
before waits until the owner has ended, and then removes the segment: so it misses nothing, even if
the owner ends while that process starts or while the segment is made.

That process can be killed as well. So beside the segment there is a file that its owner keeps
locked. The kernel releases a lock when a process ends, so a segment whose file can be locked has no
owner any more. This also holds between containers that share the folder but not their process ids.
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

    So is every file of that folder whose name begins like the segment's.

    Segments without owners are removed first.
    """
    remove_ownerless(folder)
    while True:
        segment = folder / f"{_PREFIX}{secrets.token_hex(8)}"
        owner = segment.with_name(segment.name + _OWNER)
        _have_removed(segment)
        lock = os.open(owner, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if owner.exists():
            return segment
        os.close(lock)  # another process removed the file before it was locked


def _have_removed(segment: Path) -> None:
    """Start the process that removes a segment's files once this one has ended.

    It has a session of its own and blocks signals, so that it survives the end of this process's
    group or service.
    """
    end, _ = os.pipe()  # the other end stays open as long as this process lives
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "pdserve.commands.segments", str(segment)],
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
                _remove(owner.with_name(owner.name.removesuffix(_OWNER)))
            finally:
                os.close(lock)


def _remove(segment: Path) -> None:
    for path in segment.parent.glob(f"{segment.name}*"):
        path.unlink(missing_ok=True)


def main() -> None:
    """Remove the files of the segment that is named as argument once stdin ends."""
    sys.stdin.buffer.read()
    _remove(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
