"""The host as UCX sees it: memory, network devices, and processes of peers on it.

UCX may use the devices of the network that the side channel is bound to. On every device that it
may use, UCX listens for TCP connections, and who connects can write to registered memory: UCX asks
nobody for a key. So its ports must be where the deployment's other KV ports are, and nowhere
else.

Within one host UCX copies between processes with process_vm_writev(2): the writer needs no help
from the other side, and is stopped neither by the end of the other side's agent nor by a closed
connection. This needs a common kernel and PID namespace; without them UCX falls back to TCP.
"""

from __future__ import annotations

import functools
import ipaddress
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import psutil

from pdserve.connectors.transfer.protocol import Process, Region

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

# UCX notices a silent partition after about 5 s with the first three, and never without. Without
# the fourth it connects at once, and blocks, for minutes, while the peer does not answer. Without
# the last it logs every transfer from a SIGHUP on, even if the process was told to ignore that.
UCX_DEFAULTS: Final = {
    "UCX_TCP_KEEPIDLE": "2s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "3",
    "UCX_TCP_CONN_NB": "y",
    "UCX_DEBUG_SIGNO": "0",
}
_LOOPBACK = "lo"
_INFINIBAND = Path("/sys/class/infiniband")
# Without one of these in UCX_TLS there is no such transport.
_DIRECT = ("all", "sm", "shm", "mm", "cma", "xpmem", "knem", "posix", "sysv", "cuda", "rocm")
_PROC = Path("/proc")


def region_of(memory: torch.Tensor, stride_bytes: int) -> Region:
    """Describe contiguous memory to peers, in units of `stride_bytes` bytes."""
    return Region(
        address=memory.data_ptr(),
        stride_bytes=stride_bytes,
        num_units=memory.numel() * memory.element_size() // stride_bytes,
        memory="VRAM" if memory.is_cuda else "DRAM",
        device=memory.device.index or 0,
    )


class _Address(Protocol):
    @property
    def address(self) -> str: ...


def net_devices(
    host: str,
    *,
    interfaces: Callable[[], Mapping[str, Sequence[_Address]]] = psutil.net_if_addrs,
    infiniband: Path = _INFINIBAND,
) -> str | None:
    """Return `UCX_NET_DEVICES` for a side channel that is bound to a numeric address.

    For a loopback address this is the loopback device alone; for another one the device that
    has it, and every RDMA port that is up, which no address tells apart.

    Args:
        interfaces: The addresses of this machine's network devices, by name.
        infiniband: Where the kernel lists RDMA devices.

    Returns:
        None if no device has the address but the loopback one (as where it is announced by a
        routing protocol): which devices carry it cannot be told then.
    """
    address = ipaddress.ip_address(host)
    if address.is_loopback:
        return _LOOPBACK
    for label, addresses in interfaces().items():
        name = label.partition(":")[0]  # a second address of a device may have a label
        if name != _LOOPBACK and any(str(address) == each.address for each in addresses):
            return ",".join([name, *_rdma_ports(infiniband)])
    return None


def _rdma_ports(infiniband: Path) -> list[str]:
    """Return the ports that are up, by UCX's names, such as `mlx5_0:1`."""
    return sorted(
        f"{state.parents[2].name}:{state.parent.name}"
        for state in infiniband.glob("*/ports/*/state")
        if "ACTIVE" in state.read_text()
    )


class HostProcesses:
    """See `Processes`: those of this host.

    Args:
        is_direct: Whether the mover's transports may write without the other side's help.
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
        except OSError:  # for example, no descriptor is left
            return True


@functools.cache
def _this_process(pid: int) -> Process:
    # Needed at each handshake, even in a process that has no descriptor left.
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    host = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return Process(host=host, pid=pid, started=_started(pid) or 0)


def _started(pid: int) -> int | None:
    """Return a process's start (ticks since boot: pids are reused); None if it has ended.

    Raises:
        OSError: This cannot be determined.
    """
    try:
        # The name, in parentheses, may be any bytes: what follows it is state, ppid, ...
        after_name = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        num_threads = len(os.listdir(_PROC / str(pid) / "task"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    if after_name[0] in b"ZX" and num_threads <= 1:
        return None
    return int(after_name[19])
