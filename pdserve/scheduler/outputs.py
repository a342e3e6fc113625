"""Outputs for clients, kept until they are fetched. Changes no request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.wire.request import EngineOutput, FinishReason

if TYPE_CHECKING:
    from pdserve.scheduler.request import Request
    from pdserve.wire.ids import RequestId
    from pdserve.wire.outputs import TokenLogprobs
    from pdserve.wire.request import ErrorCode

_NUM_OUTPUTS_WITH_STAGES = 2  # at D, the first token has none of its own


class OutputBuffer:
    """A buffer of outputs; those of one request keep their order."""

    def __init__(self) -> None:
        self._outputs: list[EngineOutput] = []
        self._beginning: set[RequestId] = set()

    def drain(self) -> list[EngineOutput]:
        """Return all outputs since the last call, those of requests that have just begun first.

        Whoever passes outputs on needs a fraction of a millisecond for each: that is nothing
        between two tokens of a stream, and much of what is left to gain for a first one.
        """
        outputs, self._outputs = self._outputs, []
        beginning, self._beginning = self._beginning, set()
        if beginning:
            outputs.sort(key=lambda output: output.request_id not in beginning)
        return outputs

    def tokens(
        self,
        request: Request,
        num_tokens: int,
        logprobs: list[TokenLogprobs] | None,
        *,
        prompt_logprobs: list[TokenLogprobs | None] | None = None,
        pooled: bytes | None = None,
        finish: FinishReason | None,
        stop_reason: int | None,
    ) -> None:
        """Add the newest output tokens of `request`, and its handoff if it ends as HANDOFF.

        Args:
            logprobs: Of as many tokens, at least.
        """
        is_last = finish is not None
        num_before = len(request.output_token_ids) - num_tokens
        is_beginning = num_before < _NUM_OUTPUTS_WITH_STAGES
        has_stages = is_last or is_beginning
        if is_beginning:
            self._beginning.add(request.request_id)
        self._outputs.append(
            EngineOutput(
                request_id=request.request_id,
                new_token_ids=request.output_token_ids[num_before:],
                logprobs=None if logprobs is None else logprobs[:num_tokens],
                prompt_logprobs=prompt_logprobs,
                pooled=pooled,
                finish_reason=finish,
                stop_reason=stop_reason,
                handoff=request.handoff if finish is FinishReason.HANDOFF else None,
                num_cached_tokens=request.num_cached_prompt_tokens,
                stages=request.times.stages() if has_stages else None,
                load_failures=request.load_failures if has_stages else [],
                kv_mode="" if request.kv_mode is None else request.kv_mode.value,
                num_preemptions=request.num_preemptions if is_last else 0,
                num_drafted=request.drafts.num_drafted,
                num_accepted=request.drafts.num_accepted,
            )
        )

    def handed_over(
        self,
        request: Request,
        logprobs: TokenLogprobs | None,
        *,
        finish: FinishReason | None,
        stop_reason: int | None,
    ) -> None:
        """Add the newest output token of `request`, which another engine sampled."""
        self._outputs.append(
            EngineOutput(
                request_id=request.request_id,
                new_token_ids=[request.output_token_ids[-1]],
                logprobs=None if logprobs is None else [logprobs],
                finish_reason=finish,
                stop_reason=stop_reason,
                num_cached_tokens=request.num_cached_prompt_tokens,
                kv_mode="" if request.kv_mode is None else request.kv_mode.value,
            )
        )

    def refusal(
        self,
        request_id: RequestId,
        why: str,
        code: ErrorCode | None = None,
        *,
        retry_after_s: float | None = None,
    ) -> None:
        """Add the error of a request that was not taken."""
        self._outputs.append(
            EngineOutput(
                request_id=request_id,
                finish_reason=FinishReason.ERROR,
                error=why,
                error_code="" if code is None else code.value,
                retry_after_s=retry_after_s,
            )
        )

    def error(
        self, request: Request, why: str, code: ErrorCode, *, retry_after_s: float | None = None
    ) -> None:
        """Add the error that `request` ends with."""
        self._outputs.append(
            EngineOutput(
                request_id=request.request_id,
                finish_reason=FinishReason.ERROR,
                error=why,
                error_code=code.value,
                retry_after_s=retry_after_s,
                load_failures=request.load_failures,
            )
        )

    def abort(self, request: Request, why: str) -> None:
        """Add the end of a `request` that could have been served, had there been time."""
        self._outputs.append(
            EngineOutput(request_id=request.request_id, finish_reason=FinishReason.ABORT, error=why)
        )
