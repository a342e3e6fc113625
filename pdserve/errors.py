"""Every exception pdserve raises on purpose, and the fate of each.

Three kinds of trouble have three fates. An *outcome* (no room now) is a return
value and never appears here. *Somebody else's mistake* is a `PdserveError`: it
carries an HTTP status and reaches the client as an OpenAI error object. *Our own
mistake* is an `InternalError`: it ends the engine, with the request's story.

    PdserveError                    somebody else's mistake, or the world's
    |- BadRequestError        400   a field of the request is wrong (names it)
    |  |- ContextLengthError  400   prompt + output exceed the model's context
    |  |- GrammarDeadEndError 400   the grammar allows no way to go on with the output
    |- UnauthorizedError      401
    |- ForbiddenError         403   not from where it was asked
    |- NotFoundError          404   unknown path or model
    |- RequestTimeoutError    408   headers or a body did not come in time
    |- BodyTooLargeError      413
    |- MediaTypeError         415   a body in an encoding that is not read here
    |- OverloadedError        429   queue is full; Retry-After
    |- HeadersTooLargeError   431
    |- UnavailableError       503   no ready engine for the role; Retry-After
    |  |- StartingError       503   the engine is not ready yet
    |  |- ShuttingDownError   503   nothing more is taken here
    |  |- RecomputeBudgetError     503   no tokens left for prompts that others failed; Retry-After
    |- KvTransferError        503   KV did not arrive; whoever sent the request has other ways
    |- EngineDeadError        503   the engine behind this server has ended
    |- NonFiniteLogitsError   500   the model makes NaN or infinite values of this request
    |- UpstreamError          502   an engine answered something unusable
    |- DeadlineError          504   the request's own deadline has passed
    |- ConfigError            exit 3, never HTTP: a setting, a file, a model
    |- PeerError              a peer engine is lost, incompatible or lies
    |  |- HandshakeError           layouts differ; both values are named
    |  |- HandoffRefusedError 409  a handoff or ticket that this engine cannot trust or use
    InternalError                   an illegal move inside pdserve; ends the engine
    |- PeerLostError                a rank that this one shares its world with has ended
"""

from __future__ import annotations

import errno
import os
import re
import traceback
from typing import ClassVar, Final

_TRACEBACK: Final = re.compile(r"Traceback \(most recent call last\):\n(?: .*\n)+")

_NO_THREAD: Final = ("can't start new thread", os.strerror(errno.EAGAIN))
"""What CPython, and C++'s std::thread through torch, say where clone(2) fails."""
_MORE_PROCESSES: Final = (
    "raise the limit of processes with ulimit -u, TasksMax= or docker run --pids-limit"
)


def without_tracebacks(story: str) -> str:
    """Return why something ended, without the calls that led there."""
    return _TRACEBACK.sub("", story).strip()


def refused_process(error: BaseException) -> str:
    """Return what to do if the system has refused a thread or process; empty otherwise."""
    is_thread = isinstance(error, RuntimeError) and str(error) in _NO_THREAD
    is_fork = isinstance(error, BlockingIOError) and error.filename is None
    return f"{error}: {_MORE_PROCESSES}" if is_thread or is_fork else ""


def story_of(error: BaseException) -> str:
    """Return why a process ends: what to do about it in a line, or where it came from."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return refused_process(cause) or "".join(traceback.format_exception(error))


class PdserveError(Exception):
    """Base of every error whose cause is outside pdserve.

    Args:
        message: What happened, to which field, with which value, and the remedy.
        param: Name of the request field at fault, if one is.
        retry_after_s: When a client may try again, in seconds, if that is known.
        detail: The same for operators, who may know addresses and what engines said. It is
            what `str` returns, for logs; it never reaches a client.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        code: str | None = None,
        detail: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail or message
        self.param = param
        self.retry_after_s = retry_after_s
        self.error_code = code or self.code

    def __str__(self) -> str:
        return self.detail


class BadRequestError(PdserveError):
    """A field of the request is wrong."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthError(BadRequestError):
    """The prompt, or the prompt and the output asked for, exceed the model's context."""

    code = "context_length_exceeded"


class GrammarDeadEndError(BadRequestError):
    """The grammar, or what it allows together with other fields, leaves the output no way on."""

    code = "grammar_dead_end"


class UnauthorizedError(PdserveError):
    """The key is missing or wrong.

    Args:
        challenge: How it is to be sent, as the WWW-Authenticate header says (RFC 9110, 11.6.1).
    """

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"

    def __init__(self, message: str, *, code: str | None = None, challenge: str = "Bearer") -> None:
        super().__init__(message, code=code)
        self.challenge = challenge


class ForbiddenError(PdserveError):
    """Whoever asks may not, whatever key is sent."""

    status = 403
    type = "permission_error"
    code = "operator_key_required"


class NotFoundError(PdserveError):
    """No such path or model."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class RequestTimeoutError(PdserveError):
    """The headers or the body of a request did not come in time."""

    status = 408
    type = "timeout_error"
    code = "request_timeout"


class BodyTooLargeError(PdserveError):
    """The request body is larger than the server accepts."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class MediaTypeError(PdserveError):
    """The request body has an encoding that the server does not read."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class HeadersTooLargeError(PdserveError):
    """A header, or the request line, is longer than the server accepts."""

    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class OverloadedError(PdserveError):
    """The queue is full, or the request waited in it for too long."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"


class UnavailableError(PdserveError):
    """No engine of the needed role is ready."""

    status = 503
    type = "service_unavailable_error"
    code = "unavailable"


class StartingError(UnavailableError):
    """The engine is not ready yet."""

    code = "engine_starting"

    def __init__(self) -> None:
        super().__init__("the engine is starting: ask again; /readyz says when it is ready")


class ShuttingDownError(UnavailableError):
    """Nothing more is taken here, and what could not be finished is given up.

    Args:
        who: Shuts down, for people.
    """

    code = "shutting_down"

    def __init__(self, who: str) -> None:
        super().__init__(f"{who} is shutting down: ask another one, or again once it is back")


class RecomputeBudgetError(UnavailableError):
    """The engine has computed all the prompts it may, for now, in place of others."""

    code = "recompute_budget_exhausted"


class KvTransferError(PdserveError):
    """The KV of a handed-over request did not arrive.

    Args:
        load_failures: Labels of the loads that failed, in order (`LoadFailure` values).
    """

    status = 503
    type = "service_unavailable_error"
    code = "kv_transfer_failed"

    def __init__(self, message: str, *, load_failures: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.load_failures = load_failures


class EngineDeadError(PdserveError):
    """The engine behind this server has ended.

    Args:
        story: Why, maybe with tracebacks: those are for the log alone.
    """

    status = 503
    type = "service_unavailable_error"
    code = "engine_dead"

    def __init__(self, story: str) -> None:
        super().__init__(without_tracebacks(story), detail=story)


class NonFiniteLogitsError(PdserveError):
    """The model makes NaN or infinite values of this request; other requests are well."""

    code = "non_finite_logits"


class UpstreamError(PdserveError):
    """An engine answered something that cannot be passed on."""

    status = 502
    type = "upstream_error"
    code = "bad_gateway"


class DeadlineError(PdserveError):
    """The request's own deadline passed before it could be served."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class ConfigError(PdserveError):
    """A setting, a file or a model directory cannot be used as given."""

    code = "config_error"


class PeerError(PdserveError):
    """A peer engine is lost, incompatible, or sent something it should not."""

    status = 502
    code = "peer_error"


class HandshakeError(PeerError):
    """Two engines cannot exchange KV; the message names both values."""


class HandoffRefusedError(PeerError):
    """A handoff or a ticket that this engine cannot trust or use; nothing of it was believed."""

    status = 409
    code = "handoff_refused"


class InternalError(Exception):
    """An illegal move inside pdserve.

    Caught at the top of a `run` loop; and where a request is taken, which it then ends alone.
    """


class PeerLostError(InternalError):
    """A rank of the same group has ended, or does not come; the message says which."""
