"""The router of a mixture-of-experts layer: a program of one warp chooses a token's experts.

It chooses the largest 64-bit integer: the score, as an integer of the same order, above the
inverted index. So ties go to the lower index, whatever the order of a reduction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.launch import Tuning, launch, wait_for_previous
from pdserve.kernels.cuda.sizes import next_power_of_2
from pdserve.kernels.reference.moe import RoutingRule


@triton.jit
def ranked(value: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Return integers ordered by value, then by descending index; NaN is above all."""
    value = tl.where(value == 0.0, 0.0, value)  # one zero
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    key = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, key)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def value_of(rank: tl.tensor) -> tl.tensor:
    """Return the values given to `ranked`."""
    key = (rank >> 32).to(tl.int32)
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def index_of(rank: tl.tensor) -> tl.tensor:
    """Return the indices given to `ranked`."""
    return 0x7FFFFFFF - (rank & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def open_groups(
    choice: tl.tensor,
    expert: tl.tensor,
    there: tl.tensor,
    num_groups: tl.tensor,
    TOP_GROUPS: tl.constexpr,
    BY_TWO: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tensor:
    """Return ``[GROUPS, 1]``: whether experts of a group may be chosen."""
    ranks = tl.where(there, ranked(choice, expert), -0x7FFFFFFFFFFFFFFF)
    best = tl.max(ranks, 1)
    value = value_of(best)
    if BY_TWO:
        value += value_of(tl.max(tl.where(ranks == best[:, None], -0x7FFFFFFFFFFFFFFF, ranks), 1))
    group = tl.arange(0, GROUPS)
    groups = tl.where(group < num_groups, ranked(value, group), -0x7FFFFFFFFFFFFFFF)
    opened = tl.zeros([GROUPS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        chosen = group == index_of(tl.max(groups, 0))
        opened = tl.where(chosen, 1, opened)
        groups = tl.where(chosen, -0x7FFFFFFFFFFFFFFF, groups)
    return (opened == 1)[:, None]


@triton.jit
def route_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    scale: tl.tensor,
    num_groups: tl.tensor,
    group_size: tl.tensor,
    HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BY_TWO: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Choose one token's experts; grid (tokens,). TOP_GROUPS is 0 if all groups are open.

    Args:
        logits: ``[T, num_groups * group_size]`` fp32.
        bias: ``[num_groups * group_size]`` fp32; read if ``HAS_BIAS``.
        ids: ``[T, TOP_K]`` int64.
        weights: ``[T, TOP_K]`` fp32.
        CHOICES: TOP_K, as the next power of two; GROUPS and SIZE likewise.
    """
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)[:, None]
    member = tl.arange(0, SIZE)[None, :]
    expert = group * group_size + member
    there = (group < num_groups) & (member < group_size)
    at = logits + token * (num_groups * group_size) + expert
    logit = tl.load(at, mask=there, other=float("-inf"))
    if SIGMOID:
        score = tl.div_rn(1.0, 1.0 + tl.exp(-logit))
    else:
        power = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        power = tl.where(there, power, 0.0)
        score = tl.div_rn(power, tl.sum(tl.sum(power, 1), 0) + tl.zeros_like(power))
    choice = score
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=there, other=0.0)
    if TOP_GROUPS > 0:
        is_open = open_groups(choice, expert, there, num_groups, TOP_GROUPS, BY_TWO, GROUPS)
        choice = tl.where(is_open, choice, float("-inf"))
    ranks = tl.where(there, ranked(choice, expert), -0x7FFFFFFFFFFFFFFF)
    order = tl.arange(0, CHOICES)
    chosen_ids = tl.zeros([CHOICES], tl.int64)
    chosen_weights = tl.zeros([CHOICES], tl.float32)
    total = 0.0
    for j in tl.static_range(TOP_K):
        best = index_of(tl.max(tl.max(ranks, 1), 0))
        weight = tl.sum(tl.sum(tl.where(expert == best, score, 0.0), 1), 0)
        total += weight
        chosen_ids = tl.where(order == j, best.to(tl.int64), chosen_ids)
        chosen_weights = tl.where(order == j, weight, chosen_weights)
        ranks = tl.where(expert == best, -0x7FFFFFFFFFFFFFFF, ranks)
    if NORMALIZE:
        chosen_weights = tl.div_rn(chosen_weights, total + 1e-20 + tl.zeros_like(chosen_weights))
    tl.store(ids + token * TOP_K + order, chosen_ids, mask=order < TOP_K)
    tl.store(weights + token * TOP_K + order, chosen_weights * scale, mask=order < TOP_K)


def route(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """See ``reference.moe.route``; contiguous.

    Raises:
        TypeError: A dtype is not fp32, a tensor is strided, or groups differ in size.
    """
    num_tokens, num_experts = logits.shape
    for given in (logits,) if bias is None else (logits, bias):
        if given.dtype != torch.float32 or not given.is_contiguous():
            raise TypeError(f"want contiguous fp32, got {given.dtype} {given.stride()}")
    is_limited = rule.top_k_groups < rule.num_groups
    num_groups = rule.num_groups if is_limited else 1
    group_size, rest = divmod(num_experts, num_groups)
    if rest:
        raise TypeError(f"{num_experts} experts are not {num_groups} groups of one size")
    ids = torch.empty((num_tokens, rule.top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_tokens, rule.top_k), dtype=torch.float32, device=logits.device)
    launch(
        route_kernel,
        (num_tokens,),
        logits,
        logits if bias is None else bias,
        ids,
        weights,
        float(rule.scale),
        num_groups,
        group_size,
        tuning=Tuning(warps=1 if num_experts <= 512 else 4, overlaps=True),
        HAS_BIAS=bias is not None,
        SIGMOID=rule.sigmoid,
        NORMALIZE=rule.normalize,
        TOP_GROUPS=rule.top_k_groups if is_limited else 0,
        BY_TWO=rule.rank_groups_by_two,
        TOP_K=rule.top_k,
        CHOICES=next_power_of_2(rule.top_k),
        GROUPS=next_power_of_2(num_groups),
        SIZE=next_power_of_2(group_size),
    )
    return ids, weights
