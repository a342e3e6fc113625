"""The engine's side of the P/D hop: `kv_transfer_params` in and out.

Its keys are vLLM's, so that a proxy written for vLLM can drive our engines;
keys that only our own proxy understands are under `pdserve`. Handoffs and tickets are sealed, so
nothing on the way can edit them; unsealed values are trusted. Knows no engine and no HTTP.
"""

from __future__ import annotations

import array
import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from pdserve.errors import BadRequestError
from pdserve.wire.hop import PARAMS, HandedOver, PdserveParams, PromptTokens
from pdserve.wire.sampling import TokenLogprobs
from pdserve.wire.seal import UNREADABLE
from pdserve.wire.transfer import HANDOFFS, TICKETS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.wire.hop import KVTransferParams
    from pdserve.wire.request import RequestStages
    from pdserve.wire.seal import Seal
    from pdserve.wire.transfer import KVHandoff, PushTicket

PromptLogprobs = list[TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class PrefillHop:
    """This engine prefills, another one decodes.

    Attributes:
        final_length: Whether reaching max_tokens here ends the request. A proxy written
            for vLLM asks for max_tokens = 1 and means: hand over after the first token.
        ticket: The push that writes KV into the other engine's blocks as it is computed.
    """

    final_length: bool
    ticket: PushTicket | None = None


@dataclass(frozen=True, slots=True)
class DecodeHop:
    """Another engine prefills; both lists have one entry per choice.

    Attributes:
        handoffs: None for a choice that ended at P, which this engine need not serve.
        first_delivered: Whether the client already has the output of the first tokens, or will
            have it before any from this engine.
        ticket: The push under which the KV of the running prefill arrives, with the first token;
            then there is one choice, and no handoff yet.
    """

    handoffs: list[KVHandoff | None]
    prompt_logprobs: list[PromptLogprobs | None]
    first_delivered: bool
    ticket: PushTicket | None = None


Hop = PrefillHop | DecodeHop


def parse_hop(params: KVTransferParams | None, *, num_choices: int, secret: str) -> Hop | None:
    """Return this engine's part in a disaggregated request; None if there is none.

    Args:
        secret: The deployment's secret, which seals handoffs and tickets.

    Raises:
        BadRequestError: The parameters contradict each other, are malformed, or come from
            an engine that is not ours.
        HandoffRefusedError: A handoff or a ticket is of another protocol or another deployment,
            or was edited.
    """
    if params is None or not (params.do_remote_decode or params.do_remote_prefill):
        return None
    ours = params.pdserve or PdserveParams()
    if params.do_remote_decode and params.do_remote_prefill:
        raise BadRequestError(
            f"{PARAMS}: do_remote_decode and do_remote_prefill cannot be combined", param=PARAMS
        )
    ticket = None if ours.ticket is None else _opened(ours.ticket, TICKETS, secret)
    if ticket is not None and num_choices != 1:
        raise BadRequestError(
            f"{PARAMS}: pdserve.ticket is for one choice, but the request asks for {num_choices}",
            param=PARAMS,
        )
    if params.do_remote_decode:
        return PrefillHop(final_length=ours.final_length, ticket=ticket)
    if ticket is not None:
        if ours.handoffs:
            raise BadRequestError(
                f"{PARAMS}: pdserve.ticket and pdserve.handoffs cannot be combined", param=PARAMS
            )
        return DecodeHop(
            handoffs=[None],
            prompt_logprobs=[None],
            first_delivered=bool(ours.first_delivered),
            ticket=ticket,
        )
    if not ours.handoffs:
        raise BadRequestError(
            f"{PARAMS}: do_remote_prefill needs pdserve.handoffs; without them the prefill ran on "
            "an engine whose KV this engine cannot read",
            param=PARAMS,
        )
    if len(ours.handoffs) != num_choices:
        raise BadRequestError(
            f"{PARAMS}: pdserve.handoffs has {len(ours.handoffs)} entries "
            f"for {num_choices} choices",
            param=PARAMS,
        )
    if all(handoff is None for handoff in ours.handoffs):
        raise BadRequestError(
            f"{PARAMS}: every choice ended at the prefill engine, so there is nothing to decode",
            param=PARAMS,
        )
    known = ours.prompt_logprobs or [None] * num_choices
    if len(known) != num_choices:
        raise BadRequestError(
            f"{PARAMS}: pdserve.prompt_logprobs has {len(known)} entries for {num_choices} choices",
            param=PARAMS,
        )
    return DecodeHop(
        handoffs=[
            None if text is None else _opened(text, HANDOFFS, secret) for text in ours.handoffs
        ],
        prompt_logprobs=[None if text is None else _decoded(text) for text in known],
        first_delivered=bool(ours.first_delivered),
    )


def response_params(
    handoffs: Sequence[KVHandoff | None],
    prompt_logprobs: Sequence[PromptLogprobs | None],
    stages: Sequence[RequestStages | None],
    ours: PdserveParams,
    *,
    secret: str,
) -> HandedOver:
    """Return the `kv_transfer_params` that a decode engine takes; one entry per choice.

    vLLM's keys speak of the first choice that was handed over, and of one address: the
    first rank's.

    Args:
        ours: The request's other facts.
    """
    first = next(handoff for handoff in handoffs if handoff is not None)
    address = first.endpoints[0] if first.endpoints else None
    has_scores = any(entry is not None for entry in prompt_logprobs)
    return HandedOver(
        remote_engine_id=first.engine_id,
        remote_block_ids=first.block_ids,
        remote_host=None if address is None else address.host,
        remote_port=None if address is None else address.port,
        remote_request_id=first.request_id,
        tp_size=first.shape.tp_size,
        pdserve=msgspec.structs.replace(
            ours,
            handoffs=[
                None if handoff is None else HANDOFFS.seal(handoff, secret) for handoff in handoffs
            ],
            stages=[None if stage is None else stage_fields(stage) for stage in stages],
            prompt_logprobs=[_encode(entry) for entry in prompt_logprobs] if has_scores else None,
        ),
    )


def tokens_to_send(prompts: Sequence[Sequence[int]], text_digest: str) -> PromptTokens:
    """Return the token ids of a request's texts, as sent to another engine."""
    packed = [array.array("I", prompt).tobytes() for prompt in prompts]
    return PromptTokens(
        text_digest=text_digest,
        token_ids=[base64.b64encode(each).decode("ascii") for each in packed],
    )


def known_tokens(
    params: KVTransferParams | None, text_digest: str, num_prompts: int
) -> list[list[int]] | None:
    """Return a request's token ids if an engine with the same text digest has sent them.

    Whether they match the prompt of the handoff is checked with the handoff.

    Raises:
        BadRequestError: They are malformed, or do not fit the request's prompts.
    """
    if params is None or not params.do_remote_prefill or params.pdserve is None:
        return None
    sent = params.pdserve.prompt_tokens
    if sent is None or not text_digest or sent.text_digest != text_digest:
        return None
    if len(sent.token_ids) != num_prompts:
        raise BadRequestError(
            f"{PARAMS}: pdserve.prompt_tokens has {len(sent.token_ids)} entries "
            f"for {num_prompts} prompts",
            param=PARAMS,
        )
    try:
        packed = [base64.b64decode(text, validate=True) for text in sent.token_ids]
        return [array.array("I", each).tolist() for each in packed]
    except ValueError as error:
        raise _malformed(error) from error


def stage_fields(stages: RequestStages) -> dict[str, float | int]:
    """Return every stage by name, zeros included."""
    return {name: getattr(stages, name) for name in stages.__struct_fields__}


_PROMPT_LOGPROBS: msgspec.msgpack.Decoder[PromptLogprobs] = msgspec.msgpack.Decoder(PromptLogprobs)


T = TypeVar("T")


def _encode(value: object) -> str | None:
    if value is None:
        return None
    return base64.b64encode(msgspec.msgpack.encode(value)).decode("ascii")


def _opened(text: str, seal: Seal[T], secret: str) -> T:
    try:
        return seal.open(text, secret)
    except BadRequestError as error:
        raise _malformed(error) from error


def _decoded(text: str) -> PromptLogprobs:
    try:
        return _PROMPT_LOGPROBS.decode(base64.b64decode(text, validate=True))
    except (ValueError, *UNREADABLE) as error:
        raise _malformed(error) from error


def _malformed(error: Exception) -> BadRequestError:
    return BadRequestError(f"{PARAMS}: an entry of pdserve is malformed: {error}", param=PARAMS)
