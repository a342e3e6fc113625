"""Calls into the C++ kernels: checks what is cheap to check, allocates results, passes pointers.

Shapes are trusted where checking would cost more than the kernel; dtypes and contiguity are
checked, and the kernels refuse positions, slots and blocks that are out of range. ctypes lets go of
the GIL during each call.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, get_num_threads

from pdserve.errors import InternalError
from pdserve.kernels.cpu import build

_log = logging.getLogger(__name__)

_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_STATUS = {
    1: "a position is outside the rotary table",
    2: "a slot is outside the cache",
    3: "a block, length, head_dim or block_size is out of range",
}
_ALIGNMENT = 64
_CHUNK_BYTES = 64 << 20


def available() -> str | None:
    """Return None if the kernels can be used, else why not (no compiler, or it failed).

    The first call builds and loads them: seconds, where no earlier process has.
    """
    _, reason = _loaded()
    return reason


def kernels() -> NativeKernels | None:
    """Return the kernels for this CPU, or None where they are not `available`."""
    found, _ = _loaded()
    return found


@cache
def _loaded() -> tuple[NativeKernels | None, str | None]:
    try:
        return NativeKernels(build.library()), None
    except (build.BuildError, OSError) as error:
        _log.warning("CPU kernels unavailable, using the slower torch reference: %s", error)
        return None, str(error)


# The structs of kernels.h: P pointer, q int64, i int32, f float, in C's alignment. Packed bytes go
# to C as one pointer.
_LINEAR = struct.Struct("@4P3q3i").pack
_PACK = struct.Struct("@2P2q2i").pack
_RMS_NORM = struct.Struct("@4P2qf2i").pack
_SILU_AND_MUL = struct.Struct("@2P2q2i").pack
_ROPE_AND_CACHE = struct.Struct("@8P9qf2i").pack
_PAGED_ATTENTION = struct.Struct("@6P10qf2i").pack
# Structs of structs; 0P pads the end.
_MLP = struct.Struct("@4P2qf2i4P3q3i2P2q2i4P3q3i0P").pack
_ATTENTION_BLOCK = struct.Struct("@4P2qf2i4P3q3i8P9qf2i6P10qf2i4P3q3i0P").pack


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Where a packed weight lies; its tensors are kept alive by the `PackedLinear` it is of.

    Attributes:
        address: Of the packed weight.
        bias_address: Of ``[N]`` fp32, or 0.
        num_cols: N.
    """

    address: int
    bias_address: int
    num_cols: int


class NativeKernels:
    """The functions of one built library.

    The operations take and return what their references in ``kernels/reference`` do.

    Args:
        path: The shared library, as built by `build.library`.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._packed_bytes = library.pd_packed_bytes
        self._packed_bytes.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int32)
        self._packed_bytes.restype = ctypes.c_int64
        # No argtypes: these take bytes, and a conversion per call is what that avoids.
        self._linear = library.pd_linear
        self._pack = library.pd_pack
        self._unpack = library.pd_unpack
        self._rms_norm = library.pd_rms_norm
        self._silu_and_mul = library.pd_silu_and_mul
        self._rope_and_cache = library.pd_rope_and_cache
        self._paged_attention = library.pd_paged_attention
        self._mlp = library.pd_mlp
        self._attention_block = library.pd_attention_block

    def pack(self, weight: Tensor) -> Tensor:
        """Return ``weight`` ``[N, K]`` in the kernels' layout, an opaque tensor of bytes."""
        num_cols, depth = weight.shape
        kind = _TYPES[weight.dtype]
        source = weight.contiguous()
        packed = _arena.take(self._packed_bytes(num_cols, depth, kind))
        self._pack(
            _PACK(source.data_ptr(), packed.data_ptr(), num_cols, depth, kind, get_num_threads())
        )
        return packed

    def unpack(self, packed: Tensor, num_cols: int, depth: int, dtype: torch.dtype) -> Tensor:
        """Return the weight that `pack` was given."""
        weight = torch.empty(num_cols, depth, dtype=dtype)
        self._unpack(_PACK(weight.data_ptr(), packed.data_ptr(), num_cols, depth, _TYPES[dtype], 1))
        return weight

    def multiply(self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Write ``x @ weight.T + bias`` to ``out``.

        Args:
            x: ``[M, K]``.
            packed: The weight ``[N, K]`` of the dtype of ``x``, from `pack`.
            bias: ``[N]`` fp32, or None.
            out: ``[M, N]``, of the dtype of ``x`` or fp32.
        """
        rows, depth = x.shape
        self._linear(
            _LINEAR(
                x.data_ptr(),
                packed.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
                rows,
                out.shape[1],
                depth,
                _TYPES[x.dtype],
                _TYPES[out.dtype],
                get_num_threads(),
            )
        )

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See ``reference.linear.linear``; packs the weight for this one product."""
        _same_type(x, weight.contiguous())
        out = torch.empty(len(x), len(weight), dtype=x.dtype if out_dtype is None else out_dtype)
        self.multiply(x, self.pack(weight), None if bias is None else bias.float(), out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``reference.norm.rms_norm``; x is ``[T, D]``."""
        rows, width = x.shape
        kind = _same_type(x, weight)
        out = torch.empty_like(x)
        self._rms_norm(
            _RMS_NORM(
                x.data_ptr(),
                0,
                weight.data_ptr(),
                out.data_ptr(),
                rows,
                width,
                eps,
                kind,
                get_num_threads(),
            )
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``reference.norm.add_rms_norm``."""
        rows, width = x.shape
        kind = _same_type(x, residual, weight)
        out = torch.empty_like(x)
        self._rms_norm(
            _RMS_NORM(
                x.data_ptr(),
                residual.data_ptr(),
                weight.data_ptr(),
                out.data_ptr(),
                rows,
                width,
                eps,
                kind,
                get_num_threads(),
            )
        )
        return out

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See ``reference.activation.silu_and_mul``."""
        rows, both = x.shape
        width = both // 2
        kind = _same_type(x)
        out = x.new_empty((rows, width))
        self._silu_and_mul(
            _SILU_AND_MUL(x.data_ptr(), out.data_ptr(), rows, width, kind, get_num_threads())
        )
        return out

    def rope_and_cache(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_layer: Tensor,
        slot_mapping: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """See ``reference.rope.rope_and_cache``."""
        num_blocks, _, num_kv_heads, block_size, head_dim = kv_layer.shape
        rows, width = qkv.shape
        num_heads = width // head_dim - 2 * num_kv_heads
        kind = _same_type(qkv)
        _check_places(kv_layer, qkv.dtype, positions, slot_mapping)
        num_positions, rotary_dim = cos_sin.shape
        out = qkv.new_empty((rows, num_heads, head_dim))
        status = self._rope_and_cache(
            _ROPE_AND_CACHE(
                qkv.data_ptr(),
                positions.data_ptr(),
                cos_sin.data_ptr(),
                kv_layer.data_ptr(),
                slot_mapping.data_ptr(),
                0 if q_norm is None else q_norm.data_ptr(),
                0 if k_norm is None else k_norm.data_ptr(),
                out.data_ptr(),
                kv_layer.stride(0),
                num_blocks,
                num_kv_heads,
                block_size,
                head_dim,
                rows,
                num_heads,
                num_positions,
                rotary_dim,
                eps,
                kind,
                get_num_threads(),
            )
        )
        if status:
            raise InternalError(f"rope_and_cache: {_STATUS[status]}")
        return out

    def paged_attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """See ``reference.attention.paged_attention``."""
        num_blocks, _, num_kv_heads, block_size, head_dim = kv_layer.shape
        rows, num_heads, _ = q.shape
        num_requests, max_blocks = block_tables.shape
        kind = _same_type(q)
        _check_requests(kv_layer, q.dtype, block_tables, query_start, context_lens)
        out = q.new_empty((rows, num_heads * head_dim))
        status = self._paged_attention(
            _PAGED_ATTENTION(
                q.data_ptr(),
                kv_layer.data_ptr(),
                block_tables.data_ptr(),
                query_start.data_ptr(),
                context_lens.data_ptr(),
                out.data_ptr(),
                kv_layer.stride(0),
                num_blocks,
                num_kv_heads,
                block_size,
                head_dim,
                num_requests,
                max_blocks,
                rows,
                num_heads,
                0 if window is None else window,
                scale,
                kind,
                get_num_threads(),
            )
        )
        if status:
            raise InternalError(f"paged_attention: {_STATUS[status]}")
        return out

    def mlp(
        self,
        x: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        gate_up: PackedWeight,
        down: PackedWeight,
    ) -> Tensor:
        """See ``halves.Mlp``."""
        rows, width = residual.shape
        kind = _same_type(residual, norm) if x is None else _same_type(residual, norm, x)
        out = torch.empty_like(residual)
        threads = get_num_threads()
        residual_at = residual.data_ptr()
        inner = gate_up.num_cols // 2
        self._mlp(
            _MLP(
                # PdRmsNorm
                residual_at if x is None else x.data_ptr(),
                0 if x is None else residual_at,
                norm.data_ptr(),
                0,
                rows,
                width,
                eps,
                kind,
                threads,
                # PdLinear
                0,
                gate_up.address,
                gate_up.bias_address,
                0,
                rows,
                gate_up.num_cols,
                width,
                kind,
                kind,
                threads,
                # PdSiluAndMul
                0,
                0,
                rows,
                inner,
                kind,
                threads,
                # PdLinear
                0,
                down.address,
                down.bias_address,
                out.data_ptr(),
                rows,
                width,
                inner,
                kind,
                kind,
                threads,
            )
        )
        return out

    def attention_block(
        self,
        x: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        qkv: PackedWeight,
        out_projection: PackedWeight,
        kv_layer: Tensor,
        *,
        positions: Tensor,
        cos_sin: Tensor,
        slot_mapping: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """See ``halves.Attention``."""
        num_blocks, _, num_kv_heads, block_size, head_dim = kv_layer.shape
        rows, width = residual.shape
        kind = _same_type(residual, norm) if x is None else _same_type(residual, norm, x)
        _check_places(kv_layer, residual.dtype, positions, slot_mapping)
        _check_requests(kv_layer, residual.dtype, block_tables, query_start, context_lens)
        num_heads = qkv.num_cols // head_dim - 2 * num_kv_heads
        num_positions, rotary_dim = cos_sin.shape
        num_requests, max_blocks = block_tables.shape
        out = torch.empty_like(residual)
        threads = get_num_threads()
        residual_at, kv_at, block_stride = (
            residual.data_ptr(),
            kv_layer.data_ptr(),
            kv_layer.stride(0),
        )
        status = self._attention_block(
            _ATTENTION_BLOCK(
                # PdRmsNorm
                residual_at if x is None else x.data_ptr(),
                0 if x is None else residual_at,
                norm.data_ptr(),
                0,
                rows,
                width,
                eps,
                kind,
                threads,
                # PdLinear
                0,
                qkv.address,
                qkv.bias_address,
                0,
                rows,
                qkv.num_cols,
                width,
                kind,
                kind,
                threads,
                # PdRopeAndCache
                0,
                positions.data_ptr(),
                cos_sin.data_ptr(),
                kv_at,
                slot_mapping.data_ptr(),
                0 if q_norm is None else q_norm.data_ptr(),
                0 if k_norm is None else k_norm.data_ptr(),
                0,
                block_stride,
                num_blocks,
                num_kv_heads,
                block_size,
                head_dim,
                rows,
                num_heads,
                num_positions,
                rotary_dim,
                eps,
                kind,
                threads,
                # PdPagedAttention
                0,
                kv_at,
                block_tables.data_ptr(),
                query_start.data_ptr(),
                context_lens.data_ptr(),
                0,
                block_stride,
                num_blocks,
                num_kv_heads,
                block_size,
                head_dim,
                num_requests,
                max_blocks,
                rows,
                num_heads,
                0 if window is None else window,
                scale,
                kind,
                threads,
                # PdLinear
                0,
                out_projection.address,
                out_projection.bias_address,
                out.data_ptr(),
                rows,
                width,
                num_heads * head_dim,
                kind,
                kind,
                threads,
            )
        )
        if status:
            raise InternalError(f"attention: {_STATUS[status]}")
        return out


def _same_type(first: Tensor, *others: Tensor) -> int:
    """Return the kernels' code of the one dtype of contiguous tensors.

    Raises:
        TypeError: A dtype is not supported, or they differ, or a tensor is not contiguous.
    """
    dtype = first.dtype
    kind = _TYPES.get(dtype)
    if kind is None or not first.is_contiguous():
        raise TypeError(f"want contiguous bf16, fp16 or fp32, got {dtype} {first.stride()}")
    for other in others:
        if other.dtype != dtype or not other.is_contiguous():
            raise TypeError(f"want contiguous {dtype}, got {other.dtype} {other.stride()}")
    return kind


def _check_places(
    kv_layer: Tensor, dtype: torch.dtype, positions: Tensor, slot_mapping: Tensor
) -> None:
    if kv_layer.dtype != dtype:
        raise TypeError(f"cache is {kv_layer.dtype}, want {dtype}")
    if positions.dtype != torch.int64 or slot_mapping.dtype != torch.int64:
        raise TypeError(f"want int64, got {positions.dtype} and {slot_mapping.dtype}")


def _check_requests(
    kv_layer: Tensor,
    dtype: torch.dtype,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
) -> None:
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


class _Arena:
    """Hands out bytes from large mappings in huge pages, never taking them back one by one.

    Weights are read front to back once per step. In 4 KiB pages that is a TLB miss per 4 KiB, and
    the hardware prefetcher stops at each page. A mapping is freed when no weight is left in it;
    its untouched end costs no memory.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Return ``num_bytes`` bytes, 64-byte aligned."""
        rounded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if rounded > len(self._chunk):
            mapping = mmap.mmap(-1, max(rounded, _CHUNK_BYTES))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                mapping.madvise(mmap.MADV_HUGEPAGE)
            self._chunk = torch.frombuffer(mapping, dtype=torch.uint8)
        taken, self._chunk = self._chunk[:num_bytes], self._chunk[rounded:]
        return taken


_arena = _Arena()
