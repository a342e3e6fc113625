"""The paged cache of Llama-3.1-8B's shape, and calls of attention over it."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.timing import DEVICE, sized
from pdserve.kernels.cases.case import draw
from pdserve.kernels.cuda.attention import AttentionCall, tiles_for
from pdserve.kernels.reference.attention import AttentionForm

DTYPE = sized(torch.bfloat16, torch.float16)
HEADS = sized((32, 8), (4, 2))
HEAD_DIM = sized(128, 32)
BLOCK_SIZE = 64
BASE = tiles_for(DTYPE, HEAD_DIM)


class Layers:
    """The cache of some layers, each filled at random, and a table of scattered blocks."""

    def __init__(
        self,
        num_requests: int,
        context: int,
        *,
        num_layers: int = 1,
        heads: tuple[int, int] = HEADS,
        head_dim: int = HEAD_DIM,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.heads, self.head_dim, self.num_layers = heads, head_dim, num_layers
        self.context = context
        width = -(-context // block_size)
        num_blocks = num_requests * width
        generator = torch.Generator().manual_seed(4)
        ids = torch.randperm(num_blocks, generator=generator).int()
        self.tables = ids.view(num_requests, width).to(DEVICE)
        shape = (num_blocks, num_layers, 2, heads[1], block_size, head_dim)
        self.kv = torch.empty(shape, dtype=DTYPE, device=DEVICE)
        for block in self.kv.split(512):
            block.normal_()

    def call(
        self,
        queries: list[int],
        contexts: list[int],
        *,
        q: Tensor | None = None,
        layer: int = 0,
        window: int | None = None,
    ) -> AttentionCall:
        """Return a call over ``len(queries)`` requests; queries are drawn if not given."""
        if q is None:
            q = draw((sum(queries), self.heads[0], self.head_dim), DTYPE, DEVICE, seed=3)
        return AttentionCall(
            q,
            self.kv[:, layer % self.num_layers],
            self.tables[: len(queries)],
            torch.tensor([0, *queries], device=DEVICE).cumsum(0).int(),
            torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
            self.head_dim**-0.5,
            AttentionForm(window),
        )

    def contiguous(self, layer: int) -> Tensor:
        """Return keys and values as ``[2, requests, kv heads, context, head_dim]``."""
        blocks = self.kv[self.tables.long(), layer % self.num_layers]
        return blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : self.context].contiguous()
