"""Request and response bodies: adds fields for engines, removes them for clients.

Only the top level of a body is parsed; every value keeps its bytes, so a prompt of
100 000 token ids is neither decoded nor re-encoded, and numbers keep their spelling.
Knows the fields of the engine hop; knows no engine.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from pdserve.errors import BadRequestError
from pdserve.http.parsing import encoding_remedy
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
from pdserve.wire.seal import UNREADABLE

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
    """A client's request, ready to send to engines.

    Args:
        raw: The body as received.
        created: Unix time for every answer, whichever engine it is from.
        fallback_seed: The seed if the client sent none, so that a replay gives the same text.

    Attributes:
        fields: Top-level fields, undecoded: JSON as the client wrote it.
        is_pushable: Whether its KV may be written to the decode engine during prefill; its stream
            may then also move between engines. A ticket is for one choice, so several prompts or
            choices are pulled. So are a whole answer with the prompt's log-probabilities, which
            travel only with a handoff, and a request for one token, which never reaches a decode
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
                f"the body is not a JSON object: {error}{encoding_remedy(raw)}",
                code="invalid_json",
            ) from None
        self._cached_tokens: list[int] | None = None
        self.num_bytes = len(raw)
        self.model = model[:MAX_MODEL_CHARS] if isinstance(model, str) else ""
        self.created = created
        self.seed = seed if isinstance(seed, int) else fallback_seed

    def ends_with_first_token(self) -> bool:
        """Whether the request asks for no more than a prefill engine samples."""
        return any(_value(self.fields.get(name)) in (0, 1) for name in _OUTPUT_LIMITS)

    @property
    def max_output(self) -> int | None:
        """Limit on its output tokens; None if absent or invalid."""
        given = [_value(self.fields.get(name)) for name in _OUTPUT_LIMITS]
        return min((each for each in given if isinstance(each, int) and each > 0), default=None)

    def needs_equal_text(self) -> bool:
        """Whether each engine handles part of it independently: a grammar, or tools."""
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

    def for_prefill(self, ticket: str | None) -> bytes:
        """Return the body for a prefill engine: sample one token, then lease the KV.

        Args:
            ticket: Sealed; also write the KV into another engine's blocks. None: do not.
        """
        ours = PdserveParams(**self._pinned(), final_length=True, ticket=ticket)
        return self._encode(KVTransferParams(do_remote_decode=True, pdserve=ours))

    def for_decode(self, handed_over: dict[str, Any], *, first_delivered: bool) -> bytes:
        """Return the body for a decode engine that reads the KV.

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
        """Return the body for a decode engine that continues from KV another engine writes to it.

        Its stream omits the first token, which the other engine sends.
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
        """Return the body for one engine that does everything.

        Without a remote side, the added field only pins what a replay must repeat.

        Args:
            is_fallback: Whether it computes the prompt in another engine's place.
        """
        pinned = self._pinned()
        ours = PdserveParams(**pinned, is_fallback=is_fallback, may_move=self._may_move)
        return self._encode(KVTransferParams(pdserve=ours))

    def note_cached(self, cached_tokens: list[int] | None) -> None:
        """Keep the cached tokens the client was given, so that other engines report the same."""
        if self._cached_tokens is None:
            self._cached_tokens = cached_tokens

    def _pinned(self) -> dict[str, Any]:
        """Return the fields sent to every engine of this request alike."""
        return {"created": self.created, "seed": self.seed, "cached_tokens": self._cached_tokens}

    def _encode(self, params: KVTransferParams | dict[str, Any]) -> bytes:
        """Encode the body; a client's field of that name is replaced, as it is the engine hop's."""
        return msgspec.json.encode({**self.fields, PARAMS: params})


def stages_in(data: bytes) -> EngineStages | None:
    """Return the stages in an internal event's data or a JSON answer, if present."""
    if _STAGES not in data:
        return None
    try:
        fields = msgspec.json.decode(data, type=Fields)
        return msgspec.json.decode(fields[STAGES], type=EngineStages)
    except (*UNREADABLE, KeyError):
        return None  # measurements only: not worth failing a request


def usage_at_end(stream: bytes) -> tuple[int, int] | None:
    """Return the same from the whole events at a stream's end: the last report counts."""
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
    """Return a JSON answer as sent to the client; the same bytes if there is nothing to hide.

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
        WorkerError: One of the answers does not have its endpoint's shape.
    """
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
