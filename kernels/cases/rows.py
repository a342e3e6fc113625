"""Inputs of products, norms, activation and sums over ranks."""

from __future__ import annotations

from typing import Any

import torch

from pdserve.kernels.cases.case import Case, draw


def linear() -> list[Case]:
    """x, weight, bias: every remainder of M, N and K that a tiled kernel could get wrong."""

    def case(m: int, n: int, k: int, *, bias: bool) -> Case:
        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            x = draw((m, k), dtype, device, seed=1)
            weight = draw((n, k), dtype, device, seed=2) / k**0.5
            return x, weight, draw((n,), dtype, device, seed=3) if bias else None

        return Case(f"{m}x{n}x{k}{'_bias' if bias else ''}", make)

    return [
        case(0, 32, 32, bias=False),
        case(1, 1, 1, bias=True),
        case(1, 16, 2, bias=False),
        case(1, 576, 576, bias=False),
        case(2, 100, 33, bias=True),
        case(3, 49, 64, bias=False),
        case(5, 192, 576, bias=True),
        case(8, 130, 257, bias=False),
        case(13, 960, 96, bias=True),
        case(64, 320, 1536, bias=False),
        case(131, 576, 4100, bias=True),
    ]


def rms_norm() -> list[Case]:
    """x, weight, eps: rows of one element, of odd length, of zeros; weights of fp32."""

    def case(name: str, rows: int, dim: int, scale: float = 1.0, *, wide: bool = False) -> Case:
        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            x = draw((rows, dim), dtype, device, seed=1) * scale
            return x, draw((dim,), torch.float32 if wide else dtype, device, seed=2), 1e-5

        return Case(name, make)

    return [
        case("empty", 0, 64),
        case("one_element", 3, 1),
        case("odd_length", 5, 67),
        case("model_width", 33, 576),
        case("wide", 2, 4096),
        case("zeros", 2, 64, 0.0),
        case("tiny_values", 2, 64, 1e-3),
        case("wide_weights", 5, 67, wide=True),
    ]


def add_rms_norm() -> list[Case]:
    """x, residual, weight, eps."""

    def case(name: str, rows: int, dim: int, *, wide: bool = False) -> Case:
        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            x, residual = (draw((rows, dim), dtype, device, seed=seed) for seed in (1, 2))
            weight = draw((dim,), torch.float32 if wide else dtype, device, seed=3)
            return x, residual, weight, 1e-6

        return Case(name, make)

    return [
        case("empty", 0, 64),
        case("odd_length", 5, 67),
        case("model_width", 33, 576),
        case("wide", 2, 4096),
        case("wide_weights", 5, 67, wide=True),
    ]


def gated() -> list[Case]:
    """x: lengths off the vector width, and values at which exp saturates."""

    def case(name: str, rows: int, dim: int, scale: float = 1.0) -> Case:
        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            return (draw((rows, 2 * dim), dtype, device, seed=1) * scale,)

        return Case(name, make)

    return [
        case("empty", 0, 32),
        case("odd_length", 3, 37),
        case("model_width", 17, 1536),
        case("saturated", 4, 64, 60.0),
    ]


def sum_ranks() -> list[Case]:
    """parts: sums that depend on the order of addition, with and without tails."""

    def case(name: str, ranks: int, size: int) -> Case:
        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            values, powers = (
                draw((ranks, size), torch.float32, torch.device("cpu"), seed=seed)
                for seed in (1, 2)
            )
            return (torch.ldexp(values, (3 * powers).round()).to(device, dtype),)

        return Case(name, make)

    return [case("empty", 2, 0), case("odd_length", 3, 37), case("several_blocks", 8, 2056)]
