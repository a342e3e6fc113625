"""Attention of steps with prompts by FlashAttention 3 (FA3), and of others by the CUDA kernels.

FA3 reads the cache as it lies: a block of a layer is a page, strided over pages and heads. How it
cuts keys depends on the whole step, and with it a row's last bits.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_DISTRIBUTION = "tokenspeed-fa3"
_CAPABILITY = (9, 0)
_FEW_TOKENS = 32
"""At most so many are left to the CUDA kernels, which cut their keys over the whole device."""

_HEAD_DIMS = (64, 128)
_MOST_BLOCK_SIZE = 64
"""Of larger pages, and of wider heads behind a window, FA3 loads whole tiles: what lies in the last
block behind a request's tokens, perhaps NaN, would be multiplied by 0."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, int | None], Tensor]


@dataclass(frozen=True, slots=True)
class Flash:
    """FA3 as it is installed.

    Attributes:
        version: Of the distribution.
        attend: Its ``flash_attn_with_kvcache``.
    """

    version: str
    attend: Callable[..., Tensor]


def find_flash(device: torch.device) -> Flash | str:
    """Return FA3, or why it does not run here."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _CAPABILITY:
        return "FA3 needs a device of compute capability 9.0"
    try:
        version = importlib.metadata.version(_DISTRIBUTION)
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError as error:
        return f"FA3 is not installed: {error}"
    return Flash(version, flash_attn_with_kvcache)


def with_flash(flash: Callable[..., Tensor], ours: Attend) -> Attend:
    """Return ``paged_attention`` that leaves to ``flash`` the steps it is faster for.

    Nothing is asked of the device: the numbers of tokens and requests decide, for all requests of a
    step alike.
    """

    def paged_attention(
        q: Tensor,
        kv_layer: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        num_tokens, _, head_dim = q.shape
        is_few = num_tokens <= max(len(context_lens), _FEW_TOKENS)
        if is_few or not takes(q.dtype, head_dim, kv_layer):
            return ours(q, kv_layer, block_tables, query_start, context_lens, scale, window)
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
    """Whether FA3 computes such heads over such blocks, and reads nothing but what was written."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and kv_layer.dtype == dtype
        and head_dim in _HEAD_DIMS
        and kv_layer.shape[3] <= _MOST_BLOCK_SIZE
    )
