"""A backend whose steps ask the device for nothing, in plain torch: graphs can hold them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pdserve.kernels.backend import REFERENCE
from pdserve.kernels.reference.attention import AttentionForm
from pdserve.kernels.reference.norm import rms_norm
from pdserve.kernels.reference.rope import rotate


def _rope_and_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    kv_layer: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_layer.shape
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    q = q if q_norm is None else rms_norm(q, q_norm, eps)
    k = k if k_norm is None else rms_norm(k, k_norm, eps)
    cos, sin = cos_sin[positions].to(qkv.dtype).unsqueeze(1).chunk(2, dim=-1)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    # Every slot of the pool looks for its token: no size depends on which there are.
    is_mine = slot_mapping == torch.arange(num_blocks * block_size)[:, None]
    token, is_stored = is_mine.int().argmax(-1), is_mine.any(-1)
    shape = num_blocks, block_size, num_kv_heads, head_dim
    for plane, rows in enumerate((k, v)):
        stored = rows[token].view(shape).transpose(1, 2)
        mask = is_stored.view(num_blocks, 1, block_size, 1)
        kv_layer[:, plane].copy_(torch.where(mask, stored, kv_layer[:, plane]))
    return q


def _paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    form: AttentionForm,
) -> Tensor:
    assert form.sinks is None
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv_layer.shape[2]
    # Some requests may have several tokens, and others none.
    token, last = torch.arange(num_tokens), query_start[1:].long()
    request = torch.searchsorted(last, token, right=True)
    seen = context_lens[request] - last[request] + token + 1
    seen = torch.where(context_lens[request] > 0, seen, 0)
    # [T, 2, Hkv, contexts, Dh]
    kv = kv_layer[block_tables[request].long()].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
    at = torch.arange(kv.shape[3])
    is_unseen = at >= seen[:, None]
    if form.window is not None:
        is_unseen |= at < seen[:, None] - form.window
    rows = q.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = (rows @ kv[:, 0].transpose(-1, -2)) * scale
    weights = scores.masked_fill(is_unseen[:, None, None], -torch.inf).softmax(-1)
    weights = torch.where(seen[:, None, None, None] > 0, weights, 0.0)
    # What a token does not see may be NaN, and 0 * NaN is NaN.
    values = kv[:, 1].masked_fill(is_unseen[:, None, :, None], 0.0)
    return (weights @ values).flatten(1)


CAPTURABLE = replace(
    REFERENCE, name="capturable", rope_and_cache=_rope_and_cache, paged_attention=_paged_attention
)
