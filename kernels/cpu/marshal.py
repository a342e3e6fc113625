"""Helpers for calls into the C++ kernels: dtype codes, cheap checks, statuses.

Shapes are trusted if checking would cost more than the kernel; dtypes and contiguity are checked,
and the kernels refuse positions, slots and blocks that are out of range. A call passes one struct
of ``kernels.h`` as bytes: P pointer, q int64, i int32, f float, in C's alignment. ctypes releases
the GIL meanwhile.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from pdserve.errors import InternalError
from pdserve.kernels.backend import NotTakenError

TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_STATUS = {
    1: "a position is outside the rotary table",
    2: "a slot is outside the cache",
    3: "a block, length, head_dim or block_size is out of range",
    4: "an id is outside the table",
}


def open_library(path: Path) -> ctypes.CDLL:
    """Open a library from `build.library`."""
    library = ctypes.CDLL(str(path))
    # The others take bytes, and a conversion per call is what having no argtypes avoids.
    library.pd_packed_bytes.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int32)
    library.pd_packed_bytes.restype = ctypes.c_int64
    library.pd_compiler.restype = ctypes.c_char_p
    return library


def refused(op: str, status: int) -> InternalError:
    """Return the error for a kernel's status."""
    return InternalError(f"{op}: {_STATUS[status]}")


def type_code(dtype: torch.dtype) -> int:
    """Return the kernels' code of a dtype.

    Raises:
        NotTakenError: They do not support it.
    """
    code = TYPES.get(dtype)
    if code is None:
        raise NotTakenError(f"the CPU kernels take bf16, fp16 and fp32, not {dtype}")
    return code


def same_type(first: Tensor, *others: Tensor) -> int:
    """Return the kernels' code of the one dtype of contiguous tensors.

    Raises:
        NotTakenError: The dtype of the first is not supported.
        TypeError: Dtypes differ, or a tensor is not contiguous.
    """
    dtype = first.dtype
    kind = TYPES.get(dtype)
    if kind is None:
        return type_code(dtype)
    if not first.is_contiguous():
        raise TypeError(f"want contiguous {dtype}, got {first.stride()}")
    for other in others:
        if other.dtype != dtype or not other.is_contiguous():
            raise TypeError(f"want contiguous {dtype}, got {other.dtype} {other.stride()}")
    return kind


def norm_type(dtype: torch.dtype, *weights: Tensor | None) -> int:
    """Return the kernels' code of the dtype of norms' weights: `dtype`, or fp32.

    Raises:
        TypeError: A weight has another dtype, differs from the others, or is not contiguous.
    """
    found = {weight.dtype for weight in weights if weight is not None} or {dtype}
    if len(found) > 1 or not found <= {dtype, torch.float32}:
        raise TypeError(f"want norms of {dtype} or of fp32, got {found}")
    if not all(weight is None or weight.is_contiguous() for weight in weights):
        raise TypeError("want contiguous norms")
    return TYPES[found.pop()]


def check_places(
    kv_layer: Tensor, dtype: torch.dtype, positions: Tensor, slot_mapping: Tensor
) -> None:
    """Raise TypeError where KV, positions or slots are of another dtype than the kernels read."""
    if kv_layer.dtype != dtype:
        raise TypeError(f"cache is {kv_layer.dtype}, want {dtype}")
    if positions.dtype != torch.int64 or slot_mapping.dtype != torch.int64:
        raise TypeError(f"want int64, got {positions.dtype} and {slot_mapping.dtype}")


def sinks_address(sinks: Tensor, num_heads: int) -> int:
    """Return where the sinks of attention lie.

    Raises:
        TypeError: They are not contiguous fp32, one for each head.
    """
    if sinks.dtype != torch.float32 or sinks.shape != (num_heads,) or not sinks.is_contiguous():
        raise TypeError(f"want [{num_heads}] contiguous fp32, got {sinks.shape} {sinks.dtype}")
    return sinks.data_ptr()


def check_requests(
    kv_layer: Tensor,
    dtype: torch.dtype,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
) -> None:
    """Raise TypeError where KV or a step's requests are not as the kernels read them."""
    if kv_layer.dtype != dtype:
        raise TypeError(f"cache is {kv_layer.dtype}, want {dtype}")
    # A view of the first columns of a wider table would be read as other requests' blocks.
    if not block_tables.is_contiguous():
        raise TypeError(f"block_tables is not contiguous: {block_tables.stride()}")
    if (
        block_tables.dtype != torch.int32
        or query_start.dtype != torch.int32
        or context_lens.dtype != torch.int32
    ):
        raise TypeError(
            f"want int32, got {block_tables.dtype}, {query_start.dtype}, {context_lens.dtype}"
        )
