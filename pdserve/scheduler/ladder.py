"""What is done about a request whose KV did not come from another engine. Pure but for its budget.

The rungs above (the same engine once more) are the connector's to take, those below
(another engine, the client) the sender's. See `Rung`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from pdserve.connectors.base import KVSource
from pdserve.scheduler.budget import TokenBucket
from pdserve.scheduler.counts import Rung
from pdserve.wire.request import OnLoadFailure

if TYPE_CHECKING:
    from pdserve.scheduler.request import Request

# Where nothing is ever computed for others, what they failed at may work again by then.
_RETRY_WITHOUT_BUDGET_S = 1.0


class Verdict(NamedTuple):
    """A rung; with SHED, the seconds after which the budget may allow it."""

    rung: Rung
    retry_after_s: float | None = None


class Ladder:
    """Decides, and keeps the budget. What it took for a request is in `num_budgeted`.

    Args:
        tokens_per_s: Prompt tokens that may be computed here because others failed.
        max_model_len: A full budget allows one prompt of any length.
    """

    def __init__(self, tokens_per_s: int, *, max_model_len: int, now_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._bucket = TokenBucket(tokens_per_s, max(tokens_per_s, max_model_len), now_s=now_s)

    @property
    def over_budget(self) -> str:
        """What to say of a request that is shed."""
        return (
            "too many prompts are computed here already in place of other engines (at most "
            f"{self._tokens_per_s} tokens per second)"
        )

    def after_failure(self, request: Request, num_missing: int, now_s: float) -> Verdict:
        """The load of `request` has failed for good; `num_missing` prompt tokens are not here.

        What no other engine was to compute is computed here in any case: the budget is for their
        outages. A push always goes back to its sender, who has the handoff and can have it pulled.
        """
        if request.source is KVSource.LOCAL:
            return Verdict(Rung.RECOMPUTE)
        is_planned = request.source is KVSource.PLANNED
        if is_planned or request.on_load_failure is OnLoadFailure.REPORT:
            return Verdict(Rung.REPORT)
        return self.compute_here(request, num_missing, now_s)

    def compute_here(self, request: Request, num_missing: int, now_s: float) -> Verdict:
        """Whether `num_missing` prompt tokens can be computed: RECOMPUTE or SHED."""
        wait_s = self._bucket.take(num_missing, now_s)
        if wait_s:
            return Verdict(Rung.SHED, wait_s if math.isfinite(wait_s) else _RETRY_WITHOUT_BUDGET_S)
        request.num_budgeted = num_missing
        return Verdict(Rung.RECOMPUTE)

    def start(self, request: Request, num_missing: int) -> int:
        """`request` is computed now. Returns the tokens that count as recomputed, 0 for others."""
        if request.num_budgeted is None:
            return 0
        # What the prefix cache has may have changed since.
        self._bucket.correct(request.num_budgeted - num_missing)
        request.num_budgeted = None
        return num_missing

    def leave(self, request: Request) -> None:
        """`request` ends; what it was to cost is there again if it has not begun."""
        if request.num_budgeted is not None:
            self._bucket.correct(request.num_budgeted)
            request.num_budgeted = None
