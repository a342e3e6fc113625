"""What the handlers share: engine, text processing, model names, clock and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
from aiohttp import web

from pdserve.errors import (
    EngineDeadError,
    NotFoundError,
    OverloadedError,
    ShuttingDownError,
    StartingError,
    UnavailableError,
    without_tracebacks,
)
from pdserve.observe.clock import SystemClock
from pdserve.observe.trace import Recorder
from pdserve.server.constraints import GrammarChecks
from pdserve.wire.finished import FinishedRequests
from pdserve.wire.hop import REQUEST_ID_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config.http import ServerConfig
    from pdserve.config.schema import EngineConfig
    from pdserve.engine.client import EngineClient
    from pdserve.http.bodies import Bodies
    from pdserve.http.control import Verifier
    from pdserve.observe.clock import Clock
    from pdserve.server.metrics import ServerMetrics
    from pdserve.server.registration import Registrar
    from pdserve.server.text_request import TextRequest
    from pdserve.text.load import Text
    from pdserve.wire.request import EngineInfo

T = TypeVar("T")

LONG_TEXT_CHARS = 1 << 14
"""What takes some milliseconds and belongs into a thread."""
MAX_SHORT_TEXTS = 64
"""Of more texts than that the number counts, not only what is in them."""
_MAX_ID_CHARS = 128
_LEAVING = "the server is shutting down"


class TextWork:
    """Threads and queue for one kind of work on texts. Used from one event loop.

    Short texts are processed immediately. Long ones have a few separate threads and a bounded
    queue, so that a flood of them is refused rather than queued, and other work that needs a
    thread does not wait behind them.

    Args:
        what: Name of the work in refusals.
        max_calls: Maximum running and waiting calls of `run`; further ones are refused.
    """

    def __init__(self, what: str, *, num_threads: int, max_calls: int) -> None:
        self._what = what
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=what)
        self._max_calls = max_calls
        self.num_calls = 0

    async def run(self, function: Callable[[], T], num_chars: int, num_texts: int = 1) -> T:
        """Return the result of `function`; large work runs in a thread.

        A running call continues when its caller is cancelled, and counts until it ends.

        Raises:
            OverloadedError: Too many others wait.
        """
        if num_chars < LONG_TEXT_CHARS and num_texts <= MAX_SHORT_TEXTS:
            return function()
        if self.num_calls >= self._max_calls:
            raise OverloadedError(
                f"{self.num_calls} requests for {self._what} of long texts are running or waiting: "
                "try again later"
            )
        self.num_calls += 1
        loop = asyncio.get_running_loop()

        def leave(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: counts no longer matter
                loop.call_soon_threadsafe(self._leave)

        future = self._executor.submit(function)
        future.add_done_callback(leave)
        return await asyncio.wrap_future(future)

    def _leave(self) -> None:
        self.num_calls -= 1

    def close(self) -> None:
        """Drop waiting calls; running ones finish on their own."""
        self._executor.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class Service:
    """One engine behind HTTP.

    Attributes:
        text: None until it is loaded.
        created_s: Reported as the models' creation time.
        is_leaving: Set on shutdown: no more traffic is wanted.
        draining: Set after that: running requests continue, new ones are refused.
        text_requests: Those that are being answered, by identity.
        recent: Requests that have ended.
        registration: Registers this engine with the configured proxies once it is ready.
        is_registering: Whether a configured proxy has still to take it, or to give no answer.
        recorder: Records events for traces.
        bodies: Reads the bodies of requests.
        verifier: Authenticates requests from proxies of this deployment.
        prompt_work: Renders and tokenizes prompts.
        tool_work: Does the same, and the inverse, for `/tokenize` and `/detokenize`, so that no
            prompt waits for those.
        ignored_fields: Names in bodies that have no meaning here, each logged once.
        grammar_checks: Result of `grammars`, after its first call.
    """

    client: EngineClient
    engine_config: EngineConfig
    server_config: ServerConfig
    metrics: ServerMetrics
    bodies: Bodies
    verifier: Verifier
    text: Text | None = None
    clock: Clock = field(default_factory=SystemClock)
    is_leaving: bool = False
    draining: bool = False
    text_requests: dict[int, TextRequest] = field(default_factory=dict)
    registration: Registrar | None = None
    is_registering: bool = False
    recent: FinishedRequests = field(default_factory=FinishedRequests)
    recorder: Recorder = field(default_factory=Recorder)
    created_s: int = 0
    prompt_work: TextWork = field(
        default_factory=lambda: TextWork("prompts", num_threads=2, max_calls=128)
    )
    tool_work: TextWork = field(
        default_factory=lambda: TextWork("tokens", num_threads=1, max_calls=8)
    )

    ignored_fields: set[str] = field(default_factory=set)
    grammar_checks: GrammarChecks | None = None

    @property
    def info(self) -> EngineInfo | None:
        """Description of the engine, once it is ready."""
        info = self.client.info
        if info is None or self.text is None:
            return info
        return msgspec.structs.replace(info, text_digest=self.text.digest)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names this server answers to; the first is the one it reports."""
        model = self.engine_config.model
        return model.served_model_name or (model.model,)

    @property
    def not_ready_reason(self) -> str | None:
        """Reason why no request can be accepted now, if any."""
        if self.client.dead_reason is not None:
            return f"the engine has ended: {without_tracebacks(self.client.dead_reason)}"
        if self.client.stall_reason is not None:
            return self.client.stall_reason
        if self.draining:
            return _LEAVING
        if self.client.info is None or self.text is None:
            return "the engine is starting"
        return None

    @property
    def unready_reason(self) -> str | None:
        """Reason to send no traffic here: not ready, shutting down, or refused by a proxy.

        A refused engine still serves direct requests. A proxy that does not answer is no reason:
        if it waits for ready engines, both would wait for ever.
        """
        refusal = self.registration.refusal if self.registration is not None else None
        return self.not_ready_reason or (_LEAVING if self.is_leaving else refusal)

    def grammars(self, text: Text) -> GrammarChecks:
        """Return the grammar checks; the first call starts loading the tokenizer."""
        if self.grammar_checks is None:
            self.grammar_checks = GrammarChecks(text)
        return self.grammar_checks

    def close_text(self) -> None:
        """Release the threads that work on texts; running work finishes on its own."""
        self.prompt_work.close()
        self.tool_work.close()
        if self.grammar_checks is not None:
            self.grammar_checks.close()

    def resolve_model(self, name: str | None) -> str:
        """Return the name to answer with: the first, whichever was asked for, as vLLM does.

        Raises:
            NotFoundError: No such model here.
        """
        if name and name not in self.model_names:
            known = ", ".join(self.model_names)
            raise NotFoundError(
                f"the model {name!r} does not exist here; this server has: {known}",
                param="model",
                code="model_not_found",
            )
        return self.model_names[0]

    def require_ready(self) -> tuple[Text, EngineInfo]:
        """Return the text side and the engine's description.

        Raises:
            EngineDeadError: The engine has ended.
            UnavailableError: It is not ready yet, or is shutting down.
        """
        reason = self.not_ready_reason
        if self.client.dead_reason is not None:
            raise EngineDeadError(f"the engine has ended: {self.client.dead_reason}")
        if self.text is None or self.client.info is None:
            raise StartingError
        if self.draining:
            raise ShuttingDownError("this engine")
        if reason is not None:
            raise UnavailableError(
                f"{reason}: send the request to another engine; this one recovers or is restarted",
                code="engine_stalled",
            )
        return self.text, self.client.info


SERVICE = web.AppKey("service", Service)
REQUEST_ID = web.RequestKey("request_id", str)
START_S = web.RequestKey("start_s", float)
"""When the request arrived, by the service's monotonic clock."""
UNDO: web.RequestKey[partial[None]] = web.RequestKey("undo", partial)
"""Undoes what a request has begun elsewhere, unless it ends well."""
PROMPT_TOKENS: web.RequestKey[list[list[int]]] = web.RequestKey("prompt_tokens", list)
"""Tokens of its texts that are long enough to be sent to an engine that continues it."""


async def read_body(request: web.Request) -> bytes:
    """Return a request's body; see `Bodies.read`."""
    return await request.app[SERVICE].bodies.read(request)


def request_id_of(request: web.Request) -> str:
    """Return the client's X-Request-Id if it is usable in logs and headers, else a random id."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    if given and len(given) <= _MAX_ID_CHARS and given.isascii() and given.isprintable():
        return given.strip().replace(" ", "-")
    return uuid.uuid4().hex
