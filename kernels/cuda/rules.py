"""Sampling rules on CUDA, as ``reference.rules`` defines them: a few passes over all ruled rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.launch import Tuning, launch
from pdserve.kernels.cuda.sizes import divided_up, next_power_of_2
from pdserve.kernels.reference.rules import Ruled, RuleTables

_BLOCK = 2048
"""Logits per program."""
_TUNING = Tuning(warps=4)
# Bits of a word are spelled out: the interpreter knows no globals of Triton's types.


@triton.jit
def rule_block(
    logits: tl.tensor,
    words: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    kept: tl.tensor,
    depths: tl.tensor,
    avoided: tl.tensor,
    repetitions: tl.tensor,
    frequencies: tl.tensor,
    presences: tl.tensor,
    drafted: tl.tensor,
    are_left: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    BY_BIAS: tl.constexpr,
    AVOIDS: tl.constexpr,
) -> None:
    """Apply rules to a block of a row, except avoided tokens; grid (ruled rows, blocks).

    Args:
        are_left: ``[N, blocks]`` int32: whether any token is not avoided.
    """
    index = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(rows + index).to(tl.int64)
    table = tl.load(kept + index).to(tl.int64) * vocab_size
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab_size
    into = logits + row * vocab_size + column
    value = tl.load(into, mask=inside, other=float("-inf"))
    word = tl.load(words + table + column, mask=inside, other=0)
    if BY_BIAS:
        value += tl.load(bias + table + column, mask=inside, other=0.0)
    count = word & 0xFFFFFF
    for back in range(tl.load(depths + index)):
        count += (column == tl.load(drafted + row - back)).to(tl.int32)
    repetition = tl.load(repetitions + index)
    penalised = tl.where(value > 0.0, tl.div_rn(value, repetition), value * repetition)
    penalised -= tl.load(frequencies + index) * count.to(tl.float32)
    penalised -= tl.load(presences + index) * (count > 0).to(tl.float32)
    is_seen = (count > 0) | ((word & 0x1000000) != 0)
    value = tl.where(is_seen, penalised, value)
    value = tl.where((word & 0x2000000) != 0, float("-inf"), value)
    tl.store(into, value, mask=inside)
    if AVOIDS:
        is_avoided = (word & tl.load(avoided + index)) != 0
        is_left = (value != float("-inf")) & (is_avoided == 0)
        tl.store(are_left + index * num_blocks + block, tl.max(is_left.to(tl.int32), 0))


@triton.jit
def avoid_block(
    logits: tl.tensor,
    words: tl.tensor,
    rows: tl.tensor,
    kept: tl.tensor,
    avoided: tl.tensor,
    are_left: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Exclude the avoided tokens of a block if others are left; grid (ruled rows, blocks)."""
    index = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, BLOCKS)
    left = tl.load(are_left + index * num_blocks + each, mask=each < num_blocks, other=0)
    bits = tl.load(avoided + index)
    if (tl.max(left, 0) > 0) & (bits != 0):
        row = tl.load(rows + index).to(tl.int64)
        table = tl.load(kept + index).to(tl.int64) * vocab_size
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(words + table + column, mask=column < vocab_size, other=0)
        none = tl.full([BLOCK], float("-inf"), tl.float32)
        tl.store(logits + row * vocab_size + column, none, mask=(word & bits) != 0)


@triton.jit
def note_token(
    words: tl.tensor,
    kept: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    vocab_size: tl.tensor,
) -> None:
    """Count one token; grid (tokens,)."""
    index = tl.program_id(0)
    token = tl.load(tokens + tl.load(rows + index))
    if token >= 0:
        table = tl.load(kept + index).to(tl.int64) * vocab_size
        tl.atomic_add(words + table + token, 1)


def rule(logits: Tensor, tables: RuleTables, ruled: Ruled, *, by_bias: bool, avoids: bool) -> None:
    """See ``reference.rules.rule``; contiguous."""
    num_ruled, vocab_size = len(ruled.rows), logits.shape[1]
    num_blocks = divided_up(vocab_size, _BLOCK)
    grid = num_ruled, num_blocks
    are_left = torch.empty(num_ruled * avoids, num_blocks, dtype=torch.int32, device=logits.device)
    launch(
        rule_block,
        grid,
        logits,
        *tables,
        *ruled,
        are_left,
        vocab_size,
        num_blocks,
        tuning=_TUNING,
        BLOCK=_BLOCK,
        BY_BIAS=by_bias,
        AVOIDS=avoids,
    )
    if avoids:
        launch(
            avoid_block,
            grid,
            logits,
            tables.words,
            ruled.rows,
            ruled.kept,
            ruled.avoided,
            are_left,
            vocab_size,
            num_blocks,
            tuning=_TUNING,
            BLOCK=_BLOCK,
            BLOCKS=next_power_of_2(num_blocks),
        )


def note(words: Tensor, kept: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """See ``reference.rules.note``; contiguous."""
    launch(note_token, (len(kept),), words, kept, tokens, rows, words.shape[1], tuning=_TUNING)
