"""Decides whether to reject a request early because it would miss its objectives. Pure.

Before its prompt is computed nothing is lost. The criteria are the time to its first token where it
would be sent now, in which three in four would have it, and the time between tokens when they
begin, without the streams that will have ended by then. A request that even an idle engine could
not serve in time is judged by the default objectives: an idle deployment turns no request away.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.proxy.brain.question import default_ttft_slo_s

if TYPE_CHECKING:
    from pdserve.proxy.brain.question import PairCandidate, PairDecision, RouteQuestion

_SLACK: Final = 1.1
"""Of an objective between tokens that a request may take before it is turned away."""
_SIGMAS: Final = 2.0
_MAX_RETRY_S: Final = 60.0


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """The reason for turning a request away.

    Attributes:
        reason: `ttft` or `itl`.
        predicted_s, limit_s: The predicted time, and the limit on it.
        parts: Parts of the time to the first token, by cause; see `PairCost.ttft`. `caution`: what
            prompts may take longer than predicted.
        retry_after_s: Seconds until it would be served in time.
    """

    reason: str
    predicted_s: float
    limit_s: float
    parts: dict[str, float]
    retry_after_s: float

    @property
    def in_words(self) -> str:
        """Return it in words."""
        what = "its first token" if self.reason == "ttft" else "each further token"
        parts = " + ".join(f"{name} {s * 1e3:.0f}" for name, s in self.parts.items() if s >= 5e-4)
        return (
            f"{what} would take {self.predicted_s * 1e3:.0f} ms"
            f"{f' ({parts})' if parts else ''}, and may take {self.limit_s * 1e3:.0f}: "
            f"try again in {math.ceil(self.retry_after_s)} s, or ask for less in slo"
        )


def rejection(
    decision: PairDecision, *, waiting_s: float, passed_s: float = 0.0
) -> Rejection | None:
    """Return the reason to turn a request away; None: there is none.

    Args:
        decision: Where it would be sent now.
        waiting_s: Wait before it gets a place.
        passed_s: Time in which its engine computes prompts that pass it.
    """
    question, chosen = decision.question, decision.chosen
    times = question.times
    parts = {"waiting": waiting_s, "passed": passed_s, **chosen.ttft}
    parts["caution"] = times.caution_s(chosen.ttft)
    alone_s = times.caution * chosen.ttft["prefill"] + chosen.ttft["hop"]
    slo_s = question.ttft_slo_s
    if alone_s > slo_s:
        slo_s = max(slo_s, default_ttft_slo_s(times, question.num_tokens))
    ttft_s, limit_s = sum(parts.values()), max(alone_s, slo_s)
    if ttft_s > limit_s:
        return Rejection(
            reason="ttft",
            predicted_s=ttft_s,
            limit_s=limit_s,
            parts=parts,
            retry_after_s=_bounded(ttft_s - limit_s),
        )
    return _of_decode(question, ttft_s)


def _of_decode(question: RouteQuestion, ttft_s: float) -> Rejection | None:
    """Return a rejection if tokens would come too slowly, once they begin."""
    times = question.times
    decodes = [each for each in question.candidates if each.is_decode]
    if not decodes:
        return None
    alone_s = times.step_s(1, question.num_tokens + question.num_output)
    itl_s = min(_itl_s(question, each, ttft_s) for each in decodes)
    limit_s = max(question.itl_slo_s, alone_s) * (_SLACK + _SIGMAS * times.step_error)
    if itl_s <= limit_s:
        return None
    return Rejection(
        reason="itl",
        predicted_s=itl_s,
        limit_s=limit_s,
        parts={},
        retry_after_s=_bounded(times.mean_output * (itl_s - limit_s)),
    )


def _itl_s(question: RouteQuestion, engine: PairCandidate, ttft_s: float) -> float:
    """Return seconds between tokens at an engine, given the streams that will end and arrive."""
    times, work = question.times, engine.work
    num_coming = question.coming + work.num_coming + work.num_prompts
    step_s = max(1e-6, times.step_s(work.num_streams, work.kv_tokens))
    left = max(0.0, 1 - ttft_s / (times.mean_output * step_s))
    num_streams = work.num_streams * left + num_coming + 1
    each_tokens = question.num_tokens + times.mean_output
    kv_tokens = work.kv_tokens * left + (num_coming + 1) * each_tokens
    return times.step_s(num_streams, kv_tokens)


def _bounded(seconds: float) -> float:
    return min(_MAX_RETRY_S, max(1.0, seconds))
