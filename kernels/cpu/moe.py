"""The router and the experts of a mixture-of-experts layer."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch
from torch import Tensor, get_num_threads

from pdserve.kernels.cpu.marshal import refused, same_type
from pdserve.kernels.cpu.packing import Packing, aligned
from pdserve.kernels.fp8 import Fp8Weight, plain
from pdserve.kernels.reference.moe import PackedExperts, RoutingRule

_ROUTE = struct.Struct("@4P5qf4i").pack
_EXPERTS = struct.Struct("@5P8q2f2i").pack


class RouterOps:
    """The router's call into one library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._route = library.pd_route

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


class CpuExperts(PackedExperts):
    """Experts of packed weights; ``gate_up``, ``down`` and fp32 biases lie in this order."""

    def __init__(self, packing: Packing, *sizes: int, **fields: Any) -> None:
        self._packing = packing
        self._experts = packing.library.pd_experts
        super().__init__(*sizes, **fields)

    def _allocate(self, num_experts: int, device: torch.device) -> None:
        width, inner, dtype = self._width, self._inner, self._dtype
        self._down_at = aligned(self._packing.num_bytes(2 * inner, width, dtype))
        end = aligned(self._down_at + self._packing.num_bytes(width, inner, dtype))
        self._bias_at = end if self._form.has_bias else 0
        each = aligned(end + 4 * (2 * inner + width)) if self._form.has_bias else end
        self._bytes = self._packing.memory_of(num_experts, each)

    def write_down(self, local: int, weight: Tensor | Fp8Weight) -> None:
        """See `PackedExperts.write_down`."""
        self._packing.pack(plain(weight, self._dtype), self._bytes[local, self._down_at :])

    def _write_bias(self, local: int, first: int, bias: Tensor) -> None:
        assert self._form.has_bias
        biases = self._bytes[local, self._bias_at :].view(torch.float32)
        biases[first : first + len(bias)] = bias.to(self._dtype)

    def _write_gate_up(self, local: int, first: int, weight: Tensor | Fp8Weight) -> None:
        self._packing.pack(plain(weight, self._dtype), self._bytes[local], first)

    def __call__(self, x: Tensor, local_ids: Tensor, weights: Tensor) -> Tensor:
        """See `PackedExperts.__call__`."""
        rows, width = x.shape
        kind = same_type(x)
        if local_ids.dtype != torch.int64 or weights.dtype != torch.float32:
            raise TypeError(f"want int64 and fp32, got {local_ids.dtype} and {weights.dtype}")
        if not (local_ids.is_contiguous() and weights.is_contiguous()):
            raise TypeError(f"want contiguous, got {local_ids.stride()} and {weights.stride()}")
        out = torch.empty_like(x)
        num_experts, expert_bytes = self._bytes.shape
        glu = self._form.glu
        status = self._experts(
            _EXPERTS(
                x.data_ptr(),
                local_ids.data_ptr(),
                weights.data_ptr(),
                self._bytes.data_ptr(),
                out.data_ptr(),
                rows,
                local_ids.shape[1],
                num_experts,
                width,
                self._inner,
                expert_bytes,
                self._down_at,
                self._bias_at,
                0.0 if glu is None else glu.alpha,
                0.0 if glu is None else glu.limit,
                kind,
                get_num_threads(),
            )
        )
        if status:
            raise refused("experts", status)
        return out
