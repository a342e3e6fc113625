"""Attention by FlashAttention 3 (FA3) for steps with prompts, by the CUDA kernels for others.

FA3 reads the cache in place: a block of a layer is a page, strided over pages and heads. Its split
of the keys, and so a row's last bits, depend on the whole step.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.ops import PagedAttention
from pdserve.kernels.reference.attention import PLAIN, AttentionForm

_DISTRIBUTION = "tokenspeed-fa3"
_CAPABILITY = (9, 0)
_FEW_TOKENS = 32
"""Maximum left to the CUDA kernels, which split their keys over the whole device."""

_HEAD_DIMS = (64, 128)
_MOST_BLOCK_SIZE = 64
"""With larger pages, and with wider heads and a window, FA3 loads whole tiles: the contents of the
last block after a request's tokens, perhaps NaN, would be multiplied by 0."""


@dataclass(frozen=True, slots=True)
class Flash:
    """The installed FA3.

    Attributes:
        version: Version of the distribution.
        attend: Its ``flash_attn_with_kvcache``.
    """

    version: str
    attend: Callable[..., Tensor]


def find_flash(device: torch.device) -> Flash | str:
    """Return FA3, or why it cannot run here."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _CAPABILITY:
        return "FA3 needs a device of compute capability 9.0"
    try:
        version = importlib.metadata.version(_DISTRIBUTION)
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError as error:
        return f"FA3 is not installed: {error}"
    return Flash(version, flash_attn_with_kvcache)


def with_flash(flash: Callable[..., Tensor], ours: PagedAttention) -> PagedAttention:
    """Return a ``paged_attention`` that uses ``flash`` for the steps on which it is faster.

    The device is not involved: the numbers of tokens and requests decide, for all requests of a
    step alike. FA3 has no sinks of attention.
    """

    def paged_attention(
        q: Tensor,
        kv_layer: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        scale: float,
        form: AttentionForm = PLAIN,
    ) -> Tensor:
        num_tokens, _, head_dim = q.shape
        is_few = num_tokens <= max(len(context_lens), _FEW_TOKENS)
        window, sinks = form
        if is_few or sinks is not None or not takes(q.dtype, head_dim, kv_layer):
            return ours(q, kv_layer, block_tables, query_start, context_lens, scale, form)
        keys, values = kv_layer.transpose(2, 3).unbind(1)
        attended = flash(
            q,
            keys,
            values,
            cache_seqlens=context_lens,
            page_table=block_tables,
            cu_seqlens_q=query_start,
            max_seqlen_q=num_tokens,  # no request has more, and how many it has the device knows
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
        )
        return attended.flatten(1)

    return paged_attention


def takes(dtype: torch.dtype, head_dim: int, kv_layer: Tensor) -> bool:
    """Whether FA3 supports these heads and blocks without reading unwritten memory."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and kv_layer.dtype == dtype
        and head_dim in _HEAD_DIMS
        and kv_layer.shape[3] <= _MOST_BLOCK_SIZE
    )
