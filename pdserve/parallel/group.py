"""One group of ranks and its collectives.

A `World` holds a `Group` per axis of the mesh. Every rank of a group must make the same calls
in the same order. Collectives on tensors go through the custom operations of
`pdserve.parallel.collectives`, so that torch.compile sees through them; a group of one rank
returns its input and calls nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pdserve.kernels.reference.ranks import sum_ranks
from pdserve.parallel import collectives, shared_memory
from pdserve.parallel.mesh import Axis, Mesh, MeshShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from pdserve.parallel.rendezvous import Rendezvous
    from pdserve.parallel.shared_memory import SharedExchange

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_JOIN_TIMEOUT_S = 600.0
_SIOCGIFADDR = 0x8915


class Group:
    """This rank's group along one axis.

    Attributes:
        ranks: World ranks of its members, ascending.
        index: This rank's index among them.
        device: For tensors: NCCL on CUDA, gloo on a CPU. None for a group of one.
        host: For metadata, always gloo. None for a group of one.
        shared: For CPU tensors and metadata instead of gloo, where all ranks are on one host
            that can; else None.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        *,
        device: dist.ProcessGroup | None = None,
        host: dist.ProcessGroup | None = None,
        shared: SharedExchange | None = None,
        name: str = "",
    ) -> None:
        self.ranks, self.index = ranks, ranks.index(rank)
        self.device, self.host, self.shared = device, host, shared
        self.name = name

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this is the lowest rank."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the highest rank."""
        return self.index == self.size - 1

    @property
    def first(self) -> int:
        """World rank of the first."""
        return self.ranks[0]

    @property
    def last(self) -> int:
        """World rank of the last."""
        return self.ranks[-1]

    @property
    def next(self) -> int:
        """World rank of the next member; the first follows the last."""
        return self.ranks[(self.index + 1) % self.size]

    @property
    def prev(self) -> int:
        """World rank of the previous member."""
        return self.ranks[self.index - 1]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks; the result is equal to the last bit on all of them."""
        return x if self.size == 1 else collectives.all_reduce(x, self.name)

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return every rank's `x`, of one shape, joined along `dim` in rank order."""
        return x if self.size == 1 else collectives.all_gather(x, dim, self.name)

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's part, along `dim`, of the sum over the ranks; `dim` must divide."""
        return x if self.size == 1 else collectives.reduce_scatter(x, dim, self.name)

    def all_to_all(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """Send `sent[i]` rows of `x` to rank i, in order, and return the rows sent to this rank.

        Args:
            x: `[sum(sent), ...]`.
            received: Rows that come from each rank.
            sent: Rows that go to each rank.

        Returns:
            `[sum(received), ...]`, in rank order.
        """
        if self.size == 1:
            return x
        rows: Tensor = collectives.all_to_all(x, list(received), list(sent), self.name)
        return rows

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Return `x` of the group's `source`-th rank; others pass one of equal shape and dtype."""
        return x if self.size == 1 else collectives.broadcast(x, source, self.name)

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's `values` (equally many), through the metadata group."""
        if self.size == 1:
            return [list(values)]
        if self.shared is not None:
            return self.shared.gather_ints(values)
        mine = torch.tensor(values, dtype=torch.int64)
        found = torch.empty(self.size * len(values), dtype=torch.int64)
        dist.all_gather_single(found, mine, group=self.host)
        rows: list[list[int]] = found.view(self.size, -1).tolist()
        return rows

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.gather_ints([0])

    def close(self) -> None:
        """Leave the group; further calls do nothing. Other ranks need not take part."""
        collectives.forget(self.name)
        if self.shared is not None:
            self.shared.close()
            self.shared = None


@dataclass(frozen=True)
class World:
    """All groups that one rank is in."""

    mesh: Mesh
    groups: dict[Axis, Group]

    @classmethod
    def alone(cls) -> World:
        """A world of one rank, which needs no process group."""
        mesh = Mesh(MeshShape())
        return cls(mesh, {axis: Group((0,), 0) for axis in Axis})

    @property
    def tp(self) -> Group:
        """Ranks that share each matrix."""
        return self.groups[Axis.TP]

    @property
    def pp(self) -> Group:
        """Ranks that share the layers."""
        return self.groups[Axis.PP]

    @property
    def dp(self) -> Group:
        """Ranks that serve different requests with the same part of the model."""
        return self.groups[Axis.DP]

    @property
    def ep(self) -> Group:
        """Ranks that share the experts of a layer."""
        return self.groups[Axis.EP]

    @property
    def all(self) -> Group:
        """Every rank."""
        return self.groups[Axis.WORLD]

    @property
    def engine_rank(self) -> int:
        """This rank's number among those of its engine: stage by stage, TP fastest."""
        return self.pp.index * self.tp.size + self.tp.index

    def gather_engine_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Return the values of every rank of this engine (equally many), by engine rank."""
        stage = [value for row in self.tp.gather_ints(values) for value in row]
        size = len(values)
        return [
            row[start : start + size]
            for row in self.pp.gather_ints(stage)
            for start in range(0, size * self.tp.size, size)
        ]

    def close(self) -> None:
        """Leave the world. Other ranks need not take part."""
        for group in self.groups.values():
            group.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def join(
    mesh: Mesh,
    rendezvous: Rendezvous,
    device: torch.device,
    *,
    use_shared_memory: bool = True,
    sum_ranks: Callable[[Tensor], Tensor] = sum_ranks,
) -> World:
    """Meet the other ranks of `mesh` and form every group.

    One call per process at a time. Waits for all ranks.

    Args:
        use_shared_memory: False: use gloo even between ranks of one host. Equal on all ranks.
        sum_ranks: Adds the values of all ranks that did not come through shared memory.
    """
    if mesh.shape.world_size == 1:
        return World.alone()
    # Gloo would otherwise listen at whatever address the host's name resolves to, which is a
    # loopback address on many machines.
    if rendezvous.host in _LOOPBACK:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    elif (interface := interface_towards(rendezvous.host)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    timeout = timedelta(seconds=_JOIN_TIMEOUT_S)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        rendezvous.host,
        rendezvous.port,
        world_size=mesh.shape.world_size,
        is_master=mesh.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=rendezvous.listen_fd if mesh.rank == 0 else None,
    )
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=mesh.rank, world_size=mesh.shape.world_size, timeout=timeout
    )
    groups: dict[Axis, Group] = {}
    formed: dict[tuple[int, ...], Group] = {}
    for axis in Axis:
        for ranks in mesh.shape.groups(axis):
            # Every rank forms every group, in one order; axes with equal ranks share one.
            if ranks not in formed:
                formed[ranks] = _form(ranks, mesh.rank, device, f"{axis.value}:{ranks[0]}")
            if mesh.rank in ranks:
                groups[axis] = formed[ranks]
    world = World(mesh, groups)
    if use_shared_memory:
        _share(world)
    for group in world.groups.values():
        if group.device is not None and group.host is not None:
            collectives.remember(
                group.name,
                group.ranks,
                device=group.device,
                host=group.host,
                shared=group.shared,
                sum_ranks=sum_ranks,
            )
    return world


def interface_towards(host: str) -> str | None:
    """Return the name of the interface that leads to `host`, or that has this address.

    None if it is unknown (IPv6, no route).
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # finds a route, and sends nothing
            address = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # this one has no address
                    # netdevice(7): a name of 16 bytes, then a sockaddr_in.
                    request = struct.pack("40s", name.encode())
                    answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                    if socket.inet_ntoa(answer[20:24]) == address:
                        return name
    except OSError:
        pass
    return None


def _form(ranks: tuple[int, ...], rank: int, device: torch.device, name: str) -> Group:
    if len(ranks) == 1:
        return Group(ranks, ranks[0])
    host = dist.new_group(list(ranks), backend="gloo")
    tensors = host if device.type == "cpu" else dist.new_group(list(ranks), backend="nccl")
    if rank not in ranks:
        return Group(ranks, ranks[0])
    return Group(ranks, rank, device=tensors, host=host, name=name)


def _share(world: World) -> None:
    groups = {group.name: group for group in world.groups.values() if group.size > 1}
    assert world.all.host is not None
    exchanges = shared_memory.share(
        {name: group.ranks for name, group in groups.items()}, world.mesh.rank, world.all.host
    )
    for name, exchange in exchanges.items():
        groups[name].shared = exchange
