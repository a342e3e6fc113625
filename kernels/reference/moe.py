"""Reference router and experts of a mixture-of-experts layer, and the rule of their choice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.fp8 import Fp8Weight, plain
from pdserve.kernels.reference.activation import ClampedGlu, clamped_glu, silu_and_mul

# Added to the sum that weights are divided by, as DeepSeek-V3 has it.
_LEAST_SUM = 1e-20


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How scores are computed from logits, and experts chosen by them.

    Attributes:
        top_k: Experts per token.
        sigmoid: Whether scores are sigmoids of the logits; otherwise their softmax.
        normalize: Whether the chosen scores are divided by their sum.
        scale: Factor on the weights, after that.
        num_groups: Number of equal runs of experts.
        top_k_groups: Number of best groups whose experts may be chosen.
        rank_groups_by_two: Whether a group is ranked by the sum of its two best experts, else by
            the best.
    """

    top_k: int
    sigmoid: bool = False
    normalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_k_groups: int = 1
    rank_groups_by_two: bool = False


def route(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """Choose each token's experts.

    Ties go to the expert, or the group, with the lower index.

    Args:
        logits: ``[T, E]`` fp32.
        bias: ``[E]`` fp32, added to the scores for the choice, not for the weights; or None.
        rule: How to choose.

    Returns:
        ids: ``[T, top_k]`` int64, the best first.
        weights: ``[T, top_k]`` fp32.
    """
    scores = logits.sigmoid() if rule.sigmoid else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    if rule.top_k_groups < rule.num_groups:
        grouped = choice.view(-1, rule.num_groups, choice.shape[1] // rule.num_groups)
        if rule.rank_groups_by_two:
            rank = grouped.topk(2, dim=-1).values.sum(-1)
        else:
            rank = grouped.amax(-1)
        closed = torch.ones_like(rank, dtype=torch.bool)
        closed.scatter_(1, _best(rank, rule.top_k_groups), value=False)
        choice = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)
    ids = _best(choice, rule.top_k)
    weights = scores.gather(1, ids)
    if rule.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
    return ids, weights * rule.scale


def _best(values: Tensor, count: int) -> Tensor:
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """What of a layer's experts differs between models.

    Attributes:
        has_bias: Whether gate, up and down have biases.
        glu: The gate; None is `silu_and_mul`.
    """

    has_bias: bool = False
    glu: ClampedGlu | None = None


PLAIN = ExpertForm()
"""No biases, and SiLU."""


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    biases: tuple[Tensor, Tensor] | None = None,
    glu: ClampedGlu | None = None,
) -> Tensor:
    """Return the weighted sum of the results of each token's chosen experts.

    An expert is a gated MLP with the rounding of `silu_and_mul` or `clamped_glu`; the weighted sum
    is taken in fp32, in the order of the choices, and rounded once. Cost: one pass of Python per
    chosen expert.

    Args:
        x: ``[T, D]``.
        ids: ``[T, k]`` int64; negative: this expert is not here, and adds nothing.
        weights: ``[T, k]`` fp32.
        gate_up: ``[E, 2 * I, D]``, same dtype as ``x``: gate, then up.
        down: ``[E, D, I]``, same dtype.
        biases: ``[E, 2 * I]`` and ``[E, D]``, same dtype, or None.
        glu: See `ExpertForm`.

    Returns:
        ``[T, D]``, same dtype.
    """
    parts = x.new_zeros((*ids.shape, x.shape[1]), dtype=torch.float32)
    for expert in sorted(set(ids[ids >= 0].tolist())):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        of_both, of_down = (None, None) if biases is None else (each[expert] for each in biases)
        both = functional.linear(x[token], gate_up[expert], of_both)
        gated = silu_and_mul(both) if glu is None else clamped_glu(both, glu)
        of_down = None if of_down is None else of_down.float()
        parts[token, choice] = functional.linear(gated.float(), down[expert].float(), of_down)
    total = torch.zeros_like(x, dtype=torch.float32)
    for choice in range(ids.shape[1]):
        total += weights[:, choice, None] * parts[:, choice]
    return total.to(x.dtype)


class PackedExperts:
    """Some experts of a layer: gated MLPs, each in one run of memory.

    Here the weights are row-major, and torch multiplies; a backend's own class lays them out for
    its kernels. Bytes of one expert may replace those of another of the same shape.

    Args:
        num_experts: E.
        width: D, of inputs and outputs.
        inner: I, the width between.
        dtype: Of weights and values: bf16, fp16 or fp32.
        device: Their device.
        form: Their biases and their gate.
    """

    _bytes: Tensor

    def __init__(
        self,
        num_experts: int,
        width: int,
        inner: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        form: ExpertForm = PLAIN,
    ) -> None:
        self._width, self._inner, self._dtype, self._form = width, inner, dtype, form
        self._allocate(num_experts, device)

    def _allocate(self, num_experts: int, device: torch.device) -> None:
        width, inner = self._width, self._inner
        of_both, both = 2 * inner * width, 3 * inner * width
        size = both + (2 * inner + width if self._form.has_bias else 0)
        numbers = torch.empty((num_experts, size), dtype=self._dtype, device=device)
        self._bytes = numbers.view(torch.uint8)
        self._gate_up = numbers[:, :of_both].view(num_experts, 2 * inner, width)
        self._down = numbers[:, of_both:both].view(num_experts, width, inner)
        self._bias = numbers[:, both:]

    def write_gate(self, local: int, weight: Tensor | Fp8Weight) -> None:
        """Set ``gate`` of an expert, ``[I, D]``, of any dtype and device.

        If it is in FP8, then all weights of all experts are, with runs of one length or of a row.
        """
        self._write_gate_up(local, 0, weight)

    def write_up(self, local: int, weight: Tensor | Fp8Weight) -> None:
        """Set ``up`` of an expert, ``[I, D]``."""
        self._write_gate_up(local, self._inner, weight)

    def write_down(self, local: int, weight: Tensor | Fp8Weight) -> None:
        """Set ``down`` of an expert, ``[D, I]``."""
        self._down[local] = plain(weight, self._dtype)

    def _write_gate_up(self, local: int, first: int, weight: Tensor | Fp8Weight) -> None:
        self._gate_up[local, first : first + self._inner] = plain(weight, self._dtype)

    def write_gate_bias(self, local: int, bias: Tensor) -> None:
        """Set the bias of ``gate`` of an expert, ``[I]``, rounded to the weights' dtype."""
        self._write_bias(local, 0, bias)

    def write_up_bias(self, local: int, bias: Tensor) -> None:
        """Set the bias of ``up`` of an expert, ``[I]``."""
        self._write_bias(local, self._inner, bias)

    def write_down_bias(self, local: int, bias: Tensor) -> None:
        """Set the bias of ``down`` of an expert, ``[D]``."""
        self._write_bias(local, 2 * self._inner, bias)

    def _write_bias(self, local: int, first: int, bias: Tensor) -> None:
        self._bias[local, first : first + len(bias)] = bias

    @property
    def _biases(self) -> tuple[Tensor, Tensor] | None:
        """``[E, 2 * I]`` and ``[E, D]``, strided, if there are any."""
        if not self._form.has_bias:
            return None
        return self._bias[:, : 2 * self._inner], self._bias[:, 2 * self._inner :]

    def read(self, local: int) -> Tensor:
        """Return the bytes of an expert, ``[n]`` uint8, without a copy."""
        return self._bytes[local]

    def write(self, local: int, data: Tensor) -> None:
        """Replace an expert by the bytes that `read` returned elsewhere."""
        self._bytes[local].copy_(data)

    def __call__(self, x: Tensor, local_ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts; see `experts`.

        Args:
            x: ``[T, D]``, contiguous.
            local_ids: ``[T, k]`` int64; negative: not among these.
            weights: ``[T, k]`` fp32.

        Returns:
            ``[T, D]``, same dtype.
        """
        return experts(
            x, local_ids, weights, self._gate_up, self._down, self._biases, self._form.glu
        )
