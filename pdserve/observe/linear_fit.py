"""An online linear least squares fit of relative errors, for predicting times.

It covers the last few hundred samples, older ones counting less and less. Weights that would be
negative are 0. It may begin with what others have learned. Pure.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Final, TypeAlias

from pdserve.wire.learned import FitSums

if TYPE_CHECKING:
    from collections.abc import Sequence

_DECAY: Final = 0.995
_RIDGE: Final = 1e-6
_MIN_SAMPLES: Final = 20
_MIN_REPORTED: Final = 16.0
"""What so many samples count as by then, at least."""
_ERROR_DECAY: Final = 0.05
_FIRST_ERROR: Final = 0.3
_MIN_S: Final = 1e-5
_SMALL: Final = 0.5
"""Of what is typical: what is smaller counts no more than that."""
_MAX_OFF: Final = 2.0
"""A sample's distance from the prediction is limited to this factor: it may be a stall."""
_REPORTED_SAMPLES: Final = 20.0
"""What others have learned counts as so many samples, however many they were."""
_MEAN_OF_ROOT: Final = 0.8
"""Mean of a normally distributed error's size, divided by its root mean square."""

_Matrix: TypeAlias = list[list[float]]


class LinearFit:
    """Weights of some features, from pairs of them and a positive value.

    Args:
        min_samples: Samples that it needs before its weights are used.

    Attributes:
        num_samples: Its own samples so far.
    """

    def __init__(self, num_features: int, *, min_samples: int = _MIN_SAMPLES) -> None:
        self._size, self._min_samples = num_features, min_samples
        self._products = [[0.0] * num_features for _ in range(num_features)]
        self._values = [0.0] * num_features
        self._scale = [0.0] * num_features
        self._num = 0.0
        self._weights: list[float] | None = None
        self._first: list[tuple[Sequence[float], float]] = []
        self._typical = 0.0
        self._reported: _Reported | None = None
        self._error, self._rest_of_first = 0.0, 1.0
        self.num_samples = 0

    @property
    def is_known(self) -> bool:
        """Whether there were enough samples, here or elsewhere."""
        return self.num_samples >= self._min_samples or self._reported is not None

    @property
    def error(self) -> float:
        """Mean relative error of recent predictions, each made before its value was seen."""
        if not self.is_known:
            return 1.0
        first = _FIRST_ERROR if self._reported is None else self._reported.error
        return self._error + self._rest_of_first * first

    @property
    def reported_share(self) -> float:
        """Share of its data that others have learned, 0 to 1."""
        reported = self._reported_factor * self._reported.num if self._reported is not None else 0.0
        return reported / (reported + self._num) if reported else 0.0

    @property
    def sums(self) -> FitSums:
        """What the weights of three features follow from, for `begin_with`; nothing of too few."""
        if self.num_samples < self._min_samples:
            return FitSums()
        (aa, ab, ac), (_, bb, bc), (_, _, cc) = self._products
        return FitSums(self._num, self._typical, tuple(self._values), (aa, ab, ac, bb, bc, cc))

    def begin_with(self, reported: FitSums) -> None:
        """Take what others have learned of three features; it replaces what was taken before.

        It counts as if it were of some samples before all that are seen here, and so less and less.
        """
        self._weights, self._reported = None, None
        if reported.num >= _MIN_REPORTED:
            self._reported = _Reported(reported)
            self._settle_first()
            self._typical = self._typical or reported.typical_s

    def learn(self, features: Sequence[float], value: float) -> None:
        """Take one sample."""
        value = max(value, _MIN_S)
        if self.is_known:
            predicted = self.predict(features)
            error = min(abs(predicted - value) / value, 4.0)
            self._error += _ERROR_DECAY * (error - self._error)
            self._rest_of_first *= 1 - _ERROR_DECAY
            value = max(predicted / _MAX_OFF, min(value, predicted * _MAX_OFF), _MIN_S)
        self.num_samples += 1
        if not self.is_known:
            self._first.append((features, value))
            return
        self._settle_first()
        self._typical += _ERROR_DECAY * (value - self._typical)
        self._add(features, value)

    def _settle_first(self) -> None:
        """Add the samples that came before the typical value was known."""
        if self._first:
            self._typical = statistics.median(each for _, each in self._first)
            for each in self._first:
                self._add(*each)
            self._first = []

    def _add(self, features: Sequence[float], value: float) -> None:
        """Add a sample, weighed by its size; one far too small counts no more than a small one."""
        weight = max(value, _SMALL * self._typical) ** -2
        self._num = _DECAY * self._num + value * value * weight
        for i, feature in enumerate(features):
            self._scale[i] = max(self._scale[i], abs(feature))
            self._values[i] = _DECAY * self._values[i] + feature * value * weight
            for j in range(self._size):
                product = feature * features[j] * weight
                self._products[i][j] = _DECAY * self._products[i][j] + product
        self._weights = None

    def predict(self, features: Sequence[float]) -> float:
        """Return the predicted value for these features."""
        return sum(w * x for w, x in zip(self.weights, features, strict=True))

    @property
    def weights(self) -> list[float]:
        """One for each feature."""
        if self._weights is None:
            products, values, scale = self._products, self._values, self._scale
            if (reported := self._reported) is not None:
                factor = self._reported_factor
                values = _sum(values, reported.values, factor)
                products = [
                    _sum(*rows, factor) for rows in zip(products, reported.products, strict=True)
                ]
                scale = list(map(max, scale, reported.scale))
            self._weights = _solved(products, values, scale)
        return self._weights

    @property
    def _reported_factor(self) -> float:
        """Return the factor for the sums from others."""
        if self._reported is None:
            return 0.0
        return min(1.0, _REPORTED_SAMPLES / self._reported.num) * _DECAY**self.num_samples


class _Reported:
    """What others have learned, as a fit has it.

    Attributes:
        error: Mean relative error of the weights that follow from it alone, over all their samples:
            of others that are unlike one another it is larger.
    """

    def __init__(self, sums: FitSums) -> None:
        aa, ab, ac, bb, bc, cc = sums.products
        self.num = sums.num
        self.products = [[aa, ab, ac], [ab, bb, bc], [ac, bc, cc]]
        self.values = list(sums.times)
        self.scale = [sums.typical_s * math.sqrt(each / sums.num) for each in (aa, bb, cc)]
        found = _solved(self.products, self.values, self.scale)
        squares = sums.num - sum(
            weight * (2 * value - sum(w * x for w, x in zip(found, row, strict=True)))
            for weight, value, row in zip(found, self.values, self.products, strict=True)
        )
        self.error = _MEAN_OF_ROOT * math.sqrt(max(0.0, squares) / sums.num)


def _sum(own: list[float], reported: list[float], factor: float) -> list[float]:
    return [a + factor * b for a, b in zip(own, reported, strict=True)]


def _solved(products: _Matrix, values: list[float], scale: list[float]) -> list[float]:
    """Return the weights; those that would be negative are left out, and the others found again."""
    used = [i for i, each in enumerate(scale) if each > 0]
    while used:
        found = _solve(used, products, values, scale)
        worst = min(found, key=lambda i: found[i] * scale[i])
        if found[worst] >= 0:
            return [found.get(i, 0.0) for i in range(len(scale))]
        used.remove(worst)
    return [0.0] * len(scale)


def _solve(
    used: list[int], products: _Matrix, values: list[float], scale: list[float]
) -> dict[int, float]:
    """Solve the normal equations of some features, scaled to similar sizes."""
    rows = [
        [products[i][j] / scale[i] / scale[j] for j in used] + [values[i] / scale[i]] for i in used
    ]
    largest = max(rows[i][i] for i in range(len(used)))
    for i in range(len(used)):
        rows[i][i] += _RIDGE * largest
    for i, pivot in enumerate(rows):
        # It can only be smaller if the sums from others are invalid.
        pivot[i] = max(pivot[i], _RIDGE * largest / 2)
        for other in rows[i + 1 :]:
            factor = other[i] / pivot[i]
            for j in range(i, len(pivot)):
                other[j] -= factor * pivot[j]
    found: dict[int, float] = {}
    for i in reversed(range(len(used))):
        rest = sum(rows[i][j] * found[j] for j in range(i + 1, len(used)))
        found[i] = (rows[i][-1] - rest) / rows[i][i]
    return {used[i]: value / scale[used[i]] for i, value in found.items()}
