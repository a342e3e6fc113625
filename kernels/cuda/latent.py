"""Latent attention on CUDA: paged attention whose values are the first elements of its keys.

All heads share one latent of a token, so that a program's rows are heads of few tokens. Keys are
read once, and are values too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from pdserve.kernels.backend import NotTakenError
from pdserve.kernels.cuda.attention import (
    AttentionCall,
    AttentionTiles,
    Cut,
    attend_as,
    cut_for,
)
from pdserve.kernels.cuda.launch import Tuning
from pdserve.kernels.cuda.segments import DTYPES
from pdserve.kernels.cuda.target import Architecture, target

_MAX_LATENT = 512
_FEW_HEADS = AttentionTiles(
    32, 1024, 16, Tuning(8, 3, overlaps=True), 1, 32, Tuning(8, 2, overlaps=True)
)
_SOME_HEADS = AttentionTiles(
    32, 1024, 32, Tuning(8, 2, overlaps=True), 1, 32, Tuning(8, 2, overlaps=True)
)
_MANY_HEADS = AttentionTiles(
    32, 1024, 64, Tuning(8, 2, overlaps=True), 1, 32, Tuning(8, 2, overlaps=True)
)
_FULL = AttentionTiles(
    32, 1024, 16, Tuning(8, 1, overlaps=True), 1, 16, Tuning(8, 1, overlaps=True)
)

# Hopper's have been compiled, and so have the others.
_ONE_STAGE = Tuning(8, 1, overlaps=True)
_SMALL = AttentionTiles(32, 1024, 16, _ONE_STAGE, 1, 16, _ONE_STAGE)
_SMALL_FULL = replace(_FULL, tile=16)
_TILES = {
    Architecture.SM_80: (_FEW_HEADS, _SOME_HEADS, _MANY_HEADS, _FULL),
    Architecture.SM_89: (_SMALL, _SMALL, _SMALL, _SMALL_FULL),
    Architecture.SM_90: (_FEW_HEADS, _SOME_HEADS, _MANY_HEADS, _FULL),
    Architecture.SM_100: (_FEW_HEADS, _SOME_HEADS, _MANY_HEADS, _FULL),
}


def latent_tiles(dtype: torch.dtype, num_heads: int) -> AttentionTiles:
    """Return how latent attention is cut: the more heads, the fewer read a latent."""
    few, some, many, full = _TILES[target().architecture]
    if dtype == torch.float32:
        return full
    return few if num_heads < 32 else some if num_heads < 64 else many


def latent_attention(
    q: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    latent_dim: int,
) -> Tensor:
    """See ``reference.mla.latent_attention``; ``scale`` is above 0.

    A request may have query tokens but no context, as what pads a step has: their rows are 0.

    Raises:
        NotTakenError: Latents are too wide, or a dtype or the cache's strides are others than
            `ops` says.
    """
    cut = _cut(
        latent_tiles(q.dtype, q.shape[1]),
        (q.dtype, *q.shape[1:]),
        (kv_layer.dtype, kv_layer.shape, kv_layer.stride()),
        latent_dim,
    )
    call = AttentionCall(q, kv_layer, block_tables, query_start, context_lens, scale)
    return attend_as(cut, call).view(len(q), q.shape[1], latent_dim)


@cache
def _cut(
    tiles: AttentionTiles,
    query: tuple[torch.dtype, int, int],
    layer: tuple[torch.dtype, torch.Size, tuple[int, ...]],
    latent_dim: int,
) -> Cut:
    dtype, num_heads, width = query
    layer_dtype, (_, _, _, block_size, _), strides = layer
    rotary = width - latent_dim
    if (
        dtype not in DTYPES
        or layer_dtype != dtype
        or latent_dim > _MAX_LATENT
        or strides[3:] != (width, 1)
    ):
        raise NotTakenError(
            f"the CUDA kernels take latents of at most {_MAX_LATENT}, and queries and a cache, "
            f"strided over blocks only, of one dtype of bf16, fp16 and fp32; not {latent_dim}, "
            f"{dtype} and {layer_dtype}, strides {strides}"
        )
    whole, split = (
        max(n for n in range(1, rows + 1) if num_heads % n == 0)
        for rows in (tiles.whole_rows, tiles.split_rows)
    )
    constants = {
        "HEAD": 0,
        "PLANE": 0,
        "D": latent_dim,
        "ROTARY": rotary,
        "BLOCK_SIZE": block_size,
        "WINDOWED": False,
    }
    return cut_for(tiles, num_heads, (whole, split), constants)
