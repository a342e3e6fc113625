"""Gives out places: by priority band, then to the tenant that has had the least.

Each tenant has a counter of the work it has received (VTC, "Fairness in Serving Large Language
Models", OSDI 2024): prompt tokens that had to be computed, and each output token twice. The tenant
with the lowest counter goes next; a tenant that returns from a pause starts at the lowest counter
of the others, so that pauses earn no credit. A request's expected cost is counted when it begins
and corrected when it ends. The requests of one tenant are served first come, first served.

Requests with a priority below 0 are critical, those above 0 sheddable. A band goes before the next
one, and has places reserved from it: the fuller the proxy, the fewer places lower bands may take.
A waiting request rises a band every half minute.

`FairPlaces` makes these decisions with the clock it is given; `AdmissionQueue` makes requests wait
for them, with limits on the queue's length and on the time in it.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict, deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from pdserve.errors import OverloadedError
from pdserve.proxy.shares import RecentWork

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from pdserve.proxy.brain.question import PairDecision

T = TypeVar("T")

OUTPUT_WEIGHT: Final = 2.0
"""Of an output token, where a prompt token that is computed counts 1."""
CRITICAL, STANDARD, SHEDDABLE = -1, 0, 1
RISE_S: Final = 30.0
_PACE_S: Final = 2.0
_EXPECTED_S: Final = 0.5
"""Over how long it is counted what those who wait get, and how much what was expected counts."""
_MAX_IDLE_TENANTS: Final = 4096


def band_of(priority: int) -> int:
    """Return the band of a request's priority; as in vLLM, a lower number goes earlier."""
    return max(CRITICAL, min(SHEDDABLE, priority))


def always(is_over_share: bool) -> bool:
    """Let a request begin whenever there is a place."""
    return True


@dataclass(slots=True, eq=False)
class Claim:
    """A request's claim to a place.

    Attributes:
        tenant: The tenant that sent the request.
        cost: Its expected cost, as far as known, in prompt tokens.
        num_tokens: The prompt's part of `cost`.
        is_ready: Returns whether it should begin now; the argument is whether its tenant has
            clearly exceeded its share recently. Called again at each `look`.
        goes_round: Whether it needs nothing that its tenant's other requests wait for.
        decision: The choice of engines on which it may begin now; None: it is still to be made.
        grant: Called once, when it gets a place. What it sends to engines is to be counted there,
            since other claims are looked at next.
        spent: Its actual cost, to be set before the place is given up; None: as expected.
    """

    tenant: str = ""
    band: int = STANDARD
    cost: float = 1.0
    num_tokens: float = 0.0
    is_ready: Callable[[bool], bool] = always
    goes_round: bool = False
    decision: PairDecision | None = None
    grant: Callable[[], None] = lambda: None
    spent: float | None = field(default=None, init=False)
    since_s: float = field(default=0.0, init=False)
    has_waited: bool = field(default=False, init=False)
    is_waiting: bool = field(default=False, init=False)
    is_running: bool = field(default=False, init=False)

    def band_at(self, now_s: float) -> int:
        """Return its band, after the rises for waiting."""
        return max(CRITICAL, self.band - int((now_s - self.since_s) / RISE_S))


class FairPlaces:
    """The places, their holders, and the waiting requests.

    Args:
        max_running: Number of places.
        now_s: Monotonic time.
    """

    def __init__(self, max_running: int, now_s: Callable[[], float]) -> None:
        self._max_running = max_running
        self._now_s = now_s
        self._counters: OrderedDict[str, float] = OrderedDict()
        self._recent = RecentWork()
        self._waiting: dict[tuple[str, int], deque[Claim]] = {}
        self._num_of: Counter[str] = Counter()
        self._num_in_band: Counter[int] = Counter()
        self._is_looking = False
        self._pace = _Pace()
        self.num_running = 0
        self.num_waiting = 0

    def ask(self, claim: Claim) -> None:
        """Give a claim a place now, or let it wait."""
        self._come(claim)
        claim.since_s = self._now_s()
        self._pace.go_on(claim.since_s, is_waited=self.num_waiting > 0)
        self._waiting.setdefault((claim.tenant, claim.band), deque()).append(claim)
        claim.is_waiting = True
        self.num_waiting += 1
        if claim.goes_round and self.num_running < self._ceiling(claim.band):
            self._grant(claim)
        self.look()
        claim.has_waited = claim.is_waiting
        if claim.is_waiting:
            claim.decision = None

    def withdraw(self, claim: Claim) -> None:
        """Remove a waiting claim."""
        self._forget(claim)
        self._leave(claim)
        self.look()

    def take_back(self, claim: Claim, cost: float | None = None) -> None:
        """Take a place back.

        Args:
            cost: The request's actual cost; None: as expected.
        """
        self.num_running -= 1
        if cost is not None:
            self._count(claim.tenant, cost - claim.cost)
        self._leave(claim)
        self.look()

    def look(self) -> None:
        """Give places to claims that may begin now, as there may be more room than before."""
        if self._is_looking:  # granting a place may change the conditions evaluated here
            return
        self._is_looking = True
        try:
            while (claim := self._next()) is not None:
                self._grant(claim)
        finally:
            self._is_looking = False

    def newest_of_greediest(self, tenant: str) -> Claim | None:
        """Return the claim to evict from a full queue for a tenant; None: no tenant has enough."""
        waiting: Counter[str] = Counter()
        for (name, _), queue in self._waiting.items():
            waiting[name] += len(queue)
        if not waiting:
            return None
        greediest, number = waiting.most_common(1)[0]
        if number <= waiting[tenant] + 1:
            return None
        bands = [band for name, band in self._waiting if name == greediest]
        return self._waiting[greediest, max(bands)][-1]

    def tokens_before(self, tenant: str) -> float:
        """Return prompt tokens before a tenant's next request: its own, as many of each other."""
        waiting: dict[str, float] = {}
        for (name, _), queue in self._waiting.items():
            waiting[name] = waiting.get(name, 0.0) + sum(claim.num_tokens for claim in queue)
        own = waiting.get(tenant, 0.0)
        return sum(min(own, tokens) for tokens in waiting.values())

    def wait_s(self, tenant: str, expected_s: Callable[[float], float]) -> float:
        """Return the seconds that a tenant's next request would wait, at the recent pace.

        Senders unknown to this proxy may hold part of the capacity that is waited for.

        Args:
            expected_s: Returns how long that many prompt tokens would wait, without such senders.
        """
        before = self.tokens_before(tenant)
        if not before:
            return 0.0
        expected = expected_s(before)
        self._pace.go_on(self._now_s(), is_waited=True)
        pace = self._pace
        passed_s, worth_s = pace.seconds, pace.tokens * expected / before
        return expected * (passed_s + _EXPECTED_S) / (worth_s + _EXPECTED_S)

    def is_held_back(self, tenant: str) -> bool:
        """Return whether a tenant's requests wait for idle engines although places are free."""
        return self.num_running < self._max_running and self.is_over_share(tenant)

    def is_over_share(self, tenant: str) -> bool:
        """Return whether a tenant has clearly exceeded its share of recent work."""
        return self._recent.is_over_share(tenant, self._now_s())

    def _come(self, claim: Claim) -> None:
        tenant = claim.tenant
        if tenant not in self._num_of:
            former = self._counters.pop(tenant, 0.0)
            self._counters[tenant] = max(former, self._least())
        self._num_of[tenant] += 1
        self._num_in_band[claim.band] += 1

    def _leave(self, claim: Claim) -> None:
        _take_one(self._num_of, claim.tenant)
        _take_one(self._num_in_band, claim.band)
        idle = len(self._counters) - len(self._num_of)
        if idle > _MAX_IDLE_TENANTS:
            oldest = next(name for name in self._counters if name not in self._num_of)
            del self._counters[oldest]

    def _count(self, tenant: str, cost: float) -> None:
        self._counters[tenant] += cost
        self._recent.add(tenant, cost, self._now_s())

    def _least(self) -> float:
        """Return the lowest counter among the tenants present."""
        return min((self._counters[name] for name in self._num_of), default=0.0)

    def _next(self) -> Claim | None:
        """Return the claim that gets the next place; O(waiting tenants)."""
        if not self.num_waiting or self.num_running >= self._max_running:
            return None
        now_s = self._now_s()
        claim = min(self._heads(), key=lambda each: self._rank(each, now_s))
        if self.num_running >= self._ceiling(claim.band_at(now_s)):
            return None
        is_over = self.is_over_share(claim.tenant)
        if claim.is_ready(is_over):
            return claim
        if not is_over:
            return None
        # While it is held for an idle engine, tenants within their share pass.
        within = [each for each in self._heads() if not self.is_over_share(each.tenant)]
        after = min(within, key=lambda each: self._rank(each, now_s), default=None)
        if after is None or after.band_at(now_s) > claim.band_at(now_s):
            return None
        return after if after.is_ready(False) else None

    def _heads(self) -> Iterator[Claim]:
        return (queue[0] for queue in self._waiting.values())

    def _rank(self, claim: Claim, now_s: float) -> tuple[int, float, float]:
        return claim.band_at(now_s), self._counters[claim.tenant], claim.since_s

    def _ceiling(self, band: int) -> float:
        """Return how many places a band may fill; the highest band present may fill all."""
        higher = sum(1 for each in self._num_in_band if each < band)
        if not higher:
            return self._max_running
        others = max(1, len(self._num_in_band) - 1)
        return max(1.0, self._max_running - self.num_running * min(1.0, higher / others))

    def _grant(self, claim: Claim) -> None:
        self._forget(claim)
        if claim.has_waited:
            self._pace.tokens += claim.num_tokens
        self.num_running += 1
        claim.is_running = True
        self._count(claim.tenant, claim.cost)
        claim.grant()

    def _forget(self, claim: Claim) -> None:
        """Remove a claim from the waiting ones."""
        self._pace.go_on(self._now_s(), is_waited=True)
        queue = self._waiting[claim.tenant, claim.band]
        queue.remove(claim)
        if not queue:
            del self._waiting[claim.tenant, claim.band]
        claim.is_waiting = False
        self.num_waiting -= 1


class AdmissionQueue:
    """Places for running requests, with a bounded queue in front of them.

    Args:
        max_concurrent: Limit on requests running at once.
        queue_size: Limit on requests waiting for a place.
        queue_timeout_s: Longest wait of one request.

    Attributes:
        places: The places, their holders, and the waiting requests.
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
    async def place(self, claim: Claim) -> AsyncIterator[None]:
        """Hold a place while the block runs.

        Raises:
            OverloadedError: The queue is full, or the wait was too long.
        """
        await self._acquire(claim)
        try:
            yield
        finally:
            self.places.take_back(claim, claim.spent)

    def require_room(self, tenant: str) -> None:
        """Check that one more request of a tenant may run or wait.

        Raises:
            OverloadedError: Such a request would be refused now.
        """
        is_full = self.num_waiting >= self._queue_size
        is_busy = self.num_running >= self._max_concurrent or self.num_waiting > 0
        if is_full and is_busy and self.places.newest_of_greediest(tenant) is None:
            raise OverloadedError(
                f"{self.num_running} requests are running and {self.num_waiting} are waiting: try "
                "again later"
            )

    async def _acquire(self, claim: Claim) -> None:
        self.require_room(claim.tenant)
        if self.num_waiting >= self._queue_size:
            self._turn_away(claim.tenant)
        waiter = self._waiters[claim] = asyncio.get_running_loop().create_future()
        claim.grant = partial(self._grant, claim, claim.grant)
        try:
            self.places.ask(claim)
            async with asyncio.timeout(self._queue_timeout_s):
                has_place = await waiter
        except TimeoutError:
            self._give_up(claim)
            raise OverloadedError(
                f"the request waited {self._queue_timeout_s:g} s for a place: try again later"
            ) from None
        except (asyncio.CancelledError, Exception):
            self._give_up(claim)
            raise
        finally:
            del self._waiters[claim]
        if not has_place:
            raise OverloadedError("other tenants that have used less are waiting: try again later")

    def _turn_away(self, tenant: str) -> None:
        """Make room in the queue for a tenant's next request, if another tenant fills it."""
        victim = self.places.newest_of_greediest(tenant)
        if victim is not None:
            self.places.withdraw(victim)
            self._answer(victim, False)

    def _grant(self, claim: Claim, begin: Callable[[], None]) -> None:
        try:
            begin()
        except Exception as error:  # noqa: BLE001 - raised in `claim`, not in who freed the place
            waiter = self._waiters[claim]
            if not waiter.done():
                waiter.set_exception(error)
        else:
            self._answer(claim, True)

    def _answer(self, claim: Claim, has_place: bool) -> None:
        waiter = self._waiters[claim]
        if not waiter.done():
            waiter.set_result(has_place)

    def _give_up(self, claim: Claim) -> None:
        """Leave the queue; pass on a place that was granted at the same moment."""
        if claim.is_running:
            self.places.take_back(claim, 0.0)
        elif claim.is_waiting:
            self.places.withdraw(claim)


class _Pace:
    """The rate at which waiting requests get places, with older data decayed.

    Attributes:
        tokens: Prompt tokens of requests that waited and got a place.
        seconds: Time during which any request waited.
    """

    def __init__(self) -> None:
        self.tokens = self.seconds = self._at_s = 0.0

    def go_on(self, now_s: float, *, is_waited: bool) -> None:
        """Account for the time until now, during which a request waited or none did."""
        passed_s, self._at_s = now_s - self._at_s, now_s
        left = math.exp(-passed_s / _PACE_S)
        self.tokens *= left
        self.seconds = self.seconds * left + (passed_s if is_waited else 0.0)


def _take_one(counter: Counter[T], key: T) -> None:
    """Decrement a count; an entry that reaches 0 is removed."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
