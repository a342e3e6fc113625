"""Rotary embedding fused with the write into the paged cache: of heads, and of latents.

A program rotates some heads of one token. Everything is element by element except the norm of a
head, whose order of summation depends only on the model's sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.backend import NotTakenError
from pdserve.kernels.cuda.checks import check_contiguous, check_integers, same_type
from pdserve.kernels.cuda.launch import Tuning, launch, wait_for_previous
from pdserve.kernels.cuda.norm import check_norms
from pdserve.kernels.cuda.sizes import divided_up, next_power_of_2

_TILE = 1024
"""Elements of the heads of a program: 16 for each thread of two warps."""

HEADS_TUNING = Tuning(warps=2, overlaps=True)
LATENT_TUNING = Tuning(warps=4, overlaps=True)
_MAX_HEAD_DIM = 1024
_MAX_LATENT_DIM = 4096


@triton.jit
def _rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    return x.to(dtype).to(tl.float32)


@triton.jit
def _angles(
    cos_sin: tl.tensor,
    position: tl.tensor,
    dtype: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
) -> tl.tensor:
    """Cosines and sines of one token, rounded to the model's dtype: ``[1, HALF_BLOCK]`` each."""
    i = tl.arange(0, HALF_BLOCK)
    at = cos_sin + position * (2 * HALF) + i
    cos = tl.load(at, mask=i < HALF, other=0.0)
    sin = tl.load(at + HALF, mask=i < HALF, other=0.0)
    return _rounded(cos, dtype)[None, :], _rounded(sin, dtype)[None, :]


@triton.jit
def _rotate_heads(
    source: tl.tensor,
    target: tl.tensor,
    heads: tl.tensor,
    inside: tl.tensor,
    source_head: tl.tensor,
    target_head: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
) -> None:
    """Norm (if ``norm``) and rotate heads of one token from ``source`` to ``target``."""
    dtype = source.dtype.element_ty
    i = tl.arange(0, HALF_BLOCK)
    kept = inside[:, None] & (i < HALF)[None, :]
    at = source + heads[:, None] * source_head + i[None, :]
    low = tl.load(at, mask=kept, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=kept, other=0.0).to(tl.float32)
    r = 2 * HALF + tl.arange(0, REST_BLOCK)
    kept_rest = inside[:, None] & (r < HEAD_DIM)[None, :]
    if HEAD_DIM > 2 * HALF:
        rest = tl.load(
            source + heads[:, None] * source_head + r[None, :], mask=kept_rest, other=0.0
        ).to(tl.float32)
    if norm is not None:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        if HEAD_DIM > 2 * HALF:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        of_low = tl.load(norm + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
        of_high = tl.load(norm + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
        inner: tl.constexpr = norm.dtype.element_ty  # fp32 leaves out the inner rounding
        low = _rounded(_rounded(low * scale, inner) * of_low, dtype)
        high = _rounded(_rounded(high * scale, inner) * of_high, dtype)
        if HEAD_DIM > 2 * HALF:
            of_rest = tl.load(norm + r, mask=r < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
            rest = _rounded(rest * scale, inner) * of_rest
    into = target + heads[:, None] * target_head + i[None, :]
    rotated = _rounded(low * cos, dtype) - _rounded(high * sin, dtype)
    tl.store(into, rotated.to(dtype), mask=kept)
    rotated = _rounded(high * cos, dtype) + _rounded(low * sin, dtype)
    tl.store(into + HALF, rotated.to(dtype), mask=kept)
    if HEAD_DIM > 2 * HALF:
        into_rest = target + heads[:, None] * target_head + r[None, :]
        tl.store(into_rest, rest.to(dtype), mask=kept_rest)


@triton.jit
def rope_heads(
    qkv: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    kv: tl.tensor,
    slots: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    stride_block: tl.tensor,
    stride_plane: tl.tensor,
    stride_head: tl.tensor,
    stride_token: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Rotate heads of q to ``out``, or of k to the cache, with v; grid (tokens, groups of both)."""
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    row = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    dtype: tl.constexpr = qkv.dtype.element_ty
    cos, sin = _angles(cos_sin, tl.load(positions + token), dtype, HALF, HALF_BLOCK)
    num_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    if group < num_groups:
        heads = group * HEADS + tl.arange(0, HEADS)
        _rotate_heads(
            row,
            out + token * (NUM_HEADS * HEAD_DIM),
            heads,
            heads < NUM_HEADS,
            HEAD_DIM,
            HEAD_DIM,
            q_norm,
            eps,
            cos,
            sin,
            HEAD_DIM,
            HALF,
            HALF_BLOCK,
            REST_BLOCK,
        )
    else:
        heads = (group - num_groups) * HEADS + tl.arange(0, HEADS)
        slot = tl.load(slots + token)
        inside = (heads < NUM_KV_HEADS) & (slot >= 0)
        place = kv + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token
        row += NUM_HEADS * HEAD_DIM
        _rotate_heads(
            row,
            place,
            heads,
            inside,
            HEAD_DIM,
            stride_head,
            k_norm,
            eps,
            cos,
            sin,
            HEAD_DIM,
            HALF,
            HALF_BLOCK,
            REST_BLOCK,
        )
        d = tl.arange(0, HEAD_BLOCK)
        kept = inside[:, None] & (d < HEAD_DIM)[None, :]
        at = row + NUM_KV_HEADS * HEAD_DIM + heads[:, None] * HEAD_DIM + d[None, :]
        into = place + stride_plane + heads[:, None] * stride_head + d[None, :]
        tl.store(into, tl.load(at, mask=kept), mask=kept)


def rope_and_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    kv_layer: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """See ``reference.rope.rope_and_cache``; the cache may be strided but for its last dimension.

    Raises:
        NotTakenError: The dtype or the head's size is not taken.
        TypeError: A dtype, a shape or a layout is not as the kernel reads it.
    """
    same_type(qkv, kv_layer)
    check_norms(qkv.dtype, q_norm, k_norm)
    check_contiguous(qkv, cos_sin, q_norm, k_norm)
    check_integers(torch.int64, positions, slot_mapping)
    _, _, num_kv_heads, block_size, head_dim = kv_layer.shape
    if head_dim > _MAX_HEAD_DIM:
        raise NotTakenError(f"heads of up to {_MAX_HEAD_DIM} elements are rotated, not {head_dim}")
    half = _half(cos_sin, kv_layer)
    rows, width = qkv.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    heads = heads_of_program(head_dim, num_heads)
    out = qkv.new_empty((rows, num_heads, head_dim))
    launch(
        rope_heads,
        (rows, divided_up(num_heads, heads) + divided_up(num_kv_heads, heads)),
        qkv,
        positions,
        cos_sin,
        kv_layer,
        slot_mapping,
        q_norm,
        k_norm,
        out,
        eps,
        *kv_layer.stride()[:4],
        tuning=HEADS_TUNING,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEADS=heads,
        HEAD_DIM=head_dim,
        HEAD_BLOCK=next_power_of_2(head_dim),
        HALF=half,
        HALF_BLOCK=next_power_of_2(half),
        REST_BLOCK=next_power_of_2(max(1, head_dim - 2 * half)),
        BLOCK_SIZE=block_size,
    )
    return out


def heads_of_program(head_dim: int, num_heads: int) -> int:
    """Return the number of heads of a token that a program rotates, at most all."""
    fitting: int = max(1, _TILE // next_power_of_2(head_dim))
    available: int = next_power_of_2(num_heads)
    return min(fitting, available)


@triton.jit
def rope_latent(
    q: tl.tensor,
    queries: tl.tensor,
    latent: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    kv: tl.tensor,
    slots: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    Q_DIM: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Rotate queries' last elements, or store a latent with its key; grid (tokens, groups + 1)."""
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    dtype: tl.constexpr = q.dtype.element_ty
    width: tl.constexpr = LATENT + 2 * HALF
    cos, sin = _angles(cos_sin, tl.load(positions + token), dtype, HALF, HALF_BLOCK)
    if group * HEADS < NUM_HEADS:
        heads = group * HEADS + tl.arange(0, HEADS)
        _rotate_heads(
            q + token * (NUM_HEADS * Q_DIM) + (Q_DIM - 2 * HALF),
            queries + token * (NUM_HEADS * width) + LATENT,
            heads,
            heads < NUM_HEADS,
            Q_DIM,
            width,
            None,
            eps,
            cos,
            sin,
            2 * HALF,
            HALF,
            HALF_BLOCK,
            1,
        )
    else:
        slot = tl.load(slots + token)
        source = latent + token * width
        place = kv + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token
        one = tl.arange(0, 1)
        _rotate_heads(
            source + LATENT,
            place + LATENT,
            one,
            (one == 0) & (slot >= 0),
            width,
            width,
            None,
            eps,
            cos,
            sin,
            2 * HALF,
            HALF,
            HALF_BLOCK,
            1,
        )
        i = tl.arange(0, LATENT_BLOCK)
        value = tl.load(source + i, mask=i < LATENT, other=0.0).to(tl.float32)
        factor = tl.load(norm + i, mask=i < LATENT, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / LATENT + eps)
        normed = _rounded(value * scale, dtype) * factor
        tl.store(place + i, normed.to(dtype), mask=(i < LATENT) & (slot >= 0))


def rope_and_latent(
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
    """See ``reference.mla.rope_and_latent``; the cache may be strided but for its last dimension.

    Raises:
        NotTakenError: The dtype or the latent's size is not taken.
        TypeError: A dtype, a shape or a layout is not as the kernel reads it.
    """
    same_type(q, queries, latent, kv_layer, norm)
    check_contiguous(q, queries, latent, cos_sin, norm)
    check_integers(torch.int64, positions, slot_mapping)
    block_size, width = kv_layer.shape[3:]
    half = _half(cos_sin, kv_layer)
    latent_dim = width - 2 * half
    if latent_dim > _MAX_LATENT_DIM:
        raise NotTakenError(f"latents of up to {_MAX_LATENT_DIM} elements, not of {latent_dim}")
    rows, num_heads, q_dim = q.shape
    heads = heads_of_program(2 * half, num_heads)
    launch(
        rope_latent,
        (rows, divided_up(num_heads, heads) + 1),
        q,
        queries,
        latent,
        positions,
        cos_sin,
        kv_layer,
        slot_mapping,
        norm,
        eps,
        kv_layer.stride(0),
        kv_layer.stride(3),
        tuning=LATENT_TUNING,
        NUM_HEADS=num_heads,
        HEADS=heads,
        Q_DIM=q_dim,
        LATENT=latent_dim,
        LATENT_BLOCK=next_power_of_2(latent_dim),
        HALF=half,
        HALF_BLOCK=next_power_of_2(half),
        BLOCK_SIZE=block_size,
    )
    return queries


def _half(cos_sin: Tensor, kv_layer: Tensor) -> int:
    """Check the layouts that both kernels rely on; return half of the rotated elements."""
    half, odd = divmod(cos_sin.shape[1], 2)
    if odd or cos_sin.dtype != torch.float32:
        raise TypeError(f"want an even table in fp32, got {cos_sin.shape[1]} {cos_sin.dtype}")
    if kv_layer.stride(4) != 1:
        raise TypeError(f"want a cache whose vectors are whole, got strides {kv_layer.stride()}")
    return half
