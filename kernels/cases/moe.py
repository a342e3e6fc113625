"""Inputs of the router and the experts."""

from __future__ import annotations

from typing import Any

import torch

from pdserve.kernels.cases.case import Case, draw
from pdserve.kernels.reference.activation import ClampedGlu
from pdserve.kernels.reference.moe import RoutingRule


def route() -> list[Case]:
    """logits, bias, rule: both scorings, groups of both ranks, ties, and saturated scores."""

    def case(
        name: str, tokens: int, num_experts: int, rule: RoutingRule, *, bias: bool = False
    ) -> Case:
        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            fp32 = torch.float32
            logits = draw((tokens, num_experts), fp32, device, seed=1)
            if "ties" in name:
                logits = logits.round()
            if "saturated" in name:
                logits *= 40
            given = draw((num_experts,), fp32, device, seed=2) if bias else None
            return logits, given, rule

        return Case(name, make)

    return [
        case("empty", 0, 8, RoutingRule(2)),
        case("one_expert", 3, 1, RoutingRule(1)),
        case("all_experts", 5, 4, RoutingRule(4, normalize=True)),
        case("mixtral", 70, 8, RoutingRule(2, normalize=True)),
        case("softmax_scaled", 9, 60, RoutingRule(6, scale=16.0)),
        case("ties", 40, 16, RoutingRule(5)),
        case("groups_by_best", 33, 32, RoutingRule(5, num_groups=4, top_k_groups=2)),
        case("groups_with_ties", 40, 16, RoutingRule(3, num_groups=4, top_k_groups=2)),
        case(
            "deepseek_v3",
            33,
            256,
            RoutingRule(
                8,
                sigmoid=True,
                normalize=True,
                scale=2.5,
                num_groups=8,
                top_k_groups=4,
                rank_groups_by_two=True,
            ),
            bias=True,
        ),
        case("saturated_sigmoid", 9, 16, RoutingRule(2, sigmoid=True, normalize=True), bias=True),
        case("saturated_softmax", 9, 16, RoutingRule(2, normalize=True)),
    ]


def experts() -> list[Case]:
    """The seven arguments: experts nobody chose, or elsewhere, odd sizes, biases and clamps."""

    def case(
        name: str,
        tokens: int,
        num_experts: int,
        top_k: int,
        width: int,
        inner: int,
        *,
        absent: int = 0,
    ) -> Case:
        is_plain = "clamped" not in name

        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            generator = torch.Generator().manual_seed(3)
            scores = torch.rand(tokens, num_experts + absent, generator=generator)
            ids = scores.argsort(dim=-1)[:, :top_k] - absent
            biases = (
                draw((num_experts, 2 * inner), dtype, device, seed=5),
                draw((num_experts, width), dtype, device, seed=6),
            )
            return (
                draw((tokens, width), dtype, device, seed=1) * (1 if is_plain else 4),
                ids.to(device),
                torch.rand(tokens, top_k, generator=generator).to(device),
                draw((num_experts, 2 * inner, width), dtype, device, seed=2) / width**0.5,
                draw((num_experts, width, inner), dtype, device, seed=4) / inner**0.5,
                None if is_plain else biases,
                None if is_plain else ClampedGlu(1.702, 7.0),
            )

        return Case(name, make)

    return [
        case("empty", 0, 4, 2, 64, 32),
        case("one_token", 1, 8, 2, 64, 96),
        case("one_expert", 5, 1, 1, 64, 32),
        case("every_expert", 7, 4, 4, 48, 32),
        case("many_tokens", 130, 8, 2, 64, 96),
        case("most_unused", 3, 60, 2, 32, 16),
        case("odd_sizes", 11, 5, 3, 67, 37),
        case("some_elsewhere", 40, 4, 3, 64, 32, absent=12),
        case("all_elsewhere", 2, 1, 2, 64, 32, absent=40),
        case("clamped", 40, 4, 2, 64, 96),
        case("clamped_odd_sizes", 1, 5, 4, 67, 37, absent=1),
    ]
