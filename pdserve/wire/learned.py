"""Step times that engine cores have learned, as sent to proxies with KV events. Values.

They are sent not as times but as the sums of a fit (`observe/linear_fit`), because the sums of
several cores can be added up.
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
    """The sums of a fit of times, in seconds, over three non-negative features.

    Each sample is weighted by the inverse square of its time, and counts less the older it is.

    Attributes:
        num: Total weight of the samples; 0 if there are too few to use.
        typical_s: A typical time.
        times: Sums of the products of each feature and the time.
        products: Sums of the products of two features: 00, 01, 02, 11, 12, 22.
    """

    num: float = 0.0
    typical_s: float = 0.0
    times: tuple[float, ...] = (0.0,) * 3
    products: tuple[float, ...] = (0.0,) * 6

    def plus(self, other: FitSums) -> FitSums:
        """Return the sums over the samples of both."""
        if not self.num or not other.num:
            return self if self.num else other
        num = self.num + other.num
        typical_s = (self.num * self.typical_s + other.num * other.typical_s) / num
        times = tuple(map(add, self.times, other.times))
        return FitSums(num, typical_s, times, tuple(map(add, self.products, other.products)))

    def scaled(self, a: float, b: float, c: float) -> FitSums:
        """Return the sums with the three features multiplied by these factors."""
        times = tuple(map(mul, self.times, (a, b, c)))
        squares = (a * a, a * b, a * c, b * b, b * c, c * c)
        return FitSums(self.num, self.typical_s, times, tuple(map(mul, self.products, squares)))

    @property
    def is_possible(self) -> bool:
        """Whether any samples could have these sums; sums from others may be arbitrary."""
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
        prompts: Times of prompts, without the share of streams in the same steps; features:
            prompts, their tokens, pairs of a token and one before it.
        steps: Times of steps with streams only; features: 1, streams, tokens of their KV.
    """

    prompts: FitSums = FitSums()
    steps: FitSums = FitSums()

    def plus(self, other: LearnedTimes) -> LearnedTimes:
        """Return the step times from the samples of both."""
        return LearnedTimes(self.prompts.plus(other.prompts), self.steps.plus(other.steps))

    def possible(self) -> LearnedTimes:
        """Return the step times without impossible sums."""
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
    """Return the step times of an engine with these cores, without impossible sums.

    Its streams are assumed to be spread evenly over the cores.
    """
    total, num = learned_by_all(each.possible() for each in cores), len(cores)
    return msgspec.structs.replace(total, steps=total.steps.scaled(1, num, num))


def _cosine(product: float, one: float, other: float) -> float:
    """Return a product divided by the roots of two squares; over 1 if it is impossible."""
    if not one or not other:
        return 2.0 if product else 0.0
    return product / (math.sqrt(one) * math.sqrt(other))
