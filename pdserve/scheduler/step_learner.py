"""What prompts and steps take at one engine core, learned from its own steps, for proxies to hear.

Every step at first, then one now and again. Costs a microsecond or two a step on average. Decides
nothing and has no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.observe.linear_fit import LinearFit
from pdserve.wire.learned import LearnedTimes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.scheduler.request import Request
    from pdserve.scheduler.steps import Step
    from pdserve.wire.ids import RequestId

_MIN_SAMPLES: Final = 5
"""From so many on it says something: those of several engines are enough sooner."""
_NUM_EACH: Final = 64
"""Steps of either kind that are all learned from."""
_EVERY_S: Final = 0.2
"""Between two steps that are learned from, from then on."""
_TOLD_S: Final = 1.0
"""Between two times that it says something else, but for what it knows from twice as much."""


class StepLearner:
    """Fits of prompts and of steps.

    A request that computes one token is a stream, whatever that token is; one that computes more
    is a prompt, or a part of one.
    """

    def __init__(self) -> None:
        self._prompts = LinearFit(3, min_samples=_MIN_SAMPLES)
        self._steps = LinearFit(3, min_samples=_MIN_SAMPLES)
        self._due_s = self._told_s = float("-inf")
        self._next_prompts = self._next_steps = _MIN_SAMPLES
        self._told: LearnedTimes | None = None

    def step(
        self, step: Step, requests: Mapping[RequestId, Request], seconds: float, now_s: float
    ) -> None:
        """Take a step that has come back, perhaps."""
        after = step.num_computed_after
        is_of_streams = step.num_prefill_tokens + step.num_decode_tokens == len(after)
        fit = self._steps if is_of_streams else self._prompts
        if now_s < self._due_s and fit.num_samples >= _NUM_EACH:
            return
        if step.loading:
            return  # it has waited for their KV
        self._due_s = now_s + _EVERY_S
        if is_of_streams:
            fit.learn((1.0, float(len(after)), float(sum(after.values()))), seconds)
            return
        num_streams = kv_tokens = num_prompts = num_tokens = 0
        pairs = 0.0
        for request_id, num in step.num_tokens.items():
            num_after = after[request_id]
            if num == 1:
                num_streams += 1
                kv_tokens += num_after
                continue
            request = requests.get(request_id)
            num_prompts += request is None or num_after >= len(request.prompt_token_ids)
            num_tokens += num
            pairs += num * (num_after - num / 2)
        if num_streams:
            if not self._steps.is_known:
                return
            seconds -= self._steps.predict((1.0, float(num_streams), float(kv_tokens)))
        if seconds > 0:
            fit.learn((float(num_prompts), float(num_tokens), pairs), seconds)

    def told(self, now_s: float) -> LearnedTimes | None:
        """Return what is to be said now; None while nothing is known."""
        num_prompts, num_steps = self._prompts.num_samples, self._steps.num_samples
        knows_more = num_prompts >= self._next_prompts or num_steps >= self._next_steps
        if knows_more or (self._told is not None and now_s - self._told_s >= _TOLD_S):
            self._next_prompts = max(_MIN_SAMPLES, 2 * num_prompts)
            self._next_steps = max(_MIN_SAMPLES, 2 * num_steps)
            self._told_s = now_s
            self._told = LearnedTimes(self._prompts.sums, self._steps.sums)
        return self._told
