"""Step times that engine cores have learned, as sent to proxies with KV events. Values.

Not what prompts and steps take, but the sums that this follows from (`observe/linear_fit`): those
of several cores add up to those of all that they have seen.
"""

from __future__ import annotations

import math
from operator import add, mul
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MOST: Final = 1e60
"""Of a sum: the square of a larger one may be none."""
_MIN_TIME_S: Final = 1e-6
_MAX_TIME_S: Final = 600.0
_ROUNDING: Final = 1e-9


class FitSums(msgspec.Struct, frozen=True, array_like=True):
    """The sums of a fit of times, in seconds, over three features that are not negative.

    Each sample is weighed by the inverse square of its time, and counts less the older it is.

    Attributes:
        num: Samples, as they count; 0: too few to go by.
        typical_s: A usual time.
        times: Of each feature and the time.
        products: Of two features: 00, 01, 02, 11, 12, 22.
    """

    num: float = 0.0
    typical_s: float = 0.0
    times: tuple[float, ...] = (0.0,) * 3
    products: tuple[float, ...] = (0.0,) * 6

    def plus(self, other: FitSums) -> FitSums:
        """Return the sums of all their samples."""
        if not self.num or not other.num:
            return self if self.num else other
        num = self.num + other.num
        typical_s = (self.num * self.typical_s + other.num * other.typical_s) / num
        times = tuple(map(add, self.times, other.times))
        return FitSums(num, typical_s, times, tuple(map(add, self.products, other.products)))

    def scaled(self, a: float, b: float, c: float) -> FitSums:
        """Return what they would be, had the features been so many times as large."""
        times = tuple(map(mul, self.times, (a, b, c)))
        squares = (a * a, a * b, a * c, b * b, b * c, c * c)
        return FitSums(self.num, self.typical_s, times, tuple(map(mul, self.products, squares)))

    @property
    def is_possible(self) -> bool:
        """Whether some samples have these sums: what others say may be anything."""
        if (len(self.times), len(self.products)) != (3, 6):
            return False
        sums = (*self.times, *self.products)
        if not all(0 <= each <= _MOST for each in sums):  # nor is NaN
            return False
        if not (1 <= self.num <= _MOST and _MIN_TIME_S <= self.typical_s <= _MAX_TIME_S):
            return False
        aa, ab, ac, bb, bc, cc = self.products
        x, y, z = _cosine(ab, aa, bb), _cosine(ac, aa, cc), _cosine(bc, bb, cc)
        of_times = map(_cosine, self.times, (aa, bb, cc), (self.num,) * 3)
        volume = 1 + 2 * x * y * z - x * x - y * y - z * z
        is_angle = max(x, y, z, *of_times) <= 1 + _ROUNDING and volume >= -_ROUNDING
        return is_angle and any(self.times)


class LearnedTimes(msgspec.Struct, frozen=True, array_like=True):
    """Step times that engine cores have learned.

    Attributes:
        prompts: Features: prompts, their tokens, pairs of a token and one before it. What streams
            take beside them is taken out.
        steps: Of steps of streams alone; features: 1, streams, tokens of their KV.
    """

    prompts: FitSums = FitSums()
    steps: FitSums = FitSums()

    def plus(self, other: LearnedTimes) -> LearnedTimes:
        """Return what follows from all that both have seen."""
        return LearnedTimes(self.prompts.plus(other.prompts), self.steps.plus(other.steps))

    def possible(self) -> LearnedTimes:
        """Return it without impossible sums."""
        prompts = self.prompts if self.prompts.is_possible else FitSums()
        steps = self.steps if self.steps.is_possible else FitSums()
        return LearnedTimes(prompts, steps)


def learned_by_all(all_learned: Iterable[LearnedTimes]) -> LearnedTimes:
    """Return the step times from the samples of all of them."""
    total = LearnedTimes()
    for each in all_learned:
        total = total.plus(each)
    return total


def learned_by_cores(cores: Sequence[LearnedTimes]) -> LearnedTimes:
    """Return what an engine of these cores has learned, without what cannot be.

    Its streams are spread over them alike.
    """
    total, num = learned_by_all(each.possible() for each in cores), len(cores)
    return msgspec.structs.replace(total, steps=total.steps.scaled(1, num, num))


def _cosine(product: float, one: float, other: float) -> float:
    """Return a product over the roots of two squares; more than 1 if it cannot be one of theirs."""
    if not one or not other:
        return 2.0 if product else 0.0
    return product / (math.sqrt(one) * math.sqrt(other))
