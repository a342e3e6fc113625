"""Reference sum over the ranks of a group."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_ranks(parts: Tensor) -> Tensor:
    """Add the ranks' parts in rank order: in fp32 if the dtype is narrower, rounded once.

    Args:
        parts: ``[R, n]``, of any dtype.

    Returns:
        ``[n]``, same dtype.
    """
    wide = parts.float() if parts.dtype in {torch.bfloat16, torch.float16} else parts
    total = wide[0].clone()
    for part in wide[1:]:
        total += part
    return total.to(parts.dtype)
