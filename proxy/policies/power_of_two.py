"""The less loaded of two engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.proxy.policies.least_loaded import least_loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.proxy.policies import BackendView, RouteRequest


def power_of_two(request: RouteRequest, candidates: Sequence[BackendView]) -> BackendView:
    """Return the less loaded of two candidates; the pair changes with each request.

    This keeps several proxies from all choosing the same idle engine (Mitzenmacher, "The power of
    two choices in randomized load balancing", 2001). The sequence number determines the pair.
    """
    number = len(candidates)
    first = request.sequence % number
    if number == 1:
        return candidates[0]
    distance = 1 + request.sequence // number % (number - 1)
    return least_loaded(request, [candidates[first], candidates[(first + distance) % number]])
