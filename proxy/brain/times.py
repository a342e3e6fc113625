"""How long engines take, as a decision was told: values that it can be repeated from. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.proxy.brain.work import pairs_of

if TYPE_CHECKING:
    from pdserve.proxy.brain.work import EngineWork

_CAUTION: Final = 0.67
"""Of the mean relative error that prompts are taken to be longer by: three in four are shorter."""
_CHUNK_TOKENS: Final = 2048


class ServiceTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of what takes time, in seconds; see `ServiceModel`.

    Attributes:
        prefill: Of a prompt: constant, each token, each pair of a token and one before it.
        step: Constant, each stream, each token of KV.
        wire: Constant, each token; zeros until some KV was seen on its way.
        prefill_error, step_error, wire_error: Mean relative errors of late.
        mean_output: Output tokens of a request, on average.
    """

    prefill: tuple[float, float, float]
    step: tuple[float, float, float]
    wire: tuple[float, float]
    prefill_error: float
    step_error: float
    wire_error: float
    mean_output: float

    def prompt_s(self, num_tokens: int, num_cached: int) -> float:
        """Seconds for a prompt with nothing before it; a cautious guess."""
        missing = max(0, num_tokens - num_cached)
        return self._computing_s(1.0, missing, pairs_of(missing, num_cached))

    def backlog_s(self, work: EngineWork) -> float:
        """Seconds until an engine has computed the prompts that it has."""
        return self._computing_s(work.num_prompts, work.prompt_tokens, work.prompt_pairs)

    def step_s(self, num_streams: float, kv_tokens: float) -> float:
        """Seconds between two tokens of each of so many streams."""
        constant, each_stream, each_token = self.step
        return constant + each_stream * num_streams + each_token * kv_tokens

    def wire_s(self, num_tokens: int) -> float:
        """Seconds that KV is on its way; 0 until some was seen to be."""
        return self.wire[0] + self.wire[1] * num_tokens

    @staticmethod
    def steps_of(num_tokens: int) -> int:
        """Steps that a prompt is spread over."""
        return -(-num_tokens // _CHUNK_TOKENS)

    def off(self) -> tuple[ServiceTimes, ServiceTimes, ServiceTimes]:
        """Each part in turn by its error longer: what a decision by it may rest on."""
        replace = msgspec.structs.replace
        factors = 1 + self.prefill_error, 1 + self.step_error, 1 + self.wire_error
        a, b, c = self.prefill
        d, e, f = self.step
        return (
            replace(self, prefill=(a * factors[0], b * factors[0], c * factors[0])),
            replace(self, step=(d * factors[1], e * factors[1], f * factors[1])),
            replace(self, wire=(self.wire[0] * factors[2], self.wire[1] * factors[2])),
        )

    def _computing_s(self, num_prompts: float, num_tokens: float, num_pairs: float) -> float:
        each_prompt, each_token, each_pair = self.prefill
        guess_s = each_prompt * num_prompts + each_token * num_tokens + each_pair * num_pairs
        return guess_s * (1 + _CAUTION * min(1.0, self.prefill_error))
