"""Reference gated activation."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_and_mul(x: Tensor) -> Tensor:
    """Gate the second half of each row by SiLU of the first.

    SiLU is computed in fp32 and rounded to the dtype of ``x``, and so is the product: two
    roundings, as in transformers.

    Args:
        x: ``[T, 2 * I]``: gate, then up.

    Returns:
        ``[T, I]``, same dtype.
    """
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate.float()).to(x.dtype) * up
