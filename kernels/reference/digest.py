"""Reference digests of KV memory."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK_WORDS = 4 << 20
_LOW_32 = 0xFFFFFFFF


def kv_digests(kv: Tensor, spans: Tensor, constants: Tensor, keys: Tensor, num_rows: int) -> Tensor:
    """Sum the words of spans of tokens, each times a constant of its place; mod 2^64.

    ``out[row, l, h]`` is the sum, over the spans of that row and over the planes p, of ``keys[l, p,
    h] * S``, with ``S`` the sum of ``word * constant`` over the 32-bit words of the span's tokens
    in that head. Words and constants are unsigned; a constant belongs to a token's place and to
    the word's index in its vector. With odd constants and keys the change of any one word changes
    the sum.

    Args:
        kv: ``[num_blocks, L, P, H, block_size, Dh]`` of any dtype, may be strided but for its last
            dimension, which has a multiple of 4 bytes.
        spans: ``[N, 5]`` int64 on the CPU: row of the result, block, first token in it, number of
            tokens, place of the first token.
        constants: ``[num_places, words per vector]`` int32, on the CPU.
        keys: ``[L, P, H]`` int64, on the CPU.
        num_rows: Rows of the result; a row that no span names is zero.

    Returns:
        ``[num_rows, L, H]`` int64, on the CPU: the bits of an unsigned number.

    Raises:
        TypeError: A vector is not a whole number of words.
        IndexError: A span is outside of the memory, the constants or the rows.
    """
    num_layers, num_planes, num_heads, block_size = kv.shape[1:5]
    check_spans(kv, spans, len(constants), num_rows)
    row, block, first, tokens, place = spans.unbind(1)
    words = kv.view(torch.int32)
    table = constants.to(kv.device).long() & _LOW_32
    sums = torch.zeros(
        (len(spans), num_layers, num_planes, num_heads), dtype=torch.int64, device=kv.device
    )
    in_block = torch.arange(block_size)
    each = num_layers * num_planes * num_heads * block_size * words.shape[-1]
    step = max(1, _CHUNK_WORDS // each)
    for begin in range(0, len(spans), step):
        part = slice(begin, begin + step)
        offset = in_block - first[part, None]
        is_inside = (offset >= 0) & (offset < tokens[part, None])
        places = (place[part, None] + offset).where(is_inside, 0)
        factors = table[places.to(kv.device)] * is_inside.to(kv.device)[..., None]
        values = words[block[part].to(kv.device)].long() & _LOW_32
        sums[part] = (values * factors[:, None, None, None]).sum((-1, -2))
    of_spans = (sums.cpu() * keys).sum(2)
    out = torch.zeros((num_rows, num_layers, num_heads), dtype=torch.int64)
    return out.index_add_(0, row, of_spans)


def check_spans(kv: Tensor, spans: Tensor, num_places: int, num_rows: int) -> None:
    """Check the arguments of `kv_digests` that memory is read by.

    Raises:
        TypeError: A vector is not a whole number of words.
        IndexError: A span is outside of the memory, the constants or the rows.
    """
    num_blocks, block_size, head_dim = kv.shape[0], kv.shape[4], kv.shape[5]
    if head_dim * kv.element_size() % 4:
        raise TypeError(f"a vector of {head_dim} {kv.dtype} is no whole number of 32-bit words")
    row, block, first, tokens, place = spans.unbind(1)
    for start, count, end in (
        (row, 1, num_rows),
        (block, 1, num_blocks),
        (first, tokens, block_size),
        (place, tokens, num_places),
    ):
        if bool(((start < 0) | (start + count > end)).any()) or bool((tokens < 0).any()):
            raise IndexError("a span is outside of the memory, the constants or the rows")
