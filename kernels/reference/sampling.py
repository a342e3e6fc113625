"""Reference choice of tokens from logits.

Weights are integers, so a row's token does not depend on the order of summation, and hence neither
on its batch nor on the division of work. They come from the power that a device computes, so a
token is a function of the logits and of the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FRACTION_BITS = 53
"""Number of bits of a uniform number and of a share of the weight; 1 has all bits set."""
WEIGHT_BITS = 40
"""The largest weight of a row is 2 to this; a weight below 1 counts as 0."""
NOT_FINITE = -1
"""Stands for the token of a row in which none can be chosen."""


class Draws(NamedTuple):
    """The parameters for drawing from N rows of logits; one entry each.

    Attributes:
        rows: ``[N]`` int32, rows of the logits; distinct.
        scale: ``[N]`` fp32, ``log2(e) / temperature``.
        min_p: ``[N]`` fp32; tokens below this share of the likeliest's probability are left out.
        top_k: ``[N]`` int32; number of likeliest tokens kept, with ties; 0 keeps all.
        top_p: ``[N]`` int64, in ``2**-53``; of those, the fewest likeliest with at least this share
            of the weight are kept, with ties; 2**53 keeps all.
        uniform: ``[N]`` int64, in ``2**-53``, below 1.
    """

    rows: Tensor
    scale: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    uniform: Tensor


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Find the likeliest token of each row; ties go to the lowest id.

    Args:
        logits: ``[M, V]`` fp32.

    Returns:
        ``[M]`` int64 token ids, -1 where the largest logit is infinite or one is NaN; ``[M]`` fp32,
        the largest logits.
    """
    peaks = logits.amax(-1)
    is_largest = (logits == peaks[:, None]).int()
    tokens = torch.where(peaks.isfinite(), is_largest.argmax(-1), NOT_FINITE)
    return tokens, peaks


def draw(
    logits: Tensor, peaks: Tensor, draws: Draws, tokens: Tensor, *, by_k: bool, by_p: bool
) -> None:
    """Draw tokens by inverse transform: the first whose running weight passes u of the total.

    The weight of a token is ``floor(2**40 * exp2((logit - peak) * scale))``.

    Args:
        logits: ``[M, V]`` fp32.
        peaks: ``[M]`` fp32, the largest of each row.
        draws: The rows and their parameters.
        tokens: ``[M]`` int64; those of the drawn rows are written, -1 where the peak is not finite.
        by_k: Whether any row has a ``top_k``.
        by_p: Whether any row has a ``top_p`` below 1.
    """
    rows = draws.rows.long()
    peak = peaks[rows, None]
    is_finite = peak.isfinite()
    power = torch.exp2((logits[rows] - peak) * draws.scale[:, None])
    power = torch.where(is_finite, power, 1.0)
    power = torch.where(power < draws.min_p[:, None], 0.0, power)
    if by_k or by_p:
        power = torch.where(power < _bound(power, draws), 0.0, power)
    running = _weights(power).cumsum(-1)
    target = share_of(running[:, -1:], draws.uniform[:, None])
    drawn = torch.searchsorted(running, target, right=True)
    tokens[rows] = torch.where(is_finite, drawn, NOT_FINITE).squeeze(-1)


def _bound(power: Tensor, draws: Draws) -> Tensor:
    """Return the least kept power of each row, ``[N, 1]``."""
    falling = power.sort(-1, descending=True).values
    top_k = torch.where(draws.top_k > 0, draws.top_k, power.shape[1]).long()[:, None]
    kth = falling.gather(-1, top_k - 1)
    running = _weights(torch.where(falling < kth, 0.0, falling)).cumsum(-1)
    wanted = share_of(running[:, -1:], draws.top_p[:, None]).clamp(min=1)
    return torch.maximum(kth, falling.gather(-1, torch.searchsorted(running, wanted)))


def _weights(power: Tensor) -> Tensor:
    return (power * 2.0**WEIGHT_BITS).long()


def share_of(total: Tensor, fraction: Tensor) -> Tensor:
    """``total * fraction`` in units of ``2**-53``, rounded down, where the product has 111 bits.

    Args:
        total: int64, below ``2**58``.
        fraction: int64, at most ``2**53``.
    """
    total_high, total_low = total >> 29, total & ((1 << 29) - 1)
    high, low = fraction >> 26, fraction & ((1 << 26) - 1)
    middle = high * total_low + 8 * low * total_high + (low * total_low >> 26)
    return 4 * high * total_high + (middle >> 27)
