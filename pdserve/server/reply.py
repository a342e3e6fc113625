"""Sends answers: whole, as events, or as an error, in the same format for all endpoints.

Server-sent events are as OpenAI's clients expect them (WHATWG HTML, section 9.2). A stream that has
begun always ends in `[DONE]`, also after an error; only a client that has gone gets nothing more.
Both have a part for the proxy where one asks: the handoff for another engine, and timings.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from pdserve.dialects.answer import Dialect
from pdserve.dialects.paths import error_of
from pdserve.errors import KvTransferError, PdserveError
from pdserve.http.answers import (
    IS_LOGGED,
    StreamAnswer,
    error_answer,
    error_body,
    error_object,
    is_work,
    refusal_of,
)
from pdserve.observe.log import log_event
from pdserve.observe.request_log import log_refusal
from pdserve.server.hop import response_params, tokens_to_send
from pdserve.server.service import PROMPT_TOKENS, REQUEST_ID, SERVICE, START_S
from pdserve.wire.hop import (
    HANDOFF,
    KV_MODE_HEADER,
    LOAD_FAILURES_HEADER,
    PARAMS,
    STAGES,
    STAGES_HEADER,
    PdserveParams,
)
from pdserve.wire.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import Self

    from pdserve.http.answers import Handler
    from pdserve.server.text_request import Delta, TextRequest
    from pdserve.wire.hop import HandedOver

_log = logging.getLogger(__name__)

DIALECT: web.RequestKey[Dialect] = web.RequestKey("dialect", Dialect)
"""What its client speaks in place of chat completions, if it does."""
_DONE = b"data: [DONE]\n\n"
_MARK = uuid.uuid4().hex


class EventStream:
    """One response of events. Its headers go with the first one; leaving it ends the stream.

    An error inside the block becomes an error event. Entering the block fixes the status, so
    enter it only with the first event at hand.
    """

    def __init__(self, request: web.Request, text_request: TextRequest) -> None:
        self._request = request
        self._dialect = request.get(DIALECT)
        self._encoder = msgspec.json.Encoder()
        self._around: dict[int, tuple[bytes, bytes]] = {}
        self._has_ended = False
        self.response = StreamAnswer(_kv_headers(text_request) if wants_stages(request) else None)

    async def __aenter__(self) -> Self:
        await self.response.prepare(self._request)
        return self

    async def send(self, event: dict[str, Any]) -> None:
        """Send one event.

        Raises:
            ConnectionError: The client has gone.
        """
        await self._write(self._framed(event))

    async def send_text(self, delta: Delta, chunk_of: Callable[[Delta], dict[str, Any]]) -> None:
        """Send the event for a delta that differs from its choice's others only in its text.

        The JSON around the text is encoded once per choice.

        Raises:
            ConnectionError: The client has gone.
        """
        around = self._around.get(delta.index)
        if around is None:
            event = self._encoder.encode(chunk_of(msgspec.structs.replace(delta, text=_MARK)))
            head, tail = event.split(self._encoder.encode(_MARK))
            around = self._around[delta.index] = (b"data: " + head, tail + b"\n\n")
        await self._write(around[0] + self._encoder.encode(delta.text) + around[1])

    async def end(self, events: Sequence[dict[str, Any]] = ()) -> None:
        """Send the last events and the end mark, all at once.

        Raises:
            ConnectionError: The client has gone.
        """
        data = b"".join([*map(self._framed, events), _DONE])
        self._has_ended = True
        await self.response.write_eof(data if self._dialect is None else self._dialect.events(data))

    async def _write(self, data: bytes) -> None:
        if self._dialect is not None:
            data = self._dialect.events(data)
        if data:
            await self.response.write(data)

    def _framed(self, event: dict[str, Any]) -> bytes:
        return b"data: " + self._encoder.encode(event) + b"\n\n"

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, ConnectionError):
            return True
        if error is not None and not isinstance(error, Exception):
            return False  # cancelled: the client is gone
        last = []
        if isinstance(error, PdserveError):
            last.append(error_object(error))
        elif error is not None:
            log_internal_error(self._request, error)
            last.append(error_object(PdserveError("the server failed: its log has the details")))
        if not self._has_ended:
            with contextlib.suppress(ConnectionError):
                await self.end(last)
        return True


def _kv_headers(text_request: TextRequest) -> dict[str, str]:
    """Return a stream's headers on KV for a proxy: who moved it, and what failed."""
    mode, failures = text_request.kv_at_start()
    headers = {KV_MODE_HEADER: mode, LOAD_FAILURES_HEADER: ",".join(failures)}
    return {name: text for name, text in headers.items() if text}


def finish_name(reason: FinishReason | None, *, has_calls: bool = False) -> str | None:
    """Return OpenAI's name of the reason; a handoff is no end for the client."""
    if reason is FinishReason.STOP and has_calls:
        return "tool_calls"
    return reason.value if reason in (FinishReason.STOP, FinishReason.LENGTH) else None


def _transfer_params(request: web.Request, text_request: TextRequest) -> HandedOver | None:
    """Return the parameters for a decode engine; None if every choice has ended here."""
    if not any(text_request.handoffs):
        return None
    service, prompts = request.app[SERVICE], request.get(PROMPT_TOKENS)
    prompt_tokens = None
    if prompts is not None and service.text is not None:
        prompt_tokens = tokens_to_send(prompts, service.text.digest)
    ours = PdserveParams(
        created=text_request.created,
        seed=text_request.seed,
        cached_tokens=[choice.num_cached_tokens or 0 for choice in text_request.choices],
        prompt_tokens=prompt_tokens,
    )
    return response_params(
        text_request.handoffs,
        [choice.prompt_logprobs for choice in text_request.choices],
        [choice.stages for choice in text_request.choices],
        ours,
        secret=service.engine_config.transfer.secret,
    )


def wants_stages(request: web.Request) -> bool:
    """Whether the caller (a proxy) asks for timings inside the answer."""
    return request.headers.get(STAGES_HEADER) == "1"


def hop_events(request: web.Request, text_request: TextRequest) -> list[dict[str, Any]]:
    """Return the last events of a stream to a proxy, which removes them."""
    events: list[dict[str, Any]] = []
    params = _transfer_params(request, text_request)
    if params is not None:
        events.append({HANDOFF: params})
    if wants_stages(request):
        events.append({STAGES: text_request.account()})
    return events


async def send_json(
    request: web.Request, text_request: TextRequest, answer: dict[str, Any]
) -> web.Response:
    """Send a whole answer, with the hop's parts where there are any.

    Sends at once rather than on return, so that a lease counts as handed over only when
    its answer is on the wire.
    """
    params = _transfer_params(request, text_request)
    if params is not None:
        answer[PARAMS] = params
    if wants_stages(request):
        answer[STAGES] = text_request.account()
    body = msgspec.json.encode(answer)
    if (dialect := request.get(DIALECT)) is not None:
        body = dialect.whole(body)
    response = web.Response(body=body, content_type="application/json")
    await response.prepare(request)
    await response.write_eof()
    text_request.delivered = True
    return response


def error_response(error: PdserveError, path: str) -> web.Response:
    """Return `error` as a response, as the clients of a path expect it.

    A proxy also learns why KV did not arrive: whether another engine may still read it.
    """
    answer = error_answer(error)
    answer.body = error_of(path, answer.status, error_body(error))
    if isinstance(error, KvTransferError) and error.load_failures:
        answer.headers[LOAD_FAILURES_HEADER] = ",".join(error.load_failures)
    return answer


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn what a handler raises before its response began into an error response."""
    try:
        return await handler(request)
    except PdserveError as error:
        return _refuse(request, error)
    except web.HTTPException as error:
        return _refuse(request, refusal_of(error, request))
    except ConnectionResetError:  # the client left before its answer
        raise
    except Exception as error:  # noqa: BLE001 (the top of a request: the server goes on)
        log_internal_error(request, error)
        return _refuse(request, PdserveError("the server failed: its log has the details"))
    finally:
        request.app[SERVICE].bodies.free(request)


def _refuse(request: web.Request, error: PdserveError) -> web.StreamResponse:
    """Answer with an error; log a line for an API request that has none yet."""
    if is_work(request) and IS_LOGGED not in request:
        total_s = request.app[SERVICE].clock.monotonic_s() - request[START_S]
        log_refusal(request[REQUEST_ID], request.path, error, total_s=total_s)
    return error_response(error, request.path)


def log_internal_error(request: web.Request, error: BaseException) -> None:
    """Log a handler's exception; the client learns no details."""
    log_event(
        _log,
        "request failed",
        level=logging.ERROR,
        exc_info=error,
        request=request.get(REQUEST_ID),
        endpoint=request.path,
    )
