"""Records of decisions, each with its input and outcome, for display and replay.

Also the choices that other policies would have made.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.proxy.brain.decision import PairCosts
from pdserve.proxy.brain.question import PairCost, PairDecision
from pdserve.proxy.brain.roles import HomesShown
from pdserve.proxy.policies import BackendView, RouteRequest, policy_named, split_policy_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.proxy.brain.question import PairCandidate, RouteQuestion

NUM_KEPT: Final = 1024


class ServedTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The measured times of a request that ended well, as far as available; seconds.

    Attributes:
        ttft_s: Time from the first leg to the first token.
        itl_s: Time between tokens.
        wire_s: Time of the KV transfer.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    wire_s: float | None = None


class DecisionRecord(msgspec.Struct, kw_only=True):
    """One decision.

    Attributes:
        seq: Number, counting up by one.
        at_s: Unix time.
        decision: The decision; the last one of a request that had several.
        measured: Its measured times; None until the request has ended well.
        taken: The prediction for the engines actually used, in shadow.
    """

    seq: int
    at_s: float
    request_id: str
    decision: PairDecision
    measured: ServedTimes | None = None
    taken: PairCost | None = None

    @property
    def used(self) -> PairCost | None:
        """The prediction for the engines actually used; None: in shadow, none of the candidates."""
        return self.taken if self.decision.question.is_shadow else self.decision.chosen


class FitShown(msgspec.Struct, frozen=True, kw_only=True):
    """The fit for prompts, steps or transfers; see `LinearFit`.

    Attributes:
        samples: Samples from this proxy's own requests.
        reported_share: Share of it that engines reported, 0 to 1.
    """

    samples: int
    error: float
    weights: list[float]
    reported_share: float = 0.0


class DecisionsShown(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/debug/decisions`.

    Attributes:
        num_reporting: Number of engines that report what they have learned.
        is_obeyed: Whether decisions are obeyed; else policies decide (`--split-policy shadow`).
        decisions: Decisions, the newest first.
        homes: The engines' current homes.
    """

    is_known: bool
    is_obeyed: bool
    mean_output_tokens: float
    model: dict[str, FitShown]
    decisions: list[DecisionRecord]
    homes: HomesShown = HomesShown()
    num_reporting: int = 0


class DecisionLog:
    """The last decisions, by request."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()
        self._num = 0

    def add(self, request_id: str, decision: PairDecision, at_s: float) -> None:
        """Keep one; it replaces a former one of the same request."""
        self._num += 1
        self._records.pop(request_id, None)
        self._records[request_id] = DecisionRecord(
            seq=self._num, at_s=at_s, request_id=request_id, decision=decision
        )
        if len(self._records) > NUM_KEPT:
            self._records.popitem(last=False)

    def of(self, request_id: str) -> DecisionRecord | None:
        """Return a request's record."""
        return self._records.get(request_id)

    def newest(self, *, after_seq: int = 0) -> list[DecisionRecord]:
        """Return the records with a higher number, the newest first."""
        return [each for each in reversed(self._records.values()) if each.seq > after_seq]


def chosen_by(policy: str, split_policy: str, question: RouteQuestion, sequence: int) -> PairCost:
    """Return the choice of two policies: one picks both engines, one whether to split.

    They see the engines considered in the decision, with this proxy's work there.

    Args:
        sequence: The request's number, by which policies take turns.

    Raises:
        ConfigError: A policy's name is unknown.
    """
    route = policy_named(policy, flag="policy")
    split = split_policy_named(split_policy, flag="policy")
    request = RouteRequest(sequence, question.num_tokens)
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
