"""Plans a client's request: one engine request and one text per choice.

Every objection to a request is found here, in the order of its fields, before the resulting
`TextRequest` submits anything.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import uuid
from typing import TYPE_CHECKING

import msgspec

from pdserve.config.checks import is_loopback
from pdserve.config.schema import SchedulingPolicy
from pdserve.errors import BadRequestError, HandoffRefusedError
from pdserve.server.choice import Choice
from pdserve.server.hop import DecodeHop, PrefillHop, parse_hop
from pdserve.server.intake import created_s, encode, refuse_long_prompt
from pdserve.server.sampling import (
    check_token_ids,
    choice_seed,
    constraint_in,
    output_limit,
    resolve_sampling,
    spellings_of,
)
from pdserve.server.service import REQUEST_ID, SERVICE, START_S
from pdserve.server.text_request import TextRequest
from pdserve.text.output import OutputProcessor
from pdserve.wire.hop import PARAMS, TIME_LEFT_HEADER, YIELDS_HEADER
from pdserve.wire.ids import RequestId, request_id_of
from pdserve.wire.request import GenerateRequest, OnLoadFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiohttp import web

    from pdserve.http.protocol import SamplingFields
    from pdserve.server.hop import Hop
    from pdserve.server.sampling import Asked
    from pdserve.server.service import Service
    from pdserve.wire.hop import PdserveParams
    from pdserve.wire.sampling import SamplingParams

_SEED_BITS = 63


async def make_text_request(
    request: web.Request, fields: SamplingFields, prompts: list[list[int]], asked: Asked
) -> TextRequest:
    """Check a request against the model and the engine, and plan it.

    Args:
        prompts: Token ids.

    Raises:
        PdserveError: The request cannot be served as it is, or not now.
    """
    service = request.app[SERVICE]
    params = fields.kv_transfer_params
    ours = params.pdserve if params is not None else None
    hop = _hop_of(request, fields, num_choices=fields.num_choices * len(prompts))
    if _goes_on_elsewhere(hop):
        # A proxy written for vLLM asks for one token and keeps the user's limit for D. With
        # room for a second token, the first does not end the request here.
        asked = dataclasses.replace(asked, max_tokens=max(2, asked.max_tokens or 2))
        fields = msgspec.structs.replace(fields, min_tokens=min(fields.min_tokens or 0, 2))
    seed = _seed_of(fields, ours)
    _check_priority(service, fields, ours, hop)
    limits = [_output_limit(service, fields, asked, prompt) for prompt in prompts]
    sizes = [len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)]
    _check_size(service, fields, asked, hop, num_tokens=sizes)
    sampling = await _sampling_of(service, fields, asked, hop, limits=limits, seed=seed)
    common = GenerateRequest(
        request_id=RequestId(request[REQUEST_ID]),
        prompt_token_ids=[],
        sampling=sampling[0],
        arrival_s=request[START_S],
        deadline_s=_deadline_s(request),
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
        remote_decode=isinstance(hop, PrefillHop),
        ticket=hop.ticket if hop is not None else None,
        on_load_failure=ours.on_load_failure if ours is not None else OnLoadFailure.RECOMPUTE,
        is_fallback=ours is not None and ours.is_fallback,
        prediction_token_ids=await _prediction_of(service, asked, hop),
        yields_s=_yields_s(request),
    )
    choices = choices_of(
        _processors(service, fields, asked),
        fields,
        common,
        prompts=prompts,
        sampling=sampling,
        seed=seed,
        hop=hop,
    )
    known = _cached_tokens(ours, len(choices))
    for choice, num_cached in zip(choices, known or (), strict=False):
        choice.num_cached_tokens = num_cached
    return TextRequest(
        client=service.client,
        clock=service.clock,
        metrics=service.metrics,
        request_id=request[REQUEST_ID],
        model=service.resolve_model(fields.model),
        created=created_s(request, fields),
        seed=seed,
        prompts=prompts,
        choices=choices,
        start_s=request[START_S],
        path=request.path,
        is_streamed=bool(fields.stream),
        has_prediction=asked.prediction is not None,
        may_move=ours is not None and ours.may_move and bool(fields.stream) and len(choices) == 1,
        tells_reasoning=asked.tells_reasoning,
    )


def _goes_on_elsewhere(hop: Hop | None) -> bool:
    """Whether a decode engine continues after the first token, beyond P's own max_tokens."""
    return isinstance(hop, PrefillHop) and not hop.final_length


def _seed_of(fields: SamplingFields, ours: PdserveParams | None) -> int:
    """Return the client's seed, the proxy's, or one drawn here."""
    if fields.seed is not None:
        return fields.seed
    if ours is not None and ours.seed is not None:
        return ours.seed
    return secrets.randbits(_SEED_BITS)


def _output_limit(service: Service, fields: SamplingFields, asked: Asked, prompt: list[int]) -> int:
    """Return the maximum number of output tokens for a prompt.

    Raises:
        BadRequestError: The prompt is empty, or has an invalid token id.
        ContextLengthError: It leaves no room for an output.
    """
    text, info = service.require_ready()
    if not prompt:
        field = asked.prompt_field
        raise BadRequestError(f"{field}: the prompt is empty: send at least one token", param=field)
    check_token_ids(asked.prompt_field, prompt, text.vocab_size)
    limit = output_limit(
        fields,
        asked,
        num_prompt_tokens=len(prompt),
        max_model_len=info.max_model_len,
        model_default=text.defaults.max_new_tokens,
    )
    return max(1, limit)


async def _sampling_of(
    service: Service,
    fields: SamplingFields,
    asked: Asked,
    hop: Hop | None,
    *,
    limits: Sequence[int],
    seed: int,
) -> list[SamplingParams]:
    """Return the sampling parameters for each prompt.

    Args:
        limits: Maximum output tokens, per prompt.
    """
    text, _ = service.require_ready()
    spellings = spellings_of(fields.bad_words or ())
    bad_words = await encode(service, spellings, add_special_tokens=False)
    reading, grammar = asked.reading, None
    wanted = constraint_in(fields, None if reading is None else reading.tools_grammar)
    if wanted is not None:
        is_checked = isinstance(hop, DecodeHop)
        grammar = await service.grammars(text).grammar_of(wanted, reading, is_checked=is_checked)
    resolved = resolve_sampling(
        fields,
        asked,
        text,
        max_tokens=max(limits),
        seed=seed,
        bad_words=bad_words,
        grammar=grammar,
    )
    return [
        msgspec.structs.replace(
            resolved, max_tokens=limit, min_tokens=min(resolved.min_tokens, limit)
        )
        for limit in limits
    ]


async def _prediction_of(service: Service, asked: Asked, hop: Hop | None) -> list[int]:
    """Return the prediction's tokens for drafts; none where nothing is drafted.

    Raises:
        ContextLengthError: It is longer than any answer can be.
    """
    drafts = bool(service.engine_config.speculative.method) and not isinstance(hop, PrefillHop)
    if not (asked.prediction and drafts):
        return []
    text, info = service.require_ready()
    widest = text.tokenizer.max_chars_per_token
    refuse_long_prompt(asked.prediction, widest, info.max_model_len, field="prediction")
    (token_ids,) = await encode(service, [asked.prediction], add_special_tokens=False)
    return token_ids[: info.max_model_len]


def _hop_of(request: web.Request, fields: SamplingFields, *, num_choices: int) -> Hop | None:
    """Return this engine's part in a disaggregated request; None if there is none.

    Raises:
        BadRequestError, HandoffRefusedError: See `parse_hop`; or the caller is not authorized.
    """
    secret = request.app[SERVICE].engine_config.transfer.secret
    hop = parse_hop(fields.kv_transfer_params, num_choices=num_choices, secret=secret)
    if hop is not None and not (secret or is_loopback(request.remote or "")):
        raise HandoffRefusedError(
            f"{PARAMS} came from {request.remote}, and without a secret only this host may send "
            "them: give every engine and proxy the same one as PDSERVE_SECRET"
        )
    return hop


def _processors(
    service: Service, fields: SamplingFields, asked: Asked
) -> Callable[[SamplingParams, list[int]], OutputProcessor]:
    """Return a factory of the processors that turn the tokens after a prompt into text."""
    text, _ = service.require_ready()

    def make(params: SamplingParams, prompt: list[int]) -> OutputProcessor:
        return OutputProcessor(
            text.tokenizer,
            prompt=prompt,
            stop=fields.stops,
            include_stop_str_in_output=bool(fields.include_stop_str_in_output),
            skip_special_tokens=fields.skip_special_tokens is not False,
            min_tokens=params.min_tokens,
            machine=asked.reading.new_machine() if asked.reading is not None else None,
        )

    return make


def choices_of(
    new_processor: Callable[[SamplingParams, list[int]], OutputProcessor],
    fields: SamplingFields,
    common: GenerateRequest,
    *,
    prompts: list[list[int]],
    sampling: Sequence[SamplingParams],
    seed: int,
    hop: Hop | None,
) -> list[Choice]:
    """Return the choices of a request; prompt p has those from p * n to p * n + n - 1.

    Args:
        new_processor: See `_processors`.
        common: The engine request's fields that all choices share; its id is the client's.
        prompts: Token ids.
        sampling: One per prompt; each choice gets its own seed.
        seed: The user's, or the one drawn for this request.
    """
    choices: list[Choice] = []
    for prompt_index, prompt in enumerate(prompts):
        params = sampling[prompt_index]
        if isinstance(hop, DecodeHop):  # the engine that has prefilled scores the prompt
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        for position in range(fields.num_choices):
            index = len(choices)
            choice = Choice(
                index=index,
                prompt_index=prompt_index,
                request=None,
                processor=new_processor(params, prompt),
            )
            choices.append(choice)
            handoff = hop.handoffs[index] if isinstance(hop, DecodeHop) else None
            if isinstance(hop, DecodeHop):
                if handoff is None and hop.ticket is None:
                    continue  # it ended at P
                # A push brings one first token, with the last byte of its KV.
                choice.num_from_handoff = len(handoff.first_token_ids) if handoff else 1
                choice.num_to_swallow = choice.num_from_handoff if hop.first_delivered else 0
                choice.prompt_logprobs = hop.prompt_logprobs[index]
            # With the user's own seed a prompt gets the same choices, whatever else is in
            # the request; without one, equal prompts differ.
            seeded = choice_seed(seed, position if fields.seed is not None else index)
            choice.request = msgspec.structs.replace(
                common,
                request_id=request_id_of(common.request_id, index, uuid.uuid4().hex[:8]),
                prompt_token_ids=prompt,
                sampling=msgspec.structs.replace(params, seed=seeded),
                handoff=handoff,
            )
    return choices


def _cached_tokens(ours: PdserveParams | None, num_choices: int) -> list[int] | None:
    known = ours.cached_tokens if ours is not None else None
    if known is not None and len(known) != num_choices:
        raise BadRequestError(
            f"{PARAMS}: pdserve.cached_tokens has {len(known)} entries for {num_choices} choices",
            param=PARAMS,
        )
    return known


def _check_size(
    service: Service,
    fields: SamplingFields,
    asked: Asked,
    hop: Hop | None,
    *,
    num_tokens: Sequence[int],
) -> None:
    """Refuse a request above the limits for one request, unless accepted elsewhere.

    Args:
        num_tokens: Per prompt, its tokens plus the maximum of one output.
    """
    _, info = service.require_ready()
    scheduler = service.engine_config.scheduler
    max_tokens = max(scheduler.max_request_tokens, info.max_num_seqs * info.max_model_len)
    wanted = fields.num_choices * sum(num_tokens)
    if wanted > max_tokens and not isinstance(hop, DecodeHop):
        raise BadRequestError(
            f"n is {fields.num_choices} for {len(num_tokens)} prompts, so the request may use "
            f"{wanted} tokens (each choice counts its prompt and its max_tokens), and at most "
            f"{max_tokens} are served at once: ask for fewer choices, or for fewer tokens each",
            param="n" if fields.num_choices > 1 else asked.prompt_field,
        )


def _check_priority(
    service: Service, fields: SamplingFields, ours: PdserveParams | None, hop: Hop | None
) -> None:
    """Refuse a priority that has no effect here, unless the request began elsewhere."""
    began_elsewhere = isinstance(hop, DecodeHop) or (ours is not None and ours.is_fallback)
    policy = service.engine_config.scheduler.policy
    if fields.priority and policy is not SchedulingPolicy.PRIORITY and not began_elsewhere:
        raise BadRequestError(
            f"priority is {fields.priority}, but this engine serves requests in the order of "
            "arrival: leave it out, or start the engine with --scheduling-policy priority",
            param="priority",
        )


def _deadline_s(request: web.Request) -> float | None:
    """Return the deadline; proxies send the time left, so clocks of hosts are not compared."""
    left_s = _seconds_in(request, TIME_LEFT_HEADER)
    return None if left_s is None else request[START_S] + left_s


def _yields_s(request: web.Request) -> float:
    """Return for how long the request lets others pass; never negative, which would be a lead."""
    return max(0.0, _seconds_in(request, YIELDS_HEADER) or 0.0)


def _seconds_in(request: web.Request, header: str) -> float | None:
    given = request.headers.get(header)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):  # NaN cannot be ordered
        raise BadRequestError(f"{header} is {given!r}: it must be a number of seconds")
    return seconds
