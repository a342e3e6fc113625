"""The work of engines in tokens, and how long it takes: the values decisions use."""

from __future__ import annotations

from typing import Final

import msgspec

_CAUTION: Final = 0.67
"""Of the mean relative error that prompts are taken to be longer by: three in four are shorter."""
_CHUNK_TOKENS: Final = 2048


class PromptWork(msgspec.Struct, frozen=True):
    """Prompts, and what is to be computed of them.

    Attributes:
        pairs: Of one of their tokens and one before it.
    """

    num: int = 0
    tokens: int = 0
    pairs: float = 0.0

    def plus(self, more: PromptWork) -> PromptWork:
        """Both together."""
        pairs = self.pairs + more.pairs
        return PromptWork(self.num + more.num, self.tokens + more.tokens, pairs)

    def minus(self, less: PromptWork) -> PromptWork:
        """What is left without some of them."""
        pairs = self.pairs - less.pairs
        return PromptWork(self.num - less.num, self.tokens - less.tokens, pairs)


class EngineWork(msgspec.Struct):
    """What one engine has to do.

    Attributes:
        num_prompts, prompt_tokens: Prompts that are not computed, and what is to be computed of
            them.
        prompt_pairs: Pairs of such a token and one before it.
        num_streams, kv_tokens: Requests that give tokens, and their KV.
        since_s: Monotonic; when it began with the prompt that it computes now, if it does: when
            that came, or the one before it was computed.
    """

    num_prompts: int = 0
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    num_streams: int = 0
    kv_tokens: int = 0
    since_s: float = 0.0

    @property
    def num_requests(self) -> int:
        """Of both kinds."""
        return self.num_prompts + self.num_streams

    @property
    def prompts(self) -> PromptWork:
        """Those that are not computed."""
        return PromptWork(self.num_prompts, self.prompt_tokens, self.prompt_pairs)

    def plus(self, more: EngineWork) -> EngineWork:
        """Both together, as of when this one began with the prompt that it computes."""
        return EngineWork(
            num_prompts=self.num_prompts + more.num_prompts,
            prompt_tokens=self.prompt_tokens + more.prompt_tokens,
            prompt_pairs=self.prompt_pairs + more.prompt_pairs,
            num_streams=self.num_streams + more.num_streams,
            kv_tokens=self.kv_tokens + more.kv_tokens,
            since_s=self.since_s,
        )


def prompt_work(num_tokens: int, num_cached: int) -> PromptWork:
    """What a prompt is of which an engine has the beginning."""
    missing = max(0, num_tokens - num_cached)
    return PromptWork(1, missing, pairs_of(missing, num_tokens - missing))


def pairs_of(num_tokens: int, num_before: int) -> float:
    """Pairs of one of the tokens and one that it attends to."""
    return num_tokens * (num_before + num_tokens / 2)


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
