"""The work of engines in tokens, and how long it takes: the values decisions use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

_CAUTION: Final = 0.67
"""Of the mean relative error that prompts are taken to be longer by: three in four are shorter."""
_CHUNK_TOKENS: Final = 2048
_STEP_BEGUN: Final = 0.5


class PromptWork(msgspec.Struct, frozen=True):
    """Prompts, and the part of them still to compute.

    Attributes:
        pairs: Pairs of one of their tokens and one before it.
    """

    num: int = 0
    tokens: int = 0
    pairs: float = 0.0

    def plus(self, more: PromptWork) -> PromptWork:
        """Both together."""
        pairs = self.pairs + more.pairs
        return PromptWork(self.num + more.num, self.tokens + more.tokens, pairs)

    def minus(self, less: PromptWork) -> PromptWork:
        """Return the rest without some of them."""
        pairs = self.pairs - less.pairs
        return PromptWork(self.num - less.num, self.tokens - less.tokens, pairs)


class EngineWork(msgspec.Struct):
    """The work of one engine.

    Attributes:
        num_prompts, prompt_tokens: Prompts not computed yet, and their tokens still to compute.
        prompt_pairs: Pairs of such a token and one before it.
        num_streams, kv_tokens: Requests that give tokens, and their KV.
        num_coming, coming_tokens: Requests whose prompt another engine computes and whose blocks
            are taken here, and their KV.
        since_s: When it began its current prompt, if any, in monotonic seconds: when that arrived
            or the one before it was computed.
        begun_tokens: Tokens of prompts that were there then.
    """

    num_prompts: int = 0
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    num_streams: int = 0
    kv_tokens: int = 0
    num_coming: int = 0
    coming_tokens: int = 0
    since_s: float = 0.0
    begun_tokens: int = 0

    @property
    def num_requests(self) -> int:
        """Number of requests of all kinds."""
        return self.num_prompts + self.num_streams + self.num_coming

    @property
    def prompts(self) -> PromptWork:
        """The prompts not computed yet."""
        return PromptWork(self.num_prompts, self.prompt_tokens, self.prompt_pairs)

    def plus(self, more: EngineWork) -> EngineWork:
        """Return both together, with the start of this one's current prompt."""
        return EngineWork(
            num_prompts=self.num_prompts + more.num_prompts,
            prompt_tokens=self.prompt_tokens + more.prompt_tokens,
            prompt_pairs=self.prompt_pairs + more.prompt_pairs,
            num_streams=self.num_streams + more.num_streams,
            kv_tokens=self.kv_tokens + more.kv_tokens,
            num_coming=self.num_coming + more.num_coming,
            coming_tokens=self.coming_tokens + more.coming_tokens,
            since_s=self.since_s,
            begun_tokens=self.begun_tokens,
        )


def prompt_work(num_tokens: int, num_cached: int) -> PromptWork:
    """Return the work of a prompt whose beginning an engine has."""
    missing = max(0, num_tokens - num_cached)
    return PromptWork(1, missing, pairs_of(missing, num_tokens - missing))


def pairs_of(num_tokens: int, num_before: int) -> float:
    """Return the number of pairs of one of the tokens and one that it attends to."""
    return num_tokens * (num_before + num_tokens / 2)


class ServiceTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of service times, in seconds; see `ServiceModel`.

    Attributes:
        prefill: For a prompt: constant, per token, per pair of a token and one before it.
        step: For a step: constant, per stream, per token of KV.
        wire: For a transfer: constant, per token; zeros until one was measured.
        hop_s: Part of the time to a first token that no engine takes: HTTP, both ways.
        prefill_error, step_error, wire_error: Recent mean relative errors.
        first_factor: What `prefill` was multiplied by, see `FirstTokens`.
        first_band: Relative distance from a predicted first token in which nine in ten come.
        mean_output: Mean output tokens of a request.
        spread: Mean share of a wait after the first token that lengthens the time between a
            request's tokens; short answers are affected most.
    """

    prefill: tuple[float, float, float]
    step: tuple[float, float, float]
    wire: tuple[float, float]
    prefill_error: float
    step_error: float
    wire_error: float
    first_factor: float
    first_band: float
    mean_output: float
    spread: float
    hop_s: float

    @property
    def caution(self) -> float:
        """Factor of the time of prompts where decisions must not rely on the mean."""
        return 1 + _CAUTION * min(1.0, self.prefill_error)

    def caution_s(self, ttft: Mapping[str, float]) -> float:
        """Return what prompts may add to a predicted time to the first token, see `PairCost`."""
        return (self.caution - 1) * (ttft["queue"] + ttft["prefill"])

    def prompt_s(self, num_tokens: int, num_cached: int) -> float:
        """Return seconds for a prompt with nothing before it."""
        return self.computing_s(prompt_work(num_tokens, num_cached))

    def backlog_s(self, work: EngineWork, begun_s: float) -> float:
        """Return seconds until an engine has computed its present prompts.

        Args:
            begun_s: Time spent so far on the first of them.
        """
        if not work.num_prompts:
            return 0.0
        all_s = self.computing_s(work.prompts)
        in_step = min(work.begun_tokens, _CHUNK_TOKENS) / max(1, work.prompt_tokens)
        return all_s - min(begun_s, all_s * max(in_step, 1 / work.num_prompts))

    def computing_s(self, prompts: PromptWork) -> float:
        """Return the mean seconds for some prompts."""
        constant, each_token, each_pair = self.prefill
        return constant * prompts.num + each_token * prompts.tokens + each_pair * prompts.pairs

    def step_s(self, num_streams: float, kv_tokens: float) -> float:
        """Return seconds between two tokens of each of these streams."""
        constant, each_stream, each_token = self.step
        return constant + each_stream * num_streams + each_token * kv_tokens

    def wire_s(self, num_tokens: int) -> float:
        """Return the seconds of a KV transfer; 0 until one was measured."""
        return self.wire[0] + self.wire[1] * num_tokens

    def beside_s(self, prompts: PromptWork, num_streams: int, kv_tokens: int) -> float:
        """Return the seconds that streams take of the steps in which some prompts are computed.

        A prompt alone waits for the end of a step that has begun, which is half of one on average.
        """
        if not num_streams:
            return 0.0
        num_steps = -(-prompts.tokens // _CHUNK_TOKENS) + (_STEP_BEGUN if prompts.num == 1 else 0.0)
        return num_steps * self.step_s(num_streams, kv_tokens)

    def off(self) -> tuple[ServiceTimes, ServiceTimes, ServiceTimes]:
        """Return the times with each part in turn lengthened by its error, to test a decision."""
        replace = msgspec.structs.replace
        factors = 1 + self.prefill_error, 1 + self.step_error, 1 + self.wire_error
        a, b, c = self.prefill
        d, e, f = self.step
        return (
            replace(self, prefill=(a * factors[0], b * factors[0], c * factors[0])),
            replace(self, step=(d * factors[1], e * factors[1], f * factors[1])),
            replace(self, wire=(self.wire[0] * factors[2], self.wire[1] * factors[2])),
        )
