"""Reference matrix product with a transposed weight, and a layer that keeps one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.fp8 import Fp8Weight, plain


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Multiply rows by a weight: ``x @ weight.T + bias``, accumulated in fp32, rounded once.

    Args:
        x: ``[M, K]``.
        weight: ``[N, K]``, same dtype as ``x``.
        bias: ``[N]`` or None.
        out_dtype: Dtype of the result; None means that of ``x``.

    Returns:
        ``[M, N]``.
    """
    product = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return product.to(x.dtype if out_dtype is None else out_dtype)


class PackedLinear:
    """``x @ weight.T + bias`` for one weight and many ``x``, accumulated in fp32.

    Weight and bias come in pieces, each of which goes straight to its place. Here the weight lies
    row by row, and torch multiplies; a backend's own class lays it out for its kernels.

    Args:
        out_features: ``N``.
        in_features: ``K``.
        dtype: Dtype of the weight: bf16, fp16 or fp32.
        device: Its device.
        has_bias: Whether there is a bias.
        out_dtype: Dtype of the results: None uses that of the weight, or ``torch.float32``.
    """

    _weight: Tensor
    _bias: Tensor | None

    def __init__(
        self,
        out_features: int,
        in_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        has_bias: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self.out_features, self.in_features = out_features, in_features
        self.dtype = dtype
        self.out_dtype = dtype if out_dtype is None else out_dtype
        self._allocate(device, has_bias=has_bias)

    def _allocate(self, device: torch.device, *, has_bias: bool) -> None:
        shape = self.out_features, self.in_features
        self._weight = torch.empty(shape, dtype=self.dtype, device=device)
        self._bias = None
        if has_bias:
            self._bias = torch.empty(self.out_features, dtype=self.dtype, device=device)

    def write(self, first: int, weight: Tensor | Fp8Weight) -> None:
        """Set rows of the weight.

        Args:
            first: Row of the first of them.
            weight: ``[n, K]``, of any dtype and device, strided or not; if in FP8, then all pieces
                are, with runs of one length.
        """
        rows = plain(weight, self.dtype)
        self._weight[first : first + len(rows)] = rows

    def write_bias(self, first: int, bias: Tensor) -> None:
        """Set elements of the bias from ``first`` on, rounded to the weight's dtype."""
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
            TypeError: A shape or dtype is wrong, or a tensor is not contiguous.
        """
        self._check(x, out)
        product = functional.linear(x, self._weight, self._bias)
        return product.to(self.out_dtype) if out is None else out.copy_(product)

    def _check(self, x: Tensor, out: Tensor | None) -> None:
        rows, depth = x.shape
        if depth != self.in_features or x.dtype != self.dtype or not x.is_contiguous():
            raise TypeError(f"want [M, {self.in_features}] {self.dtype}, got {x.shape} {x.dtype}")
        if out is None:
            return
        if out.shape != (rows, self.out_features) or out.dtype != self.out_dtype:
            raise TypeError(f"out is {out.shape} {out.dtype}")
        if not out.is_contiguous():
            raise TypeError("out is not contiguous")

    def rows(self, ids: Tensor, *, first_id: int, num_ids: int) -> Tensor:
        """Return rows of the weight by id, as an embedding does.

        Args:
            ids: ``[T]`` int64.
            first_id: Id of the weight's first row.
            num_ids: Total number of ids, here or elsewhere.

        Returns:
            ``[T, K]`` of the weight's dtype; zeros where the weight has no such row.
        """
        return take_rows(self._weight, ids, first_id=first_id, num_ids=num_ids)

    def unpack(self) -> Tensor:
        """Return the weight, ``[N, K]``, in its own dtype."""
        return self._weight


def take_rows(table: Tensor, ids: Tensor, *, first_id: int, num_ids: int) -> Tensor:
    """Return rows of a plain table; arguments and result as in `PackedLinear.rows`."""
    if len(table) == num_ids:
        return functional.embedding(ids, table)
    if not len(table):
        return table.new_zeros((len(ids), table.shape[1]))
    local = ids - first_id
    elsewhere = (local < 0) | (local >= len(table))
    rows = functional.embedding(local.masked_fill(elsewhere, 0), table)
    return rows.masked_fill_(elsewhere[:, None], 0)
