"""The experts of a layer, laid out once, and the rule by which a router chooses among them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.cpu import native
from pdserve.kernels.reference import moe


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How scores are made of logits, and experts chosen by them.

    Attributes:
        top_k: Experts per token.
        sigmoid: Scores are sigmoids of the logits; otherwise their softmax.
        normalize: The chosen scores are divided by their sum.
        scale: On the weights, after that.
        num_groups: Runs of experts, equally long.
        top_k_groups: Only experts of so many best groups may be chosen.
        rank_groups_by_two: A group is ranked by the sum of its two best experts, else by the best.
    """

    top_k: int
    sigmoid: bool = False
    normalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_k_groups: int = 1
    rank_groups_by_two: bool = False


class PackedExperts:
    """Some experts of a layer: gated MLPs, each in one run of memory.

    On a CPU with native kernels the weights are in their layout; anywhere else they lie as they
    are and torch multiplies. Bytes of one expert may replace those of another of the same shape.

    Args:
        num_experts: E.
        width: D, of what goes in and comes out.
        inner: I, between.
        dtype: Of weights and values: bf16, fp16 or fp32.
        device: Where they lie.
    """

    def __init__(
        self, num_experts: int, width: int, inner: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._width, self._inner, self._dtype = width, inner, dtype
        self._kernels = native.kernels() if device.type == "cpu" else None
        if self._kernels is not None:
            self._bytes = self._kernels.packed_experts(num_experts, width, inner, dtype)
            self._down_at = self._kernels.down_at(width, inner, dtype)
            return
        weights = torch.empty((num_experts, 3 * inner * width), dtype=dtype, device=device)
        self._bytes = weights.view(torch.uint8)
        self._gate_up = weights[:, : 2 * inner * width].view(num_experts, 2 * inner, width)
        self._down = weights[:, 2 * inner * width :].view(num_experts, width, inner)

    def write_gate(self, local: int, weight: Tensor) -> None:
        """Bring ``gate`` of an expert, ``[I, D]``, of any dtype and device."""
        self._write_gate_up(local, 0, weight)

    def write_up(self, local: int, weight: Tensor) -> None:
        """Bring ``up`` of an expert, ``[I, D]``."""
        self._write_gate_up(local, self._inner, weight)

    def write_down(self, local: int, weight: Tensor) -> None:
        """Bring ``down`` of an expert, ``[D, I]``."""
        if self._kernels is None:
            self._down[local] = weight
        else:
            self._kernels.pack_rows(
                weight.to(self._dtype), self._bytes[local, self._down_at :], first=0
            )

    def _write_gate_up(self, local: int, first: int, weight: Tensor) -> None:
        if self._kernels is None:
            self._gate_up[local, first : first + self._inner] = weight
        else:
            self._kernels.pack_rows(weight.to(self._dtype), self._bytes[local], first)

    def read(self, local: int) -> Tensor:
        """Return the bytes of an expert, ``[n]`` uint8, as they lie: not a copy."""
        return self._bytes[local]

    def write(self, local: int, data: Tensor) -> None:
        """Replace an expert by the bytes that `read` returned elsewhere."""
        self._bytes[local].copy_(data)

    def __call__(self, x: Tensor, local_ids: Tensor, weights: Tensor) -> Tensor:
        """Sum what each token's experts make of it; see ``reference.moe.experts``.

        Args:
            x: ``[T, D]``, contiguous.
            local_ids: ``[T, k]`` int64; negative: not among these.
            weights: ``[T, k]`` fp32.

        Returns:
            ``[T, D]``, same dtype.
        """
        if self._kernels is None:
            return moe.experts(x, local_ids, weights, self._gate_up, self._down)
        return self._kernels.run_experts(x, local_ids, weights, self._bytes, self._inner)
