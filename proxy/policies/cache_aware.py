"""The engine with the longest match while the load is balanced, as in SGLang's router."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.proxy.policies.least_loaded import least_loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.proxy.policies import BackendView, RouteRequest

_MATCH: Final = 0.3
"""Share of a prompt that an engine must exceed for its match to count."""
_MAX_LEAD: Final = 64
_MAX_RATIO: Final = 1.5
"""The load is unbalanced when the busiest engine leads the idlest by both, in requests."""


def cache_aware(request: RouteRequest, candidates: Sequence[BackendView]) -> BackendView:
    """Return the candidate that has most of the prompt, or the least loaded one.

    The latter applies if none has enough of it, or one has far more requests than another.
    """
    busiest = max(view.in_flight for view in candidates)
    idlest = min(view.in_flight for view in candidates)
    most = max(view.hit_tokens for view in candidates)
    is_balanced = busiest - idlest <= _MAX_LEAD or busiest <= _MAX_RATIO * idlest
    if not is_balanced or most <= _MATCH * request.prompt_tokens:
        return least_loaded(request, candidates)
    return least_loaded(request, [view for view in candidates if view.hit_tokens == most])
