"""Log-probabilities of chosen tokens and the likeliest ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from pdserve.wire.sampling import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


_CACHED = 1 << 17
"""Numbers that stay in a core's cache between two operations."""
_ON_DEVICE = 1 << 24
"""Numbers that a device takes at a time: 256 MiB in two dtypes of 8 bytes."""

Alternatives = int | tuple[int, ...]
"""What is reported beside a token: so many of the likeliest ones, or those with these ids."""


def token_logprobs(
    logits: Tensor, token_ids: Tensor, alternatives: Sequence[Alternatives]
) -> list[TokenLogprobs]:
    """Describe one token per row.

    The normaliser is a sum of whole numbers, so that a row's values do not depend on the order
    of the sum, hence not on the batch; rounding them changes it by less than 1e-8.

    Args:
        logits: `[M, vocab_size]` fp32, unmodified.
        token_ids: `[M]` int64, the tokens that stand there.
        alternatives: Alternatives to report, per row; ids are in the vocabulary.
    """
    normaliser = _normaliser(logits)
    chosen = logits.gather(-1, token_ids[:, None])
    values = (chosen - normaliser).squeeze(-1).tolist()
    ranks = ((logits > chosen).sum(-1) + 1).tolist()
    num_top = [each if isinstance(each, int) else 0 for each in alternatives]
    widest = min(max(num_top, default=0), logits.shape[-1])
    top_logits, top_ids = _likeliest(logits, widest)
    top_values, top_tokens = (top_logits - normaliser).tolist(), top_ids.tolist()
    described = [
        TokenLogprobs(
            token_id=token_id,
            logprob=value,
            rank=rank,
            top=list(zip(tokens[:wanted], tops[:wanted], strict=True)),
        )
        for token_id, value, rank, tokens, tops, wanted in zip(
            token_ids.tolist(), values, ranks, top_tokens, top_values, num_top, strict=True
        )
    ]
    for row, named in enumerate(alternatives):
        if not isinstance(named, int):
            logprobs = (logits[row, list(named)] - normaliser[row]).tolist()
            described[row] = msgspec.structs.replace(
                described[row], top=list(zip(named, logprobs, strict=True))
            )
    return described


def _likeliest(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return the largest logits of each row and their ids, `[M, num]`; of equal ones the lower ids.

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
    return logits.gather(-1, top_ids), top_ids


def _rows_at_once(logits: Tensor) -> int:
    return max(1, (_ON_DEVICE if logits.is_cuda else _CACHED) // logits.shape[-1])


def _normaliser(logits: Tensor) -> Tensor:
    """Return the logarithm of the sum of each row's exponentials, `[M, 1]` fp64."""
    peak = logits.amax(-1, keepdim=True).double()
    one = 2.0 ** (62 - logits.shape[-1].bit_length())
    at_once = _rows_at_once(logits)
    parts = zip(torch.split(logits, at_once), torch.split(peak, at_once), strict=True)
    sums = [
        (part - most).exp_().mul_(one).round_().long().sum(-1, keepdim=True) for part, most in parts
    ]
    # Non-finite values are lost in the sum, but kept by the last term.
    return (torch.cat(sums).double() / one).log_() + peak + (peak - peak)
