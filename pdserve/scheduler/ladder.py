"""Chooses what to do with a request whose KV did not arrive.

The connector takes the rungs above (the same engine once more), the sender those below (another
engine, the client). See `Remedy`.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, NamedTuple

from pdserve.connectors.base import KVSource
from pdserve.wire.request import OnLoadFailure

if TYPE_CHECKING:
    from pdserve.scheduler.request import Request

# Without a budget nothing is computed for other engines; by then they may work again.
_RETRY_WITHOUT_BUDGET_S = 1.0


class Remedy(enum.Enum):
    """Responses to a load that has failed, or cannot even begin: the rungs of the ladder.

    RETRY: load once more from the same engine. RECOMPUTE: compute the prompt here, within the
    budget. REPORT: tell the sender, which has other ways. SHED: refuse, over budget.
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
        tokens_per_s: Rate of prompt tokens that may be computed here because other engines failed.
        max_model_len: Longest prompt; a full budget allows one of that length.
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

        A prompt that no other engine should have computed is computed here in any case: the budget
        is for their outages. If KV was only planned, the sender is told: it can try another source.
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
        """Settle the charge of a request now that `num_computed` tokens of it are computed."""
        assert request.num_budgeted is not None
        # The prefix cache may have changed since.
        self._bucket.correct(request.num_budgeted - num_computed)
        request.charge(None)


class TokenBucket:
    """A rate limit with a burst; it starts full. Knows tokens and seconds, not requests.

    Without a limit, an outage of the prefill pool would bury the decode engines under prompts
    and end the streams that run well.

    Args:
        tokens_per_s: Refill rate; 0 means that nothing can ever be taken.
        burst: Maximum number of tokens that can be taken at once.
        now_s: Monotonic seconds, as in every later call.
    """

    def __init__(self, tokens_per_s: int, burst: int, *, now_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._burst = burst
        self._level = float(burst)
        self._at_s = now_s

    def take(self, num_tokens: int, now_s: float) -> float:
        """Take all `num_tokens` or none.

        Returns:
            0.0 if they were taken; else the seconds until they could be if no other request takes
            any: infinite if there is no budget at all, or they exceed the burst.
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
