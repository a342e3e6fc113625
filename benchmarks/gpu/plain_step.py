"""A decode step of the same shapes in plain torch, as a yardstick: no paging, no promise of bits.

cuBLAS multiplies and torch's own attention reads contiguous KV; the query heads of a KV head are
rows of one query, which is the quickest way that torch has for few queries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.llama import ARCH, DTYPE, STD


class PlainStep:
    """Weights and KV of one decode step, and the step.

    Args:
        num_rows: At most in a batch.
        max_context: At most of a row.
    """

    def __init__(self, num_rows: int, max_context: int, device: torch.device) -> None:
        def random(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=DTYPE, device=device).normal_(std=STD)

        hidden, inner, head_dim = ARCH.hidden_size, ARCH.intermediate_size, ARCH.head_dim
        qkv = (ARCH.num_heads + 2 * ARCH.num_kv_heads) * head_dim
        self._layers = [
            (
                random(qkv, hidden),
                random(hidden, ARCH.num_heads * head_dim),
                random(2 * inner, hidden),
                random(hidden, inner),
                torch.ones(2, hidden, dtype=DTYPE, device=device),
            )
            for _ in range(ARCH.num_layers)
        ]
        self._head = random(ARCH.vocab_size, hidden)
        self._table = random(ARCH.vocab_size, hidden)
        self._norm = torch.ones(hidden, dtype=DTYPE, device=device)
        angles = torch.arange(max_context, device=device)[:, None] / torch.logspace(
            0, 5, head_dim // 2, device=device
        )
        self._cos, self._sin = angles.cos().to(DTYPE), angles.sin().to(DTYPE)
        shape = num_rows * max_context * ARCH.num_kv_heads * head_dim
        self._kv = [(random(shape), random(shape)) for _ in range(ARCH.num_layers)]

    def __call__(self, token_ids: Tensor, context: int) -> Tensor:
        """Return the logits, `[B, vocab_size]`, of `token_ids`, `[B]`, each at `context - 1`."""
        residual = functional.embedding(token_ids, self._table)
        for (qkv, out, gate_up, down, norms), kv in zip(self._layers, self._kv, strict=True):
            normed = self._rms(residual, norms[0])
            attended = self._attend(functional.linear(normed, qkv), kv, context)
            residual = residual + functional.linear(attended, out)
            gate, up = functional.linear(self._rms(residual, norms[1]), gate_up).chunk(2, -1)
            residual = residual + functional.linear(functional.silu(gate) * up, down)
        return functional.linear(self._rms(residual, self._norm), self._head)

    @staticmethod
    def _rms(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, ARCH.rms_norm_eps)

    def _attend(self, qkv: Tensor, kv: tuple[Tensor, Tensor], context: int) -> Tensor:
        batch, num_kv_heads, head_dim = len(qkv), ARCH.num_kv_heads, ARCH.head_dim
        shape = batch, num_kv_heads, context, head_dim
        keys, values = (plane[: batch * num_kv_heads * context * head_dim] for plane in kv)
        keys, values = keys.view(shape), values.view(shape)
        heads = qkv.view(batch, -1, head_dim)
        q, k, v = heads.split([ARCH.num_heads, num_kv_heads, num_kv_heads], dim=1)
        keys[:, :, context - 1] = self._rotate(k, context - 1)
        values[:, :, context - 1] = v
        q = self._rotate(q, context - 1).view(batch, num_kv_heads, -1, head_dim)
        return functional.scaled_dot_product_attention(q, keys, values).reshape(batch, -1)

    def _rotate(self, x: Tensor, position: int) -> Tensor:
        low, high = x.chunk(2, -1)
        cos, sin = self._cos[position], self._sin[position]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
