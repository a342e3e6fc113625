"""Limits how many requests run at once, how many may wait, and for how long.

Knows only numbers and time; `FairPlaces` says which of the waiting requests comes next.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from pdserve.errors import OverloadedError
from pdserve.proxy.brain.fairness import Claim, FairPlaces

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

RETRY_AFTER_S = 1.0


class AdmissionQueue:
    """Places for running requests, with a bounded queue in front of them.

    Args:
        max_concurrent: Requests that may run at once.
        queue_size: Requests that may wait for a place.
        queue_timeout_s: How long one may wait.

    Attributes:
        places: Who has them, and who waits.
    """

    def __init__(self, max_concurrent: int, queue_size: int, queue_timeout_s: float) -> None:
        self._max_concurrent = max_concurrent
        self._queue_size = queue_size
        self._queue_timeout_s = queue_timeout_s
        self.places = FairPlaces(max_concurrent, _now_s)
        self._waiters: dict[Claim, asyncio.Future[bool]] = {}

    @property
    def num_running(self) -> int:
        """Requests that hold a place."""
        return self.places.num_running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self.places.num_waiting

    @asynccontextmanager
    async def place(self, claim: Claim | None = None) -> AsyncIterator[HeldPlace]:
        """Hold a place while the block runs.

        Raises:
            OverloadedError: The queue is full, or the wait was too long.
        """
        claim = claim or Claim()
        await self._acquire(claim)
        place = HeldPlace()
        try:
            yield place
        finally:
            self.places.take_back(claim, place.cost)

    def require_room(self, tenant: str = "") -> None:
        """Check that one more request of a tenant may run or wait.

        Raises:
            OverloadedError: It would be refused now.
        """
        is_full = self.num_waiting >= self._queue_size
        is_busy = self.num_running >= self._max_concurrent or self.num_waiting > 0
        if is_full and is_busy and self.places.newest_of_greediest(tenant) is None:
            raise OverloadedError(
                f"{self.num_running} requests run and {self.num_waiting} wait: try again later",
                retry_after_s=RETRY_AFTER_S,
            )

    def look(self) -> None:
        """Look again at the requests that wait: what they wait for may have come."""
        self.places.look()

    async def _acquire(self, claim: Claim) -> None:
        self.require_room(claim.tenant)
        if self.num_waiting >= self._queue_size:
            self._turn_away(claim.tenant)
        waiter = self._waiters[claim] = asyncio.get_running_loop().create_future()
        claim.grant = lambda: self._granted(claim)
        try:
            self.places.ask(claim)
            async with asyncio.timeout(self._queue_timeout_s):
                has_place = await waiter
        except TimeoutError:
            self._give_up(claim)
            raise OverloadedError(
                f"no place within {self._queue_timeout_s:g} s: try again later",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        except asyncio.CancelledError:
            self._give_up(claim)
            raise
        finally:
            del self._waiters[claim]
        if not has_place:
            raise OverloadedError(
                "others wait, who have asked for less: try again later",
                retry_after_s=RETRY_AFTER_S,
            )

    def _turn_away(self, tenant: str) -> None:
        """Make room in the queue for one more request of a tenant, if another one takes it all."""
        victim = self.places.newest_of_greediest(tenant)
        if victim is not None:
            self.places.withdraw(victim)
            if not self._waiters[victim].done():
                self._waiters[victim].set_result(False)

    def _granted(self, claim: Claim) -> None:
        waiter = self._waiters[claim]
        if not waiter.done():
            waiter.set_result(True)

    def _give_up(self, claim: Claim) -> None:
        """Leave the queue; pass on a place that was granted in the same moment."""
        if claim.is_running:
            self.places.take_back(claim, 0.0)
        elif claim.is_waiting:
            self.places.withdraw(claim)


class HeldPlace:
    """A place that a request has.

    Attributes:
        cost: What it has taken, to be set before the place is left; None: as expected.
    """

    def __init__(self) -> None:
        self.cost: float | None = None


def _now_s() -> float:
    return asyncio.get_running_loop().time()
