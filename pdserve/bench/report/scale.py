"""Axes: from values to places on a picture, round ticks, and numbers as people read them.

Pure arithmetic; knows no picture and no unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps `low..high` to `start..end`.

    Attributes:
        low, high: Values at the two ends; `low < high`.
        start, end: Places, in the picture's own units; `start` may be the larger one.
        is_log: By powers of ten; `low` is then above 0. What lies below `low` is put there.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """The place of `value`; values beyond the ends get the ends' places."""
        low, high, value = self._key(self.low), self._key(self.high), self._key(value)
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return self.start + share * (self.end - self.start)

    def _key(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.is_log else value

    @property
    def ticks(self) -> list[float]:
        """Round values within the ends."""
        if self.is_log:
            return _log_ticks(self.low, self.high, abs(self.end - self.start))
        num = max(2, round(abs(self.end - self.start) / 60))
        return linear_ticks(self.low, self.high, num)


def linear_ticks(low: float, high: float, num: int) -> list[float]:
    """About `num` round values from `low` to `high`, at even distances."""
    step = _round_up((high - low) / num)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _log_ticks(low: float, high: float, length: float) -> list[float]:
    decades = math.log10(high / low)
    factors: tuple[int, ...] = (1, 2, 5) if length / decades >= 45 else (1,)
    every = max(1, round(decades / 6))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1, every)
    values = [factor * 10.0**power for power in powers for factor in factors]
    return [v for v in values if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]


def _round_up(step: float) -> float:
    """The next round number from `step` up."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in _STEPS if power * factor >= step * (1 - 1e-9))


def linear(values: Iterable[float], start: float, end: float) -> Scale:
    """A scale from 0 to a round value that holds all `values`, with some air above them."""
    top = max((v for v in values if math.isfinite(v)), default=0.0)
    if top <= 0:
        top = 1.0
    step = _round_up(top / 5)
    return Scale(0.0, math.ceil(top * 1.02 / step) * step, start, end)


def exactly(low: float, high: float, start: float, end: float) -> Scale:
    """A scale whose ends are given; a span of no length gets one."""
    return Scale(low, high if high > low else low + 1.0, start, end)


def logarithmic(values: Iterable[float], start: float, end: float) -> Scale:
    """A scale by powers of ten, whose ends are 1, 2 or 5 times such a power."""
    positive = [v for v in values if v > 0 and math.isfinite(v)] or [1.0]
    low, high = _step_of_125(min(positive), up=False), _step_of_125(max(positive), up=True)
    if high <= low:
        low, high = low / 10, high * 10
    return Scale(low, high, start, end, is_log=True)


def _step_of_125(value: float, *, up: bool) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    steps = [power * factor for factor in (1, 2, 5, 10)]
    if up:
        return next(step for step in steps if step >= value * (1 - 1e-9))
    return next(step for step in reversed(steps) if step <= value * (1 + 1e-9))


def number(value: float | None, digits: int = 3) -> str:
    """A figure with `digits` significant digits, never in powers: 0.123, 1.23, 12.3, 1,230.

    None and what is no number become a dash.
    """
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    rounded = round(value, decimals)
    return f"{rounded:,.{max(0, decimals if abs(value) < 10**digits else 0)}f}"


def tick_label(value: float) -> str:
    """A round value without zeros behind the point: 0.5, 2, 1,000."""
    text = f"{value:,.6f}".rstrip("0").rstrip(".")
    return text or "0"
