"""Policies that choose an engine: one pure function each.

Each sees the request and the views of the eligible engines, and returns one of these views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.proxy.policies import BackendView, RouteRequest

STALE_AFTER_S: Final = 10.0
"""Age beyond which a snapshot's count of others' requests is ignored."""
_STICKY_MATCH: Final = 0.8
"""Share of a prompt an engine must have to be preferred over all others."""
_MAX_LEAD_TOKENS: Final = 16_384
"""How far its backlog may exceed the smallest one: 1 or 2 s of prefill on one accelerator."""
_SGLANG_MATCH: Final = 0.3
"""Share of a prompt that an engine must exceed for its match to count."""
_MAX_LEAD: Final = 64
_MAX_RATIO: Final = 1.5
"""The load is unbalanced when the busiest engine leads the idlest by both, in requests."""
_DYNAMO_BLOCK_TOKENS: Final = 16
_LLMD_PREFIX, _LLMD_QUEUE, _LLMD_KV = 3.0, 2.0, 2.0
_LLMD_DIGITS: Final = 9


def round_robin(request: RouteRequest, candidates: Sequence[BackendView]) -> BackendView:
    """Return the candidate whose turn it is by the request's sequence number."""
    return candidates[request.sequence % len(candidates)]


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


def prefix_sticky(request: RouteRequest, candidates: Sequence[BackendView]) -> BackendView:
    """Return the candidate that will finish computing the prompt first, counted in tokens.

    Engines that have most of the prompt take precedence until they are saturated, so that a prefix
    does not spread to every engine (llm-d's "sticky until saturated"). Ties go to the least loaded.
    """
    least_pending = min(view.pending_tokens for view in candidates)
    warm = [
        view
        for view in candidates
        if 0 < _STICKY_MATCH * request.prompt_tokens <= view.hit_tokens
        and view.pending_tokens - least_pending <= _MAX_LEAD_TOKENS
    ]
    pool = warm or candidates
    soonest = min(view.pending_tokens - view.hit_tokens for view in pool)
    return least_loaded(
        request, [view for view in pool if view.pending_tokens - view.hit_tokens == soonest]
    )


def cache_aware(request: RouteRequest, candidates: Sequence[BackendView]) -> BackendView:
    """Return the candidate that has most of the prompt, or the least loaded one, as SGLang does.

    The latter applies if none has enough of it, or one has far more requests than another.
    """
    busiest = max(view.in_flight for view in candidates)
    idlest = min(view.in_flight for view in candidates)
    most = max(view.hit_tokens for view in candidates)
    is_balanced = busiest - idlest <= _MAX_LEAD or busiest <= _MAX_RATIO * idlest
    if not is_balanced or most <= _SGLANG_MATCH * request.prompt_tokens:
        return least_loaded(request, candidates)
    return least_loaded(request, [view for view in candidates if view.hit_tokens == most])


def dynamo_cost(request: RouteRequest, candidates: Sequence[BackendView]) -> BackendView:
    """Return the candidate with the fewest blocks, the prompt's new ones plus those in use there.

    Uses the defaults of NVIDIA Dynamo: all weights 1, no temperature. Ties go to the least loaded.
    """

    def cost(view: BackendView) -> int:
        new = max(0, request.prompt_tokens - view.hit_tokens)
        return -(-new // _DYNAMO_BLOCK_TOKENS) - (-view.pending_tokens // _DYNAMO_BLOCK_TOKENS)

    least = min(map(cost, candidates))
    return least_loaded(request, [view for view in candidates if cost(view) == least])


def llmd_blend(request: RouteRequest, candidates: Sequence[BackendView]) -> BackendView:
    """Return the best candidate by prefix (weight 3), requests (2) and free KV (2), each 0 to 1.

    Omits llm-d's score for engines not used lately, which would need state.
    """
    most = max(view.in_flight for view in candidates)

    def score(view: BackendView) -> float:
        prefix = min(1.0, view.hit_tokens / request.prompt_tokens) if request.prompt_tokens else 0.0
        queue = 1.0 - view.in_flight / most if most else 1.0
        total = _LLMD_PREFIX * prefix + _LLMD_QUEUE * queue + _LLMD_KV * (1.0 - view.kv_usage)
        return round(total, _LLMD_DIGITS)

    best = max(map(score, candidates))
    return least_loaded(request, [view for view in candidates if score(view) == best])
