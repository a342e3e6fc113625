"""Learns how long engines take from measured requests. Pure.

    a prompt of n tokens behind c cached ones    a0 + a1 n + a2 n (c + n/2)
    a step of b streams with k tokens of KV      d0 + d1 b + d2 k
    KV of n tokens on the wire                   r0 + r1 n
    the way to an engine and back                h0

Each is a `LinearFit`. The first two start from the engines' reports of their own steps, which cover
all proxies' requests: they are known before this proxy has sent any, and count as a few of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from pdserve.observe.linear_fit import LinearFit
from pdserve.proxy.brain.work import ServiceTimes
from pdserve.wire.ids import GRAIN_TOKENS
from pdserve.wire.learned import learned_by_all, learned_by_cores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.proxy.brain.work import PromptWork
    from pdserve.wire.learned import LearnedTimes

_SPREAD_DECAY: Final = 0.02
_HIT_DECAY: Final = 0.05
_FIRST_OUTPUTS: Final = (150.0 * 20, 20.0)
"""Output tokens of requests before any was seen, and how many such requests."""
_FIRST_HOP_S: Final = 0.002
_CENTRE_STEP: Final = 0.004
_BAND_STEP: Final = 0.2
_IN_BAND: Final = 0.9
_FIRST_BAND: Final = 0.5
_MAX_FACTOR: Final = 4.0
_POOLED: Final = 4
"""What engines say is put together anew once one in so many has said something else."""


class FirstTokens:
    """How predicted times to first tokens compare with what they became.

    The fits know what engines take for prompts; what a first token waits for besides is known less
    well. Each step is by a small factor, whatever the distance, so that a stall counts as one.

    Attributes:
        factor: What prompts take longer than the fits say, so that half of the first tokens come
            later than predicted.
        band: Relative distance from the prediction in which nine in ten came of late.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self.band = _FIRST_BAND

    def learn(self, predicted_s: float, seconds: float, times: ServiceTimes) -> None:
        """Take one, and the times that it was predicted by."""
        is_late = seconds > predicted_s / times.first_factor * self.factor
        factor = self.factor * math.exp(_CENTRE_STEP if is_late else -_CENTRE_STEP)
        self.factor = min(_MAX_FACTOR, max(1 / _MAX_FACTOR, factor))
        is_within = abs(seconds - predicted_s) <= times.first_band * predicted_s
        self.band *= math.exp(_BAND_STEP * (_IN_BAND - 1 if is_within else _IN_BAND))


class ServiceModel:
    """The time that engines of one deployment take for a prompt, a step and a transfer.

    Attributes:
        prefill, step, wire: The fits.
    """

    def __init__(self) -> None:
        self.prefill = LinearFit(3)
        self.step = LinearFit(3)
        self.wire = LinearFit(2)
        self.first = FirstTokens()
        self._hop = LinearFit(1)
        self._behind_grains = 0.0
        self._num_output, self._num_requests = _FIRST_OUTPUTS
        self._spread = _FIRST_OUTPUTS[1] / _FIRST_OUTPUTS[0]
        self._told: dict[str, LearnedTimes] = {}
        self._num_unpooled = 0
        self._times: ServiceTimes | None = None

    @property
    def is_known(self) -> bool:
        """Whether enough is known for a decision."""
        return self.prefill.is_known and self.step.is_known

    @property
    def num_reporting(self) -> int:
        """Number of engines that report what they have learned."""
        return len(self._told)

    @property
    def mean_output(self) -> float:
        """Mean output tokens of a request."""
        return self._num_output / self._num_requests

    def hear(self, url: str, cores: Sequence[LearnedTimes]) -> None:
        """Record all that an engine's cores have learned so far; none: the engine is gone.

        Engines are assumed to be alike, as in everything learned here; the more they differ, the
        larger the error.
        """
        self._told.pop(url, None)
        if cores:
            self._told[url] = learned_by_cores(cores)
        self._num_unpooled += 1
        if self._num_unpooled * _POOLED > len(self._told):
            pool = learned_by_all(self._told.values())
            self.prefill.begin_with(pool.prompts)
            self.step.begin_with(pool.steps)
            self._num_unpooled, self._times = 0, None

    def learn_prompts(self, prompts: PromptWork, seconds: float) -> None:
        """Record an engine's time for some prompts, with nothing beside them."""
        self.prefill.learn((float(prompts.num), float(prompts.tokens), prompts.pairs), seconds)
        self._times = None

    def learn_step(self, num_streams: float, kv_tokens: float, seconds: float) -> None:
        """Record the time between a stream's tokens, with no prompts computed beside them."""
        self.step.learn((1.0, num_streams, kv_tokens), seconds)
        self._times = None

    def learn_wire(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a KV transfer."""
        self.wire.learn((1.0, float(num_tokens)), seconds)
        self._times = None

    def learn_hit(self, num_known: int, num_cached: int) -> None:
        """Record how much of a prompt an engine had, of which whole grains were known."""
        if num_known:
            behind = min(max(0, num_cached - num_known), GRAIN_TOKENS)
            self._behind_grains += _HIT_DECAY * (behind - self._behind_grains)

    def hit(self, num_known: int, num_tokens: int) -> int:
        """Return how much of a prompt an engine probably has, of which whole grains are known."""
        return min(num_tokens, num_known + round(self._behind_grains)) if num_known else 0

    def learn_hop(self, seconds: float) -> None:
        """Record the part of a time to the first token that no engine took."""
        self._hop.learn((1.0,), seconds)
        self._times = None

    def learn_first(self, predicted_s: float, seconds: float, times: ServiceTimes) -> None:
        """Record a time to the first token, and what was predicted; see `FirstTokens`."""
        self.first.learn(predicted_s, seconds, times)
        self._times = None

    def learn_output(self, num_tokens: int) -> None:
        """Record the length of an answer."""
        self._num_output += num_tokens
        self._num_requests += 1
        self._spread += _SPREAD_DECAY * (1 / max(1, num_tokens - 1) - self._spread)
        self._times = None

    def times(self) -> ServiceTimes:
        """Return the current estimates."""
        if self._times is None:
            a, b, c = (self.first.factor * each for each in self.prefill.weights)
            d, e, f = self.step.weights
            r, t = self.wire.weights if self.wire.is_known else (0.0, 0.0)
            self._times = ServiceTimes(
                prefill=(a, b, c),
                step=(d, e, f),
                wire=(r, t),
                prefill_error=self.prefill.error,
                step_error=self.step.error,
                wire_error=self.wire.error if self.wire.is_known else 0.0,
                first_factor=self.first.factor,
                first_band=self.first.band,
                mean_output=self.mean_output,
                spread=self._spread,
                hop_s=self._hop.weights[0] if self._hop.is_known else _FIRST_HOP_S,
            )
        return self._times
