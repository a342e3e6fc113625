"""What an engine sends back for a request, a few tokens at a time."""

from __future__ import annotations

import msgspec


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position.

    Attributes:
        token_id: The token that stands there.
        logprob: Its natural-log probability under the unmodified logits.
        rank: Its rank, 1 for the most likely.
        top: The most likely `(token_id, logprob)`, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
