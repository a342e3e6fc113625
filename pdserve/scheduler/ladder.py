"""Chooses what to do with a request whose KV did not arrive.

The rungs above (the same engine once more) are the connector's to take, those below
(another engine, the client) the sender's. See `Remedy`.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, NamedTuple

from pdserve.connectors.base import KVSource
from pdserve.wire.request import OnLoadFailure

if TYPE_CHECKING:
    from pdserve.scheduler.request import Request

# Where nothing is ever computed for others, what they failed at may work again by then.
_RETRY_WITHOUT_BUDGET_S = 1.0


class Remedy(enum.Enum):
    """What can be done when a load has failed, or cannot even begin: the rungs of the ladder.

    RETRY: once more from the same engine. RECOMPUTE: the prompt is computed here, within the
    budget. REPORT: whoever sent the request is told, and has other ways. SHED: over budget.
    """

    RETRY = "retry"
    RECOMPUTE = "recompute"
    REPORT = "report"
    SHED = "shed"


class Decision(NamedTuple):
    """A remedy; with SHED, the seconds after which the budget may allow it."""

    remedy: Remedy
    retry_after_s: float | None = None


class Ladder:
    """Chooses a remedy, and keeps the recompute budget; a request's share is its `num_budgeted`.

    Args:
        tokens_per_s: Prompt tokens that may be computed here because others failed.
        max_model_len: A full budget allows one prompt of any length.
    """

    def __init__(self, tokens_per_s: int, *, max_model_len: int, now_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._bucket = TokenBucket(tokens_per_s, max(tokens_per_s, max_model_len), now_s=now_s)

    @property
    def over_budget(self) -> str:
        """The message for a request that is shed."""
        return (
            "too many prompts are computed here already in place of other engines (at most "
            f"{self._tokens_per_s} tokens per second)"
        )

    def after_failure(self, request: Request, num_missing: int, now_s: float) -> Decision:
        """Choose a remedy for a load that failed for good and left `num_missing` prompt tokens.

        What no other engine was to compute is computed here in any case: the budget is for their
        outages. What was only planned goes back to its sender, who can have it brought otherwise.
        """
        if request.source is KVSource.LOCAL:
            return Decision(Remedy.RECOMPUTE)
        is_planned = request.source is KVSource.PLANNED
        if is_planned or request.on_load_failure is OnLoadFailure.REPORT:
            return Decision(Remedy.REPORT)
        return self.compute_here(request, num_missing, now_s)

    def compute_here(self, request: Request, num_missing: int, now_s: float) -> Decision:
        """Charge `num_missing` prompt tokens to the budget: RECOMPUTE, or SHED if it lacks them."""
        wait_s = self._bucket.take(num_missing, now_s)
        if wait_s:
            return Decision(
                Remedy.SHED, wait_s if math.isfinite(wait_s) else _RETRY_WITHOUT_BUDGET_S
            )
        request.charge(num_missing)
        return Decision(Remedy.RECOMPUTE)

    def settle(self, request: Request, num_computed: int) -> None:
        """Settle the charge of a request, of which so many tokens are computed after all."""
        assert request.num_budgeted is not None
        # What the prefix cache has may have changed since.
        self._bucket.correct(request.num_budgeted - num_computed)
        request.charge(None)


class TokenBucket:
    """A rate with a burst; it starts full. Knows tokens and seconds, not requests.

    Without a limit, an outage of the prefill pool would bury the decode engines under prompts
    and end the streams that run well.

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
        """Give back tokens that were not needed; a negative number takes more."""
        self._level = min(self._burst, self._level + num_tokens)

    def _refill(self, now_s: float) -> None:
        passed_s, self._at_s = now_s - self._at_s, now_s
        self._level = min(self._burst, self._level + passed_s * self._tokens_per_s)
