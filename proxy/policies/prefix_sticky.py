"""The engine that has the prompt, unless it is much busier than another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.proxy.policies.least_loaded import least_loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.proxy.policies import BackendView, RouteRequest

_WARM: Final = 0.8
"""Share of a prompt that makes an engine the one to stay with."""
_MAX_LEAD_TOKENS: Final = 16_384
"""By how much it may have more to do: a second or two of prefill on one accelerator."""


def prefix_sticky(request: RouteRequest, candidates: Sequence[BackendView]) -> BackendView:
    """Return the candidate that will have computed the prompt first, counted in tokens.

    Those that have most of the prompt come before all others while they are not saturated, so that
    one prefix does not come to lie on every engine (llm-d's "sticky until saturated"). Among equals
    it is the least loaded one.
    """
    least_pending = min(view.pending_tokens for view in candidates)
    warm = [
        view
        for view in candidates
        if 0 < _WARM * request.prompt_tokens <= view.hit_tokens
        and view.pending_tokens - least_pending <= _MAX_LEAD_TOKENS
    ]
    pool = warm or candidates
    soonest = min(view.pending_tokens - view.hit_tokens for view in pool)
    return least_loaded(
        request, [view for view in pool if view.pending_tokens - view.hit_tokens == soonest]
    )
