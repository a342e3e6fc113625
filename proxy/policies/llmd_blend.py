"""The engine with the best weighted score, as in llm-d's scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.proxy.policies.least_loaded import least_loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.proxy.policies import BackendView, RouteRequest

_PREFIX, _QUEUE, _KV = 3.0, 2.0, 2.0
_PRECISION: Final = 9


def llmd_blend(request: RouteRequest, candidates: Sequence[BackendView]) -> BackendView:
    """Return the best candidate by prefix (weight 3), requests (2) and free KV (2), each 0 to 1.

    Omits llm-d's score for engines not used lately, which would need state.
    """
    most = max(view.in_flight for view in candidates)

    def score(view: BackendView) -> float:
        prefix = min(1.0, view.hit_tokens / request.prompt_tokens) if request.prompt_tokens else 0.0
        queue = 1.0 - view.in_flight / most if most else 1.0
        total = _PREFIX * prefix + _QUEUE * queue + _KV * (1.0 - view.kv_usage)
        return round(total, _PRECISION)

    best = max(map(score, candidates))
    return least_loaded(request, [view for view in candidates if score(view) == best])
