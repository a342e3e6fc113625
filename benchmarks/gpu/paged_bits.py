"""Whether attention's bits are fixed, and right; a part of `benchmarks.gpu attention`.

A prompt at once against chunks, single tokens, mixed batches and blocks that lie elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.paged import BASE, DTYPE, HEAD_DIM, HEADS, Layers
from benchmarks.gpu.timing import DEVICE, sized
from pdserve.kernels.cases.case import draw
from pdserve.kernels.cuda.attention import AttentionTiles, attend, tiles_for


def different(found: Tensor, wanted: Tensor) -> bool | dict[str, Any]:
    """Return True where all bits are equal, else what differs."""
    if torch.equal(found, wanted):
        return True
    apart = (found != wanted).flatten(1).any(1)
    error = (found.float() - wanted.float()).abs().max().item()
    return {"rows": int(apart.sum()), "of": len(found), "max": error}


def bits(
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int | None,
    tiles: AttentionTiles | None = None,
) -> dict[str, Any]:
    """Compare every way to compute a prompt with the prompt at once, and that with torch."""
    length = sized(2900, 300)
    chosen = tiles or tiles_for(DTYPE, head_dim)
    layers = Layers(1, length, heads=heads, head_dim=head_dim, block_size=block_size)
    used = (length - 1) % block_size + 1
    layers.kv[layers.tables[0, -1].long(), :, :, :, used:] = float("nan")
    q = draw((length, heads[0], head_dim), DTYPE, DEVICE, seed=3)

    def rows(*parts: tuple[int, int]) -> Tensor:
        queries = [last - first for first, last in parts]
        layers.tables = layers.tables[:1].expand(len(parts), -1).contiguous()
        rows_q = torch.cat([q[first:last] for first, last in parts])
        call = layers.call(queries, [last for _, last in parts], q=rows_q, window=window)
        return attend(call, chosen)

    def chunked(size: int) -> Tensor:
        cuts = [*range(0, length, size), length]
        return torch.cat([rows(part) for part in pairwise(cuts)])

    whole = rows((0, length))
    some = sorted(
        {*range(0, length, sized(37, 61)), 63, 64, 511 % length, 512 % length, length - 1}
    )
    mixed = [(0, 1), (5, 40), (length - 1, length), (length // 2, length - 3), (64, 65)]
    single = torch.cat([rows((at, at + 1)) for at in some])
    found = {
        "error": _error(layers, q, whole, window),
        "finite": bool(whole.isfinite().all()),
        "single tokens alone": different(single, whole[some]),
        "single tokens in one batch": different(rows(*((at, at + 1) for at in some)), whole[some]),
        "mixed": different(rows(*mixed), torch.cat([whole[a:b] for a, b in mixed])),
    }
    for size in sized((7, 64, 512), (64,)):
        found[f"chunks of {size}"] = different(chunked(size), whole)
    order = torch.randperm(len(layers.kv), device=DEVICE)
    layers.kv = layers.kv[order]
    layers.tables = order.argsort().int()[layers.tables.long()]
    found["blocks elsewhere"] = different(rows((0, length)), whole)
    found["again"] = different(rows((0, length)), rows((0, length)))
    return found


def _error(layers: Layers, q: Tensor, found: Tensor, window: int | None) -> float:
    """Largest difference from torch's attention in fp32 over some rows."""
    length = len(q)
    at = torch.arange(0, length, 29, device=DEVICE)
    keys, values = layers.contiguous(0)[:, :, :, :length].float()
    places = torch.arange(length, device=DEVICE)
    seen = places[None] <= at[:, None]
    if window is not None:
        seen &= places[None] > at[:, None] - window
    wanted = scaled_dot_product_attention(
        q[at].transpose(0, 1)[None].float(),
        keys.repeat_interleave(q.shape[1] // keys.shape[1], 1),
        values.repeat_interleave(q.shape[1] // keys.shape[1], 1),
        attn_mask=seen,
    )
    return (found[at].float() - wanted[0].transpose(0, 1).flatten(1)).abs().max().item()


BITS: dict[str, tuple[Any, ...]] = {
    "8B, blocks of 64": (HEADS, HEAD_DIM, 64, None),
    "8B, prompts by attend_whole": (HEADS, HEAD_DIM, 64, None, replace(BASE, apart=False)),
    "8B, blocks of 16": (HEADS, HEAD_DIM, 16, None),
    "8B, window 700": (HEADS, HEAD_DIM, 64, 700),
    "8B, decode of 64 rows": (HEADS, HEAD_DIM, 64, None, replace(BASE, split_rows=64)),
    "group of 7, heads of 64": ((14, 2), 64, 32, None),
    "group of 7, heads of 64, blocks of 128": ((14, 2), 64, 128, None),
    "heads of 80": ((4, 4), 80, 128, None),
    "heads of 96, group of 3": ((9, 3), 96, 8, 300),
    "heads of 256": ((8, 1), 256, 64, None),
}
