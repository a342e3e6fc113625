"""Products with packed weights: linear layers, the rows of an embedding, one matrix per head."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, get_num_threads

from pdserve.kernels.cpu.marshal import TYPES, refused
from pdserve.kernels.cpu.packing import Packing
from pdserve.kernels.fp8 import Fp8Weight, plain
from pdserve.kernels.reference.linear import PackedLinear
from pdserve.kernels.reference.mla import PackedHeads

_LINEAR = struct.Struct("@4P3q3i").pack
_TAKE_ROWS = struct.Struct("@3P5q2i").pack
_HEAD_LINEAR = struct.Struct("@3P8q2i").pack


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The addresses of a packed weight, whose tensors its `CpuLinear` keeps alive.

    Attributes:
        address: Address of the packed weight.
        bias_address: Address of ``[N]`` fp32, or 0.
        num_cols: N.
    """

    address: int
    bias_address: int
    num_cols: int


class CpuLinear(PackedLinear):
    """A linear layer with a packed weight and a bias in fp32."""

    def __init__(self, packing: Packing, *sizes: int, **fields: Any) -> None:
        self._packing = packing
        self._linear = packing.library.pd_linear
        self._take_rows = packing.library.pd_take_rows
        super().__init__(*sizes, **fields)

    def _allocate(self, device: torch.device, *, has_bias: bool) -> None:
        self._weight = self._packing.memory(self.out_features, self.in_features, self.dtype)
        self._bias = torch.empty(self.out_features, dtype=torch.float32) if has_bias else None

    def write(self, first: int, weight: Tensor | Fp8Weight) -> None:
        """See `PackedLinear.write`."""
        self._packing.pack(plain(weight, self.dtype), self._weight, first)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `PackedLinear.__call__`."""
        self._check(x, out)
        rows, depth = x.shape
        if out is None:
            out = torch.empty((rows, self.out_features), dtype=self.out_dtype)
        self._linear(
            _LINEAR(
                x.data_ptr(),
                self._weight.data_ptr(),
                0 if self._bias is None else self._bias.data_ptr(),
                out.data_ptr(),
                rows,
                self.out_features,
                depth,
                TYPES[self.dtype],
                TYPES[self.out_dtype],
                get_num_threads(),
            )
        )
        return out

    def rows(self, ids: Tensor, *, first_id: int, num_ids: int) -> Tensor:
        """See `PackedLinear.rows`.

        Raises:
            InternalError: An id is not below ``num_ids``.
        """
        if ids.dtype != torch.int64 or not ids.is_contiguous():
            raise TypeError(f"want contiguous int64, got {ids.dtype} {ids.stride()}")
        out = torch.empty((len(ids), self.in_features), dtype=self.dtype)
        status = self._take_rows(
            _TAKE_ROWS(
                ids.data_ptr(),
                self._weight.data_ptr(),
                out.data_ptr(),
                len(ids),
                self.out_features,
                self.in_features,
                first_id,
                num_ids,
                TYPES[self.dtype],
                get_num_threads(),
            )
        )
        if status:
            raise refused("take_rows", status)
        return out

    def unpack(self) -> Tensor:
        """See `PackedLinear.unpack`."""
        return self._packing.unpack(self._weight, self.out_features, self.in_features, self.dtype)

    def packed_weight(self) -> PackedWeight:
        """Return the addresses of the packed weight; valid as long as this object."""
        bias = 0 if self._bias is None else self._bias.data_ptr()
        return PackedWeight(self._weight.data_ptr(), bias, self.out_features)


class CpuHeads(PackedHeads):
    """One packed weight per head, side by side."""

    def __init__(self, packing: Packing, weight: Tensor) -> None:
        self._packing = packing
        self._head_linear = packing.library.pd_head_linear
        super().__init__(weight)

    def _lay_out(self, weight: Tensor) -> None:
        num_heads, num_cols, depth = weight.shape
        each = self._packing.num_bytes(num_cols, depth, weight.dtype)
        self._weight = self._packing.memory_of(num_heads, each)
        for head, packed in enumerate(self._weight):
            self._packing.pack(weight[head], packed)

    def _multiply(self, x: Tensor, out: Tensor) -> None:
        rows, num_heads, depth = x.shape
        if x.stride(2) != 1 or out.stride(2) != 1 or x.dtype != out.dtype:
            raise TypeError(f"got {x.dtype} {x.stride()} for {out.dtype} {out.stride()}")
        self._head_linear(
            _HEAD_LINEAR(
                x.data_ptr(),
                self._weight.data_ptr(),
                out.data_ptr(),
                rows,
                num_heads,
                out.shape[2],
                depth,
                x.stride(0),
                x.stride(1),
                out.stride(0),
                out.stride(1),
                TYPES[x.dtype],
                get_num_threads(),
            )
        )
