"""Whether a peer's process can write to this one's memory by itself, and whether it still runs.

Within one host UCX copies between processes with process_vm_writev(2): whoever writes needs no
help of the other side, and is stopped neither by the end of the other side's agent nor by a
closed connection. It takes one kernel and one PID namespace; in others UCX falls back to TCP.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from pdserve.connectors.transfer.protocol import Process

# Without one of these in UCX_TLS there is no such transport.
_DIRECT = ("all", "sm", "shm", "mm", "cma", "xpmem", "knem", "posix", "sysv", "cuda", "rocm")
_PROC = Path("/proc")


class HostProcesses:
    """See `Processes`: those of this host.

    Args:
        is_direct: The mover's transports may write without the other side's help.
    """

    def __init__(self, *, is_direct: bool) -> None:
        self._is_direct = is_direct

    @property
    def this(self) -> Process:
        """See `Processes`."""
        return _this_process(os.getpid())

    def writes_directly(self, process: Process) -> bool:
        """See `Processes`."""
        if not self._is_direct or process.host != self.this.host:
            return False
        transports = os.environ.get("UCX_TLS", "all").lower()
        if transports.startswith("^"):
            return True  # all but those
        return any(transport.startswith(_DIRECT) for transport in transports.split(","))

    def is_alive(self, process: Process) -> bool:
        """See `Processes`."""
        try:
            return _started(process.pid) == process.started
        except OSError:  # no descriptor is left to look with, for one
            return True


@functools.cache
def _this_process(pid: int) -> Process:
    # Asked for at each handshake, also of a process that has no descriptor left.
    return Process(host=_host(), pid=pid, started=_started(pid) or 0)


def _host() -> str:
    """Equal for processes that could write to one another's memory."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int | None:
    """When a process began (in ticks since boot: pids are used again); None if it has ended.

    Raises:
        OSError: It cannot be told.
    """
    try:
        # The name, in parentheses, may have blanks: what follows it is state, ppid, ...
        after_name = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        num_threads = len(os.listdir(_PROC / str(pid) / "task"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    if after_name[0] in "ZX" and num_threads <= 1:
        return None
    return int(after_name[19])
