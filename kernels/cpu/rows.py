"""Norms and activation on rows that fit the cache."""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor, get_num_threads

from pdserve.kernels.cpu.marshal import norm_type, same_type

_RMS_NORM = struct.Struct("@4P2qf3i").pack
_GATE = struct.Struct("@2P2q3i").pack


class RowOps:
    """Calls of these kernels in one library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._rms_norm = library.pd_rms_norm
        self._gate = library.pd_gate

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``reference.norm.rms_norm``; x is ``[T, D]``."""
        return self._norm(x, 0, weight, eps, same_type(x))

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``reference.norm.add_rms_norm``."""
        kind = same_type(x, residual)
        return self._norm(x, residual.data_ptr(), weight, eps, kind)

    def _norm(self, x: Tensor, residual_at: int, weight: Tensor, eps: float, kind: int) -> Tensor:
        rows, width = x.shape
        out = torch.empty_like(x)
        self._rms_norm(
            _RMS_NORM(
                x.data_ptr(),
                residual_at,
                weight.data_ptr(),
                out.data_ptr(),
                rows,
                width,
                eps,
                kind,
                norm_type(x.dtype, weight),
                get_num_threads(),
            )
        )
        return out

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See ``reference.activation.silu_and_mul``."""
        return self._gated(x, gelu=False)

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        """See ``reference.activation.gelu_and_mul``."""
        return self._gated(x, gelu=True)

    def _gated(self, x: Tensor, *, gelu: bool) -> Tensor:
        rows, both = x.shape
        width = both // 2
        kind = same_type(x)
        out = x.new_empty((rows, width))
        self._gate(_GATE(x.data_ptr(), out.data_ptr(), rows, width, kind, get_num_threads(), gelu))
        return out
