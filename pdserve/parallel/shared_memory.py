"""Collectives between ranks of one host, on CPU tensors, through shared memory.

Sockets cost a decode step more than its arithmetic, and far more where ranks share cores. Here
a call is some copies and a look at a counter (kernels/cpu/exchange.cpp). `share` finds out
which groups lie on one host; the others, and hosts without a compiler, stay with gloo.

A rank that waits for long sleeps, and raises `PeerLostError` when a rank of its group has ended.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import select
import struct
import time
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from pdserve.errors import InternalError, PeerLostError
from pdserve.kernels.cpu import build
from pdserve.parallel import segments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

_log = logging.getLogger(__name__)

SUMMED = {
    torch.bfloat16: 0,
    torch.float16: 1,
    torch.float32: 2,
    torch.float64: 3,
    torch.int32: 4,
    torch.int64: 5,
}

# Large enough that a piece costs more than meeting, small enough that those of all ranks stay
# in a core's cache: 512 KiB take 1.5 times as long.
_SLOT_BYTES = 128 << 10
# Only touched pages cost memory. A step's activations fit several times.
_RING_BYTES = 64 << 20
_TIMEOUT_S = 600.0
# How long a waiting rank polls before it sleeps, which costs some 50 us more. It yields its core
# meanwhile; where ranks share cores, all but the first poll takes time from others.
_LOOK_NS = 100_000
_LOOK_CROWDED_NS = 20_000
# How soon it is known that a peer has ended.
_SLEEP_NS = 100_000_000

# The structs of exchange.h: P pointer, q int64, i int32.
_GROUP = struct.Struct("@2P4q2i").pack
_ALL_REDUCE = struct.Struct("@3Pq2i").pack
_ALL_GATHER = struct.Struct("@3P2qi").pack
_REDUCE_SCATTER = struct.Struct("@3P2q2i").pack
_BROADCAST = struct.Struct("@3Pq2i").pack
_ALL_TO_ALL = struct.Struct("@5P").pack
_PASS = struct.Struct("@2Pq").pack
_WAITING, _MISMATCH = 1, 2


class _Cursor(ctypes.Structure):
    """Progress of a waiting call."""

    _fields_ = (
        ("begin", ctypes.c_int64),
        ("num_rounds", ctypes.c_int64),
        ("phase", ctypes.c_int32),
        ("is_published", ctypes.c_int32),
        ("is_active", ctypes.c_int32),
        ("is_resumed", ctypes.c_int32),
    )


class SharedExchange:
    """One rank's side of a group's segment.

    Not for several threads at a time. Tensors may have any strides; results are contiguous.
    After an error the group cannot be used any more.

    Args:
        memory: The segment; owned from here on.
        members: Process ids by world rank, ascending.
        index: This rank's index among them.
        is_crowded: Whether ranks must share cores.
        slot_bytes, ring_bytes: As the segment was made with.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        memory: mmap.mmap,
        members: Mapping[int, int],
        index: int,
        *,
        is_crowded: bool,
        slot_bytes: int,
        ring_bytes: int,
    ) -> None:
        self._memory = memory
        self._ranks, self._pids = tuple(members), tuple(members.values())
        self._index, self._size = index, len(members)
        self._poller = select.poll()
        self._peer_of: dict[int, int] = {}
        for peer, pid in enumerate(self._pids):
            if peer != index:
                fd = os.pidfd_open(pid)
                self._peer_of[fd] = peer
                self._poller.register(fd, select.POLLIN)
        self._base = ctypes.c_char.from_buffer(memory)
        self._cursor = _Cursor()
        self._struct = ctypes.create_string_buffer(
            _GROUP(
                ctypes.addressof(self._base),
                ctypes.addressof(self._cursor),
                slot_bytes,
                ring_bytes,
                _LOOK_CROWDED_NS if is_crowded else _LOOK_NS,
                _SLEEP_NS,
                index,
                self._size,
            )
        )
        self._group = ctypes.addressof(self._struct)
        # No argtypes: these take bytes, and a conversion per call is what that avoids.
        self._all_reduce = library.pd_all_reduce
        self._all_gather = library.pd_all_gather
        self._reduce_scatter = library.pd_reduce_scatter
        self._broadcast = library.pd_broadcast
        self._all_to_all = library.pd_all_to_all
        self._send_next = library.pd_send_next
        self._recv_prev = library.pd_recv_prev

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Group.all_reduce`; the dtype is one of `SUMMED`."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._run(
            self._all_reduce,
            _ALL_REDUCE(
                self._group,
                x.data_ptr(),
                out.data_ptr(),
                x.numel(),
                SUMMED[x.dtype],
                torch.get_num_threads(),
            ),
        )
        return out

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """See `Group.all_gather`."""
        x = x.contiguous()
        shape = list(x.shape)
        shape[dim] *= self._size
        out = x.new_empty(shape)
        inner = _inner(x, dim)
        self._run(
            self._all_gather,
            _ALL_GATHER(
                self._group,
                x.data_ptr(),
                out.data_ptr(),
                x.numel() // inner if inner else 0,
                inner * x.element_size(),
                torch.get_num_threads(),
            ),
        )
        return out

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """See `Group.reduce_scatter`; the dtype is one of `SUMMED`."""
        x = x.contiguous()
        shape = list(x.shape)
        shape[dim] //= self._size
        out = x.new_empty(shape)
        inner = _inner(out, dim)
        self._run(
            self._reduce_scatter,
            _REDUCE_SCATTER(
                self._group,
                x.data_ptr(),
                out.data_ptr(),
                out.numel() // inner if inner else 0,
                inner,
                SUMMED[x.dtype],
                torch.get_num_threads(),
            ),
        )
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See `Group.broadcast`."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._run(
            self._broadcast,
            _BROADCAST(
                self._group,
                x.data_ptr(),
                out.data_ptr(),
                x.nbytes,
                source,
                torch.get_num_threads(),
            ),
        )
        return out

    def all_to_all(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """See `Group.all_to_all`.

        Raises:
            InternalError: A peer sends another number of rows than `received` says.
        """
        x = x.contiguous()
        out = x.new_empty((sum(received), *x.shape[1:]))
        row = x.element_size()
        for size in x.shape[1:]:
            row *= size
        amounts = ctypes.c_int64 * self._size
        from_here = amounts(*(num * row for num in sent))
        to_here = amounts(*(num * row for num in received))
        self._run(
            self._all_to_all,
            _ALL_TO_ALL(
                self._group,
                x.data_ptr(),
                out.data_ptr(),
                ctypes.addressof(from_here),
                ctypes.addressof(to_here),
            ),
        )
        return out

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """See `Group.gather_ints`."""
        num = len(values)
        mine = (ctypes.c_int64 * num)(*values)
        found = (ctypes.c_int64 * (num * self._size))()
        self._run(
            self._all_gather,
            _ALL_GATHER(
                self._group, ctypes.addressof(mine), ctypes.addressof(found), 1, 8 * num, 1
            ),
        )
        return [found[rank * num : (rank + 1) * num] for rank in range(self._size)]

    def send_next(self, x: Tensor) -> None:
        """Leave `x` for the next rank; waits only while the ring is full."""
        x = x.contiguous()
        self._run(self._send_next, _PASS(self._group, x.data_ptr(), x.nbytes))

    def recv_prev(self, out: Tensor) -> None:
        """Fill `out`, which is contiguous, with what the previous rank sent."""
        self._run(self._recv_prev, _PASS(self._group, out.data_ptr(), out.nbytes))

    def close(self) -> None:
        """Unmap the segment. The others may still read what was written to it."""
        for fd in self._peer_of:
            os.close(fd)
        del self._base, self._group  # a call from here on is an error, not a wild read
        self._memory.close()

    def _run(self, function: Callable[[bytes], int], call: bytes) -> None:
        status = function(call)
        if status:
            self._go_on(function, call, status)

    def _go_on(self, function: Callable[[bytes], int], call: bytes, status: int) -> None:
        """Resume a call until it is done; Python's signal handlers run in between."""
        began = time.monotonic()
        while status:
            peer, reason = divmod(status, 256)
            if reason == _MISMATCH:
                raise InternalError(
                    f"rank {self._ranks[peer]} does not make the same call as rank"
                    f" {self._ranks[self._index]}, or with other sizes"
                )
            if reason != _WAITING:
                raise InternalError("a collective was left half done, and another one begun")
            ended = [self._peer_of[fd] for fd, _ in self._poller.poll(0)]
            self._cursor.is_resumed = 1
            # Checked before the last try: what a rank wrote before its end still counts.
            status = function(call)
            if status and ended:
                raise PeerLostError(f"{self._name(ended[0])} has ended")
            if status and time.monotonic() - began > _TIMEOUT_S:
                raise PeerLostError(f"{self._name(peer)} did not connect within {_TIMEOUT_S:.0f} s")

    def _name(self, peer: int) -> str:
        return f"rank {self._ranks[peer]} (process {self._pids[peer]})"


def _inner(x: Tensor, dim: int) -> int:
    """Elements of `x` per index of the dims before `dim`."""
    num = 1
    for size in x.shape[dim:]:
        num *= size
    return num


class _Host(msgspec.Struct, frozen=True):
    """Where a rank runs. Ranks of equal `place`s see each other's processes."""

    place: str
    pid: int
    cores: frozenset[int]
    can_share: bool


def share(
    groups: Mapping[str, tuple[int, ...]],
    rank: int,
    world: dist.ProcessGroup,
    *,
    slot_bytes: int = _SLOT_BYTES,
    ring_bytes: int = _RING_BYTES,
) -> dict[str, SharedExchange]:
    """Open segments for those of this rank's groups whose ranks are all on one host.

    Every rank of the world calls it, at the same time.

    Args:
        groups: World ranks, ascending, of each of this rank's groups, by a name that is unique in
            the world.
        world: All ranks, on gloo.
        slot_bytes: Bytes that a rank passes at a time; larger tensors are passed in pieces.
        ring_bytes: Capacity between a sender and a receiver. Both are multiples of 4096.

    Returns:
        Exchanges by group name; all ranks of a group have one, or none.
    """
    library = _load()
    cores = frozenset(os.sched_getaffinity(0))
    host = _Host(segments.place(), os.getpid(), cores, library is not None)
    hosts = segments.gather(host, _Host, world)
    here = [host for host in hosts if host.place == hosts[rank].place]
    is_crowded = len(here) > len(frozenset[int]().union(*(host.cores for host in here)))
    sharing = {
        name: ranks
        for name, ranks in groups.items()
        if all(hosts[r].can_share and hosts[r].place == hosts[rank].place for r in ranks)
    }
    made: dict[str, segments.SharedSegment] = {}
    opened: dict[str, SharedExchange] = {}
    try:
        if library is not None:
            for name, ranks in sharing.items():
                num_bytes = library.pd_segment_bytes(len(ranks), slot_bytes, ring_bytes)
                if ranks[0] == rank and (segment := segments.make(num_bytes)) is not None:
                    made[name] = segment
        announced = segments.gather(made, dict[str, segments.SharedSegment], world)
        for name, ranks in sharing.items():
            memory = segments.open_segment(hosts[ranks[0]].pid, announced[ranks[0]].get(name))
            if library is not None and memory is not None:
                opened[name] = SharedExchange(
                    library,
                    memory,
                    {r: hosts[r].pid for r in ranks},
                    ranks.index(rank),
                    is_crowded=is_crowded,
                    slot_bytes=slot_bytes,
                    ring_bytes=ring_bytes,
                )
        for failed in segments.gather(set(sharing.keys() - opened.keys()), set[str], world):
            for name in failed & opened.keys():
                opened.pop(name).close()
    finally:
        for segment in made.values():
            os.close(segment.fd)
    return opened


def _load() -> ctypes.CDLL | None:
    if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
        return None
    try:
        library = ctypes.CDLL(str(build.library()))
    except (build.BuildError, OSError) as error:
        _log.warning("collectives go through sockets, not shared memory: %s", error)
        return None
    library.pd_segment_bytes.argtypes = (ctypes.c_int32, ctypes.c_int64, ctypes.c_int64)
    library.pd_segment_bytes.restype = ctypes.c_int64
    return library
