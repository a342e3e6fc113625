"""What completions and chat say in the same words: finish reasons, the engine hop, JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from pdserve.server.handoff import response_params
from pdserve.server.intake import wants_stages
from pdserve.wire.hop import HANDOFF, PARAMS, STAGES
from pdserve.wire.request import FinishReason

if TYPE_CHECKING:
    from pdserve.server.job import Job
    from pdserve.wire.hop import HandedOver


def finish_name(reason: FinishReason | None) -> str | None:
    """Return OpenAI's word; a handoff is no end for the client."""
    return reason.value if reason in (FinishReason.STOP, FinishReason.LENGTH) else None


def transfer_params(job: Job) -> HandedOver | None:
    """Return what a decode engine needs to go on; None if every choice has ended here."""
    if not any(job.handoffs):
        return None
    return response_params(
        job.handoffs,
        [choice.prompt_logprobs for choice in job.choices],
        [choice.stages for choice in job.choices],
        [choice.num_cached_tokens or 0 for choice in job.choices],
        created=job.created,
        seed=job.seed,
        secret=job.service.engine_config.transfer.secret,
    )


def hop_events(job: Job, *, with_stages: bool) -> list[dict[str, Any]]:
    """Return the events that end an engine hop's stream; a proxy takes them out."""
    events: list[dict[str, Any]] = []
    params = transfer_params(job)
    if params is not None:
        events.append({HANDOFF: params})
    if with_stages:
        events.append({STAGES: job.account()})
    return events


async def send_json(request: web.Request, job: Job, answer: dict[str, Any]) -> web.Response:
    """Send a whole answer, with the hop's parts where there are any.

    Sends at once rather than on return, so that a lease counts as handed over only when
    its answer is on the wire.
    """
    params = transfer_params(job)
    if params is not None:
        answer[PARAMS] = params
    if wants_stages(request):
        answer[STAGES] = job.account()
    response = web.Response(body=msgspec.json.encode(answer), content_type="application/json")
    await response.prepare(request)
    await response.write_eof()
    job.delivered = True
    return response
