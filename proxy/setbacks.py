"""The failures of one request, leg by leg, and whether and when it may be retried.

An engine that broke down comes last from then on. One that is well but could not get the KV does
not: its pair is to blame, and is abandoned. A request whose push failed is pulled from then on.
Retries are counted over all rungs of the ladder. A request is not tried on a third engine if two
died with it without giving a token that the client lacked; nor on a second, if the model gives NaN
for it. One that no engine can serve now waits for one that may come back.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.proxy.errors import (
    BudgetSpentError,
    DrainedError,
    KvFailedError,
    MovedError,
    NonFiniteError,
    PoisonousError,
    RefusedError,
    WorkerError,
)
from pdserve.proxy.story import NotPushed

if TYPE_CHECKING:
    from pdserve.errors import UnavailableError
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.breakers import TransferAttempt
    from pdserve.proxy.services import Services
    from pdserve.proxy.story import Story
    from pdserve.wire.ids import Incarnation

BACKOFF_S = 0.01
MAX_BACKOFF_S = 0.5
STANDBY_S = 0.02
MAX_STANDBY_S = 0.25
"""Between two looks at which engines are there, at first and at most: a thousand may look."""


@dataclass(frozen=True, slots=True)
class LegFailure:
    """A leg that failed.

    Attributes:
        leg: prefill, decode or local.
        was_idle: Whether it was still waiting for another engine's KV, with nothing to compute.
    """

    leg: str
    backend: Backend
    error: WorkerError | RefusedError
    was_idle: bool = False

    @property
    def reason(self) -> str:
        """The cause, one of `metrics.FAILURES`, or for a refusal busy or refused."""
        if isinstance(self.error, RefusedError):
            return "busy" if self.is_busy else "refused"
        return self.error.reason

    @property
    def is_busy(self) -> bool:
        """Whether the engine has no room, which is no failure; another may have some."""
        return isinstance(self.error, RefusedError) and self.error.status == 429

    @property
    def is_moved(self) -> bool:
        """Whether the engine has given a handoff, from which another one continues."""
        return isinstance(self.error, MovedError)

    @property
    def is_drained(self) -> bool:
        """Whether the engine is well, and the request was taken away from it."""
        return isinstance(self.error, DrainedError)

    @property
    def is_kv(self) -> bool:
        """Whether the engine is well and only the KV did not arrive."""
        return isinstance(self.error, KvFailedError)

    @property
    def load_failures(self) -> tuple[str, ...]:
        """Labels of the KV loads that failed there, if it gives them."""
        return self.error.load_failures if isinstance(self.error, KvFailedError) else ()

    def blame(self, transfer: TransferAttempt) -> None:
        """Blame the pair, not an engine, if the KV did not arrive."""
        if isinstance(self.error, KvFailedError):
            transfer.failed(self.error, kind=self.leg)


class Setbacks:
    """The failed legs of one request.

    Args:
        is_pushable: Whether its KV may be pushed if nothing has failed.

    Attributes:
        failed: Engines that broke down, or had no room.
        may_push: Whether its KV may be pushed.
        retries_left: Below 0 once no other attempt may be made.
        num_waits: Number of waits for an engine.
    """

    def __init__(self, services: Services, story: Story, *, is_pushable: bool) -> None:
        self._backends = services.backends
        self._checks = services.checks
        self._metrics = services.metrics
        self._config = services.config
        self._story = story
        self._is_pushable = is_pushable
        self._ended: set[tuple[str, Incarnation | None]] = set()
        self._num_tokens_before = 0
        self._waits_until_s = float("inf")
        self.failed: set[Backend] = set()
        self.may_push = self._is_pushable
        self.retries_left = self._config.retry_max_retries
        self.num_waits = 0

    @property
    def why_pulled(self) -> NotPushed | None:
        """The reason why it may not be pushed; None if it may."""
        if self.may_push:
            return None
        return NotPushed.FAILED if self._is_pushable else NotPushed.REQUEST

    async def add(self, failure: LegFailure) -> bool:
        """Note a failed leg; return whether another attempt may be made.

        If an engine has ended, others may have ended with it. All are checked, so that an engine
        already gone is not tried and its end blamed on the request. The request is not blamed,
        either, for an engine that ends while waiting for another's KV.

        Raises:
            NonFiniteError: The model gives NaN for the request.
            PoisonousError: Two engines have ended with it.
        """
        backend, error = failure.backend, failure.error
        if isinstance(error, RefusedError) and not failure.is_busy:
            self._story.is_refused = True
            return False
        if failure.is_kv:
            self.may_push = False
        else:
            self.failed.add(backend)
        self._story.tell(f"{failure.leg} at {backend.url} failed: {failure.reason}")
        if isinstance(error, NonFiniteError):
            raise error
        if isinstance(error, WorkerError) and error.is_end:
            if not failure.was_idle:
                self._note_end(backend)
            await self._checks.look_again(frozenset(self._backends))
        if isinstance(error, BudgetSpentError | DrainedError):
            return True  # of its own will: no engine is asked again, whatever is left of retries
        self.retries_left -= 1
        return self.retries_left >= 0

    async def pause(self, leg: str) -> None:
        """Count another attempt at a leg, and give the engines a moment before it."""
        self._metrics.retries.labels(leg).inc()
        num_tried = self._config.retry_max_retries - self.retries_left
        await asyncio.sleep(min(MAX_BACKOFF_S, BACKOFF_S * 2 ** (num_tried - 1)))

    async def stand_by(self, error: UnavailableError | WorkerError) -> None:
        """Wait until an engine comes, or has budget for such prompts again.

        Raises:
            UnavailableError, WorkerError: `error` itself, if it does not mean that no engine can
                serve now, if no engine is missing, or if the wait is over.
        """
        if isinstance(error, WorkerError) and not error.is_away:
            raise error
        now_s = asyncio.get_running_loop().time
        if not self.num_waits:
            self._waits_until_s = now_s() + self._config.queue_timeout_s
        before = self._backends.available
        await self._checks.look_again(self.failed)
        if not self._backends.has_missing and self._backends.available <= before:
            raise error
        before &= self._backends.available
        until_s = self._waits_until_s
        if isinstance(error, BudgetSpentError):
            wait_s = max(1.0, error.retry_after_s or 0.0) * 2**self.num_waits
            until_s = min(until_s, now_s() + wait_s)
        self.num_waits += 1
        self._story.stands_by(error.message)
        pause_s = STANDBY_S
        backends = self._backends
        while now_s() < until_s and backends.has_missing and backends.available <= before:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_STANDBY_S)
        if now_s() >= self._waits_until_s:
            raise error
        self._story.stood_by()

    def _note_end(self, backend: Backend) -> None:
        """Note an engine that ended with the request; a second one counts against the request.

        Raises:
            PoisonousError: It is the second.
        """
        num_tokens = self._story.num_output_tokens
        if num_tokens > self._num_tokens_before:
            self._num_tokens_before = num_tokens
            return
        life = None if backend.info is None else backend.info.incarnation
        self._ended.add((backend.url, life))
        if len(self._ended) > 1:
            urls = " and ".join(sorted(url for url, _ in self._ended))
            raise PoisonousError(
                "two engines ended or stopped answering with this request: no third one gets it",
                detail=f"{urls} ended while they had this request",
            )
