"""Reference sampling rules of many rows at once: bias, penalties, forbidden tokens.

The state of a request's tokens is one word for each token of the vocabulary. It is stored beside
the logits and updated there with each sampled token, so no rule waits for the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

COUNT_MASK = (1 << 24) - 1
"""The count of a token in the output."""
IN_PROMPT = 1 << 24
FORBIDDEN = 1 << 25
"""Never sampled."""
AVOIDED = 1 << 26
"""Not sampled if there is another token."""
AVOIDED_AT_FIRST = 1 << 27
"""The same until an output has its minimum length."""


class RuleTables(NamedTuple):
    """The stored state of a batch of B rows.

    Attributes:
        words: ``[B, V]`` int32, for each token its count and the bits above.
        bias: ``[B, V]`` fp32, or any tensor if no ruled row has a bias.
    """

    words: Tensor
    bias: Tensor


class Ruled(NamedTuple):
    """The rules for N rows of logits; one entry each.

    Attributes:
        rows: ``[N]`` int32, rows of the logits; distinct.
        kept: ``[N]`` int32, rows of the tables.
        depth: ``[N]`` int32, number of draft tokens that count as output: that of this row of
            logits and those right before it.
        avoided: ``[N]`` int32, the bits that make a token avoided.
        repetition, frequency, presence: ``[N]`` fp32, vLLM's penalties.
        drafted: ``[L]`` int32, for each row of the logits the draft token before it.
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
    """Change rows of logits: bias, repetition, frequency, presence, then excluded tokens.

    Args:
        logits: ``[L, V]`` fp32.
        tables: The stored state.
        ruled: The rows and their rules.
        by_bias: Whether any of them has a bias.
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
    """Count an output token of each of N requests, or several of one.

    Args:
        words: Those of `RuleTables`.
        kept: ``[N]`` int32, rows of the table.
        tokens: int64; a negative value is no token.
        rows: ``[N]`` int32, index in ``tokens`` of each one's token.
    """
    found = tokens[rows.long()]
    is_one = (found >= 0).int()
    words.index_put_((kept.long(), found.clamp(min=0)), is_one, accumulate=True)
