"""Shared memory between ranks of one host: one makes it, the others open it through /proc.

A segment has no name: it is a memfd, so the kernel frees it with its last rank, however that ends.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_TOKEN_BYTES = 16


def place() -> str:
    """Return a name that ranks share if they see each other's processes: host, pid namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"alone:{secrets.token_hex(8)}"


class SharedSegment(msgspec.Struct, frozen=True):
    """A memfd, as open in its maker: a token at its beginning, then zeros."""

    fd: int
    num_bytes: int
    token: bytes


def make(num_bytes: int) -> SharedSegment | None:
    """Make a segment; None if its size is 0, or no descriptors are left."""
    if num_bytes == 0:
        return None
    try:
        fd = os.memfd_create("pdserve-exchange", os.MFD_CLOEXEC)
    except OSError as error:
        _log.warning("no memory to share with other ranks: %s", error)
        return None
    token = secrets.token_bytes(_TOKEN_BYTES)
    os.ftruncate(fd, num_bytes)
    os.pwrite(fd, token, 0)
    return SharedSegment(fd, num_bytes, token)


def open_segment(pid: int, segment: SharedSegment | None) -> mmap.mmap | None:
    """Map a segment of process `pid`; None if there is none, or it cannot be opened from here."""
    if segment is None:
        return None
    try:
        fd = os.open(f"/proc/{pid}/fd/{segment.fd}", os.O_RDWR | os.O_NONBLOCK)
        try:
            memory = mmap.mmap(fd, segment.num_bytes)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        _log.warning("cannot share memory with process %d: %s", pid, error)
        return None
    if memory[:_TOKEN_BYTES] != segment.token:
        memory.close()
        return None
    return memory


def gather(value: _T, kind: type[_T], world: dist.ProcessGroup) -> list[_T]:
    """Return every rank's `value`, in rank order; sent as msgpack, because unpickling can run code.

    Raises:
        msgspec.DecodeError: A rank sent something else.
    """
    mine = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
    num_ranks = dist.get_world_size(world)
    sizes = torch.empty(num_ranks, dtype=torch.int64)
    dist.all_gather_single(sizes, torch.tensor([len(mine)]), group=world)
    num_bytes = int(sizes.max())
    padded = torch.zeros(num_bytes, dtype=torch.uint8)
    padded[: len(mine)] = mine
    found = torch.empty(num_ranks * num_bytes, dtype=torch.uint8)
    dist.all_gather_single(found, padded, group=world)
    return [
        msgspec.msgpack.decode(row[:size].numpy().tobytes(), type=kind)
        for row, size in zip(found.view(num_ranks, -1), sizes.tolist(), strict=True)
    ]
