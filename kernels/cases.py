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

from pdserve.kernels.digest import place_keys, word_constants
from pdserve.kernels.moe import RoutingRule


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


def route() -> list[Case]:
    """logits, bias, rule: both scorings, groups of both ranks, ties, and saturated scores."""

    def case(
        name: str, tokens: int, num_experts: int, rule: RoutingRule, *, bias: bool = False
    ) -> Case:
        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            fp32 = torch.float32
            logits = _draw((tokens, num_experts), fp32, device, seed=1)
            if "ties" in name:
                logits = logits.round()
            if "saturated" in name:
                logits *= 40
            given = _draw((num_experts,), fp32, device, seed=2) if bias else None
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
    """x, ids, weights, gate_up, down: experts nobody chose, or that are not here, odd sizes."""

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
        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            generator = torch.Generator().manual_seed(3)
            scores = torch.rand(tokens, num_experts + absent, generator=generator)
            ids = scores.argsort(dim=-1)[:, :top_k] - absent
            return (
                _draw((tokens, width), dtype, device, seed=1),
                ids.to(device),
                torch.rand(tokens, top_k, generator=generator).to(device),
                _draw((num_experts, 2 * inner, width), dtype, device, seed=2) / width**0.5,
                _draw((num_experts, width, inner), dtype, device, seed=4) / inner**0.5,
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
    ]


def head_linear() -> list[Case]:
    """x, weight: heads cut from wider rows, as the two parts of a query are."""

    def case(tokens: int, num_heads: int, n: int, k: int, *, beside: int = 0) -> Case:
        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            x = _draw((tokens, num_heads, k + beside), dtype, device, seed=1)
            weight = _draw((num_heads, n, k), dtype, device, seed=2) / k**0.5
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
    return _draw((num_blocks, 3, 1, 1, block_size, width), dtype, device, seed=7)[:, 1]


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
                _draw((tokens, num_heads, nope + rotary), dtype, device, seed=1),
                _draw((tokens, num_heads, latent + rotary), dtype, device, seed=2),
                _draw((tokens, latent + rotary), dtype, device, seed=3),
                torch.randint(0, 300, (tokens,), generator=generator).to(device),
                rope_table(300, rotary, device),
                latent_cache(num_blocks, block_size, latent + rotary, dtype=dtype, device=device),
                slots.to(device),
                _draw((latent,), dtype, device, seed=4),
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
        case("mixed", [1, 40, 0, 1, 7], [65, 40, 12, 513, 135], 3, (48, 16)),
        case("deepseek_decode", [1, 1], [700, 90], 16, (512, 64)),
        case("deepseek_chunk", [20], [90], 128, (512, 64), block_size=64),
        case("one_head", [20, 1], [90, 33], 1, (64, 32), block_size=8),
    ]


def kv_digests() -> list[Case]:
    """The five arguments: both orders of a block, shares of its layers and heads, any spans."""

    def case(
        name: str,
        grid: tuple[int, int, int],
        head_dim: int,
        spans: list[list[int]],
        *,
        block_size: int = 16,
        tokens_outside: bool = False,
        share: bool = False,
    ) -> Case:
        def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            layers, planes, heads = grid
            inner = (block_size, heads) if tokens_outside else (heads, block_size)
            kv = _draw((5, layers, planes, *inner, head_dim), dtype, device, seed=9)
            kv = kv.transpose(3, 4) if tokens_outside else kv
            kv = kv[:, 1:, :, : heads - 1] if share else kv
            words = head_dim * kv.element_size() // 4
            here = range(3, 3 + kv.shape[1]), planes, range(2, 2 + kv.shape[3])
            table = torch.tensor(spans, dtype=torch.int64).reshape(-1, 5)
            return kv, table, word_constants(64, words), place_keys(*here), 4

        return Case(name, make)

    whole = [[0, 3, 0, 16, 0], [1, 0, 0, 16, 0], [2, 4, 0, 7, 0]]
    return [
        case("empty", (1, 2, 1), 64, []),
        case("whole_blocks", (3, 2, 4), 128, whole),
        case("tokens_outside", (3, 2, 4), 128, whole, tokens_outside=True),
        case("share", (3, 2, 4), 64, whole, share=True),
        case("share_tokens_outside", (3, 2, 4), 64, whole, share=True, tokens_outside=True),
        case("latent", (2, 1, 1), 576, whole),
        case("odd_words", (2, 2, 3), 18, whole),
        case("parts", (2, 2, 2), 32, [[3, 1, 3, 5, 40], [3, 2, 0, 1, 63], [0, 2, 8, 0, 0]]),
        case("small_blocks", (2, 2, 2), 32, [[1, 4, 0, 4, 60], [1, 4, 1, 2, 9]], block_size=4),
    ]
