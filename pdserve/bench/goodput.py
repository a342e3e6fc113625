"""Service level objectives and the requests that meet them (DistServe, OSDI 2024, section 2).

The same objectives and rules as `vllm bench serve --goodput`: a request is good if each of its
figures is within its limit; TPOT of an answer of one token counts as 0. ITL is ours: 99 % of an
answer's own gaps are within it (all of them, if there are fewer than 100).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import msgspec

from pdserve.bench.records import Outcome
from pdserve.errors import ConfigError


class SloMetric(enum.Enum):
    """Figures of a request that can be limited."""

    TTFT = "ttft"
    TPOT = "tpot"
    E2EL = "e2el"
    ITL = "itl"

    def of(self, outcome: Outcome) -> float:
        """Return the figure of an answered request, in seconds."""
        match self:
            case SloMetric.TTFT:
                return outcome.ttft_s
            case SloMetric.TPOT:
                return outcome.tpot_s or 0.0
            case SloMetric.E2EL:
                return outcome.e2el_s
            case SloMetric.ITL:
                return _p99(outcome.itl_s)


class Slo(msgspec.Struct, frozen=True):
    """One objective.

    Attributes:
        limit_ms: What a request's figure must not exceed, in milliseconds.
    """

    metric: SloMetric
    limit_ms: float

    def __str__(self) -> str:
        return f"{self.metric.value}:{self.limit_ms:g}"


def parse_goodput(words: Sequence[str], *, flag: str = "goodput") -> tuple[Slo, ...]:
    """Read objectives as `ttft:200 tpot:50`, in milliseconds.

    Args:
        words: One objective each.
        flag: Named in errors.

    Raises:
        ConfigError: A word is not an objective, or a figure is limited twice.
    """
    found: dict[SloMetric, Slo] = {}
    for word in words:
        name, _, text = word.partition(":")
        try:
            metric, limit_ms = SloMetric(name), float(text)
        except ValueError:
            limit_ms = 0.0
        if not 0 < limit_ms < float("inf"):
            raise ConfigError(
                f"--{flag} is {word!r}: write objectives in milliseconds, such as ttft:200 "
                "tpot:50 e2el:1000 itl:50",
                param=flag,
            )
        if metric in found:
            raise ConfigError(
                f"--{flag} is {word!r}, but {name} already has the limit "
                f"{found[metric].limit_ms:g}: name it once",
                param=flag,
            )
        found[metric] = Slo(metric, limit_ms)
    return tuple(found.values())


def is_within(outcome: Outcome, slos: Sequence[Slo]) -> bool:
    """Whether an answered request meets all objectives."""
    return all(slo.metric.of(outcome) * 1e3 <= slo.limit_ms for slo in slos)


def _p99(gaps_s: Sequence[float]) -> float:
    """The gap that 99 of 100 do not exceed, by nearest rank; 0 without gaps."""
    return sorted(gaps_s)[math.ceil(0.99 * len(gaps_s)) - 1] if gaps_s else 0.0
