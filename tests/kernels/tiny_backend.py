"""A backend of one operation, which is how somebody who adds one would begin."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.backend import KernelBackend, NotTakenError
from pdserve.kernels.reference.attention import AttentionForm

num_rows: list[int] = []
"""Rows of each call that was taken."""


def load(device: torch.device, progress: Callable[[str], None]) -> KernelBackend:
    return KernelBackend(name="tiny", description="attention alone", paged_attention=_attention)


def _attention(
    q: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    form: AttentionForm,
) -> Tensor:
    if form.window is not None:
        raise NotTakenError("the tiny kernels take no windows")
    if form.sinks is not None:
        raise NotTakenError("the tiny kernels take no sinks")
    num_rows.append(len(q))
    num_kv_heads, block_size = kv_layer.shape[2:4]
    out = torch.empty_like(q)
    for row in range(len(q)):
        request = int((query_start[1:] <= row).sum())
        context = int(context_lens[request] - (query_start[request + 1] - 1 - row))
        blocks = block_tables[request, : -(-context // block_size)].long()
        kv = kv_layer[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
        keys, values = kv.repeat_interleave(q.shape[1] // num_kv_heads, dim=1)
        weights = functional.softmax((keys @ q[row, :, :, None]).squeeze(-1) * scale, dim=-1)
        out[row] = (weights[:, None] @ values).squeeze(1)
    return out.flatten(1)
