"""Packs weights into the layout of the C++ products, and owns their memory."""

from __future__ import annotations

import ctypes
import mmap
import struct

import torch
from torch import Tensor, get_num_threads

from pdserve.kernels.cpu.marshal import TYPES, type_code

_ALIGNMENT = 64
_CHUNK_BYTES = 64 << 20

_PACK = struct.Struct("@2P4q2i").pack


def aligned(num_bytes: int) -> int:
    """Round up to where the next packed weight may begin."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class Packing:
    """Packs and unpacks weights with one library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._packed_bytes = library.pd_packed_bytes
        self._pack = library.pd_pack
        self._unpack = library.pd_unpack

    def num_bytes(self, num_cols: int, depth: int, dtype: torch.dtype) -> int:
        """Return the size of a packed weight ``[num_cols, depth]``.

        Raises:
            NotTakenError: The kernels do not have the dtype.
        """
        return int(self._packed_bytes(num_cols, depth, type_code(dtype)))

    def memory(self, num_cols: int, depth: int, dtype: torch.dtype) -> Tensor:
        """Return a packed weight ``[num_cols, depth]`` of zeros, an opaque tensor of bytes."""
        return _arena.take(self.num_bytes(num_cols, depth, dtype))

    def memory_of(self, count: int, num_bytes: int) -> Tensor:
        """Return zeros, ``[count, num_bytes]`` uint8, for packed weights side by side."""
        return _arena.take(count * num_bytes).view(count, num_bytes)

    def pack(self, weight: Tensor, packed: Tensor, first: int = 0) -> None:
        """Write ``weight`` ``[N, K]`` to rows ``first`` to ``first + N`` of a packed weight.

        Args:
            weight: Its rows need not be contiguous, as in a slice of columns.
            packed: Of `memory`, with ``K`` columns and at least as many rows; its other rows are
                left as they are.
        """
        rows, depth = weight.shape
        source = weight if weight.stride(1) == 1 else weight.contiguous()
        self._pack(
            _PACK(
                source.data_ptr(),
                packed.data_ptr(),
                source.stride(0),
                rows,
                depth,
                first,
                TYPES[weight.dtype],
                get_num_threads(),
            )
        )

    def unpack(self, packed: Tensor, num_cols: int, depth: int, dtype: torch.dtype) -> Tensor:
        """Return the weight ``[num_cols, depth]`` that was packed."""
        weight = torch.empty(num_cols, depth, dtype=dtype)
        self._unpack(
            _PACK(weight.data_ptr(), packed.data_ptr(), depth, num_cols, depth, 0, TYPES[dtype], 1)
        )
        return weight


class _Arena:
    """Allocates bytes from large mappings in huge pages, and never frees them one by one.

    Each step reads the weights once from front to back. With 4 KiB pages that is a TLB miss per 4
    KiB, and the hardware prefetcher stops at each page. A mapping is freed when no weight in it is
    left; its untouched end uses no memory.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Return ``num_bytes`` zero bytes, 64-byte aligned."""
        rounded = aligned(num_bytes)
        if rounded > len(self._chunk):
            # Private: shared memory has huge pages only where the machine was told so.
            mapping = mmap.mmap(
                -1, max(rounded, _CHUNK_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            if hasattr(mmap, "MADV_HUGEPAGE"):
                mapping.madvise(mmap.MADV_HUGEPAGE)
            self._chunk = torch.frombuffer(mapping, dtype=torch.uint8)
        taken, self._chunk = self._chunk[:num_bytes], self._chunk[rounded:]
        return taken


_arena = _Arena()
