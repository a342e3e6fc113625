"""Which engine computes a prompt and which gives the tokens, in one choice, the same one allowed.

A pair costs what its request will miss of its objectives, and what it makes the requests miss that
are there already; 1 is one objective. An engine away from its role costs a little more. The least
cost wins, and of two that are close the one without a transfer. Pure: the same question has the
same answer, and each answer has its terms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.proxy.brain.ledger import EngineWork
    from pdserve.proxy.brain.model import ServiceModel

BIAS: Final = 0.15
MARGIN: Final = 0.05
_TRIED: Final = 4
"""Of the best for either part, whose pairs are looked at."""
_MIN_TTFT_S: Final = 1.0
_TTFT_RATIO: Final = 3.0
_HOP_S: Final = 0.002
_MOSTLY: Final = 0.3
_SHORT_TOKENS: Final = 512

REASONS: Final = (
    *("shorter_queue", "warm_prefill", "protects_streams"),
    *("mostly_cached", "short_prompt", "prefill_busy", "wire_slow", "decode_room", "home_role"),
)


@dataclass(frozen=True, slots=True)
class PairCandidate:
    """An engine that could take part.

    Attributes:
        is_prefill, is_decode: Its role includes that.
        hit_tokens: What it has of the prompt.
    """

    url: str
    is_prefill: bool
    is_decode: bool
    hit_tokens: int
    work: EngineWork


@dataclass(frozen=True, slots=True)
class PairCost:
    """What one pair costs.

    Attributes:
        ttft_s, itl_s, wire_s: Predicted for the request.
        terms: Of the cost, by name; they add up to it.
    """

    prefill: str
    decode: str
    ttft_s: float
    itl_s: float
    wire_s: float
    terms: dict[str, float] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        """Whether one engine does everything."""
        return self.prefill == self.decode

    @property
    def total(self) -> float:
        """In objectives."""
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class PairDecision:
    """The pair that was chosen, and why.

    Attributes:
        other: The best of the other kind (split or local), if there was one.
        reason: One of `REASONS`.
    """

    chosen: PairCost
    other: PairCost | None
    reason: str
    num_tokens: int

    def told(self, served_s: float | None) -> str:
        """Return it in words, for the request's line.

        Args:
            served_s: What the time to the first token was; None: it was not measured.
        """
        chosen = self.chosen
        told = f"route {_told(chosen)} because {self.reason}"
        if self.other is not None:
            told += f", else {_told(self.other)}"
        if served_s is not None:
            off = served_s / max(1e-6, chosen.ttft_s) - 1
            told += f", was {served_s * 1e3:.1f} ({off:+.0%})"
        return told

    def as_json(self) -> dict[str, object]:
        """Return what `/debug/decisions` shows."""
        return {
            "reason": self.reason,
            "prompt_tokens": self.num_tokens,
            "chosen": _as_json(self.chosen),
            "other": None if self.other is None else _as_json(self.other),
        }


def decide(
    num_tokens: int,
    candidates: Sequence[PairCandidate],
    model: ServiceModel,
    *,
    itl_slo_s: float,
    may_pair: Callable[[str, str], bool],
) -> PairDecision | None:
    """Return the best pair; None if there is no engine.

    Args:
        num_tokens: Of the prompt.
        itl_slo_s: Between tokens; the first token's objective is a second, or three times what
            the prompt takes alone.
        may_pair: Whether KV can go from the engine at one URL to that at another.
    """
    costs = _Costs(num_tokens, model, itl_slo_s)
    by_prefill = sorted((each for each in candidates if each.is_prefill), key=costs.of_prefill)[
        :_TRIED
    ]
    by_decode = sorted((each for each in candidates if each.is_decode), key=costs.of_decode)[
        :_TRIED
    ]
    local = [costs.pair(each, each) for each in candidates]
    split = [
        costs.pair(p, d)
        for p in by_prefill
        for d in by_decode
        if p.url != d.url and may_pair(p.url, d.url)
    ]
    best_local = min(local, key=lambda each: each.total, default=None)
    best_split = min(split, key=lambda each: each.total, default=None)
    if best_local is None:
        return None
    if best_split is None or best_split.total >= best_local.total - MARGIN:
        chosen, other = best_local, best_split
    else:
        chosen, other = best_split, best_local
    hits = {each.url: each.hit_tokens for each in candidates}
    return PairDecision(chosen, other, _reason(chosen, other, num_tokens, hits), num_tokens)


class _Costs:
    """The costs of one request at engines."""

    def __init__(self, num_tokens: int, model: ServiceModel, itl_slo_s: float) -> None:
        self._num_tokens = num_tokens
        self._model = model
        self._itl_slo_s = itl_slo_s
        self._ttft_slo_s = max(_MIN_TTFT_S, _TTFT_RATIO * model.prompt_s(num_tokens, 0))
        self._output = max(1.0, model.mean_output)

    def of_prefill(self, engine: PairCandidate) -> float:
        return sum(self._prefill_terms(engine)[0].values())

    def of_decode(self, engine: PairCandidate) -> float:
        return sum(self._decode_terms(engine, 0.0)[0].values())

    def pair(self, prefill: PairCandidate, decode: PairCandidate) -> PairCost:
        is_local = prefill is decode
        wire_s = 0.0
        if not is_local:
            wire_s = self._model.wire_s(max(0, self._num_tokens - decode.hit_tokens)) + _HOP_S
        ours, ttft_s = self._prefill_terms(prefill)
        theirs, itl_s = self._decode_terms(decode, wire_s)
        terms = {name: ours.get(name, 0.0) + theirs.get(name, 0.0) for name in {**ours, **theirs}}
        return PairCost(prefill.url, decode.url, ttft_s, itl_s, wire_s, terms)

    def _prefill_terms(self, engine: PairCandidate) -> tuple[dict[str, float], float]:
        """What computing the prompt there costs; and the time to the first token."""
        model, work = self._model, engine.work
        itl_s = model.step_s(work.num_streams, work.kv_tokens) if work.num_streams else 0.0
        prompt_s = model.prompt_s(self._num_tokens, engine.hit_tokens)
        missing = max(1, self._num_tokens - engine.hit_tokens)
        num_steps = model.steps_of(missing + work.prompt_tokens)
        ttft_s = _HOP_S + model.backlog_s(work) + prompt_s + num_steps * itl_s
        harm = work.num_streams * (
            _missed((itl_s + prompt_s / self._output) / self._itl_slo_s)
            - _missed(itl_s / self._itl_slo_s)
        )
        bias = 0.0 if engine.is_prefill else BIAS
        return {"ttft": _missed(ttft_s / self._ttft_slo_s), "harm": harm, "bias": bias}, ttft_s

    def _decode_terms(self, engine: PairCandidate, wire_s: float) -> tuple[dict[str, float], float]:
        """What giving the tokens there costs; and the time between them."""
        model, work, slo_s = self._model, engine.work, self._itl_slo_s
        backlog_s = model.backlog_s(work) / self._output if work.num_prompts else 0.0
        before_s = model.step_s(work.num_streams, work.kv_tokens) + backlog_s
        after_s = backlog_s + model.step_s(
            work.num_streams + 1, work.kv_tokens + self._num_tokens + self._output
        )
        harm = work.num_streams * (_missed(after_s / slo_s) - _missed(before_s / slo_s))
        itl = _missed(after_s / slo_s)
        wire = _missed((after_s + wire_s / self._output) / slo_s) - itl
        bias = 0.0 if engine.is_decode else BIAS
        return {"itl": itl, "wire": wire, "harm": harm, "bias": bias}, after_s


def _missed(ratio: float) -> float:
    """The cost of taking so many times an objective: a little below it, ever more above."""
    return 0.1 * ratio + 2 * max(0.0, ratio - 0.8) + 6 * max(0.0, ratio - 1.0)


def _reason(chosen: PairCost, other: PairCost | None, num_tokens: int, hits: dict[str, int]) -> str:
    """Name what made the difference."""
    missing = num_tokens - hits[chosen.prefill]
    if chosen.is_local:
        if missing < _MOSTLY * num_tokens:
            return "mostly_cached"
        if missing < _SHORT_TOKENS:
            return "short_prompt"
    if other is None:
        return "home_role"
    gains = {name: other.terms[name] - chosen.terms[name] for name in chosen.terms}
    most = max(gains, key=lambda name: gains[name])
    if chosen.is_local:
        named = {"ttft": "prefill_busy", "wire": "wire_slow", "bias": "home_role"}
        return named.get(most, "decode_room")
    if most == "ttft":
        is_warmer = hits[chosen.prefill] > hits[other.prefill]
        return "warm_prefill" if is_warmer else "shorter_queue"
    return "home_role" if most == "bias" else "protects_streams"


def _told(cost: PairCost) -> str:
    way = cost.decode if cost.is_local else f"{cost.prefill}->{cost.decode}"
    times = f"ttft {cost.ttft_s * 1e3:.1f} itl {cost.itl_s * 1e3:.1f} wire {cost.wire_s * 1e3:.1f}"
    return f"{way} at {cost.total:.2f}: {times}"


def _as_json(cost: PairCost) -> dict[str, object]:
    return {
        "prefill": cost.prefill,
        "decode": cost.decode,
        "cost": cost.total,
        "terms": cost.terms,
        "ttft_ms": round(cost.ttft_s * 1e3, 3),
        "itl_ms": round(cost.itl_s * 1e3, 3),
        "wire_ms": round(cost.wire_s * 1e3, 3),
    }
