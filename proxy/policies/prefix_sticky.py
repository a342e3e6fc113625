"""The engine that has the prompt, unless it is much busier than another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.proxy.policies.least_loaded import least_loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.proxy.policies import BackendView, RouteRequest

_WARM: Final = 0.8
"""Share of a prompt an engine must have to be preferred over all others."""
_MAX_LEAD_TOKENS: Final = 16_384
"""How far its backlog may exceed the smallest one: 1 or 2 s of prefill on one accelerator."""


def prefix_sticky(request: RouteRequest, candidates: Sequence[BackendView]) -> BackendView:
    """Return the candidate that will finish computing the prompt first, counted in tokens.

    Engines that have most of the prompt take precedence until they are saturated, so that a prefix
    does not spread to every engine (llm-d's "sticky until saturated"). Ties go to the least loaded.
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
