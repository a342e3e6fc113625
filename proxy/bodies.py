"""Request and response bodies: adds fields for engines, removes them for clients.

Only the top level of a body is taken apart; every value keeps its bytes, so a prompt of
100 000 token ids is neither decoded nor printed again, and numbers keep their spelling.
Knows the fields of the engine hop; knows no engine.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from pdserve.errors import BadRequestError
from pdserve.proxy.errors import WorkerError
from pdserve.proxy.relay import SseParser
from pdserve.wire.hop import (
    INTERNAL,
    OURS,
    PARAMS,
    STAGES,
    EngineStages,
    KVTransferParams,
    PdserveParams,
)
from pdserve.wire.request import OnLoadFailure

_OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens")
_PROMPT_SCORES = ("prompt_logprobs", "echo", "logprobs")
_BY_TEXT = (
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "response_format",
    "structured_outputs",
    "tools",
)
_ASKS_FOR_NOTHING = (b"null", b"[]")
_MAY_BE_SEVERAL = re.compile(rb"\[\s*[\"\[]")
"""How a `prompt` begins that is a list of texts or of lists."""
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What JSON that is not to be trusted raises when it is read: ValueError is for its UTF-8."""
_STAGES = f'"{STAGES}"'.encode()
"""As it stands in JSON: what is without it is not decoded."""

MAX_MODEL_CHARS = 256
"""Of the name that a client gives, in logs."""

Fields = dict[str, msgspec.Raw]


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _WithUsage(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


class ClientBody:
    """A client's request, ready to be sent to engines.

    Args:
        raw: The body as it came.
        created: Unix time that every answer carries, whichever engine it is from.
        fallback_seed: The seed if the client sent none, so that a replay repeats itself.

    Attributes:
        fields: Of its top level, undecoded: JSON as the client wrote it.
        is_pushable: Its KV may be written to the decode engine while it is prefilled; a stream may
            go from engine to engine then as well. A ticket is of one choice, so several prompts or
            choices are pulled. So is a whole answer with the prompt's log-probabilities, which
            travel with a handoff only, and a request for one token, which never gets to a decode
            engine.

    Raises:
        BadRequestError: The body is not a JSON object.
    """

    def __init__(self, raw: bytes, *, created: int, fallback_seed: int) -> None:
        try:
            self.fields: Fields = msgspec.json.decode(raw, type=Fields)
            stream, seed, model = (
                _value(self.fields.get(name)) for name in ("stream", "seed", "model")
            )
            self.stream = stream is True
            self.is_pushable = self._looks_pushable()
            self._may_move = self.stream and self.is_pushable
        except RecursionError:
            raise BadRequestError("the body is nested too deeply", code="invalid_json") from None
        except UNREADABLE as error:
            raise BadRequestError(
                f"the body is not a JSON object: {error}", code="invalid_json"
            ) from None
        self._cached_tokens: list[int] | None = None
        self.num_bytes = len(raw)
        self.model = model[:MAX_MODEL_CHARS] if isinstance(model, str) else ""
        self.created = created
        self.seed = seed if isinstance(seed, int) else fallback_seed

    def ends_with_first_token(self) -> bool:
        """Whether no more is asked for than a prefill engine samples."""
        return any(_value(self.fields.get(name)) in (0, 1) for name in _OUTPUT_LIMITS)

    @property
    def max_output(self) -> int | None:
        """Output tokens that it may have; None if it does not say, or says nonsense."""
        given = [_value(self.fields.get(name)) for name in _OUTPUT_LIMITS]
        return min((each for each in given if isinstance(each, int) and each > 0), default=None)

    def needs_equal_text(self) -> bool:
        """Whether what it asks for is worked out by each engine by itself: a grammar, or tools."""
        given = (self.fields.get(name) for name in _BY_TEXT)
        return any(each is not None and bytes(each) not in _ASKS_FOR_NOTHING for each in given)

    def _looks_pushable(self) -> bool:
        if _value(self.fields.get("n")) not in (None, 1) or self._num_prompts() != 1:
            return False
        if self.ends_with_first_token():
            return False
        asked = {name for name in _PROMPT_SCORES if _value(self.fields.get(name)) is not None}
        wants_scores = "prompt_logprobs" in asked or asked == {"echo", "logprobs"}
        return self.stream or not wants_scores

    def _num_prompts(self) -> int:
        raw = self.fields.get("prompt")
        if raw is None or _MAY_BE_SEVERAL.match(raw) is None:
            return 1  # one text, one list of tokens, or a chat
        return len(msgspec.json.decode(raw, type=list[msgspec.Raw]))

    def for_prefill(self, ticket: str | None = None) -> bytes:
        """The body for a prefill engine: sample one token, then lease the KV out.

        Args:
            ticket: Sealed; write the KV into another engine's blocks as well.
        """
        ours = PdserveParams(**self._pinned(), final_length=True, ticket=ticket)
        return self._encode(KVTransferParams(do_remote_decode=True, pdserve=ours))

    def for_decode(self, handed_over: dict[str, Any], *, first_delivered: bool) -> bytes:
        """The body for a decode engine that reads the KV.

        Args:
            handed_over: `Handoff.params`.
        """
        ours = PdserveParams(
            **self._pinned(),
            first_delivered=first_delivered,
            on_load_failure=OnLoadFailure.REPORT,
            may_move=self._may_move,
        )
        both = {**handed_over[OURS], **msgspec.to_builtins(ours)}
        return self._encode({**handed_over, OURS: both})

    def for_receiving(self, ticket: str) -> bytes:
        """The body for a decode engine that goes on from what another one writes to it.

        Of a stream it leaves out the first token, which comes from the other one.
        """
        ours = PdserveParams(
            **self._pinned(),
            ticket=ticket,
            first_delivered=self.stream,
            on_load_failure=OnLoadFailure.REPORT,
            may_move=self._may_move,
        )
        return self._encode(KVTransferParams(do_remote_prefill=True, pdserve=ours))

    def for_local(self, *, is_fallback: bool) -> bytes:
        """The body for one engine that does everything.

        Without a remote side in it, the field pins what a replay must repeat.

        Args:
            is_fallback: It computes the prompt in another engine's place.
        """
        pinned = self._pinned()
        ours = PdserveParams(**pinned, is_fallback=is_fallback, may_move=self._may_move)
        return self._encode(KVTransferParams(pdserve=ours))

    def note_cached(self, cached_tokens: list[int] | None) -> None:
        """Keep what a prefill engine has told the client, so that others tell it the same."""
        if self._cached_tokens is None:
            self._cached_tokens = cached_tokens

    def _pinned(self) -> dict[str, Any]:
        """Return what every engine of this request is told alike."""
        return {"created": self.created, "seed": self.seed, "cached_tokens": self._cached_tokens}

    def _encode(self, params: KVTransferParams | dict[str, Any]) -> bytes:
        """Encode the body; a user's field of that name gives way, for it is the engine hop's."""
        return msgspec.json.encode({**self.fields, PARAMS: params})


def stages_in(data: bytes) -> EngineStages | None:
    """Return the stages in an internal event's data or a JSON answer, if they are there."""
    if _STAGES not in data:
        return None
    try:
        fields = msgspec.json.decode(data, type=Fields)
        return msgspec.json.decode(fields[STAGES], type=EngineStages)
    except (*UNREADABLE, KeyError):
        return None  # measurements only: never worth a request


def usage_at_end(stream: bytes) -> tuple[int, int] | None:
    """Return the same for the end of a stream, whole events: the last report counts."""
    if b'"usage"' not in stream:
        return None
    reports = [usage_in(event.data) for event in SseParser().feed(stream)]
    return next(filter(None, reversed(reports)), None)


def usage_in(data: bytes) -> tuple[int, int] | None:
    """Return (prompt tokens, completion tokens) if an answer or an event reports them."""
    if b'"usage"' not in data:
        return None
    try:
        usage = msgspec.json.decode(data, type=_WithUsage).usage
    except UNREADABLE:
        return None
    return None if usage is None else (usage.prompt_tokens, usage.completion_tokens)


def without_internals(data: bytes) -> bytes:
    """Return a JSON answer as the client gets it; the same bytes if nothing is to be hidden.

    Raises:
        WorkerError: It is not a JSON object.
    """
    try:
        fields = msgspec.json.decode(data, type=Fields)
    except UNREADABLE as error:
        message = f"an engine's answer is not a JSON object: {error}"
        raise WorkerError(message, reason="garbled") from error
    hidden = [name for name in fields if name == PARAMS or name.startswith(INTERNAL)]
    if not hidden:
        return data
    for name in hidden:
        del fields[name]
    return msgspec.json.encode(fields)


def merged(prefilled: bytes, decoded: bytes) -> bytes:
    """Join the choices that ended at the prefill engine with those that went on.

    The usage is the decode engine's, which counts every choice wherever it ended.

    Raises:
        WorkerError: One of the answers is not what its endpoint answers.
    """
    decoded = without_internals(decoded)
    try:
        first = msgspec.json.decode(prefilled)
        ended = {choice["index"]: choice for choice in first["choices"] if _has_ended(choice)}
        if not ended:
            return decoded
        answer = msgspec.json.decode(decoded)
        choices = ended | {choice["index"]: choice for choice in answer["choices"]}
        answer["choices"] = [choices[index] for index in sorted(choices)]
    except (*UNREADABLE, AttributeError, KeyError, TypeError) as error:
        message = f"two engines' answers cannot be joined: {error!r}"
        raise WorkerError(message, reason="garbled") from error
    return msgspec.json.encode(answer)


def _has_ended(choice: dict[str, Any]) -> bool:
    return choice.get("finish_reason") is not None


def _value(raw: msgspec.Raw | None) -> Any:
    return None if raw is None else msgspec.json.decode(raw)
