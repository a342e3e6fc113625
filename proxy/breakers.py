"""The circuit breakers of engines and of pairs of engines, and the attempts that move them.

An engine has one for each of its lives. A pair of a prefill and a decode engine has two, because
two healthy engines may be unable to reach each other: one for pulls and one for pushes, which need
not fail together.

An attempt succeeds, fails, or ends without evidence: its leg was given up, or the request itself
was refused (4xx). Every failure held against an engine or a pair is counted and logged here, even
if the request no longer waits for the attempt. Sends nothing.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from pdserve.observe.log import log_event
from pdserve.proxy.backend import Breaker, BreakerState
from pdserve.proxy.errors import DrainedError, KvFailedError, MovedError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.config.http import ProxyConfig
    from pdserve.observe.clock import Clock
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.leg import Leg
    from pdserve.proxy.metrics import Metrics
    from pdserve.proxy.story import Story
    from pdserve.wire.transfer import KVMode

log = logging.getLogger(__name__)

_Pair: TypeAlias = "tuple[str, str, KVMode]"
"""URLs of a prefill and a decode engine, and who moves the KV."""


class Breakers:
    """All breakers of one proxy; starts and ends the attempts of all requests."""

    def __init__(self, config: ProxyConfig, clock: Clock, metrics: Metrics) -> None:
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._pairs: dict[_Pair, Breaker] = {}
        self._failing: set[_Pair] = set()

    def for_engine(self) -> Breaker:
        """Return a new breaker for an engine, without failures."""
        return Breaker(self._clock, self._config.cb_failure_threshold, self._config.cb_timeout_s)

    def renew(self, backend: Backend) -> None:
        """Reset the breakers of a restarted engine and of its pairs."""
        backend.breaker = self.for_engine()
        self.forget_pairs(backend.url)

    def forget_pairs(self, url: str) -> None:
        """Drop the breakers of all pairs that include the engine at `url`."""
        for pair in [pair for pair in self._pairs if url in pair]:
            del self._pairs[pair]

    def lets_through(self, prefill: Backend, decode: Backend, mode: KVMode) -> bool:
        """Return whether KV may now go from one engine to the other in this mode."""
        breaker = self._pairs.get((prefill.url, decode.url, mode))
        return breaker is None or breaker.allows

    def open_pairs(self) -> list[tuple[str, str, KVMode, BreakerState]]:
        """Return the breakers of pairs that are not closed: (prefill, decode, mode, state).

        It looks only at pairs that have failed, since hundreds of engines are many pairs.
        """
        found: list[tuple[str, str, KVMode, BreakerState]] = []
        for pair in list(self._failing):
            breaker = self._pairs.get(pair)
            if breaker is None or not breaker.num_failures:
                self._failing.discard(pair)
            elif breaker.state is not BreakerState.CLOSED:
                found.append((*pair, breaker.state))
        return found

    @property
    def num_open_pairs(self) -> int:
        """Number of pairs with a breaker that is not closed."""
        return len({(prefill, decode) for prefill, decode, _, _ in self.open_pairs()})

    def _of_pair(self, prefill: Backend, decode: Backend, mode: KVMode) -> Breaker:
        """Return the breaker of a pair; a temporary one if an engine is gone."""
        key = (prefill.url, decode.url, mode)
        breaker = self._pairs.get(key) or self.for_engine()
        if not (prefill.is_gone or decode.is_gone):
            self._pairs[key] = breaker
        return breaker

    @contextmanager
    def exchange(
        self, backend: Backend, leg: Leg, *, kind: str, num_tokens: int = 0
    ) -> Iterator[Breaker]:
        """Count a leg in its engine's load and, depending on how the block ends, in its breaker.

        KV that did not arrive says nothing about the engine: see `TransferAttempt`.

        Args:
            kind: One of `metrics.LEGS`.
            num_tokens: Its contribution to `Backend.pending_tokens`.

        Yields:
            That breaker; `succeed` is called once, when the engine begins a proper answer.
        """
        breaker = backend.breaker  # of this life: a restarted engine gets another one
        backend.in_flight += 1
        backend.pending_tokens += num_tokens
        backend.legs.add(leg)
        trial_s = breaker.begin()
        try:
            yield breaker
        except (KvFailedError, MovedError):
            raise
        except DrainedError:
            self._metrics.migrations.labels("drain", "replayed").inc()
            raise
        except WorkerError as failure:
            if failure.blames_engine:
                breaker.fail()
            _note(self._metrics, kind, backend.url, failure, leg.request_id)
            raise
        finally:
            breaker.leave(trial_s)
            backend.legs.discard(leg)
            backend.in_flight -= 1
            backend.pending_tokens -= num_tokens

    @contextmanager
    def transfer(
        self, prefill: Backend, decode: Backend, mode: KVMode, story: Story
    ) -> Iterator[TransferAttempt]:
        """Let KV go from one engine to another while the block runs."""
        breaker = self._of_pair(prefill, decode, mode)
        attempt = TransferAttempt(
            breaker, self._failing, self._metrics, prefill, decode, mode, story
        )
        try:
            yield attempt
        finally:
            attempt.end()


class TransferAttempt:
    """One attempt to get one request's KV from one engine to another.

    Attributes:
        mode: Which engine moves the KV.
    """

    def __init__(
        self,
        breaker: Breaker,
        failing: set[_Pair],
        metrics: Metrics,
        prefill: Backend,
        decode: Backend,
        mode: KVMode,
        story: Story,
    ) -> None:
        self._breaker = breaker
        self._failing = failing
        self._trial_s = breaker.begin()
        self._is_lost = False
        self._metrics = metrics
        self._prefill_url = prefill.url
        self._decode_url = decode.url
        self._story = story
        self.mode = mode

    def end(self) -> None:
        """Note that no KV is in transit any more; may be repeated."""
        self._breaker.leave(self._trial_s)

    def report(self, *, has_come: bool, load_failures: tuple[str, ...], at_s: float) -> None:
        """Note what the decode engine reports once it needs no more KV; may be repeated.

        Args:
            has_come: Whether there was KV to transfer, and it arrived.
            load_failures: Loads that failed before that.
            at_s: When (monotonic seconds).
        """
        self.end()
        if load_failures:
            self.lost(load_failures)
        elif has_come:
            self._breaker.succeed(at_s)

    def failed(self, failure: KvFailedError, *, kind: str) -> None:
        """Note that an engine reports, in place of an answer, that the KV did not arrive.

        Args:
            kind: Its leg, one of `metrics.LEGS`.
        """
        url = self._prefill_url if kind == "prefill" else self._decode_url
        _note(self._metrics, kind, url, failure, self._story.request_id)
        self.lost(failure.load_failures or (failure.reason,))

    def lost(self, reasons: tuple[str, ...]) -> None:
        """Note why KV did not arrive, however the request ended; once."""
        if self._is_lost:
            return
        self._is_lost = True
        self._breaker.fail()
        self._failing.add((self._prefill_url, self._decode_url, self.mode))
        self._metrics.kv_load_failures.inc(len(reasons))
        log_event(
            log,
            "kv load failed",
            level=logging.WARNING,
            prefill=self._prefill_url,
            decode=self._decode_url,
            reasons=",".join(reasons),
            request=self._story.request_id,
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
