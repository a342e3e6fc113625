"""Descriptors of the paged cache, with which Gluon kernels load tiles of keys and values.

They keep no memory alive, and know only a layer's address and shape.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia import hopper


class _Place(NamedTuple):
    """A cache's address, for a descriptor that does not keep the cache alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Return the address, as a tensor does."""
        return self.address


def describe_cache(kv_layer: Tensor, tile: int) -> hopper.TensorDescriptor:
    """Describe tiles of ``tile`` keys or values of a layer, seen as rows ``[D]``, for Gluon.

    It is made once for all layers with this address and shape, because it contains nothing else.

    Args:
        kv_layer: ``[blocks, 2, KV heads, block size, D]`` of 16 bits an element, strided over
            blocks by a multiple of D; fewer than 2^31 rows.
        tile: At most the block size.
    """
    place = _Place(kv_layer.data_ptr(), kv_layer.dtype)
    return _describe_rows(place, kv_layer.shape, kv_layer.stride(0), tile)


@lru_cache(maxsize=1024)
def _describe_rows(
    place: _Place, shape: torch.Size, stride_block: int, tile: int
) -> hopper.TensorDescriptor:
    num_blocks, planes, heads, block_size, dim = shape
    num_rows = (num_blocks - 1) * stride_block // dim + planes * heads * block_size
    element = gl.bfloat16 if place.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([tile, dim], element)
    return hopper.TensorDescriptor(place, [num_rows, dim], [dim, 1], [tile, dim], layout)
