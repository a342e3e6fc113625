"""Whether a token is the last one of its request. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.wire.request import FinishReason

if TYPE_CHECKING:
    from pdserve.scheduler.request import Request


def finish_reason(
    request: Request, token_id: int, *, max_model_len: int
) -> tuple[FinishReason | None, int | None]:
    """Why `request` ends with `token_id`, its newest output, and which stop id of the user's did.

    (None, None) = it goes on. Stop strings are text, and the server's business.
    """
    sampling = request.sampling
    num_output = len(request.output_token_ids)
    if num_output >= sampling.min_tokens:
        if not sampling.ignore_eos and token_id in sampling.eos_token_ids:
            return FinishReason.STOP, None
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP, token_id
    if num_output >= sampling.max_tokens:
        return FinishReason.LENGTH, None
    if len(request.prompt_token_ids) + num_output >= max_model_len:
        return FinishReason.LENGTH, None
    return None, None
