"""Inputs on which every implementation of an operation must agree with its reference.

A `Case` makes its arguments anew at each call, always the same values, so that operations that
write to their arguments can be compared. Used by tests and benchmarks only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Named arguments of one call.

    Attributes:
        name: Unique within its operation.
        make: From a dtype and a device to the positional arguments; the same values every time.
    """

    name: str
    make: Callable[[torch.dtype, torch.device], tuple[Any, ...]]


def _draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def linear() -> list[Case]:
    """x, weight, bias: every remainder of M, N and K that a tiled kernel could get wrong."""

    def case(m: int, n: int, k: int, *, bias: bool) -> Case:
        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            x = _draw((m, k), dtype, device, seed=1)
            weight = _draw((n, k), dtype, device, seed=2) / k**0.5
            return x, weight, _draw((n,), dtype, device, seed=3) if bias else None

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
    """x, weight, eps: rows of one element, of odd length, of zeros."""

    def case(name: str, rows: int, dim: int, scale: float = 1.0) -> Case:
        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            x = _draw((rows, dim), dtype, device, seed=1) * scale
            return x, _draw((dim,), dtype, device, seed=2), 1e-5

        return Case(name, make)

    return [
        case("empty", 0, 64),
        case("one_element", 3, 1),
        case("odd_length", 5, 67),
        case("model_width", 33, 576),
        case("wide", 2, 4096),
        case("zeros", 2, 64, 0.0),
        case("tiny_values", 2, 64, 1e-3),
    ]


def add_rms_norm() -> list[Case]:
    """x, residual, weight, eps."""

    def case(name: str, rows: int, dim: int) -> Case:
        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            x, residual = (_draw((rows, dim), dtype, device, seed=seed) for seed in (1, 2))
            return x, residual, _draw((dim,), dtype, device, seed=3), 1e-6

        return Case(name, make)

    return [
        case("empty", 0, 64),
        case("odd_length", 5, 67),
        case("model_width", 33, 576),
        case("wide", 2, 4096),
    ]


def silu_and_mul() -> list[Case]:
    """x: lengths off the vector width, and values at which exp saturates."""

    def case(name: str, rows: int, dim: int, scale: float = 1.0) -> Case:
        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            return (_draw((rows, 2 * dim), dtype, device, seed=1) * scale,)

        return Case(name, make)

    return [
        case("empty", 0, 32),
        case("odd_length", 3, 37),
        case("model_width", 17, 1536),
        case("saturated", 4, 64, 60.0),
    ]


def kv_cache(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 7,
) -> Tensor:
    """Return the middle layer of a three-layer cache of random values.

    Returns:
        ``[num_blocks, 2, Hkv, block_size, Dh]``, strided over blocks.
    """
    shape = (num_blocks, 3, 2, num_kv_heads, block_size, head_dim)
    return _draw(shape, dtype, device, seed=seed)[:, 1]


def rope_table(max_pos: int, rotary_dim: int, device: torch.device) -> Tensor:
    """Return cosines and sines, ``[max_pos, rotary_dim]`` fp32, with base 10000."""
    inverse = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(max_pos, dtype=torch.float64)[:, None] * inverse
    return torch.cat((angle.cos(), angle.sin()), dim=-1).float().to(device)


def rope_and_cache() -> list[Case]:
    """The eight arguments: partial rotation, q/k norms, unset slots, every head size."""

    def case(
        name: str,
        tokens: int,
        heads: tuple[int, int],
        head_dim: int,
        *,
        block_size: int = 16,
        rotary_dim: int | None = None,
        norms: bool = False,
        unset: bool = False,
    ) -> Case:
        num_heads, num_kv_heads = heads

        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            generator = torch.Generator().manual_seed(11)
            num_blocks = tokens // block_size + 3
            slots = torch.randperm(num_blocks * block_size, generator=generator)[:tokens]
            if unset:
                slots[::3] = -1
            width = (num_heads + 2 * num_kv_heads) * head_dim
            return (
                _draw((tokens, width), dtype, device, seed=1),
                torch.randint(0, 300, (tokens,), generator=generator).to(device),
                rope_table(300, rotary_dim or head_dim, device),
                kv_cache(
                    num_blocks, num_kv_heads, block_size, head_dim, dtype=dtype, device=device
                ),
                slots.to(device),
                _draw((head_dim,), dtype, device, seed=2) if norms else None,
                _draw((head_dim,), dtype, device, seed=3) if norms else None,
                1e-6,
            )

        return Case(name, make)

    return [
        case("empty", 0, (4, 2), 64),
        case("one_token", 1, (9, 3), 64),
        case("chunk", 70, (9, 3), 64),
        case("unset_slots", 10, (4, 4), 32, unset=True),
        case("qk_norm", 9, (4, 2), 128, norms=True),
        case("partial_rotation", 7, (4, 1), 96, rotary_dim=24, block_size=8),
        case("head_80", 5, (2, 2), 80, block_size=64),
        case("head_256", 3, (8, 1), 256, block_size=32, norms=True),
    ]


def attention_inputs(
    queries: list[int],
    contexts: list[int],
    heads: tuple[int, int],
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int = 16,
    window: int | None = None,
) -> tuple[Any, ...]:
    """Make the arguments of ``paged_attention``.

    Args:
        queries: Query tokens of each request.
        contexts: KV tokens of each request, queries included.
        heads: Number of query heads and of KV heads.
        head_dim: Dh.
        dtype: Of q and the cache.
        device: Of every tensor.
        block_size: Tokens per block; blocks are scattered, and unused table entries invalid.
        window: Sliding window.
    """
    num_heads, num_kv_heads = heads
    needed = [-(-context // block_size) for context in contexts]
    num_blocks = sum(needed) + 1
    ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(5)).int()
    tables = torch.full((len(contexts), max([*needed, 0]) + 1), -7, dtype=torch.int32)
    taken = 0
    for request, count in enumerate(needed):
        tables[request, :count] = ids[taken : taken + count]
        taken += count
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    return (
        _draw((sum(queries), num_heads, head_dim), dtype, device, seed=1),
        kv_cache(num_blocks, num_kv_heads, block_size, head_dim, dtype=dtype, device=device),
        tables.to(device),
        starts.to(device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        head_dim**-0.5,
        window,
    )


def paged_attention() -> list[Case]:
    """The seven arguments: prefill chunks among decodes, windows, every head and block size."""

    def case(
        name: str,
        queries: list[int],
        contexts: list[int],
        heads: tuple[int, int] = (9, 3),
        head_dim: int = 64,
        *,
        block_size: int = 16,
        window: int | None = None,
    ) -> Case:
        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            return attention_inputs(
                queries,
                contexts,
                heads,
                head_dim,
                dtype=dtype,
                device=device,
                block_size=block_size,
                window=window,
            )

        return Case(name, make)

    return [
        case("empty", [], []),
        case("first_token", [1], [1]),
        case("decode", [1], [100]),
        case("decode_long", [1], [1700], (2, 1)),
        case("decode_batch", [1] * 5, [1, 16, 17, 64, 600]),
        case("prefill", [130], [130]),
        case("chunk", [33], [600]),
        case("mixed", [1, 40, 0, 1, 7], [65, 40, 12, 513, 135], (4, 4), 32),
        case("window", [50, 1], [150, 200], (4, 2), window=37),
        case("window_long", [3, 1], [1400, 1200], (2, 2), 32, window=600, block_size=64),
        case("window_of_one", [5], [70], (1, 1), 32, window=1),
        case("head_80", [20, 1], [90, 33], (4, 2), 80, block_size=8),
        case("head_96", [20, 1], [90, 33], (3, 3), 96, block_size=32),
        case("head_128", [70], [90], (8, 2), 128, block_size=64),
        case("head_256", [20, 1], [90, 33], (8, 1), 256),
    ]
