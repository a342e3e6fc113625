"""Settings of speculative decoding (`--speculative-config`)."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.config.checks import POSITIVE, require, require_not_negative, require_positive

DRAFT_MODEL: Final = "draft_model"
MEDUSA: Final = "medusa"
EAGLE: Final = ("eagle", "eagle3")
MTP: Final = ("mtp", "deepseek_mtp", "glm4_moe_mtp")
"""Names of the same."""
METHODS: Final = ("ngram", "suffix", DRAFT_MODEL, MEDUSA, *EAGLE, *MTP)
WITH_MODEL: Final = (DRAFT_MODEL, MEDUSA, *EAGLE)
"""Methods that need a model beside the one that is served."""
MAX_DRAFTED: Final = 64
_SUFFIX: Final = "speculative-config.suffix-decoding-"


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding. Tokens are the same with and without it, and so is what is reported.

    Attributes:
        method: ngram (what followed the last tokens where they stood before: in the prompt, the
            prediction or the answer), suffix (what followed them most often, there and in former
            answers of the same salt), draft_model (what a smaller model puts out; until it has
            computed what there is of a request, what ngram finds), medusa (what heads guess, each
            a place further on, from the state of the last token), eagle and eagle3 (what a head
            guesses that goes on from the model's states), mtp, deepseek_mtp or glm4_moe_mtp (the
            same by a layer that the model's checkpoint has for that); empty drafts nothing.
        model: Of draft_model, medusa, eagle and eagle3: the directory of the model or heads.
        num_speculative_tokens: Tokens of a draft, at most; a request gets fewer where they do not
            pay (`scheduler.drafts`).
        prompt_lookup_max, prompt_lookup_min: Of ngram: how many tokens must be alike before a
            draft; the most alike wins. If only one is given, it is the other as well, as in vLLM;
            see `lookup`.
        suffix_decoding_max_tree_depth: Of suffix: tokens that are compared, at most.
        suffix_decoding_max_cached_requests: Former answers of a salt that are kept, at most.
        suffix_decoding_max_spec_factor: Tokens of a draft for each that is alike, at most.
        suffix_decoding_min_token_prob: How often a draft must have followed, as a share.
    """

    method: str = ""
    model: str = ""
    num_speculative_tokens: int = 7
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    @property
    def max_drafted(self) -> int:
        """Tokens of a draft, at most; 0 if nothing is drafted."""
        return self.num_speculative_tokens if self.method else 0

    @property
    def lookup(self) -> tuple[int, int]:
        """The most and the fewest tokens that ngram compares."""
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        if longest is None:
            return (5, 3) if shortest is None else (shortest, shortest)
        return longest, longest if shortest is None else shortest

    @property
    def is_by_model(self) -> bool:
        """Whether a draft takes a forward pass."""
        return self.method in (DRAFT_MODEL, MEDUSA) or self.is_by_head

    @property
    def is_by_head(self) -> bool:
        """Whether a draft goes on from the model's own states, by a layer with KV of its own."""
        return self.method in (*EAGLE, *MTP)

    def __post_init__(self) -> None:
        require(
            self.method in ("", *METHODS),
            "speculative-config.method",
            self.method,
            f"it is not supported: use {' or '.join(METHODS)}",
        )
        fields = msgspec.structs.fields(self)
        given = [each.name for each in fields if getattr(self, each.name) != each.default]
        require(
            bool(self.method) or not given,
            "speculative-config.method",
            self.method,
            f"nothing is drafted without one, so {', '.join(given)} would have no effect: use "
            f"{' or '.join(METHODS)}",
        )
        require(
            bool(self.model) == (self.method in WITH_MODEL),
            "speculative-config.model",
            self.model,
            f"the methods {', '.join(WITH_MODEL)} need a directory (a smaller model with the same "
            f"tokenizer, or heads) and the others take none; this is {self.method!r}",
        )
        num = self.num_speculative_tokens
        require(
            0 < num <= MAX_DRAFTED,
            "speculative-config.num-speculative-tokens",
            num,
            f"it must be from 1 to {MAX_DRAFTED}",
        )
        longest, shortest = self.lookup
        for name, length in (("max", self.prompt_lookup_max), ("min", self.prompt_lookup_min)):
            require_positive(f"speculative-config.prompt-lookup-{name}", length)
        require(
            longest >= shortest,
            "speculative-config.prompt-lookup-max",
            longest,
            f"it must be at least prompt_lookup_min ({shortest})",
        )
        depth = self.suffix_decoding_max_tree_depth
        require(depth > 1, _SUFFIX + "max-tree-depth", depth, "it must be at least 2")
        cached = self.suffix_decoding_max_cached_requests
        require_not_negative(_SUFFIX + "max-cached-requests", cached)
        factor = self.suffix_decoding_max_spec_factor
        require(0 < factor <= MAX_DRAFTED, _SUFFIX + "max-spec-factor", factor, POSITIVE)
        least = self.suffix_decoding_min_token_prob
        require(0 <= least <= 1, _SUFFIX + "min-token-prob", least, "it must be from 0 to 1")

    def require_stages(self, num_stages: int) -> None:
        """Refuse a method that cannot draft for so many pipeline stages.

        Raises:
            ConfigError: It cannot.
        """
        require(
            not self.is_by_head or num_stages == 1,
            "speculative-config.method",
            self.method,
            "with several pipeline stages the last one would need the embedding of the first: "
            "use another method, or leave --pipeline-parallel-size out",
        )
