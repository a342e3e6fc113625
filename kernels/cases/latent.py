"""Inputs of latent attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdserve.kernels.cases.attention import attention_inputs, rope_table
from pdserve.kernels.cases.case import Case, draw


def head_linear() -> list[Case]:
    """x, weight: heads cut from wider rows, as the two parts of a query are."""

    def case(tokens: int, num_heads: int, n: int, k: int, *, beside: int = 0) -> Case:
        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            x = draw((tokens, num_heads, k + beside), dtype, device, seed=1)
            weight = draw((num_heads, n, k), dtype, device, seed=2) / k**0.5
            return x[..., :k], weight

        return Case(f"{tokens}x{num_heads}x{n}x{k}{'_strided' if beside else ''}", make)

    return [
        case(0, 2, 32, 16),
        case(1, 1, 1, 1),
        case(1, 16, 512, 128, beside=64),
        case(5, 3, 37, 17, beside=3),
        case(33, 4, 128, 512),
        case(600, 2, 32, 24, beside=16),
    ]


def latent_cache(
    num_blocks: int, block_size: int, width: int, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the middle layer of a three-layer cache of random latents.

    Returns:
        ``[num_blocks, 1, 1, block_size, width]``, strided over blocks.
    """
    return draw((num_blocks, 3, 1, 1, block_size, width), dtype, device, seed=7)[:, 1]


def rope_and_latent() -> list[Case]:
    """The nine arguments: unset slots, the sizes of DeepSeek's models and small ones."""

    def case(
        name: str,
        tokens: int,
        num_heads: int,
        dims: tuple[int, int, int],
        *,
        block_size: int = 16,
        unset: bool = False,
    ) -> Case:
        nope, latent, rotary = dims

        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            generator = torch.Generator().manual_seed(11)
            num_blocks = tokens // block_size + 3
            slots = torch.randperm(num_blocks * block_size, generator=generator)[:tokens]
            if unset:
                slots[::3] = -1
            return (
                draw((tokens, num_heads, nope + rotary), dtype, device, seed=1),
                draw((tokens, num_heads, latent + rotary), dtype, device, seed=2),
                draw((tokens, latent + rotary), dtype, device, seed=3),
                torch.randint(0, 300, (tokens,), generator=generator).to(device),
                rope_table(300, rotary, device),
                latent_cache(num_blocks, block_size, latent + rotary, dtype=dtype, device=device),
                slots.to(device),
                draw((latent,), dtype, device, seed=4),
                1e-6,
            )

        return Case(name, make)

    return [
        case("empty", 0, 4, (16, 32, 16)),
        case("one_token", 1, 16, (128, 512, 64)),
        case("chunk", 70, 4, (16, 32, 16)),
        case("unset_slots", 10, 2, (48, 64, 16), unset=True),
        case("narrow_rotation", 5, 3, (24, 48, 8), block_size=64),
    ]


def latent_inputs(
    queries: list[int],
    contexts: list[int],
    num_heads: int,
    dims: tuple[int, int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int = 16,
) -> tuple[Any, ...]:
    """Make the arguments of ``latent_attention``; those of the same name as `attention_inputs`.

    Args:
        dims: Elements of the latent and of the rotated key.
    """
    latent, rotary = dims
    width = latent + rotary
    q, _, tables, starts, lens, scale, _ = attention_inputs(
        queries,
        contexts,
        (num_heads, 1),
        width,
        dtype=dtype,
        device=device,
        block_size=block_size,
    )
    num_blocks = sum(-(-context // block_size) for context in contexts) + 1
    cache = latent_cache(num_blocks, block_size, width, dtype=dtype, device=device)
    return q, cache, tables, starts, lens, scale, latent


def latent_attention() -> list[Case]:
    """The seven arguments: prefill chunks among decodes, few heads and many."""

    def case(
        name: str,
        queries: list[int],
        contexts: list[int],
        num_heads: int = 4,
        dims: tuple[int, int] = (32, 16),
        *,
        block_size: int = 16,
    ) -> Case:
        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            return latent_inputs(
                queries,
                contexts,
                num_heads,
                dims,
                dtype=dtype,
                device=device,
                block_size=block_size,
            )

        return Case(name, make)

    return [
        case("empty", [], []),
        case("first_token", [1], [1]),
        case("decode_batch", [1] * 5, [1, 16, 17, 64, 600]),
        case("prefill", [130], [130]),
        case("odd_latent", [20, 1], [90, 133], 3, (21, 8), block_size=8),
        case("mixed", [1, 40, 0, 1, 7], [65, 40, 12, 513, 135], 3, (48, 16)),
        case("deepseek_decode", [1, 1], [700, 90], 16, (512, 64)),
        case("deepseek_chunk", [20], [90], 128, (512, 64), block_size=64),
        case("one_head", [20, 1], [90, 33], 1, (64, 32), block_size=8),
    ]
