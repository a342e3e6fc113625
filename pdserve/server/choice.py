"""One choice of a text request: its counts, and its error if it fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.errors import (
    BadRequestError,
    DeadlineError,
    GrammarDeadEndError,
    HandoffRefusedError,
    KvTransferError,
    NonFiniteLogitsError,
    PdserveError,
    RecomputeBudgetError,
    UnavailableError,
)
from pdserve.wire.request import ErrorCode, FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.server.hop import PromptLogprobs
    from pdserve.text.output import OutputProcessor
    from pdserve.wire.request import EngineOutput, GenerateRequest, RequestStages
    from pdserve.wire.transfer import KVHandoff


@dataclass(slots=True)
class Choice:
    """One choice and its progress.

    Attributes:
        request: None if the choice ended at the prefill engine, with one token.
        num_from_handoff: Leading tokens that another engine sampled.
        num_to_swallow: Those of them whose text the client already has.
        prompt_logprobs: Prompt log-probabilities that the prefill engine computed.
        kv_mode: How KV came from another engine, if it did: push or pull.
        num_cached_tokens: Prompt tokens found in a prefix cache; None until an engine reports it.
        num_computed_tokens: Prompt tokens whose KV was computed for it here.
        num_drafted, num_accepted: Draft tokens verified here, and accepted ones among them.
        num_events: Outputs of this engine's own tokens.
        pooled: Its prompt's vector, if that was asked for; fp32.
        core: Index of the engine core that serves it.
    """

    index: int
    prompt_index: int
    request: GenerateRequest | None
    processor: OutputProcessor
    num_from_handoff: int = 0
    num_to_swallow: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    handoff: KVHandoff | None = None
    finish_reason: FinishReason | None = None
    stages: RequestStages | None = None
    load_failures: list[str] = field(default_factory=list)
    kv_mode: str = ""
    num_cached_tokens: int | None = None
    num_computed_tokens: int = 0
    pooled: bytes | None = None
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_events: int = 0
    core: int = 0
    first_token_s: float | None = None
    own_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, wherever they were sampled."""
        return 1 if self.request is None else self.processor.num_tokens


def usage_of(
    choices: Sequence[Choice], prompts: Sequence[Sequence[int]], *, has_prediction: bool
) -> dict[str, Any]:
    """Return OpenAI's usage object for some choices.

    A prompt counts once however many choices it has. Its cached tokens are those that a prefix
    cache had before the first of them was prefilled.

    Args:
        prompts: All prompts of the request.
        has_prediction: Whether to report accepted and rejected tokens of a prediction.
    """
    num_cached = cached_by_prompt(choices)
    num_prompt = sum(len(prompts[index]) for index in num_cached)
    num_output = sum(choice.num_tokens for choice in choices)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_output,
        "completion_tokens": num_output,
        "prompt_tokens_details": {"cached_tokens": sum(num_cached.values())},
    }
    details: dict[str, int] = {}
    if choices[0].processor.reads_reasoning:
        reasoning = [choice.processor.num_reasoning_tokens for choice in choices]
        details["reasoning_tokens"] = sum(reasoning)
    if has_prediction:
        num_accepted = sum(choice.num_accepted for choice in choices)
        num_drafted = sum(choice.num_drafted for choice in choices)
        details["accepted_prediction_tokens"] = num_accepted
        details["rejected_prediction_tokens"] = num_drafted - num_accepted
    if details:
        usage["completion_tokens_details"] = details
    return usage


def cached_by_prompt(choices: Sequence[Choice]) -> dict[int, int]:
    """Return the cached tokens of each prompt, by its index, as soon as one choice knows them."""
    found: dict[int, int] = {}
    for choice in choices:
        found.setdefault(choice.prompt_index, 0)
        found[choice.prompt_index] = found[choice.prompt_index] or choice.num_cached_tokens or 0
    return found


def raise_if_failed(output: EngineOutput, request: GenerateRequest | None, now_s: float) -> None:
    """Raise the error for an output that reports a failure.

    Args:
        request: None if it is not known.
        now_s: Current time by the clock of its deadline.

    Raises:
        PdserveError: It failed, or the engine gave it up.
    """
    match output.finish_reason:
        case FinishReason.ERROR:
            raise _failure(output)
        case FinishReason.ABORT if _is_late(request, now_s):
            raise DeadlineError("the request's deadline passed before its output was complete")
        case FinishReason.ABORT:
            why = output.error or "the engine gave the request up: it is shutting down"
            raise UnavailableError(why, code="shutting_down")


def _is_late(request: GenerateRequest | None, now_s: float) -> bool:
    return request is not None and request.deadline_s is not None and request.deadline_s < now_s


def _failure(output: EngineOutput) -> PdserveError:
    """Return the error for an engine's error code; without one it is the engine's own fault."""
    message = output.error or "the engine failed this request"
    match output.error_code:
        case ErrorCode.KV_TRANSFER_FAILED.value:
            return KvTransferError(message, load_failures=tuple(output.load_failures))
        case ErrorCode.RECOMPUTE_BUDGET_EXHAUSTED.value:
            return RecomputeBudgetError(message, retry_after_s=output.retry_after_s)
        case ErrorCode.HANDOFF_REFUSED.value:
            return HandoffRefusedError(message)
        case ErrorCode.BAD_REQUEST.value:
            return BadRequestError(message)
        case ErrorCode.NON_FINITE_LOGITS.value:
            return NonFiniteLogitsError(message)
        case ErrorCode.GRAMMAR_DEAD_END.value:
            return GrammarDeadEndError(message)
        case _:
            return PdserveError(message, retry_after_s=output.retry_after_s)
