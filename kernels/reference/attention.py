"""Reference causal attention over a paged KV cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AttentionForm(NamedTuple):
    """What of a layer's attention differs between models.

    Attributes:
        window: Each query sees itself and the ``window - 1`` positions before it; None is all.
        sinks: ``[H]`` fp32: of each head a score, not scaled, that every query has beside those of
            the positions, and that has no value (gpt-oss; Xiao et al. 2023); None is none.
    """

    window: int | None = None
    sinks: Tensor | None = None


PLAIN = AttentionForm()
"""Attention to all positions, and to nothing else."""


def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    form: AttentionForm = PLAIN,
) -> Tensor:
    """Attend from each query token to its own request's cache, up to itself.

    The queries of request ``r`` are rows ``query_start[r]`` to ``query_start[r + 1]`` of ``q``, and
    stand at the last positions of its ``context_lens[r]``. Several queries (a prefill chunk) and
    single ones (a decode) mix freely. Cost: one pass of Python per request.

    Args:
        q: ``[T, H, Dh]``.
        kv_layer: ``[num_blocks, 2, Hkv, block_size, Dh]``, H a multiple of Hkv; it already holds
            the keys and values of this step's tokens.
        block_tables: ``[R, max_blocks]`` int32; the entries past a request's context are not read.
        query_start: ``[R + 1]`` int32, from 0 to T, never falling.
        context_lens: ``[R]`` int32: KV tokens of each request, this step's included.
        scale: Factor on the scores.
        form: Its window and its sinks.

    Returns:
        ``[T, H * Dh]``, same dtype.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[2], kv_layer.shape[3]
    group = num_heads // num_kv_heads
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    starts, lens = query_start.tolist(), context_lens.tolist()
    for request, context in enumerate(lens):
        first, last = starts[request], starts[request + 1]
        if first == last:
            continue
        blocks = block_tables[request, : -(-context // block_size)].long()
        # [2, Hkv, context, Dh]
        kv = kv_layer[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context].float()
        rows = q[first:last].float().view(-1, num_kv_heads, group, head_dim)
        scores = torch.einsum("tkgd,ksd->kgts", rows, kv[0]) * scale
        at = torch.arange(context, device=q.device)
        query_at = at[context - (last - first) :, None]
        hidden = at > query_at
        if form.window is not None:
            hidden |= at <= query_at - form.window
        scores.masked_fill_(hidden, float("-inf"))
        if form.sinks is not None:
            beside = form.sinks.view(num_kv_heads, group, 1, 1).expand(-1, -1, last - first, 1)
            scores = torch.cat((scores, beside), dim=-1)
        weights = scores.softmax(-1)[..., :context]
        attended = torch.einsum("kgts,ksd->tkgd", weights, kv[1])
        out[first:last] = attended.flatten(1, 2).to(q.dtype)
    return out.flatten(1, 2)
