"""Digests of KV memory: integers, whose sum has the same bits in any order."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.checks import check_integers
from pdserve.kernels.cuda.launch import Tuning, launch
from pdserve.kernels.cuda.sizes import next_power_of_2
from pdserve.kernels.reference.digest import check_spans

TUNING = Tuning(warps=4)
_TILE_WORDS = 1024


@triton.jit
def _unsigned(words: tl.tensor) -> tl.tensor:
    return words.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def digest_span(
    words: tl.tensor,
    tables: tl.tensor,
    constants: tl.tensor,
    out: tl.tensor,
    stride_block: tl.tensor,
    stride_layer: tl.tensor,
    stride_plane: tl.tensor,
    stride_head: tl.tensor,
    stride_token: tl.tensor,
    PLANES: tl.constexpr,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Add one span's share to the sum of its row, layer and head; grid (spans, layers * heads).

    ``tables`` holds spans, then keys.
    """
    span = tables + tl.program_id(0) * 5
    keys = tables + tl.num_programs(0) * 5
    layer_head = tl.program_id(1)
    layer, head = layer_head // HEADS, layer_head % HEADS
    row, block, first = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    tokens, place = tl.load(span + 3), tl.load(span + 4)
    word = tl.arange(0, WORDS_BLOCK)
    base = words + block * stride_block + layer.to(tl.int64) * stride_layer + head * stride_head
    total = tl.zeros([TOKENS, WORDS_BLOCK], tl.int64)
    for plane in range(PLANES):
        key = tl.load(keys + (layer * PLANES + plane) * HEADS + head)
        for start in range(0, BLOCK_SIZE, TOKENS):
            token = start + tl.arange(0, TOKENS)
            inside = (token < tokens)[:, None] & (word < WORDS)[None, :]
            at = base + plane * stride_plane + ((first + token) * stride_token)[:, None]
            value = tl.load(at + word[None, :], mask=inside, other=0)
            factor = tl.load(
                constants + ((place + token) * WORDS)[:, None] + word[None, :],
                mask=inside,
                other=0,
            )
            total += _unsigned(value) * _unsigned(factor) * key
    into = out + row * tl.num_programs(1) + layer_head
    tl.atomic_add(into, tl.sum(tl.sum(total, 1), 0), sem="relaxed")


def kv_digests(kv: Tensor, spans: Tensor, constants: Tensor, keys: Tensor, num_rows: int) -> Tensor:
    """See ``reference.digest.kv_digests``; waits for the device, because its result is on the CPU.

    Raises:
        TypeError: A vector is not a whole number of words, or an argument has another shape or
            dtype.
        IndexError: A span is outside the memory, the constants or the rows.
    """
    check_spans(kv, spans, len(constants), num_rows)
    check_integers(torch.int64, spans, keys)
    check_integers(torch.int32, constants)
    if keys.shape != kv.shape[1:4] or constants.shape[1] * 4 != kv.shape[5] * kv.element_size():
        raise TypeError(f"got keys {keys.shape} and constants {constants.shape} for {kv.shape}")
    return digests_on_device(kv, spans, constants, keys, num_rows).cpu()


def digests_on_device(
    kv: Tensor, spans: Tensor, constants: Tensor, keys: Tensor, num_rows: int
) -> Tensor:
    """Return `kv_digests` of checked spans on the device of ``kv``, without waiting."""
    num_layers, num_planes, num_heads = kv.shape[1:4]
    words = kv.view(torch.int32)
    num_words = words.shape[-1]
    tables = torch.cat([spans.flatten(), keys.flatten()])
    out = torch.zeros((num_rows, num_layers, num_heads), dtype=torch.int64, device=kv.device)
    words_block = next_power_of_2(num_words)
    launch(
        digest_span,
        (len(spans), num_layers * num_heads),
        words,
        tables.to(kv.device, non_blocking=True),
        kept_on(kv.device, constants),
        out,
        *words.stride()[:5],
        tuning=TUNING,
        PLANES=num_planes,
        HEADS=num_heads,
        WORDS=num_words,
        WORDS_BLOCK=words_block,
        TOKENS=max(1, _TILE_WORDS // words_block),
        BLOCK_SIZE=kv.shape[4],
    )
    return out


@lru_cache(maxsize=16)
def kept_on(device: torch.device, constants: Tensor) -> Tensor:
    """Copy the constants of `word_constants` to a device, once."""
    return constants.to(device)
