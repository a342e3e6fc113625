"""What an engine has to do for this proxy, in tokens. Values only."""

from __future__ import annotations

import msgspec


class EngineWork(msgspec.Struct):
    """What one engine has to do for this proxy.

    Attributes:
        num_prompts, prompt_tokens: Prompts that are not computed, and what is to be computed of
            them.
        prompt_pairs: Pairs of such a token and one before it.
        num_streams, kv_tokens: Requests that give tokens, and their KV.
    """

    num_prompts: int = 0
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    num_streams: int = 0
    kv_tokens: int = 0


def pairs_of(num_tokens: int, num_before: int) -> float:
    """Pairs of one of the tokens and one that it attends to."""
    return num_tokens * (num_before + num_tokens / 2)
