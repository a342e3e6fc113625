"""Metrics of HTTP requests under vLLM's names, which are FastAPI instrumentator's.

There is one set of labels for each route, method and class of status, all present from the start.
As in FastAPI instrumentator, probes and scrapes are not counted.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import Counter, Summary

from pdserve.observe.metrics import HistogramFamily
from pdserve.observe.vllm_series import meaning

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from pdserve.http.answers import Handler

_UNCOUNTED = frozenset(
    {"/health", "/livez", "/load", "/metrics", "/pdserve/info", "/ping", "/readyz", "/version"}
)
_NO_ROUTE = "none"
_METHODS = ("GET", "POST", "DELETE")
_OTHER_METHOD = "other"
_STATUSES = ("2xx", "4xx", "5xx")
_BUCKETS_S = (0.1, 0.5, 1.0)
_FINE_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0,
    7.5, 10.0, 30.0, 60.0,
)  # fmt: skip


class HttpSeries:
    """Counts an application's requests; `middleware` must enclose what makes answers of errors."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests",
            meaning("http_requests"),
            ["handler", "method", "status"],
            registry=registry,
        )
        duration, fine = "http_request_duration_seconds", "http_request_duration_highr_seconds"
        self._duration = HistogramFamily(
            duration,
            meaning(duration),
            labels=("handler", "method"),
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._fine = HistogramFamily(
            fine, meaning(fine), buckets=_FINE_BUCKETS_S, registry=registry
        ).of()
        self._request_size, self._response_size = (
            Summary(name, meaning(name), ["handler"], registry=registry)
            for name in ("http_request_size_bytes", "http_response_size_bytes")
        )

    def create(self, app: web.Application) -> None:
        """Create the series of an application's routes; call it after adding all of them."""
        routes = {(_handler_of(route), route.method) for route in app.router.routes()}
        routes |= {(_NO_ROUTE, method) for method in (*_METHODS, _OTHER_METHOD)}
        for handler, method in sorted(routes):
            if handler in _UNCOUNTED or method not in (*_METHODS, _OTHER_METHOD):
                continue
            self._duration.of(handler, method)
            self._request_size.labels(handler)
            self._response_size.labels(handler)
            for status in _STATUSES:
                self._requests.labels(handler, method, status)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count a request and its answer."""
        path = _handler_of(request.match_info.route)
        if path in _UNCOUNTED:
            return await handler(request)
        start_s = time.perf_counter()
        status, size = "4xx", 0  # its client has left
        try:
            response = await handler(request)
            status, size = f"{response.status // 100}xx", response.content_length or 0
            return response
        finally:
            taken_s = time.perf_counter() - start_s
            method = request.method if request.method in _METHODS else _OTHER_METHOD
            self._requests.labels(path, method, status).inc()
            self._duration.of(path, method).observe(taken_s)
            self._fine.observe(taken_s)
            self._request_size.labels(path).observe(request.content_length or 0)
            self._response_size.labels(path).observe(size)


def _handler_of(route: web.AbstractRoute) -> str:
    return _NO_ROUTE if route.resource is None else route.resource.canonical
