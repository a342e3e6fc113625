"""The toy's KV memory: every position is checked before it is read.

A token's value lies there once for each layer, plane, head and dimension, each with an offset of
its own, so that what is misplaced is never what should be there. Knows no requests and no steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pdserve.connectors.base import KVLayout
from pdserve.connectors.slicing import shard_of
from pdserve.wire.transfer import BlockOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.wire.transfer import KVShape

TOY_DTYPE = "int64"


class ToyMemory:
    """The KV memory of one rank.

    Attributes:
        kv: As `KVShape` says, int64; -1 where nothing was written.
    """

    def __init__(self, shape: KVShape, rank: int) -> None:
        shard = shard_of(shape, rank)
        self.layout = KVLayout(
            num_blocks=shape.num_blocks,
            num_layers=len(shard.layers),
            num_kv_heads=len(shard.heads),
            block_size=shape.block_size,
            head_dim=shape.head_dim,
            dtype=TOY_DTYPE,
            dtype_bytes=8,
            num_planes=shape.num_planes,
        )
        inner = [len(shard.heads), shape.block_size]
        if shape.order is BlockOrder.NHD:
            inner.reverse()
        outer = [shape.num_blocks, len(shard.layers), shape.num_planes]
        self.kv = torch.full([*outer, *inner, shape.head_dim], -1, dtype=torch.int64)
        # [blocks, block_size, layers, planes, heads, head_dim]: a token is a row.
        axes = (0, 4, 1, 2, 3, 5) if shape.order is BlockOrder.HND else (0, 3, 1, 2, 4, 5)
        self._rows = self.kv.numpy().transpose(axes)
        self._offsets: np.ndarray = (
            np.array(shard.layers)[:, None, None, None] * 100_003
            + np.arange(shape.num_planes)[None, :, None, None] * 10_007
            + np.array(shard.heads)[None, None, :, None] * 1009
            + np.arange(shape.head_dim)[None, None, None, :]
        ).astype(np.int64)

    def check(self, blocks: Sequence[int], values: np.ndarray) -> str | None:
        """Say which of a table's first positions is not as it must be; None if all are."""
        size = self.layout.block_size
        found = self._rows[blocks[: -(-len(values) // size)]]
        found = found.reshape(-1, *found.shape[2:])[: len(values)]
        right = found == values[:, None, None, None, None] + self._offsets
        if right.all():
            return None
        position = int(np.argmin(right.reshape(len(values), -1).all(axis=1)))
        return f"position {position} of {len(values)}, block {blocks[position // size]}"

    def write(self, blocks: Sequence[int], start: int, values: np.ndarray) -> None:
        """Write positions from `start` on."""
        for position, value in enumerate(values, start):
            block, slot = divmod(position, self.layout.block_size)
            self._rows[blocks[block], slot] = value + self._offsets
