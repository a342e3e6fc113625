"""The two halves of a dense decoder layer, each as one operation.

They compute what the operations of `pdserve.kernels.ops` compute one after the other, bit for bit.
On a CPU with native kernels a step of few tokens is one call into C per half, which saves most of
the Python of a decode step; otherwise the operations are called in turn. Nothing here knows of
tensor parallelism: the caller sums partial results over ranks after each half. A caller whose ranks
hold a share of the residual stream each calls ``norm`` on its rows, gathers, and goes on with
``after_norm``: the same operations, in two calls.
"""

from __future__ import annotations

from torch import Tensor

from pdserve.kernels.cpu import native
from pdserve.kernels.ops import (
    PackedLinear,
    add_rms_norm,
    paged_attention,
    rms_norm,
    rope_and_cache,
    silu_and_mul,
)

# Above this many tokens a call's arithmetic dwarfs its Python, and the intermediate results of one
# call (which the native one keeps for the next) would hold memory for nothing.
_MAX_ROWS = 128


class Mlp:
    """Norm, gate and up projection, gated activation, down projection.

    Args:
        norm: ``[D]``, weight of the norm.
        eps: Of the norm.
        gate_up: ``[D] -> [2 * I]``.
        down: ``[I] -> [D]``.
    """

    def __init__(self, norm: Tensor, eps: float, gate_up: PackedLinear, down: PackedLinear) -> None:
        self._norm, self._eps = norm, eps
        self._gate_up, self._down = gate_up, down
        self._kernels = native.kernels() if norm.is_cpu else None
        self._packed = gate_up.packed_weight(), down.packed_weight()

    def __call__(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """Run the half layer.

        Args:
            x: ``[T, D]``, added to ``residual`` in place first; None adds nothing.
            residual: ``[T, D]``.

        Returns:
            ``[T, D]``, not yet added to ``residual``.
        """
        gate_up, down = self._packed
        if (
            self._kernels is not None
            and gate_up is not None
            and down is not None
            and len(residual) <= _MAX_ROWS
        ):
            return self._kernels.mlp(x, residual, self._norm, self._eps, gate_up, down)
        return self.after_norm(self.norm(x, residual))

    def norm(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """Add ``x`` to ``residual`` in place and return the norm of the sum, ``[T, D]``."""
        return _normed(x, residual, self._norm, self._eps)

    def after_norm(self, normed: Tensor) -> Tensor:
        """Run what follows the norm: ``[T, D] -> [T, D]``."""
        return self._down(silu_and_mul(self._gate_up(normed)))


class Attention:
    """Norm, qkv projection, rotation and cache write, attention, output projection.

    Args:
        norm: ``[D]``, weight of the norm.
        eps: Of this norm and of those of q and k.
        qkv: ``[D] -> [(H + 2 * Hkv) * Dh]``.
        out: ``[H * Dh] -> [D]``.
        cos_sin: ``[max_pos, Dh]`` fp32.
        q_norm: ``[Dh]`` or None.
        k_norm: ``[Dh]`` or None.
        scale: Factor on the scores.
        window: Sliding window, or None.
    """

    def __init__(
        self,
        norm: Tensor,
        eps: float,
        qkv: PackedLinear,
        *,
        out: PackedLinear,
        cos_sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        scale: float,
        window: int | None,
    ) -> None:
        self._norm, self._eps = norm, eps
        self._qkv, self._out = qkv, out
        self._cos_sin = cos_sin
        self._q_norm, self._k_norm = q_norm, k_norm
        self._scale, self._window = scale, window
        self._kernels = native.kernels() if norm.is_cpu else None
        self._takes_kv: bool | None = None  # told by the first call
        self._packed = qkv.packed_weight(), out.packed_weight()

    def __call__(
        self,
        x: Tensor | None,
        residual: Tensor,
        kv_layer: Tensor,
        *,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
    ) -> Tensor:
        """Run the half layer.

        Args:
            x: ``[T, D]``, added to ``residual`` in place first; None adds nothing.
            residual: ``[T, D]``.
            kv_layer: As `rope_and_cache` writes and `paged_attention` reads it; so are the rest.
            positions: ``[T]`` int64.
            slot_mapping: ``[T]`` int64.
            block_tables: ``[R, max_blocks]`` int32.
            query_start: ``[R + 1]`` int32.
            context_lens: ``[R]`` int32.

        Returns:
            ``[T, D]``, not yet added to ``residual``.
        """
        qkv, out = self._packed
        if self._takes_kv is None:
            *_, block_size, head_dim = kv_layer.shape
            self._takes_kv = native.takes_attention(head_dim, head_dim, block_size)
        if (
            self._kernels is not None
            and self._takes_kv
            and qkv is not None
            and out is not None
            and len(residual) <= _MAX_ROWS
        ):
            return self._kernels.attention_block(
                x,
                residual,
                self._norm,
                self._eps,
                qkv,
                out,
                kv_layer,
                positions=positions,
                cos_sin=self._cos_sin,
                slot_mapping=slot_mapping,
                q_norm=self._q_norm,
                k_norm=self._k_norm,
                block_tables=block_tables,
                query_start=query_start,
                context_lens=context_lens,
                scale=self._scale,
                window=self._window,
            )
        return self.after_norm(
            self.norm(x, residual),
            kv_layer,
            positions=positions,
            slot_mapping=slot_mapping,
            block_tables=block_tables,
            query_start=query_start,
            context_lens=context_lens,
        )

    def norm(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """Add ``x`` to ``residual`` in place and return the norm of the sum, ``[T, D]``."""
        return _normed(x, residual, self._norm, self._eps)

    def after_norm(
        self,
        normed: Tensor,
        kv_layer: Tensor,
        *,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
    ) -> Tensor:
        """Run what follows the norm: ``[T, D] -> [T, D]``; arguments as of a call."""
        q = rope_and_cache(
            self._qkv(normed),
            positions,
            self._cos_sin,
            kv_layer,
            slot_mapping,
            self._q_norm,
            self._k_norm,
            self._eps,
        )
        attended = paged_attention(
            q, kv_layer, block_tables, query_start, context_lens, self._scale, self._window
        )
        return self._out(attended)


def _normed(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x is None:
        return rms_norm(residual, weight, eps)
    return add_rms_norm(x, residual, weight, eps)
