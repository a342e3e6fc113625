"""Reference router and experts of a mixture-of-experts layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.reference.activation import silu_and_mul

if TYPE_CHECKING:
    from pdserve.kernels.moe import RoutingRule

# Added to the sum that weights are divided by, as DeepSeek-V3 has it.
_LEAST_SUM = 1e-20


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


def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sum what each token's chosen experts make of it, weighted.

    An expert is a gated MLP with the rounding of `silu_and_mul`; the weighted sum is taken in fp32,
    in the order of the choices, and rounded once. Cost: one pass of Python per expert that is
    chosen.

    Args:
        x: ``[T, D]``.
        ids: ``[T, k]`` int64; negative: this expert is not here, and adds nothing.
        weights: ``[T, k]`` fp32.
        gate_up: ``[E, 2 * I, D]``, same dtype as ``x``: gate, then up.
        down: ``[E, D, I]``, same dtype.

    Returns:
        ``[T, D]``, same dtype.
    """
    parts = x.new_zeros((*ids.shape, x.shape[1]), dtype=torch.float32)
    for expert in sorted(set(ids[ids >= 0].tolist())):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gated = silu_and_mul(functional.linear(x[token], gate_up[expert]))
        parts[token, choice] = functional.linear(gated.float(), down[expert].float())
    total = torch.zeros_like(x, dtype=torch.float32)
    for choice in range(ids.shape[1]):
        total += weights[:, choice, None] * parts[:, choice]
    return total.to(x.dtype)
