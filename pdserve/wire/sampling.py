"""Fully resolved sampling parameters, and what is reported of a token beside its id."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

MAX_LOGPROBS: Final = 20
"""Maximum number of alternatives per token."""


class Pooling(enum.Enum):
    """How the final hidden states of a prompt's tokens become one vector."""

    LAST = "last"
    MEAN = "mean"


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The required form of an output, which every engine of a request compiles itself.

    The tokens that may follow depend only on this and on the output tokens so far, so nothing
    else has to travel with a request.

    Attributes:
        text: Source for llguidance: Lark, or its JSON of grammars. Made once, by the server.
        starts_after: Output is free up to and including these tokens; if None, the grammar
            applies from the first token.
    """

    text: str
    starts_after: tuple[int, ...] | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request's tokens are chosen. No field is left to a server's default.

    The random number for output token `i` is a function of `(seed, i)` alone, so any
    engine that holds the request continues it identically.

    Attributes:
        max_tokens: Maximum number of output tokens, > 0.
        min_tokens: Number of output tokens before which EOS and stop ids are masked.
        temperature: 0 is greedy.
        top_k: 0 keeps all.
        seed: Always set; the server draws one where the user gave none.
        eos_token_ids: The model's own EOS ids; masked or obeyed as `ignore_eos` says.
        stop_token_ids: The user's stop ids; obeyed even with `ignore_eos`.
        logprobs: Number of alternatives to report per output token; None reports none,
            0 only the sampled token's.
        logprob_token_ids: Tokens to report in place of the likeliest ones; empty reports those.
        prompt_logprobs: The same as `logprobs` for prompt tokens.
        allowed_token_ids: If not None, every other token is impossible.
        pooling: If not None, the prompt's vector is reported with the first token.
        bad_words: Token sequences whose last token is impossible after the others.
        grammar: If not None, every token that it does not allow is impossible.
    """

    max_tokens: int
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None
    grammar: Grammar | None = None

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every token of the prompt must be computed, cached or not."""
        return self.prompt_logprobs is not None or self.pooling is Pooling.MEAN


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position.

    Attributes:
        token_id: The token at this position.
        logprob: Its natural-log probability under the unmodified logits.
        rank: Its rank, 1 for the most likely.
        top: The most likely `(token_id, logprob)`, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
