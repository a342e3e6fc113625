"""How much may be computed here because a prefill engine failed it. Pure.

Without a limit, an outage of the prefill pool would bury the decode engines under prompts
and end the streams that run well. Knows tokens and seconds, not requests.
"""

from __future__ import annotations

import math


class TokenBucket:
    """A rate with a burst; it starts full.

    Args:
        tokens_per_s: What it regains; 0 means that nothing can ever be taken.
        burst: The most that can be taken at once.
        now_s: Monotonic seconds, as in every later call.
    """

    def __init__(self, tokens_per_s: int, burst: int, *, now_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._burst = burst
        self._level = float(burst)
        self._at_s = now_s

    def take(self, num_tokens: int, now_s: float) -> float:
        """Take all or nothing.

        Returns:
            0.0 if they were taken; else the seconds until they could be, if nobody else takes
            any: infinite if there is no budget at all, or they are more than a burst.
        """
        if self._tokens_per_s <= 0 or num_tokens > self._burst:
            return math.inf
        self._refill(now_s)
        missing = num_tokens - self._level
        if missing > 0:
            return missing / self._tokens_per_s
        self._level -= num_tokens
        return 0.0

    def correct(self, num_tokens: int) -> None:
        """So many more than were taken were not needed; below 0: were needed, too."""
        self._level = min(self._burst, self._level + num_tokens)

    def _refill(self, now_s: float) -> None:
        passed_s, self._at_s = now_s - self._at_s, now_s
        self._level = min(self._burst, self._level + passed_s * self._tokens_per_s)
