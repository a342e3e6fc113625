"""Errors as the OpenAI API shapes them, and the two ways an engine can fail a leg.

Knows HTTP bodies and server-sent events; knows nothing of routing or of retries.

    PdserveError
    |- UpstreamError
    |  |- WorkerError       an engine broke down: another one may be asked
    |  |  |- WorkerBusyError      it says that it cannot serve now
    RefusedError            an engine said 4xx: the client's own mistake, passed on as it is
    ClientGoneError               nobody reads the answer any more
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import PdserveError, UpstreamError

if TYPE_CHECKING:
    from collections.abc import Mapping

DONE = b"data: [DONE]\n\n"


class WorkerError(UpstreamError):
    """An engine could not be reached, dropped the connection or answered 5xx.

    Args:
        reason: A short fixed word for the counters: connect, dropped, status, error_event,
            garbled, lost.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, code=code, retry_after_s=retry_after_s)
        self.reason = reason


class WorkerBusyError(WorkerError):
    """An engine answered 503: it starts, shuts down or has ended."""

    status = 503
    type = "service_unavailable_error"
    code = "unavailable"


class RefusedError(Exception):
    """An engine answered 4xx; the request is at fault, not the engine.

    Args:
        body: The engine's answer, in OpenAI's shape whatever the engine sent.
        retry_after: The engine's Retry-After header, if it sent one.
    """

    def __init__(self, status: int, body: bytes, retry_after: str | None = None) -> None:
        super().__init__(f"engine answered {status}")
        self.status = status
        self.body = openai_shaped(status, body)
        self.retry_after = retry_after


class ClientGoneError(Exception):
    """The client has closed its connection."""


def error_body(error: PdserveError) -> bytes:
    """Return `{"error": {...}}` as JSON."""
    return _error_json(error.message, error.type, error.param, error.error_code)


def error_headers(error: PdserveError) -> dict[str, str]:
    """Return the headers that go with an error: Retry-After in whole seconds, at least 1."""
    if error.retry_after_s is None:
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}


def error_event(body: bytes) -> bytes:
    """Return a stream's last words: an error event, then `[DONE]`."""
    return b"data: " + body + b"\n\n" + DONE


def openai_shaped(status: int, body: bytes) -> bytes:
    """Return `body` untouched if it is an OpenAI error object, else wrapped into one."""
    try:
        parsed = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        parsed = {}
    if bytes(parsed.get("error", b"")).lstrip().startswith(b"{"):
        return body
    text = body.decode("utf-8", "replace").strip()[:1000] or f"the engine answered {status}"
    return _error_json(text, "invalid_request_error", None, str(status))


def is_clients_fault(error_data: bytes) -> bool:
    """Whether an `{"error": ...}` event from a running stream blames the request itself."""
    try:
        parsed: Mapping[str, object] = msgspec.json.decode(error_data)
    except msgspec.DecodeError:
        return False
    error = parsed.get("error")
    return isinstance(error, dict) and error.get("type") == "invalid_request_error"


def _error_json(message: str, type_: str, param: str | None, code: str) -> bytes:
    return msgspec.json.encode(
        {"error": {"message": message, "type": type_, "param": param, "code": code}}
    )
