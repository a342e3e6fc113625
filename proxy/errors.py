"""Errors in OpenAI's format, and the two ways an engine can fail a leg.

Knows HTTP bodies and server-sent events; knows nothing of routing or of retries.

    PdserveError
    |- UpstreamError
    |  |- WorkerError       an engine broke down: another one may be asked
    |  |  |- WorkerBusyError      it says that it cannot serve now
    |  |  |  |- BudgetSpentError  ... compute this prompt in another engine's place
    |  |  |- KvFailedError        it is well, but the KV did not reach it
    |  |  |- NonFiniteError       it is well, but the model makes NaN of this request
    |  |  |- DrainedError         it is well, but what runs there is taken away
    |  |  |  |- MovedError           ... and it says from where another one may go on
    |  |- PoisonousError    engines died while they had the request: no other one is asked
    RefusedError            an engine said 4xx: the client's own mistake, passed on as it is
    ClientGoneError               nobody reads the answer any more
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.errors import (
    DeadlineError,
    EngineDeadError,
    NonFiniteLogitsError,
    PdserveError,
    UpstreamError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

DONE = b"data: [DONE]\n\n"
CAUSES: Final = {
    "connect": ("engine_unreachable", "an engine could not be reached"),
    "timeout": ("engine_unreachable", "an engine did not answer in time"),
    "dropped": ("engine_dropped", "an engine broke off its answer"),
    "lost": ("engine_lost", "an engine stopped answering"),
    "status": ("engine_failed", "an engine failed"),
    "error_event": ("engine_failed", "an engine failed"),
    "garbled": ("engine_garbled", "an engine's answer could not be read"),
    "not_ready": ("engine_not_ready", "the engines that were asked start, shut down or have ended"),
    "drained": ("engine_not_ready", "an engine was drained, and no other one is there"),
    "budget": (
        "recompute_budget_exhausted",
        "no engine may compute more prompts in another engine's place for now",
    ),
    "kv_failed": ("kv_transfer_failed", "the KV did not get from one engine to the other"),
    "handoff_refused": (
        "kv_transfer_failed",
        "an engine did not take what another one handed over",
    ),
    "non_finite": ("non_finite_logits", "the model makes NaN or infinite values of this request"),
}
"""By a failure's reason: the code that a client gets, and what happened. What to do about each
code is in docs/errors.md."""
_ENDS = frozenset({"dropped", "lost"})
_AWAY = frozenset({"connect", "not_ready", "budget", "drained"})


class WorkerError(UpstreamError):
    """An engine could not be reached, dropped the connection or answered 5xx.

    The client's message says what happened, but never where or in the engine's words.

    Args:
        detail: Which engine did what; see `PdserveError`.
        reason: A short fixed word for the counters, one of `CAUSES`.
        was_taken: Whether the engine may have begun to work on the request.
        is_end: Whether the engine reports that it has ended.

    Attributes:
        blames_engine: Whether it counts against the engine itself, whatever the request.
        is_away: Whether it means that the engine is away for now, or takes no such request.
    """

    blames_engine = True

    def __init__(
        self,
        detail: str,
        *,
        reason: str,
        retry_after_s: float | None = None,
        was_taken: bool = True,
        is_end: bool = False,
    ) -> None:
        code, what = CAUSES[reason]
        message = f"{what}; the proxy's log says which, and more, under this request's id"
        super().__init__(message, code=code, retry_after_s=retry_after_s, detail=detail)
        self.reason = reason
        self.was_taken = was_taken
        self.is_end = is_end or reason in _ENDS
        self.is_away = reason in _AWAY


class WorkerBusyError(WorkerError):
    """An engine answered 503: it is starting, shutting down or has ended."""

    status = 503
    type = "service_unavailable_error"


class BudgetSpentError(WorkerBusyError):
    """An engine has used up, for now, its budget for computing in place of others."""

    blames_engine = False


class KvFailedError(WorkerError):
    """A decode engine is well, but the KV it was to continue from did not reach it.

    The pair is to blame, or the prefill engine; never the engine that reports it.

    Args:
        load_failures: Labels of the loads that failed there, if it gives them.
    """

    blames_engine = False

    def __init__(self, detail: str, *, reason: str, load_failures: tuple[str, ...]) -> None:
        was_taken = reason != "handoff_refused"
        super().__init__(detail, reason=reason, was_taken=was_taken)
        self.load_failures = load_failures


class NonFiniteError(WorkerError):
    """The model gives NaN or infinite values for a request, as it would on any engine."""

    status = 500
    type = "server_error"
    blames_engine = False


class DrainedError(WorkerError):
    """An engine is drained: its requests continue elsewhere without spending a retry.

    Args:
        url: The engine's.
    """

    blames_engine = False

    def __init__(self, url: str) -> None:
        super().__init__(f"{url} is drained", reason="drained", was_taken=False)


class MovedError(DrainedError):
    """An engine has ended a stream with a handoff, from which another one continues.

    Args:
        url: The engine's.
        handoff: Data of the event that contains it.
    """

    def __init__(self, url: str, handoff: bytes) -> None:
        super().__init__(url)
        self.handoff = handoff


class PoisonousError(UpstreamError):
    """Two engines ended while they had the request, and neither made progress with it."""

    code = "engines_ended"


class RefusedError(Exception):
    """An engine answered 4xx; the request is at fault, not the engine.

    Args:
        body: The engine's answer, in OpenAI's shape whatever the engine sent.
        retry_after: The engine's Retry-After header, if it sent one.

    Attributes:
        code: The engine's code for it.
    """

    def __init__(self, status: int, body: bytes, retry_after: str | None = None) -> None:
        super().__init__(f"engine answered {status}")
        self.status = status
        self.body = openai_shaped(status, body)
        self.code = str(_error_of(self.body).get("code") or status)
        self.retry_after = retry_after


class ClientGoneError(Exception):
    """The client has closed its connection."""


def error_event(body: bytes) -> bytes:
    """Return a failed stream's end: an error event, then `[DONE]`."""
    return b"data: " + body + b"\n\n" + DONE


def openai_shaped(status: int, body: bytes) -> bytes:
    """Return `body` unchanged if it is an OpenAI error object, else one in its place."""
    try:
        parsed = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        parsed = {}
    if bytes(parsed.get("error", b"")).lstrip().startswith(b"{"):
        return body
    message = (
        f"an engine refused the request with status {status}, and did not say why in a form that "
        "can be passed on"
    )
    error = {"message": message, "type": "invalid_request_error", "param": None}
    return msgspec.json.encode({"error": {**error, "code": str(status)}})


def failure_in(
    url: str, status: int, body: bytes, *, retry_after: str | None, load_failures: str | None
) -> PdserveError | RefusedError:
    """Return the error that an engine's answer with a status other than 200 means.

    Args:
        body: As the engine sent it.
        retry_after, load_failures: The headers of these names, if present.
    """
    code = _error_of(body).get("code")
    message = f"{url} answered {status}: {body.decode('utf-8', 'replace')[:300]}"
    failure = _coded(code, message, retry_after=retry_after, load_failures=load_failures)
    if failure is not None:
        return failure
    if 400 <= status < 500:
        return RefusedError(status, body, retry_after)
    if status == 503:
        return WorkerBusyError(
            message,
            reason="not_ready",
            was_taken=code == EngineDeadError.code,
            is_end=code == EngineDeadError.code,
        )
    return WorkerError(message, reason="status")


def failure_in_stream(url: str, data: bytes) -> PdserveError | RefusedError:
    """Return the error that an error event means: the request's fault, or the engine's."""
    error = _error_of(data)
    message = f"{url} reported {data[:300].decode('utf-8', 'replace')}"
    failure = _coded(error.get("code"), message, retry_after=None, load_failures=None)
    if failure is not None:
        return failure
    if error.get("type") == "invalid_request_error":
        return RefusedError(400, data)
    is_end = error.get("code") == EngineDeadError.code
    return WorkerError(message, reason="error_event", is_end=is_end)


def _coded(
    code: object, message: str, *, retry_after: str | None, load_failures: str | None
) -> PdserveError | None:
    """Return the failure that an engine's error code names; None for a code unknown here."""
    match code:
        case "kv_transfer_failed" | "handoff_refused":
            reason = "kv_failed" if code == "kv_transfer_failed" else code
            labels = tuple(load_failures.split(",")) if load_failures else ()
            return KvFailedError(message, reason=reason, load_failures=labels)
        case "recompute_budget_exhausted":
            wait_s = float(retry_after) if retry_after and retry_after.isdecimal() else None
            return BudgetSpentError(
                message,
                reason="budget",
                retry_after_s=wait_s,
                was_taken=False,
            )
        case NonFiniteLogitsError.code:
            return NonFiniteError(message, reason="non_finite")
        case "deadline_exceeded":
            return DeadlineError("the request was not finished in time", detail=message)
        case _:
            return None


def _error_of(body: bytes) -> Mapping[str, object]:
    """Return the error object in a body or an event's data; empty if there is none."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    error = parsed.get("error") if isinstance(parsed, dict) else None
    return error if isinstance(error, dict) else {}
