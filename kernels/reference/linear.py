"""Reference matrix product with a transposed weight."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


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
