"""Masks of grammars on CUDA, as ``reference.masks`` defines them: one pass over the masked rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.launch import Tuning, launch
from pdserve.kernels.cuda.sizes import divided_up

_BLOCK = 2048
"""Logits per program."""
_TUNING = Tuning(warps=4)
# The layout of a mask is spelled out: the interpreter knows no globals of Triton's types.


@triton.jit
def mask_block(
    logits: tl.tensor,
    masks: tl.tensor,
    vocab_size: tl.tensor,
    num_words: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Exclude tokens from a block of a row; grid (masked rows, blocks)."""
    mask = masks + tl.program_id(0).to(tl.int64) * num_words
    row = tl.load(mask).to(tl.int64)
    is_even = tl.load(mask + 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab_size
    word = tl.load(mask + 2 + column // 32, mask=inside, other=0)
    is_allowed = ((word >> (column % 32)) & 1) != 0
    into = logits + row * vocab_size + column
    value = tl.load(into, mask=inside, other=0.0)
    value = tl.where(is_even != 0, 0.0, value)
    tl.store(into, tl.where(is_allowed, value, float("-inf")), mask=inside)


def mask(logits: Tensor, masks: Tensor) -> None:
    """See ``reference.masks.mask``; contiguous."""
    num_masked, num_words = masks.shape
    vocab_size = logits.shape[1]
    launch(
        mask_block,
        (num_masked, divided_up(vocab_size, _BLOCK)),
        logits,
        masks,
        vocab_size,
        num_words,
        tuning=_TUNING,
        BLOCK=_BLOCK,
    )
