"""Reads a client's request: decodes its body and tokenizes its prompts.

Overlong input is refused before any work on it.

Whether it can be served as it is, `plan` says.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import BadRequestError, ContextLengthError
from pdserve.http.ignored import MAX_NAME_CHARS, note_ignored
from pdserve.http.parsing import Body, parse_body, top_level
from pdserve.http.protocol import SamplingFields
from pdserve.observe.log import log_event
from pdserve.server.hop import known_tokens
from pdserve.server.prefill_leg import as_ordered
from pdserve.server.service import PROMPT_TOKENS, REQUEST_ID, SERVICE, read_body
from pdserve.wire.hop import PREFILL_HEADER
from pdserve.wire.trace import SliceEvent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiohttp import web

    from pdserve.server.service import Service

_log = logging.getLogger(__name__)

_MAX_IGNORED = 64
_MIN_SENT_TOKENS = 512
"""Fewer are not sent to an engine that continues: it makes them as quickly as it reads them."""
MAX_CHARS_PER_TOKEN = 32
"""A text with more characters for each token of the context cannot be a prompt that fits: prose has
3 to 5, and the few texts with more have runs of spaces."""
MIN_PROMPT_CHARS = 1 << 16
MIN_MESSAGES = 1 << 10
"""Bounds for models of short contexts."""
_BYTES_PER_CHAR = 6
"""JSON writes a character as `\\uXXXX` at worst."""


def say_unknown_fields(
    request: web.Request, data: bytes, kind: type[msgspec.Struct], *, also: Sequence[str] = ()
) -> None:
    """Name unknown request fields in the answer, and log each of them once.

    Args:
        also: See `note_ignored`.
    """
    logged = request.app[SERVICE].ignored_fields
    for name in note_ignored(request, top_level(data), kind, also=also):
        if name not in logged and len(logged) < _MAX_IGNORED:
            logged.add(name)
            shown = ascii(name[:MAX_NAME_CHARS])
            log_event(_log, "request field ignored", field=shown)


async def read_request(request: web.Request, kind: type[Body]) -> tuple[Body, int]:
    """Return a request's body and its size in bytes; name its unknown fields.

    If an order involves a prefill engine, return after that engine has done its part.

    Raises:
        PdserveError: It cannot be received (see `Bodies.read`), cannot be parsed (see
            `parse_body`), or asks for what is not allowed (see `as_ordered`).
    """
    data = await read_body(request)
    body = parse_body(data, kind)
    if not (isinstance(body, SamplingFields) and PREFILL_HEADER in request.headers):
        say_unknown_fields(request, data, kind)
        return body, len(data)
    replaced = [] if body.kv_transfer_params is None else ["kv_transfer_params"]
    say_unknown_fields(request, data, kind, also=replaced)
    return await as_ordered(request, body, data, request.path), len(data)


async def encode_prompts(
    request: web.Request,
    fields: SamplingFields,
    given: Sequence[str] | list[list[int]],
    *,
    add_special_tokens: bool,
    field: str,
) -> list[list[int]]:
    """Tokenize a request's prompts, if they are texts; the trace has the time that this took.

    Token ids of long prompts are taken from another engine if it has sent them, and sent on if
    another one continues the request.

    Args:
        fields: Sampling fields; they say whether to cut overlong prompts or refuse them.
        given: Texts, or the tokens of each prompt.
        field: Name of the body's field that has the prompts.

    Raises:
        ContextLengthError: One of them is longer than the context.
        OverloadedError: Too many long ones are already waiting.
    """
    texts = [each for each in given if isinstance(each, str)]
    if not texts:
        return [each for each in given if not isinstance(each, str)]
    service = request.app[SERVICE]
    text, info = service.require_ready()
    known = known_tokens(fields.kv_transfer_params, text.digest, len(texts))
    if known is not None:
        request[PROMPT_TOKENS] = known
        return known
    widest = None
    if fields.truncate_prompt_tokens is None:
        widest = text.tokenizer.max_chars_per_token
    for prompt in texts:
        refuse_long_prompt(prompt, widest, info.max_model_len, field=field)
    start_s = service.clock.monotonic_s()
    prompts = await encode(service, texts, add_special_tokens=add_special_tokens)
    num_tokens = sum(map(len, prompts))
    facts: dict[str, int | float | str] = {"request": request[REQUEST_ID], "tokens": num_tokens}
    now_s = service.clock.monotonic_s()
    service.recorder.add(SliceEvent(now_s, start_s, "tokenizer", "tokenize", facts))
    if num_tokens >= _MIN_SENT_TOKENS:
        request[PROMPT_TOKENS] = prompts
    return prompts


def cut_prompts(
    prompts: list[list[int]],
    fields: SamplingFields,
    *,
    max_tokens: int | None,
    max_model_len: int,
) -> list[list[int]]:
    """Return prompts cut as a request asks; the same on every engine that gets it.

    Args:
        prompts: Token ids.
        max_tokens: Output tokens to leave room for when cutting to the context length.

    Raises:
        ContextLengthError: They leave no room for a prompt.
    """
    limit = fields.truncate_prompt_tokens
    if limit is None:
        return prompts
    if limit == -1:
        limit = max_model_len - (max_tokens or 1)
        if limit < 1:
            raise ContextLengthError(
                f"This model's maximum context length is {max_model_len} tokens, and prompts are "
                f"cut to leave room for {max_tokens} output tokens; ask for fewer.",
                param="truncate_prompt_tokens",
            )
    if fields.truncation_side == "right":
        return [prompt[:limit] for prompt in prompts]
    return [prompt[-limit:] for prompt in prompts]


def created_s(request: web.Request, fields: SamplingFields) -> int:
    """Return the answer's timestamp: the other leg's if there is one, else the current time."""
    params = fields.kv_transfer_params
    if params is not None and params.pdserve is not None and params.pdserve.created is not None:
        return params.pdserve.created
    return int(request.app[SERVICE].clock.wall_s())


def refuse_long_prompt(text: str, widest: int | None, max_model_len: int, *, field: str) -> None:
    """Refuse a text too long for a prompt before it is tokenized, which may take minutes.

    Args:
        widest: Maximum characters of a token; None if unknown, or if the prompt is cut.

    Raises:
        ContextLengthError: It is longer than the context.
    """
    if widest is not None and len(text) > widest * max_model_len:
        num_tokens = -(-len(text) // widest)
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens, but the request's "
            f"prompt has at least {num_tokens} tokens; shorten the prompt.",
            param=field,
        )
    max_chars = max(MIN_PROMPT_CHARS, MAX_CHARS_PER_TOKEN * max_model_len)
    if len(text) > max_chars:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens, but {field} has "
            f"{len(text)} characters, and at most {max_chars} are tokenized; shorten the prompt.",
            param=field,
        )


def refuse_large_chat(
    fields: Mapping[str, Sequence[object] | Mapping[str, object] | None],
    num_bytes: int,
    max_model_len: int,
) -> None:
    """Refuse a chat too large for a prompt before it is rendered.

    Args:
        fields: The body's fields that a template sees, by name, including `messages`.
        num_bytes: Size of the body, which may have other large fields.

    Raises:
        BadRequestError: The messages are too many, or a field is too large.
    """
    num_messages = len(fields["messages"] or ())
    refuse_more("messages", num_messages, max(MIN_MESSAGES, max_model_len), "messages")
    max_chars = max(MIN_PROMPT_CHARS, MAX_CHARS_PER_TOKEN * max_model_len)
    if num_bytes <= _BYTES_PER_CHAR * max_chars:
        return
    for field, value in fields.items():
        try:
            size = len(msgspec.json.encode(value))
        except RecursionError as error:
            raise BadRequestError(f"{field} is nested too deeply", param=field) from error
        refuse_more(field, size, _BYTES_PER_CHAR * max_chars, "bytes of JSON")


def refuse_more(field: str, size: int, maximum: int, what: str) -> None:
    """Refuse a field that exceeds its maximum size.

    Raises:
        BadRequestError: It does.
    """
    if size > maximum:
        raise BadRequestError(
            f"{field} has {size} {what}, and at most {maximum} are accepted: send less, or split "
            "it into several requests",
            param=field,
        )


async def encode(
    service: Service, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Tokenize parts of prompts without blocking the event loop.

    Raises:
        OverloadedError: See `TextWork`.
    """
    tokenizer = service.require_ready()[0].tokenizer

    def encode_all() -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    return await service.prompt_work.run(encode_all, sum(map(len, texts)), len(texts))
