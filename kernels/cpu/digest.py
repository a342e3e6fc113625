"""Digests of KV memory."""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from pdserve.kernels.cpu.marshal import refused

_DIGEST = struct.Struct("@5P14q").pack


class DigestOps:
    """Their call into one library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._digest = library.pd_digest

    def kv_digests(
        self, kv: Tensor, spans: Tensor, constants: Tensor, keys: Tensor, num_rows: int
    ) -> Tensor:
        """See ``reference.digest.kv_digests``; on the caller's thread, whatever torch's number.

        Raises:
            InternalError: A span is outside of the memory, the constants or the rows.
        """
        num_blocks, num_layers, num_planes, num_heads, block_size, head_dim = kv.shape
        item = kv.element_size()
        words, odd_bytes = divmod(head_dim * item, 4)
        if odd_bytes or kv.stride(5) != 1 or constants.shape[1] != words:
            raise TypeError(
                f"got vectors of {head_dim} {kv.dtype} {item * kv.stride(5)} bytes apart, and "
                f"{constants.shape[1]} constants for each of their 32-bit words"
            )
        if keys.shape != kv.shape[1:4] or spans.shape[1:] != (5,):
            raise TypeError(f"got keys {keys.shape} and spans {spans.shape} for {kv.shape}")
        wanted = ((spans, torch.int64), (constants, torch.int32), (keys, torch.int64))
        for given, dtype in wanted:
            if given.dtype != dtype or not given.is_contiguous():
                raise TypeError(f"want contiguous {dtype}, got {given.dtype} {given.stride()}")
        out = torch.zeros((num_rows, num_layers, num_heads), dtype=torch.int64)
        status = self._digest(
            _DIGEST(
                kv.data_ptr(),
                spans.data_ptr(),
                constants.data_ptr(),
                keys.data_ptr(),
                out.data_ptr(),
                len(spans),
                len(constants),
                num_rows,
                num_blocks,
                num_layers,
                num_planes,
                num_heads,
                block_size,
                words,
                *(stride * item for stride in kv.stride()[:5]),
            )
        )
        if status:
            raise refused("kv_digests", status)
        return out
