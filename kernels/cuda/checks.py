"""Checks of kernel arguments: dtypes and layouts, which need no synchronisation.

Values (positions, slots, ids of blocks) are trusted: reading one would stop the host until the
device is done.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kernels.backend import NotTakenError

FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32})


def same_type(first: Tensor, *others: Tensor | None) -> torch.dtype:
    """Return the one dtype of tensors of a model; None stands for an absent tensor.

    Raises:
        NotTakenError: The kernels do not support it.
        TypeError: Dtypes differ.
    """
    check_float(first.dtype)
    for other in others:
        if other is not None and other.dtype != first.dtype:
            raise TypeError(f"want {first.dtype}, got {other.dtype}")
    return first.dtype


def check_float(dtype: torch.dtype) -> None:
    """Raise NotTakenError if the kernels do not support a dtype."""
    if dtype not in FLOATS:
        raise NotTakenError(f"the CUDA kernels take bf16, fp16 and fp32, not {dtype}")


def check_contiguous(*tensors: Tensor | None) -> None:
    """Raise TypeError if a tensor is strided."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise TypeError(f"want a contiguous tensor, got strides {tensor.stride()}")


def check_integers(dtype: torch.dtype, *tensors: Tensor) -> None:
    """Raise TypeError if a tensor is not contiguous or has another dtype."""
    check_contiguous(*tensors)
    for tensor in tensors:
        if tensor.dtype != dtype:
            raise TypeError(f"want {dtype}, got {tensor.dtype}")
