"""Which network devices UCX may use: those of the network that the side channel is bound to.

On every device that it may use, UCX listens for TCP connections, and who connects can write to
registered memory: UCX asks nobody for a key. So the ports are to be where the deployment's other
KV ports are, and nowhere else.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_LOOPBACK = "lo"
_INFINIBAND = Path("/sys/class/infiniband")


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
    """The ports that are up, as UCX calls them: `mlx5_0:1`."""
    return sorted(
        f"{state.parents[2].name}:{state.parent.name}"
        for state in infiniband.glob("*/ports/*/state")
        if "ACTIVE" in state.read_text()
    )
