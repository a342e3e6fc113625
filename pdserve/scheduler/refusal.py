"""Why an engine will not take a request. Pure.

The server has checked all of this already, and answers with better words. Here it is
checked once more because a step serves many: one impossible request must not end the
others. Knows limits, not state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.wire.sampling import MAX_LOGPROBS

if TYPE_CHECKING:
    from pdserve.wire.request import GenerateRequest
    from pdserve.wire.sampling import SamplingParams
    from pdserve.wire.transfer import KVHandoff

# Beyond these, fp32 logits overflow and nothing can be drawn from them. NaN is in no range.
_RANGES: Final = (
    ("temperature", 0.0, 1e6),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -1e6, 1e6),
    ("frequency_penalty", -1e6, 1e6),
    ("repetition_penalty", 1e-6, 1e6),
)
_MAX_LOGIT_BIAS: Final = 1e6


def refusal_of(request: GenerateRequest, *, vocab_size: int, max_model_len: int) -> str | None:
    """What is wrong with `request`; None = it can be run. O(prompt tokens)."""
    prompt = request.prompt_token_ids
    if not prompt:
        return "the prompt is empty"
    if len(prompt) >= max_model_len:
        return (
            f"the prompt has {len(prompt)} tokens, the maximum context length is "
            f"{max_model_len} tokens"
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        return f"the prompt has token ids outside of the vocabulary (0 to {vocab_size - 1})"
    if request.handoff is not None:
        refusal = refusal_of_handoff(request.handoff, vocab_size=vocab_size)
        if refusal is not None:
            return refusal
    if request.sampling.prompt_logprobs is not None and not request.is_computed_here:
        return "prompt_logprobs come from the engine that computes the prompt"
    if request.sampling.pooling is not None and (request.remote_decode or request.handoff):
        return "the vector of a prompt comes from an engine that has the request alone"
    return _refusal_of_sampling(request.sampling, vocab_size)


def refusal_of_handoff(handoff: KVHandoff, *, vocab_size: int) -> str | None:
    """What is wrong with what a request is to go on from; None = it can be used."""
    first = handoff.first_token_ids
    if not first or not 0 <= min(first) <= max(first) < vocab_size:
        return f"the handoff has no usable first token: {first}"
    if handoff.first_logprobs is not None and len(handoff.first_logprobs) != len(first):
        return f"the handoff has {len(handoff.first_logprobs)} logprobs of {len(first)} tokens"
    return None


def _refusal_of_sampling(sampling: SamplingParams, vocab_size: int) -> str | None:
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}: it must be positive"
    for name, low, high in _RANGES:
        value = getattr(sampling, name)
        if not low <= value <= high:
            return f"{name} is {value}: it must be from {low} to {high}"
    for name, number in (
        ("logprobs", sampling.logprobs),
        ("prompt_logprobs", sampling.prompt_logprobs),
    ):
        if number is not None and not 0 <= number <= MAX_LOGPROBS:
            return f"{name} is {number}: it must be from 0 to {MAX_LOGPROBS}"
    if not all(abs(bias) <= _MAX_LOGIT_BIAS for bias in sampling.logit_bias.values()):
        return f"logit_bias has a value beyond {_MAX_LOGIT_BIAS}"
    if any(not 0 <= token_id < vocab_size for token_id in sampling.logprob_token_ids):
        return f"logprob_token_ids has ids outside of the vocabulary (0 to {vocab_size - 1})"
    allowed = sampling.allowed_token_ids
    if allowed is not None and not any(0 <= token_id < vocab_size for token_id in allowed):
        return "allowed_token_ids leaves nothing of the vocabulary"
    return None
