"""One matrix per attention head, laid out once."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kernels.cpu import native
from pdserve.kernels.reference import mla


class PackedHeads:
    """``x[:, h] @ weight[h].T`` for weights that are used often; as `PackedLinear` per head.

    Args:
        weight: ``[H, N, K]`` in bf16, fp16 or fp32.
    """

    def __init__(self, weight: Tensor) -> None:
        self._shape = weight.shape
        self._dtype = weight.dtype
        self._kernels = native.kernels() if weight.is_cpu else None
        if self._kernels is None:
            self._weight = weight
            return
        num_heads, num_cols, depth = weight.shape
        self._weight = self._kernels.packed_heads(num_heads, num_cols, depth, weight.dtype)
        for head, packed in enumerate(self._weight):
            self._kernels.pack_rows(weight[head], packed)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply.

        Args:
            x: ``[T, H, K]`` of the weight's dtype, may be strided over tokens and heads.
            out: ``[T, H, N]`` to write to, may be strided likewise; None allocates it.

        Returns:
            ``[T, H, N]``: ``out`` if that was given.

        Raises:
            TypeError: A shape or dtype is another one, or elements of a head are strided.
        """
        num_heads, num_cols, depth = self._shape
        if x.shape[1:] != (num_heads, depth) or x.dtype != self._dtype:
            raise TypeError(
                f"want [T, {num_heads}, {depth}] {self._dtype}, got {x.shape} {x.dtype}"
            )
        if out is None:
            out = torch.empty((len(x), num_heads, num_cols), dtype=x.dtype, device=x.device)
        elif out.shape != (len(x), num_heads, num_cols):
            raise TypeError(f"want [{len(x)}, {num_heads}, {num_cols}], got {out.shape}")
        if self._kernels is None:
            return out.copy_(mla.head_linear(x, self._weight))
        self._kernels.multiply_heads(x, self._weight, out)
        return out
