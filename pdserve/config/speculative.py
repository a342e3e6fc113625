"""What is drafted for requests that decode (`--speculative-config`)."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.config.checks import require

METHODS: Final = ("ngram",)
MAX_DRAFTED: Final = 64


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding. Tokens are the same with and without it, and so is what is reported.

    Attributes:
        method: ngram (what followed the last tokens where they stood before: in the prompt, the
            prediction or the answer); empty drafts nothing.
        num_speculative_tokens: Tokens of a draft, at most; a request gets fewer where they do not
            pay (`scheduler.drafts`).
        prompt_lookup_max, prompt_lookup_min: Of ngram: how many tokens must be alike before a
            draft; the most alike wins.
    """

    method: str = ""
    num_speculative_tokens: int = 7
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 3

    @property
    def max_drafted(self) -> int:
        """Tokens of a draft, at most; 0 if nothing is drafted."""
        return self.num_speculative_tokens if self.method else 0

    def __post_init__(self) -> None:
        require(
            self.method in ("", *METHODS),
            "speculative-config.method",
            self.method,
            f"it is not here: use {' or '.join(METHODS)}",
        )
        num = self.num_speculative_tokens
        require(
            0 < num <= MAX_DRAFTED,
            "speculative-config.num-speculative-tokens",
            num,
            f"it must be from 1 to {MAX_DRAFTED}",
        )
        require(
            self.prompt_lookup_min > 0,
            "speculative-config.prompt-lookup-min",
            self.prompt_lookup_min,
            "it must be positive",
        )
        require(
            self.prompt_lookup_max >= self.prompt_lookup_min,
            "speculative-config.prompt-lookup-max",
            self.prompt_lookup_max,
            f"it must be at least prompt_lookup_min ({self.prompt_lookup_min})",
        )
