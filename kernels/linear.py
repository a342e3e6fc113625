"""A linear layer whose weight is laid out once for the kernels that multiply by it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.cpu import native


class PackedLinear:
    """``x @ weight.T + bias`` for one weight and many ``x``.

    On a CPU with native kernels the weight is copied into their layout and the caller may drop the
    original; anywhere else it is kept as it is and multiplied by torch. Accumulates in fp32.

    Args:
        weight: ``[N, K]`` in bf16, fp16 or fp32.
        bias: ``[N]``, same dtype, or None.
        out_dtype: Dtype of the results: None for that of ``weight``, or ``torch.float32``.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.out_dtype = weight.dtype if out_dtype is None else out_dtype
        self._kernels = native.kernels() if weight.is_cpu else None
        if self._kernels is None:
            self._weight, self._bias = weight, bias
            return
        self._weight = self._kernels.pack(weight)
        self._bias = None if bias is None else bias.float().contiguous()

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply.

        Args:
            x: ``[M, K]``, contiguous, of the weight's dtype.
            out: ``[M, N]`` of ``out_dtype`` to write to, contiguous; None allocates it.

        Returns:
            ``[M, N]`` of ``out_dtype``: ``out`` if that was given.

        Raises:
            TypeError: A shape or dtype is another one, or a tensor is not contiguous.
        """
        rows, depth = x.shape
        if depth != self.in_features or x.dtype != self.dtype or not x.is_contiguous():
            raise TypeError(f"want [M, {self.in_features}] {self.dtype}, got {x.shape} {x.dtype}")
        if self._kernels is None:
            product = functional.linear(x, self._weight, self._bias)
            return product.to(self.out_dtype) if out is None else out.copy_(product)
        if out is None:
            out = torch.empty((rows, self.out_features), dtype=self.out_dtype)
        elif out.shape != (rows, self.out_features) or out.dtype != self.out_dtype:
            raise TypeError(f"out is {out.shape} {out.dtype}")
        elif not out.is_contiguous():
            raise TypeError("out is not contiguous")
        self._kernels.multiply(x, self._weight, self._bias, out)
        return out

    def unpack(self) -> Tensor:
        """Return the weight, ``[N, K]``, in its own dtype."""
        if self._kernels is None:
            return self._weight
        return self._kernels.unpack(self._weight, self.out_features, self.in_features, self.dtype)

    def packed_weight(self) -> native.PackedWeight | None:
        """Return where the packed weight lies, or None if it is not packed.

        Only for a result of the weight's own dtype. Valid as long as this object.
        """
        if self._kernels is None or self.out_dtype != self.dtype:
            return None
        bias = 0 if self._bias is None else self._bias.data_ptr()
        return native.PackedWeight(self._weight.data_ptr(), bias, self.out_features)
