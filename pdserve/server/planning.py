"""A checked request as a job: one engine request, and one text in the making, for each choice.

Submits nothing: the job does. Pure, but for the ids that engines know requests by.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import msgspec

from pdserve.server.handoff import DecodeHop, PrefillHop
from pdserve.server.job import Choice, Job
from pdserve.server.sampling import choice_seed
from pdserve.text.output import OutputProcessor
from pdserve.wire.ids import request_id_of
from pdserve.wire.request import GenerateRequest, OnLoadFailure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.http.protocol import SamplingFields
    from pdserve.server.handoff import Hop
    from pdserve.server.service import Service
    from pdserve.text.load import Text
    from pdserve.wire.sampling import SamplingParams
    from pdserve.wire.transfer import KVHandoff


def plan(
    service: Service,
    text: Text,
    fields: SamplingFields,
    *,
    request_id: str,
    model: str,
    prompts: list[list[int]],
    sampling: Sequence[SamplingParams],
    seed: int,
    created: int,
    start_s: float,
    hop: Hop | None,
    deadline_s: float | None,
    on_load_failure: OnLoadFailure = OnLoadFailure.RECOMPUTE,
    is_fallback: bool = False,
    cached_tokens: Sequence[int] | None = None,
    path: str = "",
) -> Job:
    """Return the job for a request; nothing is submitted yet.

    Args:
        prompts: Token ids; prompt p has the choices p * n to p * n + n - 1.
        sampling: One per prompt; each choice gets its own seed.
        seed: The user's, or the one drawn for this request.
        deadline_s: Monotonic seconds from when on the answer is of no use.
        on_load_failure, is_fallback: See `GenerateRequest`.
        cached_tokens: Per choice, what another engine has said of it.
    """
    num_choices = fields.num_choices
    choices: list[Choice] = []
    for prompt_index, prompt in enumerate(prompts):
        for position in range(num_choices):
            index = len(choices)
            params = sampling[prompt_index]
            # With a seed of his own a user gets the same choices for a prompt, whatever
            # else is in the request; without one, equal prompts differ.
            seeded = choice_seed(seed, position if fields.seed is not None else index)
            handoff: KVHandoff | None = None
            choice = Choice(
                index=index,
                prompt_index=prompt_index,
                request=None,
                processor=OutputProcessor(
                    text.tokenizer,
                    stop=fields.stops,
                    include_stop_str_in_output=bool(fields.include_stop_str_in_output),
                    skip_special_tokens=fields.skip_special_tokens is not False,
                    min_tokens=params.min_tokens,
                ),
            )
            choices.append(choice)
            if cached_tokens is not None:
                choice.num_cached_tokens = cached_tokens[index]
            if isinstance(hop, DecodeHop):
                handoff = hop.handoffs[index]
                if handoff is None and hop.ticket is None:
                    continue
                # A push brings one first token, with the last byte of its KV.
                choice.num_from_handoff = len(handoff.first_token_ids) if handoff else 1
                choice.num_to_swallow = choice.num_from_handoff if hop.first_delivered else 0
                choice.prompt_logprobs = hop.prompt_logprobs[index]
            choice.request = GenerateRequest(
                request_id=request_id_of(request_id, index, uuid.uuid4().hex[:8]),
                prompt_token_ids=prompt,
                sampling=_with_seed(params, seeded, handed_over=isinstance(hop, DecodeHop)),
                arrival_s=start_s,
                deadline_s=deadline_s,
                priority=fields.priority or 0,
                cache_salt=fields.cache_salt or "",
                remote_decode=isinstance(hop, PrefillHop),
                handoff=handoff,
                ticket=hop.ticket if hop is not None else None,
                on_load_failure=on_load_failure,
                is_fallback=is_fallback,
            )
    return Job(
        service=service,
        request_id=request_id,
        model=model,
        created=created,
        seed=seed,
        prompts=prompts,
        choices=choices,
        start_s=start_s,
        path=path,
        is_streamed=bool(fields.stream),
    )


def _with_seed(params: SamplingParams, seed: int, *, handed_over: bool) -> SamplingParams:
    """A choice's own parameters; prompt logprobs come from the engine that has prefilled."""
    if handed_over:
        return msgspec.structs.replace(params, seed=seed, prompt_logprobs=None)
    return msgspec.structs.replace(params, seed=seed)
