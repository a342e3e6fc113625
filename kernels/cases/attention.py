"""Inputs for operations that read or write the KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdserve.kernels.cases.case import Case, draw
from pdserve.kernels.digest import place_keys, word_constants
from pdserve.kernels.reference.attention import AttentionForm

GROUPS = (1, 2, 4, 5, 7, 8, 16)
"""Query heads to a KV head."""

HEAD_DIMS = (64, 128, 192, 256)


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
    return draw(shape, dtype, device, seed=seed)[:, 1]


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
        norms: torch.dtype | bool = False,
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
            of_norms = norms if isinstance(norms, torch.dtype) else dtype
            return (
                draw((tokens, width), dtype, device, seed=1),
                torch.randint(0, 300, (tokens,), generator=generator).to(device),
                rope_table(300, rotary_dim or head_dim, device),
                kv_cache(
                    num_blocks, num_kv_heads, block_size, head_dim, dtype=dtype, device=device
                ),
                slots.to(device),
                draw((head_dim,), of_norms, device, seed=2) if norms else None,
                draw((head_dim,), of_norms, device, seed=3) if norms else None,
                1e-6,
            )

        return Case(name, make)

    return [
        case("empty", 0, (4, 2), 64),
        case("one_token", 1, (9, 3), 64),
        case("chunk", 70, (9, 3), 64),
        case("unset_slots", 10, (4, 4), 32, unset=True),
        case("qk_norm", 9, (4, 2), 128, norms=True),
        case("wide_qk_norm", 9, (4, 2), 96, rotary_dim=64, norms=torch.float32),
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
        draw((sum(queries), num_heads, head_dim), dtype, device, seed=1),
        kv_cache(num_blocks, num_kv_heads, block_size, head_dim, dtype=dtype, device=device),
        tables.to(device),
        starts.to(device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        head_dim**-0.5,
        AttentionForm(window),
    )


def with_sinks(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add sinks from far below the scores to far above to the arguments of ``paged_attention``."""
    q, *others, form = arguments
    sinks = draw((q.shape[1],), torch.float32, q.device, seed=13) * 8
    return q, *others, AttentionForm(form.window, sinks)


def with_nan_in_unused_slots(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Fill what of the cache is in nobody's context with NaN; arguments of ``paged_attention``."""
    _, layer, tables, _, contexts, *_ = arguments
    is_used = torch.zeros(len(layer), layer.shape[3], dtype=torch.bool, device=layer.device)
    for table, context in zip(tables.long(), contexts.tolist(), strict=True):
        at = torch.arange(context, device=layer.device)
        is_used[table[at // layer.shape[3]], at % layer.shape[3]] = True
    layer.movedim(3, 1)[~is_used] = torch.nan
    return arguments


def without_last_request(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Leave the last request out of the arguments of ``paged_attention``, or of latents."""
    q, layer, tables, starts, contexts, *rest = arguments
    return q[: int(starts[-2])], layer, tables[:-1], starts[:-1], contexts[:-1], *rest


def grouped_attention(group: int, head_dim: int) -> Case:
    """So many query heads to a KV head: a step of decode and a chunk, and NaN where no token is."""

    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        heads = 2 * group, 2
        return with_nan_in_unused_slots(
            attention_inputs([1, 3], [40, 37], heads, head_dim, dtype=dtype, device=device)
        )

    return Case(f"group_{group}_head_{head_dim}", make)


def paged_attention() -> list[Case]:
    """The seven arguments: prefill chunks, decodes, windows, sinks, every head and block size."""

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
            found = attention_inputs(
                queries,
                contexts,
                heads,
                head_dim,
                dtype=dtype,
                device=device,
                block_size=block_size,
                window=window,
            )
            return with_sinks(found) if "sinks" in name else found

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
        case("empty_rows", [0, 1, 0, 4, 0], [0, 19, 5, 12, 0], (2, 1), 32),
        case("window", [50, 1], [150, 200], (4, 2), window=37),
        case("window_long", [3, 1], [1400, 1200], (2, 2), 32, window=600, block_size=64),
        case("window_of_one", [5], [70], (1, 1), 32, window=1),
        case("sinks", [1, 40, 0, 7], [600, 40, 12, 135], (16, 2)),
        case("sinks_decode_long", [1], [1700], (4, 2)),
        case("sinks_window", [50, 1], [150, 700], (8, 1), window=37),
        case("sinks_head_100", [20, 1], [90, 133], (4, 2), 100, block_size=128),
        case("head_80", [20, 1], [90, 33], (4, 2), 80, block_size=8),
        case("head_96", [20, 1], [90, 33], (3, 3), 96, block_size=32),
        case("head_128", [70], [90], (8, 2), 128, block_size=64),
        case("head_256", [20, 1], [90, 33], (8, 1), 256),
        case("head_100", [20, 1], [90, 133], (4, 2), 100, block_size=128),
        *(grouped_attention(group, HEAD_DIMS[i % 4]) for i, group in enumerate(GROUPS)),
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
            kv = draw((5, layers, planes, *inner, head_dim), dtype, device, seed=9)
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
