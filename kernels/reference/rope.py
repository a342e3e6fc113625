"""Reference rotary embedding, fused with the write into the paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kernels.reference.norm import rms_norm


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
    """Norm and rotate q and k, and store k and v in the cache.

    Rotation is the rotate-half form over the first ``rotary_dim`` of each head, with the rounding
    of transformers: cos and sin are rounded to the model's dtype, and each product and the sum are
    rounded to it too. In fp32 nothing is rounded.

    Args:
        qkv: ``[T, (H + 2 * Hkv) * Dh]``: the q heads, the k heads, the v heads.
        positions: ``[T]`` int64, each below ``max_pos``.
        cos_sin: ``[max_pos, rotary_dim]`` fp32: the first half cosines, the second half sines.
        kv_layer: ``[num_blocks, 2, Hkv, block_size, Dh]``, may be strided over blocks; k and v of
            each token are written at its slot.
        slot_mapping: ``[T]`` int64, block * block_size + offset; negative means: store nothing.
        q_norm: ``[Dh]`` weight of a per-head RMS norm of q, before rotation, or None; of the
            model's dtype, or fp32 as of `rms_norm`.
        k_norm: The same for k.
        eps: Epsilon of both norms.

    Returns:
        q, ``[T, H, Dh]``, same dtype.
    """
    _, _, num_kv_heads, block_size, head_dim = kv_layer.shape
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    cos, sin = cos_sin[positions].to(qkv.dtype).unsqueeze(1).chunk(2, dim=-1)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)

    stored = slot_mapping >= 0
    slots = slot_mapping[stored]
    block, offset = slots // block_size, slots % block_size
    kv_layer[block, 0, :, offset] = k[stored]
    kv_layer[block, 1, :, offset] = v[stored]
    return q


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first elements of each head, in the rotate-half form.

    Args:
        x: ``[..., Dh]``.
        cos: ``[..., rotary_dim / 2]``, same dtype.
        sin: Likewise.

    Returns:
        ``[..., Dh]``, same dtype.
    """
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)
