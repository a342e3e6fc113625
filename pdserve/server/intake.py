"""From an HTTP request to a job: the steps that completions and chat have in common.

A job gets one engine request, and one text in the making, for each choice. Nothing is submitted
here: the job does that.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import secrets
import uuid
from typing import TYPE_CHECKING

import msgspec

from pdserve.config.checks import is_loopback
from pdserve.config.schema import SchedulingPolicy
from pdserve.errors import BadRequestError, HandoffRefusedError
from pdserve.http.ignored import MAX_NAME_CHARS, note_ignored
from pdserve.http.parsing import Body, parse_body, top_level
from pdserve.http.protocol import SamplingFields
from pdserve.observe.log import log_event
from pdserve.server.choice import Choice
from pdserve.server.hop import DecodeHop, PrefillHop, parse_hop
from pdserve.server.prefill_leg import as_ordered
from pdserve.server.sampling import (
    check_token_ids,
    choice_seed,
    output_limit,
    resolve_sampling,
    spellings_of,
)
from pdserve.server.service import REQUEST_ID, SERVICE, START_S, read_body
from pdserve.server.text_request import TextRequest
from pdserve.server.text_work import encode, refuse_long_prompt
from pdserve.text.output import OutputProcessor
from pdserve.wire.hop import PARAMS, TIME_LEFT_HEADER
from pdserve.wire.ids import RequestId, request_id_of
from pdserve.wire.request import GenerateRequest, OnLoadFailure
from pdserve.wire.trace import SliceEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiohttp import web

    from pdserve.server.hop import Hop
    from pdserve.server.sampling import Asked
    from pdserve.server.service import Service
    from pdserve.text.load import Text
    from pdserve.wire.hop import PdserveParams
    from pdserve.wire.sampling import SamplingParams

_log = logging.getLogger(__name__)

_SEED_BITS = 63
_MAX_IGNORED = 64


def say_unknown_fields(
    request: web.Request, data: bytes, kind: type[msgspec.Struct], *, also: Sequence[str] = ()
) -> None:
    """Name fields that no request here has in the answer, and log each of them once.

    Args:
        also: See `note_ignored`.
    """
    told = request.app[SERVICE].ignored_fields
    for name in note_ignored(request, top_level(data), kind, also=also):
        if name not in told and len(told) < _MAX_IGNORED:
            told.add(name)
            shown = ascii(name[:MAX_NAME_CHARS])
            log_event(_log, "request field ignored", field=shown)


async def read_request(request: web.Request, kind: type[Body]) -> tuple[Body, int]:
    """Return a request's body, and its size in bytes; name what of it nobody reads.

    One for tokens is returned when another engine has done its part, if one is to.

    Raises:
        PdserveError: It is not to be had: see `Bodies.read`; or cannot be read: see `parse_body`;
            or asks for what may not be asked: see `as_ordered`.
    """
    data = await read_body(request)
    body = parse_body(data, kind)
    say_unknown_fields(request, data, kind)
    if isinstance(body, SamplingFields):
        body = await as_ordered(request, body, data, request.path)
    return body, len(data)


async def encode_prompts(
    request: web.Request,
    fields: SamplingFields,
    texts: Sequence[str],
    *,
    add_special_tokens: bool,
    field: str,
) -> list[list[int]]:
    """Tokenize a request's prompts; how long that took is in the trace.

    Args:
        fields: Say whether prompts without room are cut down, and not refused.
        field: Where they stand in the body.

    Raises:
        ContextLengthError: One of them is longer than any that has room.
        OverloadedError: Too many long ones wait already.
    """
    service = request.app[SERVICE]
    text, info = service.require_ready()
    widest = None
    if fields.truncate_prompt_tokens is None:
        widest = text.tokenizer.max_chars_per_token
    for prompt in texts:
        refuse_long_prompt(prompt, widest, info.max_model_len, field=field)
    start_s = service.clock.monotonic_s()
    prompts = await encode(
        service.prompt_work, text.tokenizer, texts, add_special_tokens=add_special_tokens
    )
    facts: dict[str, int | float | str] = {
        "request": request[REQUEST_ID],
        "tokens": sum(map(len, prompts)),
    }
    now_s = service.clock.monotonic_s()
    service.recorder.add(SliceEvent(now_s, start_s, "tokenizer", "tokenize", facts))
    return prompts


def cut_prompts(
    prompts: list[list[int]],
    fields: SamplingFields,
    *,
    max_tokens: int | None,
    max_model_len: int,
) -> list[list[int]]:
    """Return prompts as a request wants them cut; the same on every engine that gets it.

    Args:
        prompts: Token ids.
        max_tokens: Of output, for which a cut to what has room leaves room.
    """
    limit = fields.truncate_prompt_tokens
    if limit is None:
        return prompts
    if limit == -1:
        limit = max(1, max_model_len - (max_tokens or 1))
    if fields.truncation_side == "right":
        return [prompt[:limit] for prompt in prompts]
    return [prompt[-limit:] for prompt in prompts]


def created_s(request: web.Request, fields: SamplingFields) -> int:
    """Return the answer's timestamp: the other leg's if there is one, else now's."""
    params = fields.kv_transfer_params
    if params is not None and params.pdserve is not None and params.pdserve.created is not None:
        return params.pdserve.created
    return int(request.app[SERVICE].clock.wall_s())


async def make_job(
    request: web.Request, fields: SamplingFields, prompts: list[list[int]], asked: Asked
) -> TextRequest:
    """Check a request against the model and the engine, and plan it.

    Args:
        prompts: Token ids.

    Raises:
        PdserveError: The request cannot be served as it is, or not now.
    """
    service = request.app[SERVICE]
    text, info = service.require_ready()
    params = fields.kv_transfer_params
    ours = params.pdserve if params is not None else None
    hop = _hop_of(request, fields, num_choices=fields.num_choices * len(prompts))
    if isinstance(hop, PrefillHop) and not hop.final_length:
        # A proxy written for vLLM asks for one token and keeps the user's limit for D. With
        # room for a second one, the first does not end the request here.
        asked = dataclasses.replace(asked, max_tokens=max(2, asked.max_tokens or 2))
        fields = msgspec.structs.replace(fields, min_tokens=min(fields.min_tokens or 0, 2))
    drawn = ours.seed if ours is not None and ours.seed is not None else None
    if drawn is None:
        drawn = secrets.randbits(_SEED_BITS)
    seed = fields.seed if fields.seed is not None else drawn
    is_fallback = ours is not None and ours.is_fallback
    if not (isinstance(hop, DecodeHop) or is_fallback):  # what goes on here began elsewhere
        _check_priority(fields.priority, service.engine_config.scheduler.policy)
    limits = []
    for prompt in prompts:
        _check_prompt(prompt, text.vocab_size, asked.prompt_field)
        for_prompt = asked
        if isinstance(hop, PrefillHop) and not hop.final_length:
            room = max(1, info.max_model_len - len(prompt))
            for_prompt = dataclasses.replace(asked, max_tokens=min(asked.max_tokens or 0, room))
        limit = output_limit(
            fields,
            for_prompt,
            num_prompt_tokens=len(prompt),
            max_model_len=info.max_model_len,
            model_limit=text.defaults.max_new_tokens,
        )
        limits.append(max(1, limit))
    if not isinstance(hop, DecodeHop):  # what was taken elsewhere is not refused here
        scheduler = service.engine_config.scheduler
        _check_size(
            fields.num_choices,
            [len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)],
            max(scheduler.max_request_tokens, info.max_num_seqs * info.max_model_len),
            field="n" if fields.num_choices > 1 else asked.prompt_field,
        )
    bad_words = await encode(
        service.prompt_work,
        text.tokenizer,
        spellings_of(fields.bad_words or ()),
        add_special_tokens=False,
    )
    checks = service.grammars(text)
    grammar = await checks.grammar_of(fields, asked.reading, is_checked=isinstance(hop, DecodeHop))
    resolved = resolve_sampling(
        fields,
        asked,
        text,
        max_tokens=max(limits),
        seed=seed,
        bad_words=bad_words,
        grammar=grammar,
    )
    prediction: list[int] = []
    if asked.prediction and not isinstance(hop, PrefillHop):
        prediction = await _prediction_of(service, asked.prediction)
    sampling = [
        msgspec.structs.replace(
            resolved, max_tokens=limit, min_tokens=min(resolved.min_tokens, limit)
        )
        for limit in limits
    ]
    common = GenerateRequest(
        request_id=RequestId(request[REQUEST_ID]),
        prompt_token_ids=[],
        sampling=resolved,
        arrival_s=request[START_S],
        deadline_s=_deadline_s(request),
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
        remote_decode=isinstance(hop, PrefillHop),
        ticket=hop.ticket if hop is not None else None,
        on_load_failure=ours.on_load_failure if ours is not None else OnLoadFailure.RECOMPUTE,
        is_fallback=is_fallback,
        prediction_token_ids=prediction,
    )
    choices = choices_of(
        _processors(text, fields, asked),
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
    )


async def _prediction_of(service: Service, prediction: str) -> list[int]:
    """Return the tokens that drafts may be made of; none where nothing is drafted.

    Raises:
        ContextLengthError: It is longer than any answer can be.
    """
    if not service.engine_config.speculative.method:
        return []
    text, info = service.require_ready()
    widest = text.tokenizer.max_chars_per_token
    refuse_long_prompt(prediction, widest, info.max_model_len, field="prediction")
    (token_ids,) = await encode(
        service.prompt_work, text.tokenizer, [prediction], add_special_tokens=False
    )
    return token_ids[: info.max_model_len]


def _hop_of(request: web.Request, fields: SamplingFields, *, num_choices: int) -> Hop | None:
    """Return this engine's part in a disaggregated request; None if there is none.

    Raises:
        BadRequestError, HandoffRefusedError: See `parse_hop`; or who asks may not.
    """
    secret = request.app[SERVICE].engine_config.transfer.secret
    hop = parse_hop(fields.kv_transfer_params, num_choices=num_choices, secret=secret)
    if hop is not None and not (secret or is_loopback(request.remote or "")):
        raise HandoffRefusedError(
            f"{PARAMS} came from {request.remote}: without a secret only this host may "
            "send them; give every engine and proxy the same one as PDSERVE_SECRET"
        )
    return hop


def _processors(
    text: Text, fields: SamplingFields, asked: Asked
) -> Callable[[SamplingParams], OutputProcessor]:
    """Return what makes a choice's text of its tokens."""

    def make(params: SamplingParams) -> OutputProcessor:
        return OutputProcessor(
            text.tokenizer,
            stop=fields.stops,
            include_stop_str_in_output=bool(fields.include_stop_str_in_output),
            skip_special_tokens=fields.skip_special_tokens is not False,
            min_tokens=params.min_tokens,
            machine=asked.reading.new_machine() if asked.reading is not None else None,
        )

    return make


def choices_of(
    new_processor: Callable[[SamplingParams], OutputProcessor],
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
        common: What the engine requests of all choices share; its id is the client's.
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
                processor=new_processor(params),
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
            # With a seed of his own a user gets the same choices for a prompt, whatever
            # else is in the request; without one, equal prompts differ.
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


def _check_prompt(prompt: list[int], vocab_size: int, field: str) -> None:
    if not prompt:
        raise BadRequestError(f"{field}: the prompt is empty", param=field)
    check_token_ids(field, prompt, vocab_size)


def _check_size(
    num_choices: int, num_tokens: Sequence[int], max_tokens: int, *, field: str
) -> None:
    """Refuse a request that asks for more than one request may.

    Args:
        num_choices: For each prompt.
        num_tokens: Per prompt, those of it and of one output at most.
        max_tokens: Over all choices of all prompts.
    """
    asked = num_choices * sum(num_tokens)
    if asked > max_tokens:
        raise BadRequestError(
            f"n is {num_choices}, for {len(num_tokens)} prompts: the request may take {asked} "
            f"tokens (each choice counts its prompt and its max_tokens), at most {max_tokens} "
            "are served at once; ask for fewer choices, or for fewer tokens each",
            param=field,
        )


def _check_priority(priority: int | None, policy: SchedulingPolicy) -> None:
    if priority and policy is not SchedulingPolicy.PRIORITY:
        raise BadRequestError(
            f"priority is {priority}: this engine takes requests in the order of their arrival; "
            "leave it out, or start the engine with --scheduling-policy priority",
            param="priority",
        )


def _deadline_s(request: web.Request) -> float | None:
    """A proxy passes on how long its client will wait; two hosts' clocks are never compared."""
    given = request.headers.get(TIME_LEFT_HEADER)
    if given is None:
        return None
    try:
        left_s = float(given)
    except ValueError:
        left_s = math.nan
    if math.isnan(left_s):  # which has no place in the order of deadlines
        raise BadRequestError(f"{TIME_LEFT_HEADER} is {given!r}: it must be a number of seconds")
    return request[START_S] + left_s
