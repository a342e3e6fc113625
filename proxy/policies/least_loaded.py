"""The engine with the fewest requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.proxy.policies import BackendView, RouteRequest

STALE_AFTER_S = 10.0
"""Age beyond which a snapshot's count of others' requests is ignored."""


def least_loaded(request: RouteRequest, candidates: Sequence[BackendView]) -> BackendView:
    """Return the candidate with the fewest requests, ours and others'.

    Ours are counted exactly; others' come from a snapshot and count while it is fresh. Ties
    go to the engine with more free KV, in steps of a tenth, and then to each engine in turn,
    so that idle engines share the work.
    """
    turn = request.sequence % len(candidates)

    def cost(index: int) -> tuple[int, int, int]:
        view = candidates[index]
        fresh = view.age_s <= STALE_AFTER_S
        load = view.in_flight + (view.num_foreign if fresh else 0)
        usage = int(view.kv_usage * 10) if fresh else 0
        return load, usage, (index - turn) % len(candidates)

    return candidates[min(range(len(candidates)), key=cost)]
