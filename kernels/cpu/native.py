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
from typing import TYPE_CHECKING

import torch
from torch import Tensor, get_num_threads

from pdserve.errors import InternalError
from pdserve.kernels.cpu import build

if TYPE_CHECKING:
    from pdserve.kernels.moe import RoutingRule

_log = logging.getLogger(__name__)

_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_STATUS = {
    1: "a position is outside the rotary table",
    2: "a slot is outside the cache",
    3: "a block, length, head_dim or block_size is out of range",
    4: "an id is outside the table",
}
_ALIGNMENT = 64
_CHUNK_BYTES = 64 << 20
# What attention.cpp takes.
_LANES = 16
_MAX_HEAD_DIM = 1024
_TILE = 64


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
def takes_attention(head_dim: int, value_dim: int, block_size: int) -> bool:
    """Whether the attention kernels take these sizes; says once if they do not."""
    widths = (head_dim, value_dim)
    takes = (
        all(width % _LANES == 0 for width in widths)
        and max(widths) <= _MAX_HEAD_DIM
        and _TILE % block_size == 0
    )
    if not takes:
        _log.warning(
            "attention runs as the slower torch reference: the CPU kernels take heads of multiples "
            "of %d up to %d and blocks of at most %d tokens, not heads of %d (values %d) and "
            "blocks of %d",
            *(_LANES, _MAX_HEAD_DIM, _TILE),
            *(head_dim, value_dim, block_size),
        )
    return takes


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
_PACK = struct.Struct("@2P4q2i").pack
_TAKE_ROWS = struct.Struct("@3P5q2i").pack
_RMS_NORM = struct.Struct("@4P2qf2i").pack
_SILU_AND_MUL = struct.Struct("@2P2q2i").pack
_ROPE_AND_CACHE = struct.Struct("@8P9qf2i").pack
_PAGED_ATTENTION = struct.Struct("@6P12qf2i").pack
_HEAD_LINEAR = struct.Struct("@3P8q2i").pack
_ROPE_AND_LATENT = struct.Struct("@8P9qf2i").pack
_ROUTE = struct.Struct("@4P5qf4i").pack
_EXPERTS = struct.Struct("@5P7q2i").pack
_DIGEST = struct.Struct("@5P14q").pack
# Structs of structs; 0P pads the end.
_MLP = struct.Struct("@4P2qf2i4P3q3i2P2q2i4P3q3i0P").pack
_ATTENTION_BLOCK = struct.Struct("@4P2qf2i4P3q3i8P9qf2i6P12qf2i4P3q3i0P").pack


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
        self._has_tiles = library.pd_has_tiles
        # No argtypes: these take bytes, and a conversion per call is what that avoids.
        self._linear = library.pd_linear
        self._pack = library.pd_pack
        self._unpack = library.pd_unpack
        self._take_rows = library.pd_take_rows
        self._rms_norm = library.pd_rms_norm
        self._silu_and_mul = library.pd_silu_and_mul
        self._rope_and_cache = library.pd_rope_and_cache
        self._paged_attention = library.pd_paged_attention
        self._mlp = library.pd_mlp
        self._attention_block = library.pd_attention_block
        self._head_linear = library.pd_head_linear
        self._rope_and_latent = library.pd_rope_and_latent
        self._route = library.pd_route
        self._experts = library.pd_experts
        self._digest = library.pd_digest

    def has_tiles(self) -> bool:
        """Return whether this process computes products of bf16 on the CPU's matrix unit (AMX)."""
        return bool(self._has_tiles())

    def packed_memory(self, num_cols: int, depth: int, dtype: torch.dtype) -> Tensor:
        """Return a packed weight ``[num_cols, depth]`` of zeros, an opaque tensor of bytes."""
        return _arena.take(self._packed_bytes(num_cols, depth, _TYPES[dtype]))

    def pack(self, weight: Tensor) -> Tensor:
        """Return ``weight`` ``[N, K]`` in the kernels' layout, an opaque tensor of bytes."""
        rows, depth = weight.shape
        packed = self.packed_memory(rows, depth, weight.dtype)
        self.pack_rows(weight, packed)
        return packed

    def pack_rows(self, weight: Tensor, packed: Tensor, first: int = 0) -> None:
        """Write ``weight`` ``[N, K]`` to rows ``first`` to ``first + N`` of a packed weight.

        Args:
            weight: Its rows may be apart, as those of a slice of columns are.
            packed: From `packed_memory`, with ``K`` columns and at least as many rows; its other
                rows are left as they are.
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
                _TYPES[weight.dtype],
                get_num_threads(),
            )
        )

    def unpack(self, packed: Tensor, num_cols: int, depth: int, dtype: torch.dtype) -> Tensor:
        """Return the weight that `pack` was given."""
        weight = torch.empty(num_cols, depth, dtype=dtype)
        self._unpack(
            _PACK(weight.data_ptr(), packed.data_ptr(), depth, num_cols, depth, 0, _TYPES[dtype], 1)
        )
        return weight

    def take_rows(
        self,
        ids: Tensor,
        packed: Tensor,
        out: Tensor,
        *,
        num_cols: int,
        first_id: int,
        num_ids: int,
    ) -> None:
        """Write row ``ids[i] - first_id`` of a packed weight to ``out[i]``.

        Args:
            ids: ``[T]`` int64.
            packed: The weight ``[num_cols, K]`` of the dtype of ``out``.
            out: ``[T, K]``, contiguous; zeros where the weight has no such row.
            num_cols: Rows of the weight.
            first_id: Id of its first.
            num_ids: Ids that there are, here or elsewhere.

        Raises:
            InternalError: An id is not below ``num_ids``.
        """
        rows, depth = out.shape
        if ids.dtype != torch.int64 or not ids.is_contiguous():
            raise TypeError(f"want contiguous int64, got {ids.dtype} {ids.stride()}")
        status = self._take_rows(
            _TAKE_ROWS(
                ids.data_ptr(),
                packed.data_ptr(),
                out.data_ptr(),
                rows,
                num_cols,
                depth,
                first_id,
                num_ids,
                _same_type(out),
                get_num_threads(),
            )
        )
        if status:
            raise InternalError(f"take_rows: {_STATUS[status]}")

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
                head_dim,
                num_kv_heads * block_size * head_dim,
                scale,
                kind,
                get_num_threads(),
            )
        )
        if status:
            raise InternalError(f"paged_attention: {_STATUS[status]}")
        return out

    def latent_attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        scale: float,
        latent_dim: int,
    ) -> Tensor:
        """See ``reference.mla.latent_attention``."""
        num_blocks, _, _, block_size, head_dim = kv_layer.shape
        rows, num_heads, _ = q.shape
        num_requests, max_blocks = block_tables.shape
        kind = _same_type(q)
        _check_requests(kv_layer, q.dtype, block_tables, query_start, context_lens)
        out = q.new_empty((rows, num_heads, latent_dim))
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
                1,
                block_size,
                head_dim,
                num_requests,
                max_blocks,
                rows,
                num_heads,
                0,
                latent_dim,
                0,
                scale,
                kind,
                get_num_threads(),
            )
        )
        if status:
            raise InternalError(f"latent_attention: {_STATUS[status]}")
        return out

    def rope_and_latent(
        self,
        q: Tensor,
        queries: Tensor,
        latent: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_layer: Tensor,
        slot_mapping: Tensor,
        norm: Tensor,
        eps: float,
    ) -> Tensor:
        """See ``reference.mla.rope_and_latent``."""
        num_blocks, _, _, block_size, width = kv_layer.shape
        rows, num_heads, head_dim = q.shape
        kind = _same_type(q, queries, latent, norm)
        _check_places(kv_layer, q.dtype, positions, slot_mapping)
        num_positions, rotary_dim = cos_sin.shape
        status = self._rope_and_latent(
            _ROPE_AND_LATENT(
                q.data_ptr(),
                queries.data_ptr(),
                latent.data_ptr(),
                positions.data_ptr(),
                cos_sin.data_ptr(),
                kv_layer.data_ptr(),
                slot_mapping.data_ptr(),
                norm.data_ptr(),
                kv_layer.stride(0),
                num_blocks,
                block_size,
                width - rotary_dim,
                rotary_dim,
                rows,
                num_heads,
                head_dim,
                num_positions,
                eps,
                kind,
                get_num_threads(),
            )
        )
        if status:
            raise InternalError(f"rope_and_latent: {_STATUS[status]}")
        return queries

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """See ``reference.mla.head_linear``; packs the weight for this one product."""
        num_heads, num_cols, depth = weight.shape
        packed = self.packed_heads(num_heads, num_cols, depth, weight.dtype)
        for head in range(num_heads):
            self.pack_rows(weight[head], packed[head])
        out = x.new_empty((len(x), num_heads, num_cols))
        self.multiply_heads(x, packed, out)
        return out

    def packed_heads(self, num_heads: int, num_cols: int, depth: int, dtype: torch.dtype) -> Tensor:
        """Return packed weights ``[num_cols, depth]`` of zeros, one per head: ``[H, bytes]``."""
        each = self._packed_bytes(num_cols, depth, _TYPES[dtype])
        return _arena.take(num_heads * each).view(num_heads, each)

    def multiply_heads(self, x: Tensor, packed: Tensor, out: Tensor) -> None:
        """Write ``x[:, h] @ weight[h].T`` to ``out[:, h]``.

        Args:
            x: ``[M, H, K]``, rows of the last dim contiguous.
            packed: The weights ``[H, N, K]`` of the dtype of ``x``, in `packed_heads`.
            out: ``[M, H, N]``, of that dtype too, rows of the last dim contiguous.
        """
        rows, num_heads, depth = x.shape
        if x.stride(2) != 1 or out.stride(2) != 1 or x.dtype != out.dtype:
            raise TypeError(f"got {x.dtype} {x.stride()} for {out.dtype} {out.stride()}")
        self._head_linear(
            _HEAD_LINEAR(
                x.data_ptr(),
                packed.data_ptr(),
                out.data_ptr(),
                rows,
                num_heads,
                out.shape[2],
                depth,
                x.stride(0),
                x.stride(1),
                out.stride(0),
                out.stride(1),
                _TYPES[x.dtype],
                get_num_threads(),
            )
        )

    def route(
        self, logits: Tensor, bias: Tensor | None, rule: RoutingRule
    ) -> tuple[Tensor, Tensor]:
        """See ``reference.moe.route``."""
        rows, num_experts = logits.shape
        for given in (logits,) if bias is None else (logits, bias):
            if given.dtype != torch.float32 or not given.is_contiguous():
                raise TypeError(f"want contiguous fp32, got {given.dtype} {given.stride()}")
        ids = torch.empty((rows, rule.top_k), dtype=torch.int64)
        weights = torch.empty((rows, rule.top_k), dtype=torch.float32)
        self._route(
            _ROUTE(
                logits.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                ids.data_ptr(),
                weights.data_ptr(),
                rows,
                num_experts,
                rule.top_k,
                rule.num_groups,
                rule.top_k_groups,
                rule.scale,
                rule.sigmoid,
                rule.normalize,
                rule.rank_groups_by_two,
                get_num_threads(),
            )
        )
        return ids, weights

    def experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """See ``reference.moe.experts``; packs the weights for this one call."""
        num_experts, width, inner = down.shape
        packed = self.packed_experts(num_experts, width, inner, x.dtype)
        for expert in range(num_experts):
            self.pack_rows(gate_up[expert], packed[expert])
            self.pack_rows(down[expert], packed[expert, self.down_at(width, inner, x.dtype) :])
        return self.run_experts(x, ids, weights, packed, inner)

    def packed_experts(
        self, num_experts: int, width: int, inner: int, dtype: torch.dtype
    ) -> Tensor:
        """Return experts of zeros, ``[num_experts, bytes]``.

        Of each, ``gate_up`` ``[2 * inner, width]`` is packed at the start, and ``down`` ``[width,
        inner]`` at `down_at`.
        """
        down_bytes = self._packed_bytes(width, inner, _TYPES[dtype])
        each = _aligned(self.down_at(width, inner, dtype) + down_bytes)
        return _arena.take(num_experts * each).view(num_experts, each)

    def down_at(self, width: int, inner: int, dtype: torch.dtype) -> int:
        """Where ``down`` begins within a packed expert, in bytes."""
        return _aligned(self._packed_bytes(2 * inner, width, _TYPES[dtype]))

    def run_experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, packed: Tensor, inner: int
    ) -> Tensor:
        """See ``reference.moe.experts``.

        Args:
            packed: From `packed_experts`.
            inner: Intermediate size of an expert.
        """
        rows, width = x.shape
        kind = _same_type(x)
        if ids.dtype != torch.int64 or weights.dtype != torch.float32:
            raise TypeError(f"want int64 and fp32, got {ids.dtype} and {weights.dtype}")
        if not (ids.is_contiguous() and weights.is_contiguous()):
            raise TypeError(f"want contiguous, got {ids.stride()} and {weights.stride()}")
        out = torch.empty_like(x)
        num_experts, expert_bytes = packed.shape
        status = self._experts(
            _EXPERTS(
                x.data_ptr(),
                ids.data_ptr(),
                weights.data_ptr(),
                packed.data_ptr(),
                out.data_ptr(),
                rows,
                ids.shape[1],
                num_experts,
                width,
                inner,
                expert_bytes,
                self.down_at(width, inner, x.dtype),
                kind,
                get_num_threads(),
            )
        )
        if status:
            raise InternalError(f"experts: {_STATUS[status]}")
        return out

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
            raise InternalError(f"kv_digests: {_STATUS[status]}")
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
                head_dim,
                num_kv_heads * block_size * head_dim,
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


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class _Arena:
    """Hands out bytes from large mappings in huge pages, never taking them back one by one.

    Weights are read front to back once per step. In 4 KiB pages that is a TLB miss per 4 KiB, and
    the hardware prefetcher stops at each page. A mapping is freed when no weight is left in it;
    its untouched end costs no memory.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Return ``num_bytes`` zero bytes, 64-byte aligned."""
        rounded = _aligned(num_bytes)
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
