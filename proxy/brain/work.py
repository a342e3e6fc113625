"""What an engine has to do, in tokens. Values only."""

from __future__ import annotations

import msgspec


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
