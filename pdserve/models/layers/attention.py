"""Grouped-query attention over the paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.kernels.ops import paged_attention, rope_and_cache
from pdserve.models.layers.linear import Linear
from pdserve.models.layers.parameter import Parameter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pdserve.models.arch import ModelArch
    from pdserve.models.decoder import StepInputs
    from pdserve.models.layers.parameter import Placement
    from pdserve.models.weights import Slot


class Attention:
    """Projections, optional q and k norms, rotation, cache write, attention, projection.

    Args:
        arch: Whole model.
        layer: Index of this layer, for its window.
        cos_sin: `[max_positions, head_dim]` fp32, shared by all layers.
    """

    def __init__(self, arch: ModelArch, layer: int, cos_sin: Tensor, placement: Placement) -> None:
        q_rows, kv_rows = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        self._qkv = Linear(
            arch.hidden_size,
            {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows},
            placement,
            bias=arch.qkv_bias,
        )
        self._out = Linear(q_rows, {"o_proj": arch.hidden_size}, placement, bias=arch.o_bias)
        self._q_norm = Parameter((arch.head_dim,), placement) if arch.qk_norm else None
        self._k_norm = Parameter((arch.head_dim,), placement) if arch.qk_norm else None
        self._cos_sin = cos_sin
        self._eps = arch.rms_norm_eps
        self._scale = arch.head_dim**-0.5
        self._window = arch.windows[layer]

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how each parameter is loaded, by name."""
        yield from self._qkv.slots(prefix)
        yield from self._out.slots(prefix)
        if self._q_norm is not None and self._k_norm is not None:
            yield f"{prefix}q_norm.weight", self._q_norm.slot()
            yield f"{prefix}k_norm.weight", self._k_norm.slot()

    def __call__(self, x: Tensor, step: StepInputs, kv_layer: Tensor) -> Tensor:
        """Attend.

        Args:
            x: `[T, hidden_size]`.
            step: The tokens' places.
            kv_layer: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`; this step's keys
                and values are written to it.

        Returns:
            `[T, hidden_size]`.
        """
        q = rope_and_cache(
            self._qkv.packed(x),
            step.positions,
            self._cos_sin,
            kv_layer,
            step.slot_mapping,
            None if self._q_norm is None else self._q_norm.value,
            None if self._k_norm is None else self._k_norm.value,
            self._eps,
        )
        attended = paged_attention(
            q,
            kv_layer,
            step.block_tables,
            step.query_start,
            step.context_lens,
            self._scale,
            self._window,
        )
        return self._out.packed(attended)
