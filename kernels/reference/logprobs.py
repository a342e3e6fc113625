"""Reference description of tokens: log-probabilities, ranks, and the likeliest others.

The normaliser is a sum of whole numbers, so a row's results do not depend on the order of the sum,
and hence neither on its batch nor on the division of work; rounding them changes it by less than
1e-8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_CACHED = 1 << 17
"""Numbers that stay in a core's cache between two operations."""
_ON_DEVICE = 1 << 24
"""Numbers that a device takes at a time: 256 MiB in two dtypes of 8 bytes."""


class Described(NamedTuple):
    """What rows of logits say of one token each.

    Attributes:
        normalisers: ``[M]`` fp64, the logarithm of the sum of each row's exponentials; NaN where a
            logit is NaN or the largest is infinite.
        ranks: ``[M]`` int64, from 1: how many logits are larger, and one more.
        top: ``[M, N]`` int64, ids of the largest logits; of equal ones the lower ids. Only as many
            of a row have a meaning as were asked for, and none where its normaliser is NaN.
    """

    normalisers: Tensor
    ranks: Tensor
    top: Tensor


def describe(logits: Tensor, tokens: Tensor, num_top: Tensor) -> Described:
    """Describe one token of each row.

    Args:
        logits: ``[M, V]`` fp32.
        tokens: ``[M]`` int64.
        num_top: ``[M]`` int32, on the host: how many of the likeliest; at most V.
    """
    ranks = (logits > logits.gather(-1, tokens[:, None])).sum(-1) + 1
    widest = int(num_top.max()) if len(num_top) else 0
    return Described(_normaliser(logits), ranks, _likeliest(logits, widest))


def _likeliest(logits: Tensor, num: int) -> Tensor:
    """Return the ids of the largest logits of each row, ``[M, num]``.

    Which of equal ones `topk` takes depends on `num`, hence on the batch, and on the device. So in
    rows that have some it gets whole numbers: a logit's bits, and below them the ids, descending.
    """
    last = logits.shape[-1] - 1
    top_logits, top_ids = logits.topk(min(num + 1, last + 1), dim=-1)
    tied = (top_logits[:, 1:] == top_logits[:, :-1]).any(-1).nonzero().squeeze(-1)
    top_ids = top_ids[:, :num]
    below = torch.arange(last, -1, -1, device=logits.device)
    for rows in torch.split(tied, _rows_at_once(logits)) if num else ():
        bits = (logits[rows] + 0.0).view(torch.int32)  # both zeros are one
        bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)  # so that they are in the order of logits
        keys = bits.long().bitwise_left_shift_(32).add_(below)
        top_ids[rows] = last - (keys.topk(num, dim=-1).values & 0xFFFFFFFF)
    return top_ids


def _rows_at_once(logits: Tensor) -> int:
    return max(1, (_ON_DEVICE if logits.is_cuda else _CACHED) // logits.shape[-1])


def _normaliser(logits: Tensor) -> Tensor:
    """Return the logarithm of the sum of each row's exponentials, ``[M]`` fp64."""
    peak = logits.amax(-1, keepdim=True).double()
    one = 2.0 ** (62 - logits.shape[-1].bit_length())
    at_once = _rows_at_once(logits)
    parts = zip(torch.split(logits, at_once), torch.split(peak, at_once), strict=True)
    sums = [
        (part - most).exp_().mul_(one).round_().long().sum(-1, keepdim=True) for part, most in parts
    ]
    # Non-finite values are lost in the sum, but kept by the last term.
    return ((torch.cat(sums).double() / one).log_() + peak + (peak - peak)).squeeze(-1)
