"""Reference operations of multi-head latent attention (DeepSeek-V2, section 2.1), absorbed.

The cache has one normed latent of R elements and one rotated key of P elements per token. Queries
are mapped into the space of the latent, which is key and value of all heads at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kernels.reference.attention import paged_attention
from pdserve.kernels.reference.norm import rms_norm
from pdserve.kernels.reference.rope import rotate


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head by its own weight, accumulated in fp32, rounded once.

    Args:
        x: ``[T, H, K]``, strided over tokens and heads.
        weight: ``[H, N, K]``, same dtype.

    Returns:
        ``[T, H, N]``, same dtype.
    """
    return torch.einsum("thk,hnk->thn", x.float(), weight.float()).to(x.dtype)


class PackedHeads:
    """``x[:, h] @ weight[h].T`` for weights that are used often; like a `PackedLinear` per head.

    Args:
        weight: ``[H, N, K]`` in bf16, fp16 or fp32; not to be changed afterwards.
    """

    _weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        self._shape = weight.shape
        self._dtype = weight.dtype
        self._lay_out(weight)

    def _lay_out(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply.

        Args:
            x: ``[T, H, K]`` of the weight's dtype, may be strided over tokens and heads.
            out: ``[T, H, N]`` to write to, may be strided likewise; None allocates it.

        Returns:
            ``[T, H, N]``: ``out`` if that was given.

        Raises:
            TypeError: A shape or dtype is wrong, or elements of a head are strided.
        """
        num_heads, num_cols, depth = self._shape
        if x.shape[1:] != (num_heads, depth) or x.dtype != self._dtype:
            raise TypeError(
                f"want [T, {num_heads}, {depth}] {self._dtype}, got {x.shape} {x.dtype}"
            )
        if out is None:
            out = torch.empty((len(x), num_heads, num_cols), dtype=x.dtype, device=x.device)
        elif out.shape != (len(x), num_heads, num_cols):
            raise TypeError(f"want [{len(x)}, {num_heads}, {num_cols}], got {out.shape}")
        self._multiply(x, out)
        return out

    def _multiply(self, x: Tensor, out: Tensor) -> None:
        out.copy_(head_linear(x, self._weight))


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
    """Rotate the queries' last P elements, and store the normed latent with its rotated key.

    Rotation is the rotate-half form with the rounding of `rope_and_cache`.

    Args:
        q: ``[T, H, N + P]``.
        queries: ``[T, H, R + P]``: the rotated elements are written to the last P; the others are
            left alone.
        latent: ``[T, R + P]``.
        positions: ``[T]`` int64, each below ``max_pos``.
        cos_sin: ``[max_pos, P]`` fp32: the first half cosines, the second half sines.
        kv_layer: ``[num_blocks, 1, 1, block_size, R + P]``, may be strided over blocks.
        slot_mapping: ``[T]`` int64, block * block_size + offset; negative means: store nothing.
        norm: ``[R]``, weight of the latent's RMS norm.
        eps: Epsilon of that norm.

    Returns:
        ``queries``.
    """
    rotary_dim = cos_sin.shape[1]
    block_size = kv_layer.shape[3]
    cos, sin = cos_sin[positions].to(q.dtype).chunk(2, dim=-1)
    queries[..., -rotary_dim:] = rotate(q[..., -rotary_dim:], cos.unsqueeze(1), sin.unsqueeze(1))
    normed = rms_norm(latent[:, :-rotary_dim], norm, eps)
    cached = torch.cat((normed, rotate(latent[:, -rotary_dim:], cos, sin)), dim=-1)
    stored = slot_mapping >= 0
    slots = slot_mapping[stored]
    kv_layer[slots // block_size, 0, 0, slots % block_size] = cached[stored]
    return queries


def latent_attention(
    q: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    latent_dim: int,
) -> Tensor:
    """Attend from each query token to its own request's latents, up to itself.

    Like `paged_attention` with one KV head for all heads, whose values are the first ``latent_dim``
    elements of its keys.

    Args:
        q: ``[T, H, R + P]``.
        kv_layer: ``[num_blocks, 1, 1, block_size, R + P]``.
        block_tables: ``[R, max_blocks]`` int32.
        query_start: ``[R + 1]`` int32, from 0 to T, never falling.
        context_lens: ``[R]`` int32: tokens of each request in the cache, this step's included.
        scale: Factor on the scores.
        latent_dim: Elements of a value.

    Returns:
        ``[T, H, latent_dim]``, same dtype.
    """
    both = kv_layer.expand(-1, 2, -1, -1, -1)
    attended = paged_attention(q, both, block_tables, query_start, context_lens, scale)
    return attended.view(q.shape)[..., :latent_dim].contiguous()
