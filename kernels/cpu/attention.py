"""Writes and reads the KV cache: rotation fused with the cache write, and paged attention."""

from __future__ import annotations

import ctypes
import struct
from functools import cache

from torch import Tensor, get_num_threads

from pdserve.kernels.backend import NotTakenError
from pdserve.kernels.cpu.marshal import (
    check_places,
    check_requests,
    norm_type,
    refused,
    same_type,
    sinks_address,
)
from pdserve.kernels.reference.attention import PLAIN, AttentionForm

# What attention.cpp takes.
_MAX_HEAD_DIM = 1024
_TILE = 64

_ROPE_AND_CACHE = struct.Struct("@8P9qf3i").pack
_PAGED_ATTENTION = struct.Struct("@7P12qf2i").pack
_ROPE_AND_LATENT = struct.Struct("@8P9qf2i").pack


@cache
def refusal(head_dim: int, value_dim: int, block_size: int) -> str | None:
    """Return None if the attention kernels support these sizes, else the supported ones."""
    if value_dim <= head_dim <= _MAX_HEAD_DIM and 0 in (_TILE % block_size, block_size % _TILE):
        return None
    return (
        f"the CPU kernels take heads of up to {_MAX_HEAD_DIM}, and blocks that divide {_TILE} "
        f"tokens or are a multiple of it, not heads of {head_dim} (values {value_dim}) and blocks "
        f"of {block_size}"
    )


class AttentionOps:
    """Calls of these kernels in one library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._rope_and_cache = library.pd_rope_and_cache
        self._rope_and_latent = library.pd_rope_and_latent
        self._paged_attention = library.pd_paged_attention

    def rope_and_cache(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_layer: Tensor,
        slot_mapping: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """See ``reference.rope.rope_and_cache``."""
        num_blocks, _, num_kv_heads, block_size, head_dim = kv_layer.shape
        rows, width = qkv.shape
        num_heads = width // head_dim - 2 * num_kv_heads
        kind = same_type(qkv)
        check_places(kv_layer, qkv.dtype, positions, slot_mapping)
        num_positions, rotary_dim = cos_sin.shape
        out = qkv.new_empty((rows, num_heads, head_dim))
        status = self._rope_and_cache(
            _ROPE_AND_CACHE(
                qkv.data_ptr(),
                positions.data_ptr(),
                cos_sin.data_ptr(),
                kv_layer.data_ptr(),
                slot_mapping.data_ptr(),
                0 if q_norm is None else q_norm.data_ptr(),
                0 if k_norm is None else k_norm.data_ptr(),
                out.data_ptr(),
                kv_layer.stride(0),
                num_blocks,
                num_kv_heads,
                block_size,
                head_dim,
                rows,
                num_heads,
                num_positions,
                rotary_dim,
                eps,
                kind,
                norm_type(qkv.dtype, q_norm, k_norm),
                get_num_threads(),
            )
        )
        if status:
            raise refused("rope_and_cache", status)
        return out

    def rope_and_latent(
        self,
        q: Tensor,
        queries: Tensor,
        latent: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_layer: Tensor,
        slot_mapping: Tensor,
        norm: Tensor,
        eps: float,
    ) -> Tensor:
        """See ``reference.mla.rope_and_latent``."""
        num_blocks, _, _, block_size, width = kv_layer.shape
        rows, num_heads, head_dim = q.shape
        kind = same_type(q, queries, latent, norm)
        check_places(kv_layer, q.dtype, positions, slot_mapping)
        num_positions, rotary_dim = cos_sin.shape
        status = self._rope_and_latent(
            _ROPE_AND_LATENT(
                q.data_ptr(),
                queries.data_ptr(),
                latent.data_ptr(),
                positions.data_ptr(),
                cos_sin.data_ptr(),
                kv_layer.data_ptr(),
                slot_mapping.data_ptr(),
                norm.data_ptr(),
                kv_layer.stride(0),
                num_blocks,
                block_size,
                width - rotary_dim,
                rotary_dim,
                rows,
                num_heads,
                head_dim,
                num_positions,
                eps,
                kind,
                get_num_threads(),
            )
        )
        if status:
            raise refused("rope_and_latent", status)
        return queries

    def paged_attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        scale: float,
        form: AttentionForm = PLAIN,
    ) -> Tensor:
        """See ``reference.attention.paged_attention``."""
        num_tokens, num_heads, head_dim = q.shape
        out = q.new_empty((num_tokens, num_heads * head_dim))
        requests = block_tables, query_start, context_lens
        self._attend(q, kv_layer, requests, out, scale, form)
        return out

    def latent_attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        scale: float,
        latent_dim: int,
    ) -> Tensor:
        """See ``reference.mla.latent_attention``."""
        out = q.new_empty((*q.shape[:2], latent_dim))
        requests = block_tables, query_start, context_lens
        self._attend(q, kv_layer, requests, out, scale, PLAIN)
        return out

    def _attend(
        self,
        q: Tensor,
        kv_layer: Tensor,
        requests: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        scale: float,
        form: AttentionForm,
    ) -> None:
        """Attend; if KV has one plane, a value is the beginning of its key.

        Args:
            out: ``[T, H * Dh]``, or of one plane ``[T, H, elements of a value]``.
        """
        window, sinks = form
        num_tokens, num_heads, _ = q.shape
        num_blocks, num_planes, num_kv_heads, block_size, head_dim = kv_layer.shape
        value_dim = out.shape[-1] if num_planes == 1 else head_dim
        reason = refusal(head_dim, value_dim, block_size)
        if reason is not None:
            raise NotTakenError(reason)
        block_tables, query_start, context_lens = requests
        num_requests, max_blocks = block_tables.shape
        kind = same_type(q)
        check_requests(kv_layer, q.dtype, block_tables, query_start, context_lens)
        status = self._paged_attention(
            _PAGED_ATTENTION(
                q.data_ptr(),
                kv_layer.data_ptr(),
                block_tables.data_ptr(),
                query_start.data_ptr(),
                context_lens.data_ptr(),
                0 if sinks is None else sinks_address(sinks, num_heads),
                out.data_ptr(),
                kv_layer.stride(0),
                num_blocks,
                num_kv_heads,
                block_size,
                head_dim,
                num_requests,
                max_blocks,
                num_tokens,
                num_heads,
                window or 0,
                value_dim,
                (num_planes - 1) * num_kv_heads * block_size * head_dim,
                scale,
                kind,
                get_num_threads(),
            )
        )
        if status:
            raise refused("attention", status)
