"""A linear layer whose weight is laid out once for the kernels that multiply by it."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.cpu import native


class PackedLinear:
    """``x @ weight.T + bias`` for one weight and many ``x``.

    On a CPU with native kernels the weight is copied into their layout and the caller may drop the
    original; anywhere else it is kept as it is and multiplied by torch. Accumulates in fp32. A
    weight that comes in pieces goes straight to its place: see `reserve`.

    Args:
        weight: ``[N, K]`` in bf16, fp16 or fp32.
        bias: ``[N]``, same dtype, or None.
        out_dtype: Dtype of the results: None for that of ``weight``, or ``torch.float32``.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> None:
        rows, depth = weight.shape
        self._describe(rows, depth, weight.dtype, out_dtype, on_cpu=weight.is_cpu)
        if self._kernels is None:
            self._weight, self._bias = weight, bias
            return
        self._weight = self._kernels.pack(weight)
        self._bias = None if bias is None else bias.float().contiguous()

    @classmethod
    def reserve(
        cls,
        out_features: int,
        in_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        has_bias: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> Self:
        """Allocate a layer whose weight and bias `write` and `write_bias` bring, row by row.

        Args:
            out_features: ``N``.
            in_features: ``K``.
            dtype: Of the weight.
            device: Where it lies.
        """
        layer = cls.__new__(cls)
        layer._describe(out_features, in_features, dtype, out_dtype, on_cpu=device.type == "cpu")
        shape = out_features, in_features
        if layer._kernels is None:
            layer._weight = torch.empty(shape, dtype=dtype, device=device)
        else:
            layer._weight = layer._kernels.packed_memory(*shape, dtype)
        wide = dtype if layer._kernels is None else torch.float32
        layer._bias = torch.empty(out_features, dtype=wide, device=device) if has_bias else None
        return layer

    def _describe(
        self,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None,
        *,
        on_cpu: bool,
    ) -> None:
        self.out_features, self.in_features = out_features, in_features
        self.dtype = dtype
        self.out_dtype = dtype if out_dtype is None else out_dtype
        self._kernels = native.kernels() if on_cpu else None

    def write(self, first: int, weight: Tensor) -> None:
        """Bring rows of the weight.

        Args:
            first: Row of the first of them.
            weight: ``[n, K]``, of any dtype and device, strided or not.
        """
        if self._kernels is None:
            self._weight[first : first + len(weight)] = weight
        else:
            self._kernels.pack_rows(weight.to(self.dtype), self._weight, first)

    def write_bias(self, first: int, bias: Tensor) -> None:
        """Bring elements of the bias from ``first`` on, rounded to the weight's dtype."""
        assert self._bias is not None
        self._bias[first : first + len(bias)] = bias.to(self.dtype)

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

    def rows(self, ids: Tensor, *, first_id: int, num_ids: int) -> Tensor:
        """Take rows of the weight by id, as an embedding does.

        Args:
            ids: ``[T]`` int64.
            first_id: Id of the weight's first row.
            num_ids: Ids that there are, here or elsewhere.

        Returns:
            ``[T, K]`` of the weight's dtype; zeros where the weight has no such row.
        """
        if self._kernels is None:
            return take_rows(self._weight, ids, first_id=first_id, num_ids=num_ids)
        out = torch.empty((len(ids), self.in_features), dtype=self.dtype)
        self._kernels.take_rows(
            ids, self._weight, out, num_cols=self.out_features, first_id=first_id, num_ids=num_ids
        )
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


def take_rows(table: Tensor, ids: Tensor, *, first_id: int, num_ids: int) -> Tensor:
    """Take rows of a plain table; arguments and result as of `PackedLinear.rows`."""
    if len(table) == num_ids:
        return functional.embedding(ids, table)
    if not len(table):
        return table.new_zeros((len(ids), table.shape[1]))
    local = ids - first_id
    elsewhere = (local < 0) | (local >= len(table))
    rows = functional.embedding(local.masked_fill(elsewhere, 0), table)
    return rows.masked_fill_(elsewhere[:, None], 0)
