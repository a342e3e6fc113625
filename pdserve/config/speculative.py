"""What is drafted for requests that decode (`--speculative-config`)."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.config.checks import POSITIVE, require, require_not_negative

METHODS: Final = ("ngram", "suffix")
MAX_DRAFTED: Final = 64
_SUFFIX: Final = "speculative-config.suffix-decoding-"


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding. Tokens are the same with and without it, and so is what is reported.

    Attributes:
        method: ngram (what followed the last tokens where they stood before: in the prompt, the
            prediction or the answer), suffix (what followed them most often, there and in former
            answers of the same salt); empty drafts nothing.
        num_speculative_tokens: Tokens of a draft, at most; a request gets fewer where they do not
            pay (`scheduler.drafts`).
        prompt_lookup_max, prompt_lookup_min: Of ngram: how many tokens must be alike before a
            draft; the most alike wins.
        suffix_decoding_max_tree_depth: Of suffix: tokens that are compared, at most.
        suffix_decoding_max_cached_requests: Former answers of a salt that are kept, at most.
        suffix_decoding_max_spec_factor: Tokens of a draft for each that is alike, at most.
        suffix_decoding_min_token_prob: How often a draft must have followed, as a share.
    """

    method: str = ""
    num_speculative_tokens: int = 7
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 3
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

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
        depth = self.suffix_decoding_max_tree_depth
        require(depth > 1, _SUFFIX + "max-tree-depth", depth, "it must be at least 2")
        cached = self.suffix_decoding_max_cached_requests
        require_not_negative(_SUFFIX + "max-cached-requests", cached)
        factor = self.suffix_decoding_max_spec_factor
        require(0 < factor <= MAX_DRAFTED, _SUFFIX + "max-spec-factor", factor, POSITIVE)
        least = self.suffix_decoding_min_token_prob
        require(0 <= least <= 1, _SUFFIX + "min-token-prob", least, "it must be from 0 to 1")
