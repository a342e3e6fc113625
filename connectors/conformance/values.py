"""KV whose values identify the writer, token, layer, plane, head and dimension.

Engines of any shape agree on a token's KV, so a stale, misplaced, half-copied or wrongly sliced
block cannot pass for the right one. Knows no connector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdserve.connectors.base import KVLayout
from pdserve.connectors.slicing import shard_of
from pdserve.wire.transfer import BlockOrder, KVShape

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUM_VALUES = 251  # exact in every dtype of KV
_STRIDES = (7_919, 104_729, 1_299_709, 15_485_863, 179_424_673, 2_038_074_743)


def make_shape(
    *,
    tp: int = 1,
    pp: int = 1,
    block_size: int = 16,
    num_blocks: int = 32,
    num_layers: int = 4,
    num_kv_heads: int = 4,
    head_dim: int = 8,
    num_planes: int = 2,
    dtype: str = "float32",
) -> KVShape:
    """Return the shape of an engine of `tp * pp` ranks, with layers spread evenly over stages."""
    edges = [num_layers * stage // pp for stage in range(pp + 1)]
    return KVShape(
        num_blocks=num_blocks,
        num_layers=num_layers,
        num_planes=num_planes,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype_bytes=getattr(torch, dtype).itemsize,
        block_size=block_size,
        tp_size=tp,
        stages=tuple((edges[stage], edges[stage + 1]) for stage in range(pp)),
    )


class Share:
    """One rank's share of a shape.

    Attributes:
        layers: Indices of the rank's layers in the whole model, in memory order.
        heads: Indices of the rank's KV heads, likewise.
    """

    def __init__(self, shape: KVShape, rank: int) -> None:
        shard = shard_of(shape, rank)
        self.layers, self.heads = shard.layers, shard.heads
        self._shape = shape

    def layout(self, dtype: str) -> KVLayout:
        """Return the layout of the rank's memory."""
        shape = self._shape
        return KVLayout(
            num_blocks=shape.num_blocks,
            num_layers=len(self.layers),
            num_kv_heads=len(self.heads),
            block_size=shape.block_size,
            head_dim=shape.head_dim,
            dtype=dtype,
            dtype_bytes=getattr(torch, dtype).itemsize,
            num_planes=shape.num_planes,
        )

    def values(self, seed: int, tokens: Sequence[int], dtype: str) -> torch.Tensor:
        """Return the KV of some tokens.

        Args:
            seed: Identifies the writer.
            tokens: Positions in the prompt.

        Returns:
            `[len(tokens), layers, planes, heads, head_dim]`.
        """
        axes = (
            torch.tensor(list(tokens), dtype=torch.int64),
            torch.tensor(list(self.layers), dtype=torch.int64),
            torch.arange(self._shape.num_planes),
            torch.tensor(list(self.heads), dtype=torch.int64),
            torch.arange(self._shape.head_dim),
        )
        mixed = torch.full((1,) * len(axes), (seed + 1) * _STRIDES[-1])
        for axis, values in enumerate(axes):
            view = [1] * len(axes)
            view[axis] = len(values)
            mixed = mixed + (values.view(view) + 1) * _STRIDES[axis]
        # The finalizer of MurmurHash3 (Appleby), in the 63 bits that stay positive.
        for _ in range(2):
            mixed = (mixed ^ (mixed >> 33)) * -49064778989728563
        return ((mixed ^ (mixed >> 33)) % _NUM_VALUES).to(getattr(torch, dtype))


def by_token(kv: torch.Tensor, blocks: Sequence[int], shape: KVShape) -> torch.Tensor:
    """Return a copy of some blocks by token: `[tokens, layers, planes, heads, head_dim]`."""
    picked = kv[list(blocks)]
    if shape.order is BlockOrder.HND:
        picked = picked.transpose(3, 4)
    # [blocks, layers, planes, block_size, heads, dim] -> [blocks, block_size, layers, ...]
    moved = picked.permute(0, 3, 1, 2, 4, 5)
    return moved.reshape(-1, *moved.shape[2:])


def write_tokens(
    kv: torch.Tensor, blocks: Sequence[int], shape: KVShape, first: int, values: torch.Tensor
) -> None:
    """Write the tokens from `first` on through a block table."""
    for offset, value in enumerate(values):
        block, slot = divmod(first + offset, shape.block_size)
        if shape.order is BlockOrder.HND:
            kv[blocks[block], :, :, :, slot] = value
        else:
            kv[blocks[block], :, :, slot] = value
