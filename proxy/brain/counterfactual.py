"""What other policies would have chosen for a request, at what predicted cost. Pure.

They see the engines that came into the decision, with the work that this proxy had there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.proxy.brain.decision import PairCosts
from pdserve.proxy.policies import (
    BackendView,
    RouteRequest,
    policy_named,
    split_policy_named,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.proxy.brain.question import PairCandidate, PairCost, RouteQuestion


def chosen_by(policy: str, split_policy: str, question: RouteQuestion, sequence: int) -> PairCost:
    """Return what two policies choose: one for both engines, one whether they are two.

    Args:
        sequence: The request's number, by which policies take turns.

    Raises:
        ConfigError: There is no policy of a name.
    """
    route = policy_named(policy, flag="policy")
    split = split_policy_named(split_policy, flag="policy")
    request = RouteRequest(sequence, 4 * question.num_tokens, question.num_tokens)
    costs = PairCosts(question)
    by_url = {each.url: each for each in question.candidates}

    def pick(engines: Sequence[PairCandidate]) -> BackendView | None:
        return route(request, [_view(each) for each in engines]) if engines else None

    decode = pick([each for each in question.candidates if each.is_decode] or question.candidates)
    assert decode is not None
    apart = frozenset(question.apart)
    paired = [
        each
        for each in question.candidates
        if each.is_prefill and each.url != decode.url and (each.url, decode.url) not in apart
    ]
    prefill = pick(paired)
    if prefill is None or split(request, prefill, decode):
        return costs.pair(by_url[decode.url], by_url[decode.url])
    return costs.pair(by_url[prefill.url], by_url[decode.url])


def _view(engine: PairCandidate) -> BackendView:
    work = engine.work
    return BackendView(
        engine.url,
        in_flight=work.num_prompts + work.num_streams,
        age_s=0.0,
        hit_tokens=engine.hit_tokens,
        pending_tokens=work.prompt_tokens + (work.kv_tokens if engine.is_decode else 0),
    )
