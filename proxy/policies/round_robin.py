"""Every engine in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.proxy.policies import BackendView, RouteRequest


def round_robin(request: RouteRequest, candidates: Sequence[BackendView]) -> BackendView:
    """Return the candidate whose turn it is by the request's sequence number."""
    return candidates[request.sequence % len(candidates)]
