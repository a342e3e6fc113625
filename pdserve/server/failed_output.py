"""What engines say of a request that failed, as errors for its client.

An engine reports the failure of a single request as an output; one without a known code is its own
fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    from pdserve.wire.request import EngineOutput, GenerateRequest


def raise_if_failed(output: EngineOutput, request: GenerateRequest | None, now_s: float) -> None:
    """Raise what an output says of its request, if that is a failure.

    Args:
        request: None if it is not known.
        now_s: By the clock of its deadline.

    Raises:
        PdserveError: It failed, or the engine gave it up.
    """
    match output.finish_reason:
        case FinishReason.ERROR:
            raise _failure(output)
        case FinishReason.ABORT if _is_late(request, now_s):
            raise DeadlineError("the request's deadline passed before it was complete")
        case FinishReason.ABORT:
            why = output.error or "the engine gave the request up: it is shutting down"
            raise UnavailableError(why, retry_after_s=1.0, code="shutting_down")


def _is_late(request: GenerateRequest | None, now_s: float) -> bool:
    return request is not None and request.deadline_s is not None and request.deadline_s < now_s


def _failure(output: EngineOutput) -> PdserveError:
    """Return the error for an engine's error code; without one it is the engine's own fault."""
    message = output.error or "the engine failed this request"
    match output.error_code:
        case ErrorCode.KV_TRANSFER_FAILED.value:
            return KvTransferError(message, load_failures=tuple(output.load_failures))
        case ErrorCode.RECOMPUTE_BUDGET_EXHAUSTED.value:
            return RecomputeBudgetError(message, retry_after_s=output.retry_after_s or 1.0)
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
