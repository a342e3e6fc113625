"""Attempts: exchanges with one engine, hand-overs between two, and what each says about them.

A breaker is made with its engine or pair (`backends`); all that happens to it afterwards happens
here. An attempt ends well, or fails, or ends without saying anything: its leg was given up, or
the request itself was refused (4xx). Whatever is held against an engine or a pair is counted and
logged in the same place, also if nobody waits for the attempt any more. Sends nothing.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pdserve.observe.log import log_event
from pdserve.proxy.errors import KvFailedError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.proxy.backend import Backend
    from pdserve.proxy.backends import Backends
    from pdserve.proxy.breaker import Breaker
    from pdserve.proxy.client import Leg
    from pdserve.proxy.metrics import Metrics
    from pdserve.wire.transfer import KVMode

log = logging.getLogger(__name__)


class Attempts:
    """Begins and ends the attempts of all requests."""

    def __init__(self, backends: Backends, metrics: Metrics) -> None:
        self._backends = backends
        self._metrics = metrics

    @contextmanager
    def exchange(
        self, backend: Backend, leg: Leg, *, kind: str, request_id: str
    ) -> Iterator[Exchange]:
        """Count a leg towards its engine's load and, by how the block ends, its breaker.

        KV that did not arrive says nothing about the engine: see `HandOver`.

        Args:
            kind: One of `metrics.LEGS`.
        """
        breaker = backend.breaker  # of this life: a restarted engine gets another one
        backend.in_flight += 1
        backend.legs.add(leg)
        breaker.begin()
        try:
            yield Exchange(breaker)
        except KvFailedError:
            raise
        except WorkerError as failure:
            if failure.blames_engine:
                breaker.fail()
            _note(self._metrics, kind, backend.url, failure, request_id)
            raise
        finally:
            breaker.leave()
            backend.legs.discard(leg)
            backend.in_flight -= 1

    @contextmanager
    def hand_over(
        self, prefill: Backend, decode: Backend, mode: KVMode, *, request_id: str
    ) -> Iterator[HandOver]:
        """Let KV go from one engine to another while the block runs."""
        edge = self._backends.edge(prefill, decode, mode)
        edge.begin()
        try:
            yield HandOver(edge, self._metrics, prefill.url, decode.url, request_id)
        finally:
            edge.leave()


class Exchange:
    """A request's hold on an engine while a leg runs there."""

    def __init__(self, breaker: Breaker) -> None:
        self._breaker = breaker
        self._is_ok = False

    def ok(self) -> None:
        """The engine answers as it should; said once per leg, when it begins to."""
        if not self._is_ok:
            self._is_ok = True
            self._breaker.succeed()


class HandOver:
    """One way of one request's KV over a pair of engines."""

    def __init__(
        self, edge: Breaker, metrics: Metrics, prefill_url: str, decode_url: str, request_id: str
    ) -> None:
        self._edge = edge
        self._metrics = metrics
        self._prefill_url = prefill_url
        self._decode_url = decode_url
        self._request_id = request_id

    def arrived(self) -> None:
        """The KV got there."""
        self._edge.succeed()

    def failed(self, failure: KvFailedError, *, kind: str) -> None:
        """An engine says in place of an answer that the KV did not get there.

        Args:
            kind: Its leg, one of `metrics.LEGS`.
        """
        url = self._prefill_url if kind == "prefill" else self._decode_url
        _note(self._metrics, kind, url, failure, self._request_id)
        self.lost(failure.load_failures or (failure.reason,))

    def lost(self, reasons: tuple[str, ...]) -> None:
        """KV did not get there, for these reasons, whatever became of the request."""
        self._edge.fail()
        self._metrics.kv_load_failures.inc(len(reasons))
        log_event(
            log,
            "kv load failed",
            level=logging.WARNING,
            prefill=self._prefill_url,
            decode=self._decode_url,
            reasons=",".join(reasons),
            request=self._request_id,
        )


def _note(metrics: Metrics, kind: str, url: str, failure: WorkerError, request_id: str) -> None:
    metrics.leg_failures.labels(kind, failure.reason).inc()
    log_event(
        log,
        "leg failed",
        level=logging.WARNING,
        leg=kind,
        engine=url,
        reason=failure.reason,
        request=request_id,
        error=str(failure),
    )
