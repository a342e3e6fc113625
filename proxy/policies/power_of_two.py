"""The less loaded of two engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.proxy.policies.least_loaded import least_loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.proxy.policies import BackendView, RouteRequest


def power_of_two(request: RouteRequest, candidates: Sequence[BackendView]) -> BackendView:
    """Return the less loaded of two candidates, another two for each request.

    Several proxies that see the same idle engine do not all choose it (Mitzenmacher, "The power of
    two choices in randomized load balancing", 2001; the pairs here follow from the sequence).
    """
    number = len(candidates)
    first = request.sequence % number
    if number == 1:
        return candidates[0]
    distance = 1 + request.sequence // number % (number - 1)
    return least_loaded(request, [candidates[first], candidates[(first + distance) % number]])
