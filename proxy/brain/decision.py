"""Chooses the engines for prompt and tokens in one decision, possibly the same engine.

A pair's cost is how far its request will miss its objectives, and how far it makes the requests
already there miss theirs; 1 is one objective. An engine outside its home role costs a little more.
The lowest cost wins; of two within the prediction's error, the one without a transfer. Pure: the
same question has the same answer, and each answer has its terms.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.proxy.brain.ledger import RECENT_S
from pdserve.proxy.brain.question import PairCost, PairDecision
from pdserve.proxy.brain.work import prompt_work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.proxy.brain.question import PairCandidate, RouteQuestion
    from pdserve.proxy.brain.work import ServiceTimes

BIAS: Final = 0.15
MARGIN: Final = 0.05
_MAX_MARGIN: Final = 0.3
"""In overload costs are large, and so are their errors: a split must still be possible."""
_TRIED: Final = 4
"""Of the best for either part, whose pairs are looked at."""
_HOP_S: Final = 0.002
_MOSTLY: Final = 0.3
_SHORT_TOKENS: Final = 512
_MAX_BUSY: Final = 0.9


def decide(question: RouteQuestion, may_pair: Callable[[str, str], bool]) -> PairDecision | None:
    """Return the best pair; None if there is no engine.

    Args:
        may_pair: Returns whether KV can go from the engine at one URL to that at another.
    """
    costs = PairCosts(question)
    candidates = question.candidates
    roomy = _with_room(question)
    prefills = _best([c for c in candidates if c.is_prefill], costs.of_prefill)
    decodes = _best([c for c in roomy if c.is_decode], costs.of_decode)
    local = min(roomy, key=lambda each: costs.pair(each, each).total, default=None)
    if local is None:
        return None
    pairs = [(p, d) for p in prefills for d in decodes if p.url != d.url]
    apart = tuple((p.url, d.url) for p, d in pairs if not may_pair(p.url, d.url))
    split = min(
        (pair for pair in pairs if (pair[0].url, pair[1].url) not in apart),
        key=lambda pair: costs.pair(*pair).total,
        default=None,
    )
    seen = {each.url for each in (*prefills, *decodes, local)}
    full = "" if len(roomy) == len(candidates) else _full(question, costs)
    seen.add(full)
    kept = tuple(each for each in candidates if question.is_shadow or each.url in seen)
    asked = msgspec.structs.replace(question, candidates=kept, apart=apart)
    best_local = costs.pair(local, local)
    if split is None:
        reason = "kv_room" if full else "no_pair"
        return PairDecision(
            chosen=best_local, other=None, reason=reason, margin=MARGIN, question=asked
        )
    best_split = costs.pair(*split)
    gain = best_local.total - best_split.total
    margin = _margin(question, (local, local), split, gain)
    needed = margin
    if question.was_split is not None:
        needed = -2 * margin if question.was_split else 2 * margin
    is_split = gain > needed
    chosen, other = (best_split, best_local) if is_split else (best_local, best_split)
    if is_split is not (gain > margin):
        reason = "session"
    else:
        reason = "kv_room" if full else _reason(chosen, other, question)
    return PairDecision(chosen=chosen, other=other, reason=reason, margin=margin, question=asked)


def _with_room(question: RouteQuestion) -> Sequence[PairCandidate]:
    """Return the engines that have room for the KV of prompt and answer; all, if none has."""
    candidates, num_tokens = question.candidates, question.num_tokens + question.num_output
    roomy = [
        each
        for each in candidates
        if each.room_tokens is None or num_tokens - each.hit_tokens <= each.room_tokens
    ]
    return roomy or candidates


def _full(question: RouteQuestion, costs: PairCosts) -> str:
    """Return the engine that would give tokens soonest, if it has no room; else nothing."""
    decodes = [each for each in question.candidates if each.is_decode]
    best = min(decodes, key=costs.of_decode, default=None)
    return "" if best is None or best in _with_room(question) else best.url


def repeated(decision: PairDecision) -> PairDecision | None:
    """Return the answer to a decision's question, recomputed from its record."""
    apart = frozenset(decision.question.apart)
    return decide(decision.question, lambda prefill, decode: (prefill, decode) not in apart)


def taken(decision: PairDecision, prefill: str, decode: str) -> PairCost | None:
    """Return the predicted cost of the engines used, if a decision is not obeyed.

    Args:
        prefill, decode: URLs of the engines; the first is empty if the other did everything.

    Returns:
        None: the decision was obeyed, or one of them was no candidate.
    """
    by_url = {each.url: each for each in decision.question.candidates}
    pair = by_url.get(prefill or decode), by_url.get(decode)
    if not decision.question.is_shadow or pair[0] is None or pair[1] is None:
        return None
    return PairCosts(decision.question).pair(pair[0], pair[1])


class PairCosts:
    """The costs of one request at each engine."""

    def __init__(self, question: RouteQuestion, times: ServiceTimes | None = None) -> None:
        self._num_tokens = question.num_tokens
        self._times = times or question.times
        self._ttft_slo_s, self._itl_slo_s = question.ttft_slo_s, question.itl_slo_s
        self._output, self._spread = question.num_output, question.spread
        self._coming, self._held_s = question.coming, question.held_s

    def of_prefill(self, engine: PairCandidate) -> float:
        """Return the cost of computing the prompt there."""
        return sum(self._prefill_terms(engine)[0].values())

    def of_decode(self, engine: PairCandidate) -> float:
        """Return the cost of giving the tokens there, without a transfer."""
        return sum(self._decode_terms(engine, 0.0)[0].values())

    def pair(self, prefill: PairCandidate, decode: PairCandidate) -> PairCost:
        """Return the cost of both; the same engine twice does everything."""
        wire_s = 0.0
        if prefill.url != decode.url:
            wire_s = self._times.wire_s(max(0, self._num_tokens - decode.hit_tokens)) + _HOP_S
        ours, ttft = self._prefill_terms(prefill)
        theirs, itl_s = self._decode_terms(decode, wire_s)
        terms = {name: ours.get(name, 0.0) + theirs.get(name, 0.0) for name in {**ours, **theirs}}
        return PairCost(
            prefill=prefill.url,
            decode=decode.url,
            ttft=ttft,
            ttft_s=sum(ttft.values()),
            itl_s=itl_s,
            wire_s=wire_s,
            terms=terms,
            total=sum(terms.values()),
        )

    def ttft(self, engine: PairCandidate) -> dict[str, float]:
        """Return seconds to the first token of a prompt sent there now, by cause."""
        times, work = self._times, engine.work
        own = prompt_work(self._num_tokens, min(engine.hit_tokens, self._num_tokens - 1))
        return {
            "held": self._held_s if engine.is_prefill else 0.0,
            "queue": times.backlog_s(work, engine.begun_s),
            "prefill": times.prompt_s(self._num_tokens, engine.hit_tokens),
            "beside": times.beside_s(work.prompts.plus(own), work.num_streams, work.kv_tokens),
            "hop": times.hop_s,
        }

    def _prefill_terms(self, engine: PairCandidate) -> tuple[dict[str, float], dict[str, float]]:
        """Return the cost of computing the prompt there, and the time to the first token."""
        work, slo_s, times = engine.work, self._itl_slo_s, self._times
        ttft = self.ttft(engine)
        harm = 0.0
        num_coming = work.num_coming + (self._coming if engine.is_decode else 0.0)
        num_streams = work.num_streams + num_coming
        if num_streams:
            itl_s = self._itl_s(engine, num_streams, work.kv_tokens + work.coming_tokens)
            slowed_s = itl_s + times.caution * ttft["prefill"] * times.spread
            harm = num_streams * (_missed(slowed_s / slo_s) - _missed(itl_s / slo_s))
        bias = 0.0 if engine.is_prefill else BIAS
        late_s = sum(ttft.values()) + times.caution_s(ttft)
        missed = _missed(late_s / self._ttft_slo_s)
        return {"ttft": missed, "harm": harm, "bias": bias}, ttft

    def _decode_terms(self, engine: PairCandidate, wire_s: float) -> tuple[dict[str, float], float]:
        """Return the cost of giving the tokens there, and the time between them."""
        work, slo_s = engine.work, self._itl_slo_s
        num_streams = work.num_streams + work.num_coming + self._coming
        kv_tokens = work.kv_tokens + work.coming_tokens
        before_s = self._itl_s(engine, num_streams, kv_tokens)
        after_s = self._itl_s(engine, num_streams + 1, kv_tokens + self._num_tokens + self._output)
        harm = num_streams * (_missed(after_s / slo_s) - _missed(before_s / slo_s))
        itl = _missed(after_s / slo_s)
        wire = _missed((after_s + wire_s * self._spread) / slo_s) - itl
        bias = 0.0 if engine.is_decode else BIAS
        return {"itl": itl, "wire": wire, "harm": harm, "bias": bias}, after_s

    def _itl_s(self, engine: PairCandidate, num_streams: float, kv_tokens: float) -> float:
        """Return seconds between two tokens there, with the time spent on prompts.

        Its present prompts are computed between the tokens of the present streams; and the share of
        time for prompts stays as it was recently, and until those are computed.
        """
        times = self._times
        backlog_s = times.caution * times.backlog_s(engine.work, engine.begun_s)
        share = min(_MAX_BUSY, (engine.busy_s + backlog_s) / (RECENT_S + backlog_s))
        return times.step_s(num_streams, kv_tokens) / (1 - share) + backlog_s * times.spread


def _missed(ratio: float) -> float:
    """The cost of taking so many times an objective: a little below it, ever more above."""
    return 0.1 * ratio + 2 * max(0.0, ratio - 0.8) + 6 * max(0.0, ratio - 1.0)


def _best(
    engines: Sequence[PairCandidate], cost: Callable[[PairCandidate], float]
) -> Sequence[PairCandidate]:
    return sorted(engines, key=cost)[:_TRIED]


def _margin(
    question: RouteQuestion,
    local: tuple[PairCandidate, PairCandidate],
    split: tuple[PairCandidate, PairCandidate],
    gain: float,
) -> float:
    """Return how much better a split must be: the change of its gain if a fit were off."""
    changes = []
    for times in question.times.off():
        costs = PairCosts(question, times)
        changes.append(costs.pair(*local).total - costs.pair(*split).total - gain)
    return min(_MAX_MARGIN, max(MARGIN, math.hypot(*changes)))


def _reason(chosen: PairCost, other: PairCost, question: RouteQuestion) -> str:
    """Name the deciding difference."""
    hits = {each.url: each.hit_tokens for each in question.candidates}
    missing = question.num_tokens - hits[chosen.prefill]
    if chosen.is_local:
        if missing < _MOSTLY * question.num_tokens:
            return "mostly_cached"
        if missing < _SHORT_TOKENS:
            return "short_prompt"
    gains = {name: other.terms[name] - chosen.terms[name] for name in chosen.terms}
    most = max(gains, key=lambda name: gains[name])
    if chosen.is_local:
        named = {"ttft": "prefill_busy", "wire": "wire_slow", "bias": "home_role"}
        return named.get(most, "decode_room")
    if most == "ttft":
        is_warmer = hits[chosen.prefill] > hits[other.prefill]
        return "warm_prefill" if is_warmer else "shorter_queue"
    return "home_role" if most == "bias" else "protects_streams"
