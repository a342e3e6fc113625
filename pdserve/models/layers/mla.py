"""Multi-head latent attention (DeepSeek-V2, section 2.1) over a paged cache of latents.

All heads share the cached part of a token: a latent, and a rotated key beside it. A matrix per head
makes keys and values from the latent, and those matrices are absorbed: the one for keys into the
query, the one for values into the output. So attention runs in the latent's space, and the cache is
read once for all heads. Heads are split over the TP group; the latent is whole on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdserve.models.layers.linear import Linear, RowParallel, Rows, in_order
from pdserve.models.layers.parameter import Parameter
from pdserve.models.slots import Slot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pdserve.kernels.reference.mla import PackedHeads
    from pdserve.kernels.step import StepInputs
    from pdserve.models.arch import ModelArch
    from pdserve.models.layers.parameter import Placement


class LatentAttention:
    """Norm, query and latent, absorption, rotation and cache write, attention, projection.

    Shapes below: H heads of this rank; R elements of the latent; query heads of N elements that
    are not rotated and P that are; value heads of V.

    Args:
        arch: The whole model, which has latent attention.
        layer: Index of this layer; all are alike.
        cos_sin: `[max_positions, P]` fp32, shared by all layers.

    Raises:
        ConfigError: The TP group's size does not divide the heads.
    """

    _absorb: PackedHeads
    """`[T, H, N] -> [T, H, R]`, queries into the latent's space; set once loaded."""

    _expand: PackedHeads
    """`[T, H, R] -> [T, H, V]`, values out of that space; set once loaded."""

    def __init__(self, arch: ModelArch, layer: int, cos_sin: Tensor, placement: Placement) -> None:
        mla = arch.mla
        assert mla is not None
        self._mla = mla
        self._placement = placement
        self._stream = placement.stream
        self._kernels = placement.kernels
        self._heads = placement.part("num_attention_heads", arch.num_heads)
        self._all_heads = arch.num_heads
        self._cos_sin = cos_sin
        self._eps = arch.rms_norm_eps
        self._norm = Parameter((arch.hidden_size,), placement)
        hidden, rank, bias = arch.hidden_size, mla.q_lora_rank, arch.qkv_bias
        self._q_a: Linear | None = None
        self._q_norm: Parameter | None = None
        if rank is not None:
            self._q_a = Linear(hidden, {"q_a_proj": rank}, placement, bias=bias)
            self._q_norm = Parameter((rank,), placement)
        self._q = Linear(
            hidden if rank is None else rank,
            {"q_proj" if rank is None else "q_b_proj": self._rows(self._q_head_dim)},
            placement,
        )
        self._kv_a = Linear(
            hidden,
            {"kv_a_proj_with_mqa": mla.kv_lora_rank + mla.qk_rope_head_dim},
            placement,
            bias=bias,
        )
        self._kv_norm = Parameter((mla.kv_lora_rank,), placement)
        self._out = RowParallel(
            arch.num_heads * mla.v_head_dim,
            "o_proj",
            hidden,
            placement=placement,
            bias=arch.o_bias,
        )

    @property
    def _q_head_dim(self) -> int:
        return self._mla.qk_nope_head_dim + self._mla.qk_rope_head_dim

    def _rows(self, head_dim: int) -> Rows:
        first, end = self._heads.start * head_dim, self._heads.stop * head_dim
        return Rows(self._all_heads * head_dim, range(first, end))

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how to load each parameter; `prefix` is that of the layer."""
        mla = self._mla
        yield f"{prefix}input_layernorm.weight", self._norm.slot()
        prefix += "self_attn."
        if self._q_a is not None and self._q_norm is not None:
            yield from self._q_a.slots(prefix)
            yield f"{prefix}q_a_layernorm.weight", self._q_norm.slot()
        yield f"{prefix}kv_a_layernorm.weight", self._kv_norm.slot()
        for linear, kept in ((self._q, mla.qk_nope_head_dim), (self._kv_a, mla.kv_lora_rank)):
            for name, slot in linear.slots(prefix):
                yield name, self._halves_apart(slot, kept)
        rows = self._rows(mla.qk_nope_head_dim + mla.v_head_dim)
        yield (
            f"{prefix}kv_b_proj.weight",
            Slot(
                (rows.num_rows, mla.kv_lora_rank),
                self._load_kv_b,
                (slice(rows.rows.start, rows.rows.stop), slice(None)),
            ),
        )
        yield from self._out.slots(prefix)

    def _halves_apart(self, slot: Slot, kept: int) -> Slot:
        """Move the two elements of each rotated pair as far apart as the kernels expect.

        In the checkpoint the elements of a pair are adjacent; in the kernels they are half a head
        apart. Queries and keys are reordered alike, so no score changes.

        Args:
            slot: Slot whose rows are heads, each of `kept` elements and then the rotated ones.
        """
        if not self._mla.interleaved_rope:
            return slot
        end = kept + self._mla.qk_rope_head_dim
        order = torch.tensor([*range(kept), *range(kept, end, 2), *range(kept + 1, end, 2)])
        return in_order(slot, order)

    def _load_kv_b(self, tensor: Tensor) -> None:
        nope, device = self._mla.qk_nope_head_dim, self._placement.device
        heads = tensor.to(device, self._placement.dtype)
        heads = heads.reshape(len(self._heads), -1, self._mla.kv_lora_rank)
        self._absorb = self._kernels.heads(heads[:, :nope].transpose(1, 2).contiguous())
        self._expand = self._kernels.heads(heads[:, nope:].contiguous())

    def _queries(self, normed: Tensor) -> Tensor:
        if self._q_a is None or self._q_norm is None:
            return self._q.packed(normed)
        low = self._q_a.packed(normed)
        return self._q.packed(
            self._kernels.rms_norm(low, self._q_norm.value, self._mla.lora_norm_eps)
        )

    def __call__(
        self, x: Tensor | None, residual: Tensor, step: StepInputs, kv_layer: Tensor
    ) -> Tensor:
        """Run the half layer. Rows are this rank's share of the residual stream, or all.

        Args:
            x: `[rows, hidden_size]`, added to `residual` in place first; None adds nothing.
            residual: `[rows, hidden_size]`.
            step: The T tokens' places.
            kv_layer: `[num_blocks, 1, 1, block_size, R + P]`; this step's latents are written to
                it, the same on every rank.

        Returns:
            `[rows, hidden_size]`, summed over the TP group, not yet added to `residual`.
        """
        mla, stream, kernels = self._mla, self._stream, self._kernels
        nope, latent_dim = mla.qk_nope_head_dim, mla.kv_lora_rank
        if x is None:
            normed = kernels.rms_norm(residual, self._norm.value, self._eps)
        else:
            normed = kernels.add_rms_norm(x, residual, self._norm.value, self._eps)
        normed = stream.gather(normed, len(step.positions))
        q = self._queries(normed).view(-1, len(self._heads), self._q_head_dim)
        queries = q.new_empty((*q.shape[:2], latent_dim + mla.qk_rope_head_dim))
        self._absorb(q[..., :nope], queries[..., :latent_dim])
        kernels.rope_and_latent(
            q,
            queries,
            self._kv_a.packed(normed),
            step.positions,
            self._cos_sin,
            kv_layer,
            step.slot_mapping,
            self._kv_norm.value,
            mla.lora_norm_eps,
        )
        attended = kernels.latent_attention(
            queries,
            kv_layer,
            step.block_tables,
            step.query_start,
            step.context_lens,
            mla.softmax_scale,
            latent_dim,
        )
        return stream.sum(self._out.packed(self._expand(attended).flatten(1)))
