"""How long engines take, as a decision was told: values that it can be repeated from. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.proxy.brain.work import prompt_work

if TYPE_CHECKING:
    from pdserve.proxy.brain.work import EngineWork, PromptWork

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
        spread: Of a wait behind the first token, the share by which a request's tokens come further
            apart, on average: short answers feel it most.
    """

    prefill: tuple[float, float, float]
    step: tuple[float, float, float]
    wire: tuple[float, float]
    prefill_error: float
    step_error: float
    wire_error: float
    mean_output: float
    spread: float

    def prompt_s(self, num_tokens: int, num_cached: int) -> float:
        """Seconds for a prompt with nothing before it; a cautious guess."""
        return self._cautious_s(prompt_work(num_tokens, num_cached))

    def backlog_s(self, work: EngineWork, begun_s: float) -> float:
        """Seconds until an engine has computed the prompts that it has.

        Args:
            begun_s: For how long it has computed the first of them.
        """
        if not work.num_prompts:
            return 0.0
        all_s = self._cautious_s(work.prompts)
        return all_s - min(begun_s, all_s / work.num_prompts)

    def computing_s(self, prompts: PromptWork) -> float:
        """Seconds for some prompts, as they take on average."""
        constant, each_token, each_pair = self.prefill
        return constant * prompts.num + each_token * prompts.tokens + each_pair * prompts.pairs

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

    def _cautious_s(self, prompts: PromptWork) -> float:
        return self.computing_s(prompts) * (1 + _CAUTION * min(1.0, self.prefill_error))
