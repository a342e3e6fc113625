"""The engine with the lowest cost, as NVIDIA Dynamo's router computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.proxy.policies.least_loaded import least_loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.proxy.policies import BackendView, RouteRequest

_BLOCK_TOKENS: Final = 16


def dynamo_cost(request: RouteRequest, candidates: Sequence[BackendView]) -> BackendView:
    """Return the candidate with the fewest blocks, the prompt's new ones plus those in use there.

    Uses Dynamo's defaults: all weights 1, no temperature. Ties go to the least loaded.
    """

    def cost(view: BackendView) -> int:
        new = max(0, request.prompt_tokens - view.hit_tokens)
        return -(-new // _BLOCK_TOKENS) - (-view.pending_tokens // _BLOCK_TOKENS)

    least = min(map(cost, candidates))
    return least_loaded(request, [view for view in candidates if cost(view) == least])
