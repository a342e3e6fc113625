"""Inputs of copies between blocks and a pool of chunks."""

from __future__ import annotations

from typing import Any

import torch

from pdserve.kernels.cases.case import Case, draw
from pdserve.kernels.digest import place_keys, word_constants

_HEADER_BYTES = 64
_NUM_BLOCKS = 7


def gather_chunks() -> list[Case]:
    """The six arguments: both orders of a block, shares of its layers and heads, some heads."""
    return [
        _case("empty", (1, 2, 1, 64), []),
        _case("chunks", (3, 2, 4, 128), [[3, 0], [6, 5]]),
        _case("tokens_outside", (3, 2, 4, 128), [[3, 0], [6, 5]], tokens_outside=True),
        _case("share", (3, 2, 4, 64), [[3, 0], [6, 5]], share=True),
        _case("some_heads", (2, 2, 3, 64), [[3, 0], [6, 5]], absent=[(0, 1), (1, 0), (1, 2)]),
        _case("latent", (2, 1, 1, 576), [[4, 1, 2]]),
        _case("odd_words", (2, 2, 3, 18), [[4], [1], [2]]),
        _case("small_blocks", (2, 2, 2, 6), [[4, 1, 2]], block_size=1),
        _case(
            "small_blocks_tokens_outside", (2, 2, 2, 6), [[4]], block_size=3, tokens_outside=True
        ),
    ]


def scatter_chunks() -> list[Case]:
    """The same, and blocks that are not to be written."""
    return [
        *gather_chunks(),
        _case("kept_blocks", (3, 2, 4, 128), [[-1, 0], [6, 5]]),
        _case("kept_tokens_outside", (3, 2, 4, 32), [[-1, 0, 3]], tokens_outside=True),
        _case("nothing_written", (1, 2, 2, 32), [[-1, -1]]),
    ]


def _case(
    name: str,
    grid: tuple[int, int, int, int],
    blocks: list[list[int]],
    *,
    block_size: int = 16,
    tokens_outside: bool = False,
    share: bool = False,
    absent: list[tuple[int, int]] | None = None,
) -> Case:
    """One of them.

    Args:
        grid: Layers, planes, heads, elements of a vector.
        share: Of the layers and heads, the blocks have more.
        absent: Heads of chunks that are not copied.
    """

    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        layers, planes, heads, head_dim = grid
        inner = (block_size, heads) if tokens_outside else (heads, block_size)
        kv = draw((_NUM_BLOCKS, layers, planes, *inner, head_dim), dtype, device, seed=9)
        # Bytes: what is in the pool need not be finite.
        kv = (kv.transpose(3, 4) if tokens_outside else kv).view(torch.uint8)
        kv = kv[:, 1:, :, : heads - 1] if share else kv
        table = torch.tensor(blocks or [[0]], dtype=torch.int64)[: len(blocks)]
        num_places = table.shape[1] * block_size
        size = kv[0, :, :, 0, 0].numel() * num_places
        num_heads = kv.shape[3]
        # The last head of the last chunk lies first, and what is behind it is no chunk's.
        starts = torch.arange(table.shape[0] * num_heads).flip(0) * (size + _HEADER_BYTES)
        starts = (starts + _HEADER_BYTES).view(-1, num_heads)
        for place in absent or ():
            starts[place] = -1
        num_words = (len(blocks) * num_heads * (size + _HEADER_BYTES) + 128) // 4
        pool = draw((num_words,), torch.float32, torch.device("cpu"), seed=5).view(torch.uint8)
        here = range(3, 3 + kv.shape[1]), planes, range(2, 2 + num_heads)
        constants = word_constants(num_places, kv.shape[5] // 4)
        return kv, table, pool, starts, constants, place_keys(*here)

    return Case(name, make)
