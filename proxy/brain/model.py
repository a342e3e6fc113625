"""How long engines take, learned from what was measured of requests. Pure.

    a prompt of n tokens behind c cached ones    a0 + a1 n + a2 n (c + n/2)
    a step of b streams with k tokens of KV      d0 + d1 b + d2 k
    KV of n tokens on the wire                   r0 + r1 n

Each is a linear least squares fit of relative errors over the last few hundred samples, older ones
counting less and less; what would come out negative is 0.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from pdserve.proxy.brain.times import ServiceTimes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.proxy.brain.work import PromptWork

_DECAY: Final = 0.995
_RIDGE: Final = 1e-6
_MIN_SAMPLES: Final = 20
_ERROR_DECAY: Final = 0.05
_MIN_S: Final = 1e-5
_SMALL: Final = 0.5
"""Of what is typical: what is smaller counts no more than that."""
_MAX_OFF: Final = 2.0
"""A sample is taken for no further off the prediction than this factor: it may be a stall."""
_SPREAD_DECAY: Final = 0.02
_FIRST_OUTPUTS: Final = (150.0 * 20, 20.0)
"""Output tokens of requests before any was seen, and how many such requests."""


class LinearFit:
    """Weights of some features, from pairs of them and a positive value.

    Attributes:
        num_samples: Seen so far.
        error: Mean relative error of the predictions of late, each made before its value was seen.
    """

    def __init__(self, num_features: int) -> None:
        self._size = num_features
        self._products = [[0.0] * num_features for _ in range(num_features)]
        self._values = [0.0] * num_features
        self._scale = [0.0] * num_features
        self._weights: list[float] | None = None
        self._first: list[tuple[Sequence[float], float]] = []
        self._typical = 0.0
        self.num_samples = 0
        self.error = 1.0

    @property
    def is_known(self) -> bool:
        """Whether there were enough samples to go by."""
        return self.num_samples >= _MIN_SAMPLES

    def learn(self, features: Sequence[float], value: float) -> None:
        """Take one sample."""
        value = max(value, _MIN_S)
        if self.is_known:
            error = abs(self.predict(features) - value) / value
            self.error += _ERROR_DECAY * (min(error, 4.0) - self.error)
            predicted = self.predict(features)
            value = max(predicted / _MAX_OFF, min(value, predicted * _MAX_OFF), _MIN_S)
        self.num_samples += 1
        if self.num_samples < _MIN_SAMPLES:
            self._first.append((features, value))
            return
        if self._first:
            self._typical = statistics.median(each for _, each in self._first)
            for each in self._first:
                self._add(*each)
            self._first, self.error = [], 0.3
        self._typical += _ERROR_DECAY * (value - self._typical)
        self._add(features, value)

    def _add(self, features: Sequence[float], value: float) -> None:
        """Add a sample, weighed by its size; one far too small counts no more than a small one."""
        weight = max(value, _SMALL * self._typical) ** -2
        for i, feature in enumerate(features):
            self._scale[i] = max(self._scale[i], abs(feature))
            self._values[i] = _DECAY * self._values[i] + feature * value * weight
            for j in range(self._size):
                product = feature * features[j] * weight
                self._products[i][j] = _DECAY * self._products[i][j] + product
        self._weights = None

    def predict(self, features: Sequence[float]) -> float:
        """Return the value that features should have."""
        return sum(w * x for w, x in zip(self.weights, features, strict=True))

    @property
    def weights(self) -> list[float]:
        """One for each feature."""
        if self._weights is None:
            self._weights = self._solved()
        return self._weights

    def _solved(self) -> list[float]:
        """The weights; those that would be negative are left out, and the others found again."""
        used = [i for i in range(self._size) if self._scale[i] > 0]
        while used and self.num_samples:
            found = self._solve(used)
            worst = min(found, key=lambda i: found[i] * self._scale[i])
            if found[worst] >= 0:
                return [found.get(i, 0.0) for i in range(self._size)]
            used.remove(worst)
        return [0.0] * self._size

    def _solve(self, used: list[int]) -> dict[int, float]:
        """Solve the normal equations of some features, scaled to alike sizes."""
        scale = self._scale
        rows = [
            [self._products[i][j] / scale[i] / scale[j] for j in used]
            + [self._values[i] / scale[i]]
            for i in used
        ]
        largest = max(rows[i][i] for i in range(len(used)))
        for i in range(len(used)):
            rows[i][i] += _RIDGE * largest
        for i, pivot in enumerate(rows):
            for other in rows[i + 1 :]:
                factor = other[i] / pivot[i]
                for j in range(i, len(pivot)):
                    other[j] -= factor * pivot[j]
        found: dict[int, float] = {}
        for i in reversed(range(len(used))):
            rest = sum(rows[i][j] * found[j] for j in range(i + 1, len(used)))
            found[i] = (rows[i][-1] - rest) / rows[i][i]
        return {used[i]: value / scale[used[i]] for i, value in found.items()}


class ServiceModel:
    """What engines of one deployment take for a prompt, a step and a transfer.

    Attributes:
        prefill, step, wire: The fits.
    """

    def __init__(self) -> None:
        self.prefill = LinearFit(3)
        self.step = LinearFit(3)
        self.wire = LinearFit(2)
        self._num_output, self._num_requests = _FIRST_OUTPUTS
        self._spread = _FIRST_OUTPUTS[1] / _FIRST_OUTPUTS[0]
        self._times: ServiceTimes | None = None

    @property
    def is_known(self) -> bool:
        """Whether there is enough to decide by."""
        return self.prefill.is_known and self.step.is_known

    @property
    def mean_output(self) -> float:
        """Output tokens of a request, on average."""
        return self._num_output / self._num_requests

    def learn_prompts(self, prompts: PromptWork, seconds: float) -> None:
        """Take what an engine took for some prompts, with nothing beside them."""
        self.prefill.learn((float(prompts.num), float(prompts.tokens), prompts.pairs), seconds)
        self._times = None

    def learn_step(self, num_streams: float, kv_tokens: float, seconds: float) -> None:
        """Take how far apart a stream's tokens were, with no prompts computed beside them."""
        self.step.learn((1.0, num_streams, kv_tokens), seconds)
        self._times = None

    def learn_wire(self, num_tokens: int, seconds: float) -> None:
        """Take how long KV was on its way."""
        self.wire.learn((1.0, float(num_tokens)), seconds)
        self._times = None

    def learn_output(self, num_tokens: int) -> None:
        """Take how long an answer was."""
        self._num_output += num_tokens
        self._num_requests += 1
        self._spread += _SPREAD_DECAY * (1 / max(1, num_tokens - 1) - self._spread)
        self._times = None

    def times(self) -> ServiceTimes:
        """Return what is known now."""
        if self._times is None:
            a, b, c = self.prefill.weights
            d, e, f = self.step.weights
            r, t = self.wire.weights if self.wire.is_known else (0.0, 0.0)
            self._times = ServiceTimes(
                prefill=(a, b, c),
                step=(d, e, f),
                wire=(r, t),
                prefill_error=self.prefill.error,
                step_error=self.step.error,
                wire_error=self.wire.error if self.wire.is_known else 0.0,
                mean_output=self.mean_output,
                spread=self._spread,
            )
        return self._times
