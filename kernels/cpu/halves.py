"""The two halves of a dense decoder layer in one call each, which saves Python time."""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor, get_num_threads

from pdserve.kernels.cpu.attention import refusal
from pdserve.kernels.cpu.linear import CpuLinear, PackedWeight
from pdserve.kernels.cpu.marshal import (
    check_places,
    check_requests,
    norm_type,
    refused,
    same_type,
    sinks_address,
    type_code,
)
from pdserve.kernels.gates import Activation
from pdserve.kernels.ops import Ops
from pdserve.kernels.reference.halves import Attention, AttentionWeights, Mlp, MlpWeights
from pdserve.kernels.reference.linear import PackedLinear
from pdserve.kernels.step import StepInputs

# Structs of structs; 0P pads the end.
_MLP = struct.Struct("@4P2qf3i4P3q3i2P2q3i4P3q3i0P").pack
_ATTENTION_BLOCK = struct.Struct("@4P2qf3i4P3q3i8P9qf3i7P12qf2i4P3q3i0P").pack


def make_mlp(library: ctypes.CDLL, ops: Ops, weights: MlpWeights) -> Mlp:
    """Return the feed-forward half, in one call if its matrices are packed for that."""
    gate_up, down = _packed(weights.gate_up), _packed(weights.down)
    if gate_up is None or down is None or weights.norm is None:
        return Mlp(ops, weights)
    return CpuMlp(library, ops, weights, gate_up, down)


def make_attention(library: ctypes.CDLL, ops: Ops, weights: AttentionWeights) -> Attention:
    """Return the attention half, in one call if its matrices are packed for that."""
    qkv, out = _packed(weights.qkv), _packed(weights.out)
    is_usual = weights.norm is not None and weights.between is None and weights.q_scale is None
    if qkv is None or out is None or not is_usual:
        return Attention(ops, weights)
    return CpuAttention(library, ops, weights, qkv, out)


def _packed(layer: PackedLinear) -> PackedWeight | None:
    if isinstance(layer, CpuLinear) and layer.out_dtype == layer.dtype:
        return layer.packed_weight()
    return None


class CpuMlp(Mlp):
    """The feed-forward half, in one call."""

    def __init__(
        self,
        library: ctypes.CDLL,
        ops: Ops,
        weights: MlpWeights,
        gate_up: PackedWeight,
        down: PackedWeight,
    ) -> None:
        super().__init__(ops, weights)
        self._call = library.pd_mlp
        assert weights.norm is not None
        self._norm, self._eps = weights.norm, weights.eps
        self._kind = type_code(weights.gate_up.dtype)
        self._norm_kind = norm_type(weights.gate_up.dtype, weights.norm)
        self._gate_up, self._down = gate_up, down
        self._is_gelu = weights.gate is Activation.GELU_TANH

    def __call__(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """See `Mlp.__call__`."""
        rows, width = residual.shape
        norm, gate_up, down = self._norm, self._gate_up, self._down
        kind = same_type(residual) if x is None else same_type(residual, x)
        if kind != self._kind:
            raise TypeError(f"the weights are of another dtype than {residual.dtype}")
        out = torch.empty_like(residual)
        threads = get_num_threads()
        residual_at = residual.data_ptr()
        inner = gate_up.num_cols // 2
        self._call(
            _MLP(
                # PdRmsNorm
                residual_at if x is None else x.data_ptr(),
                0 if x is None else residual_at,
                norm.data_ptr(),
                0,
                rows,
                width,
                self._eps,
                kind,
                self._norm_kind,
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
                # PdGate
                0,
                0,
                rows,
                inner,
                kind,
                threads,
                self._is_gelu,
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


class CpuAttention(Attention):
    """The attention half, in one call."""

    def __init__(
        self,
        library: ctypes.CDLL,
        ops: Ops,
        weights: AttentionWeights,
        qkv: PackedWeight,
        out: PackedWeight,
    ) -> None:
        super().__init__(ops, weights)
        self._call = library.pd_attention_block
        assert weights.norm is not None
        self._norm, self._qkv, self._out = weights.norm, qkv, out
        dtype = weights.qkv.dtype
        self._kind = type_code(dtype)
        self._norm_kinds = (
            norm_type(dtype, weights.norm),
            norm_type(dtype, weights.q_norm, weights.k_norm),
        )
        self._takes_kv: bool | None = None  # told by the first call
        self._window, sinks = weights.form.window or 0, weights.form.sinks
        self._sinks_at = 0 if sinks is None else sinks_address(sinks, len(sinks))

    def __call__(
        self, x: Tensor | None, residual: Tensor, kv_layer: Tensor, step: StepInputs
    ) -> Tensor:
        """See `Attention.__call__`."""
        num_blocks, _, num_kv_heads, block_size, head_dim = kv_layer.shape
        rows, width = residual.shape
        if self._takes_kv is None:
            self._takes_kv = refusal(head_dim, head_dim, block_size) is None
        if not self._takes_kv:
            return super().__call__(x, residual, kv_layer, step)
        weights, qkv, out_projection = self._weights, self._qkv, self._out
        norm, q_norm, k_norm = self._norm, weights.q_norm, weights.k_norm
        cos_sin = weights.cos_sin
        positions, slot_mapping = step.positions, step.slot_mapping
        block_tables, query_start, context_lens = (
            step.block_tables,
            step.query_start,
            step.context_lens,
        )
        kind = same_type(residual) if x is None else same_type(residual, x)
        if kind != self._kind:
            raise TypeError(f"the weights are of another dtype than {residual.dtype}")
        check_places(kv_layer, residual.dtype, positions, slot_mapping)
        check_requests(kv_layer, residual.dtype, block_tables, query_start, context_lens)
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
        status = self._call(
            _ATTENTION_BLOCK(
                # PdRmsNorm
                residual_at if x is None else x.data_ptr(),
                0 if x is None else residual_at,
                norm.data_ptr(),
                0,
                rows,
                width,
                weights.eps,
                kind,
                self._norm_kinds[0],
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
                weights.eps,
                kind,
                self._norm_kinds[1],
                threads,
                # PdPagedAttention
                0,
                kv_at,
                block_tables.data_ptr(),
                query_start.data_ptr(),
                context_lens.data_ptr(),
                self._sinks_at,
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
                self._window,
                head_dim,
                num_kv_heads * block_size * head_dim,
                weights.scale,
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
            raise refused("attention", status)
        return out
