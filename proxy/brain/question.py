"""The input and result of a pair decision: values that can be stored and sent.

Also a request's objectives, which are part of the question.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.config.objectives import ModelObjectives, objectives_by_model
from pdserve.proxy.brain.work import EngineWork, ServiceTimes

if TYPE_CHECKING:
    from pdserve.config.http import ProxyConfig
    from pdserve.proxy.brain.prompt import RoutePrompt

REASONS: Final = (
    *("shorter_queue", "warm_prefill", "protects_streams"),
    *("mostly_cached", "short_prompt", "prefill_busy", "wire_slow", "decode_room", "home_role"),
    *("no_pair", "session", "kv_room"),
)
"""Why a request is split (the first three), why it is not, and why it is either: engines away from
their roles would be needed; no two engines can share it; its session's former requests were; the
engine that tokens would come from soonest has no room for its KV."""


MIN_TTFT_SLO_S: Final = 1.0
_TTFT_RATIO: Final = 3.0
_NONE: Final = ModelObjectives()


class PairCandidate(msgspec.Struct, frozen=True):
    """An engine that could take part.

    Attributes:
        is_prefill, is_decode: Whether its role includes that.
        hit_tokens: Tokens of the prompt that it has.
        work: Its work, for this proxy and for others.
        num_others: Requests in `work` that are not this proxy's.
        room_tokens: Room for KV, in tokens; None: not reported.
        begun_s: Time spent so far on its current prompt, if any.
        busy_s: Recent time spent on prompts; see `WorkLedger.busy_s`.
    """

    url: str
    is_prefill: bool
    is_decode: bool
    hit_tokens: int
    work: EngineWork
    begun_s: float = 0.0
    busy_s: float = 0.0
    num_others: int = 0
    room_tokens: int | None = None


class RouteQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The request to serve, the engines that could, and the facts known of them.

    Attributes:
        num_tokens: Length of the prompt.
        candidates: The engines; of two with equal cost, the first is taken.
        ttft_slo_s, itl_slo_s: Objectives for the first token and between tokens.
        max_output: Limit on its output tokens; None: not given.
        held_s: Seconds until it would be sent to a prompt engine; to others it goes at once.
        coming: Further streams that each decode engine will get, from prompts being computed at
            other engines.
        was_split: Whether the session's last request was split, if that counts.
        apart: Pairs (prefill, decode) that cannot share the request, among those checked.
        is_shadow: Whether the answer is not obeyed: the policies then decide.
    """

    num_tokens: int
    candidates: tuple[PairCandidate, ...]
    times: ServiceTimes
    ttft_slo_s: float
    itl_slo_s: float
    max_output: int | None = None
    held_s: float = 0.0
    coming: float = 0.0
    was_split: bool | None = None
    apart: tuple[tuple[str, str], ...] = ()
    is_shadow: bool = False

    @property
    def num_output(self) -> float:
        """Estimated tokens of its answer."""
        limit = self.times.mean_output if self.max_output is None else self.max_output
        return max(1.0, min(limit, self.times.mean_output))

    @property
    def spread(self) -> float:
        """The share of a wait after the first token that lengthens the time between tokens."""
        if self.max_output is None:
            return self.times.spread
        return max(self.times.spread, 1 / (self.max_output - 1)) if self.max_output > 1 else 0.0


class PairCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one pair.

    Attributes:
        ttft: Predicted seconds to the first token, by cause: held back for others (held),
            others' prompts (queue), its own (prefill), steps of streams beside it (beside), and
            HTTP (hop).
        ttft_s, itl_s, wire_s: Predictions for the request.
        terms: Terms of the cost, by name.
        total: Their sum, in objectives.
    """

    prefill: str
    decode: str
    ttft: dict[str, float]
    ttft_s: float
    itl_s: float
    wire_s: float
    terms: dict[str, float]
    total: float

    @property
    def is_local(self) -> bool:
        """Whether one engine does everything."""
        return self.prefill == self.decode

    @property
    def way(self) -> str:
        """Its engines, for people to read."""
        return self.decode if self.is_local else f"{self.prefill}->{self.decode}"

    def in_words(self, within: float | None = None) -> str:
        """Return it in words, with parts that add up as they are printed.

        Args:
            within: Possible error of the cost.
        """
        tenths = {name: round(seconds * 1e4) for name, seconds in self.ttft.items()}
        total = round(self.ttft_s * 1e4)
        tenths["prefill"] += total - sum(tenths.values())
        parts = " + ".join(
            f"{name} {value / 10:.1f}"
            for name, value in tenths.items()
            if value or name == "prefill"
        )
        times = f"itl {self.itl_s * 1e3:.1f} wire {self.wire_s * 1e3:.1f}"
        if self.terms["bias"]:
            times += ", away from home"
        off = "" if within is None else f"±{within:.2f}"
        return f"{self.way} at {self.total:.2f}{off}: ttft {total / 10:.1f} = {parts}, {times}"


class PairDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The pair that was chosen, and why.

    Attributes:
        other: The best pair of the other kind (split or local), if any.
        reason: One of `REASONS`.
        margin: How much better a split had to be.
        question: The question it answers, with only the engines considered, but all in shadow.
    """

    chosen: PairCost
    other: PairCost | None
    reason: str
    margin: float
    question: RouteQuestion

    def in_words(self, served_s: float | None, taken: PairCost | None = None) -> str:
        """Return it in words, for the request's log line.

        Args:
            served_s: Measured time to the first token; None: not measured.
            taken: The cost of the engines actually used, in shadow.
        """
        kind = "shadow" if self.question.is_shadow else "route"
        words = f"{kind} {self.chosen.in_words(self.margin)} because {self.reason}"
        if self.other is not None:
            words += f", else {self.other.in_words()}"
        if taken is not None:
            words += f", sent {taken.in_words()}"
        judged = taken if self.question.is_shadow else self.chosen
        if served_s is not None and judged is not None:
            off = served_s / max(1e-6, judged.ttft_s) - 1
            words += f", was {served_s * 1e3:.1f} ({off:+.0%})"
        return words


def default_ttft_slo_s(times: ServiceTimes, num_tokens: int) -> float:
    """Return the default objective: a second, or three times the prompt's time alone."""
    return max(MIN_TTFT_SLO_S, _TTFT_RATIO * times.caution * times.prompt_s(num_tokens, 0))


class ServiceObjectives:
    """A request's objectives: its own, else its model's, else those for all requests."""

    def __init__(self, config: ProxyConfig) -> None:
        self._ttft_s, self._itl_s = config.ttft_slo_s, config.itl_slo_s
        self._by_model = objectives_by_model(config.model_slo)

    def ttft_s(self, prompt: RoutePrompt, times: ServiceTimes | None) -> float:
        """Return the limit on seconds to the first token.

        Args:
            times: Service times for the default; None: nothing is known.
        """
        model_s = self._by_model.get(prompt.model, _NONE).ttft_s
        slo_s = prompt.ttft_slo_s or model_s or self._ttft_s
        if not slo_s and times is not None:
            slo_s = default_ttft_slo_s(times, prompt.num_tokens)
        return slo_s or MIN_TTFT_SLO_S

    def itl_s(self, prompt: RoutePrompt) -> float:
        """Return the limit on seconds between two tokens."""
        model_s = self._by_model.get(prompt.model, _NONE).itl_s
        return prompt.itl_slo_s or model_s or self._itl_s
