"""One request's exchange with a gateway: its events in, answers to them out.

The request's headers are answered once its body has arrived, since the body contains the question;
then the body goes back to the gateway unchanged. Only the start of the answer matters: it shows
that the prompt has been computed. Knows neither gRPC nor sockets.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from aiohttp import hdrs
from multidict import CIMultiDict
from prometheus_client import Histogram

from pdserve.dialects.paths import error_of
from pdserve.errors import PdserveError, UnavailableError
from pdserve.http.answers import error_body, error_headers
from pdserve.observe.log import log_event
from pdserve.observe.metrics import counter_of
from pdserve.proxy.epp.messages import (
    BodyMode,
    MessagePart,
    ProcessingEvent,
    body_chunks,
    go_on,
    go_to,
    refuse,
)
from pdserve.proxy.epp.picking import GatewayRequest
from pdserve.wire.hop import (
    PREFILL_HEADER,
    PREFILL_ORDERS,
    REQUEST_ID_HEADER,
    TIME_LEFT_HEADER,
    YIELDS_HEADER,
    PrefillOrder,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from prometheus_client import CollectorRegistry

    from pdserve.proxy.epp.picking import Pick, Picker
    from pdserve.proxy.services import Services

log = logging.getLogger(__name__)


_OUTCOMES = ("pair", "one", "client_error", "shed", "unavailable", "error")
_OF_STATUS = {429: "shed", 503: "unavailable"}
_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)


class GatewayExchange:
    """See the module.

    Args:
        metrics: Counts what was picked.
    """

    def __init__(self, services: Services, picker: Picker, metrics: EppMetrics) -> None:
        self._services = services
        self._picker = picker
        self._metrics = metrics
        self._clock = services.clock
        self._held = AsyncExitStack()
        self._begun: ProcessingEvent | None = None
        self._body = bytearray()
        self._pick: Pick | None = None

    async def replies(self, events: AsyncIterator[ProcessingEvent]) -> AsyncGenerator[bytes, None]:
        """Yield the answers to a stream's events; ends with a refusal if it cannot be served."""
        async with self._held:
            count_body = self._held.enter_context(self._services.bodies.counted())
            try:
                async for event in events:
                    for reply in await self._replies_to(event, count_body):
                        yield reply
            except PdserveError as error:
                yield self._refusal(error)

    async def _replies_to(
        self, event: ProcessingEvent, count_body: Callable[[int], None]
    ) -> list[bytes]:
        match event.part:
            case MessagePart.REQUEST_HEADERS:
                return await self._begin(event)
            case MessagePart.REQUEST_BODY:
                self._body += event.body
                count_body(len(self._body))
                return await self._picked(event.part, is_end=True) if event.is_end else []
            case MessagePart.REQUEST_TRAILERS:
                picked = []
                if self._pick is None:
                    picked = await self._picked(MessagePart.REQUEST_BODY, is_end=False)
                return [*picked, go_on(event.part)]
            case MessagePart.RESPONSE_HEADERS:
                if self._pick is not None:
                    self._pick.computed()
                return [go_on(event.part)]
            case MessagePart.RESPONSE_BODY:
                if self._mode(is_request=False) is BodyMode.FULL_DUPLEX_STREAMED:
                    return body_chunks(event.part, event.body, is_end=event.is_end)
                return [go_on(event.part)]
            case MessagePart.RESPONSE_TRAILERS:
                return [go_on(event.part)]

    async def _begin(self, event: ProcessingEvent) -> list[bytes]:
        """Take a request's headers; answer them if nothing follows.

        Raises:
            PdserveError: The gateway does not pass bodies on in the required mode.
        """
        self._begun = event
        mode = self._mode(is_request=True)
        if event.is_end or mode is BodyMode.NONE:
            return (await self._picked(MessagePart.REQUEST_BODY, is_end=True))[:1]
        if mode is not BodyMode.FULL_DUPLEX_STREAMED:
            raise PdserveError(
                f"the gateway sends request bodies in mode {mode.name}: its ext_proc filter needs "
                "request_body_mode FULL_DUPLEX_STREAMED and request_trailer_mode SEND"
            )
        return []

    def _mode(self, *, is_request: bool) -> BodyMode:
        """Return how bodies are passed on; by default, as the protocol requires."""
        begun = self._begun
        mode = None
        if begun is not None:
            mode = begun.request_body_mode if is_request else begun.response_body_mode
        return mode or BodyMode.FULL_DUPLEX_STREAMED

    async def _picked(self, part: MessagePart, *, is_end: bool) -> list[bytes]:
        """Pick engines; return the answer to the headers, and the body's.

        Raises:
            PdserveError: No engine is available, or the request is invalid.
        """
        if self._begun is None:
            raise PdserveError(
                "the gateway sends no request headers: set request_header_mode SEND in its "
                "ext_proc filter"
            )
        body = bytes(self._body)
        self._body.clear()
        headers = CIMultiDict(self._begun.headers)
        request = GatewayRequest(headers, body, self._begun.subset)
        start_s = self._clock.monotonic_s()
        pick = self._pick = await self._picker.pick(request, self._held)
        self._held.callback(pick.close)
        self._metrics.picked(pick, self._clock.monotonic_s() - start_s)
        config = self._services.config
        added = {TIME_LEFT_HEADER.lower(): f"{config.request_timeout_s:.3f}"}
        if pick.prefill is not None:
            order = PrefillOrder(pick.prefill.url)
            added[PREFILL_HEADER.lower()] = PREFILL_ORDERS.seal(order, config.secret)
        if pick.yields_s:
            added[YIELDS_HEADER.lower()] = f"{pick.yields_s:g}"
        self._tell(pick)
        ours = (PREFILL_HEADER.lower(), YIELDS_HEADER.lower())
        without = [each for each in ours if each not in added]
        return [
            go_to(pick.endpoints, added, without),
            *body_chunks(part, body, is_end=is_end),
        ]

    def _tell(self, pick: Pick) -> None:
        assert self._begun is not None
        log_event(
            log,
            "picked",
            level=logging.DEBUG,
            request=self._begun.headers.get(REQUEST_ID_HEADER.lower(), ""),
            endpoints=",".join(pick.endpoints),
            prefill=pick.prefill.url if pick.prefill is not None else "",
            reason=pick.reason,
        )

    def _refusal(self, error: PdserveError) -> bytes:
        """Return an error answer in the form that clients of the path expect."""
        self._metrics.refused(error)
        headers = {} if self._begun is None else self._begun.headers
        path = headers.get(":path", "").partition("?")[0]
        request_id = headers.get(REQUEST_ID_HEADER.lower(), "")
        is_outage = isinstance(error, UnavailableError) or error.status >= 500
        log_event(
            log,
            "request refused",
            level=logging.WARNING if is_outage else logging.DEBUG,
            request=request_id,
            status=error.status,
            reason=error.error_code,
        )
        body = error_of(path, error.status, error_body(error))
        fields = {hdrs.CONTENT_TYPE.lower(): "application/json"}
        fields |= {name.lower(): value for name, value in error_headers(error).items()}
        if request_id:
            fields[REQUEST_ID_HEADER.lower()] = request_id
        return refuse(error.status, fields, body, f"pdserve_{error.error_code}")


class EppMetrics:
    """Metrics that exist only where gateways are answered."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._picks = counter_of(
            registry,
            "pdserve_epp_picks",
            "Requests of gateways: engines picked (pair: two; one), or refused, and why.",
            outcome=_OUTCOMES,
        )
        self._seconds = Histogram(
            "pdserve_epp_pick_seconds",
            "From the end of a request's body to the choice of its engines, the wait for a place "
            "included.",
            buckets=_BUCKETS_S,
            registry=registry,
        )

    def picked(self, pick: Pick, seconds: float) -> None:
        """Count a request that got its engines."""
        self._picks.labels("one" if pick.prefill is None else "pair").inc()
        self._seconds.observe(seconds)

    def refused(self, error: PdserveError) -> None:
        """Count a request that was refused."""
        other = "error" if error.status >= 500 else "client_error"
        self._picks.labels(_OF_STATUS.get(error.status, other)).inc()
