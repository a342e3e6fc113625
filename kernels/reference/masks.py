"""Reference masks of grammars: the tokens that may come next, a bit each, for many rows at once."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32
HEAD = 2
"""Words before a mask's bits: its row, and whether the tokens that it allows are equally likely."""


def num_words(vocab_size: int) -> int:
    """Return the length of a row of masks."""
    return HEAD + -(-vocab_size // WORD_BITS)


def mask(logits: Tensor, masks: Tensor) -> None:
    """Exclude tokens from rows of logits.

    Args:
        logits: ``[L, V]`` fp32.
        masks: ``[N, num_words(V)]`` int32: a row of the logits, distinct; 1 if all allowed tokens
            get the logit 0, else 0; then the bits, lowest first, 1 for a token that is allowed.
    """
    rows, is_even, bits = masks[:, 0].long(), masks[:, 1, None] != 0, masks[:, HEAD:]
    each = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    is_allowed = ((bits[:, :, None] >> each) & 1).flatten(1)[:, : logits.shape[1]] != 0
    values = torch.where(is_even, 0.0, logits[rows])
    logits[rows] = torch.where(is_allowed, values, -torch.inf)
