"""Reference sampling rules of many rows at once: bias, penalties, forbidden tokens.

What a rule needs of a request's tokens is kept in one word for each token of the vocabulary, where
the logits are, and grows there by what is sampled: nobody waits for a token to rule the next one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

COUNT_MASK = (1 << 24) - 1
"""How often a token is in the output."""
IN_PROMPT = 1 << 24
FORBIDDEN = 1 << 25
"""Never sampled."""
AVOIDED = 1 << 26
"""Not sampled as long as there is another one."""
AVOIDED_AT_FIRST = 1 << 27
"""The same, until an output has its least length."""


class RuleTables(NamedTuple):
    """What is kept of the rows of a batch, B of them.

    Attributes:
        words: ``[B, V]`` int32, of each token its count and the bits above.
        bias: ``[B, V]`` fp32, or anything where no row that is ruled has one.
    """

    words: Tensor
    bias: Tensor


class Ruled(NamedTuple):
    """What N rows of logits are ruled by; one entry each.

    Attributes:
        rows: ``[N]`` int32, rows of the logits; distinct.
        kept: ``[N]`` int32, rows of the tables.
        depth: ``[N]`` int32, how many tokens of a draft count as output: that of this row of logits
            and of those right before it.
        avoided: ``[N]`` int32, the bits by which a token is avoided.
        repetition, frequency, presence: ``[N]`` fp32, vLLM's penalties.
        drafted: ``[L]`` int32, for each row of the logits the token of a draft that it follows.
    """

    rows: Tensor
    kept: Tensor
    depth: Tensor
    avoided: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    drafted: Tensor


def rule(logits: Tensor, tables: RuleTables, ruled: Ruled, *, by_bias: bool, avoids: bool) -> None:
    """Change rows of logits: bias, repetition, frequency, presence, then what is not sampled.

    Args:
        logits: ``[L, V]`` fp32.
        tables: What is kept.
        ruled: Which rows, and by what.
        by_bias: Whether any of them has one.
        avoids: Whether any of them avoids tokens.
    """
    rows, kept = ruled.rows.long(), ruled.kept.long()
    values, words = logits[rows], tables.words[kept]
    if by_bias:
        values = values + tables.bias[kept]
    counts = words & COUNT_MASK
    ids = torch.arange(logits.shape[1], device=logits.device)
    for back in range(int(ruled.depth.max())):
        token = ruled.drafted[(rows - back).clamp(min=0), None]
        counts = counts + ((token == ids) & (ruled.depth[:, None] > back))
    penalised = torch.where(
        values > 0, values / ruled.repetition[:, None], values * ruled.repetition[:, None]
    )
    penalised = penalised - ruled.frequency[:, None] * counts
    penalised = penalised - ruled.presence[:, None] * (counts > 0)
    is_seen = (counts > 0) | ((words & IN_PROMPT) != 0)
    values = torch.where(is_seen, penalised, values)
    values = torch.where((words & FORBIDDEN) != 0, -torch.inf, values)
    if avoids:
        is_avoided = (words & ruled.avoided[:, None]) != 0
        others = torch.where(is_avoided, -torch.inf, values)
        values = torch.where((others == -torch.inf).all(-1, keepdim=True), values, others)
    logits[rows] = values


def note(words: Tensor, kept: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """Count a token of the output of each of N requests, or several of one.

    Args:
        words: Of `RuleTables`.
        kept: ``[N]`` int32, rows of the table.
        tokens: int64; below 0 there is none.
        rows: ``[N]`` int32, where in ``tokens`` each one's is.
    """
    found = tokens[rows.long()]
    is_one = (found >= 0).int()
    words.index_put_((kept.long(), found.clamp(min=0)), is_one, accumulate=True)
