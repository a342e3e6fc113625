"""One engine as the proxy knows it, with the breaker that keeps requests away from it.

    UNKNOWN -> READY <-> NOT_READY <-> UNREACHABLE               (`Health`, by health checks)
    CLOSED -> OPEN -(timeout)-> HALF_OPEN -> CLOSED or OPEN      (`Breaker`, by attempts)

`backends` holds the set of engines; `breakers` tells each breaker how attempts ended.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.config.schema import Role
from pdserve.proxy.errors import WorkerError

if TYPE_CHECKING:
    from pdserve.observe.clock import Clock
    from pdserve.proxy.leg import Leg
    from pdserve.wire.events import RoutingLoad
    from pdserve.wire.request import EngineInfo, EngineStats


class Health(enum.Enum):
    """The result of the last check."""

    UNKNOWN = "unknown"
    READY = "ready"
    NOT_READY = "not_ready"
    UNREACHABLE = "unreachable"


class BreakerState(enum.Enum):
    """See the drawing above."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Keeps requests from a failing target: `threshold` failures in a row open it for `timeout_s`.

    After that one request may try, and another when that one has ended or has been silent for
    `timeout_s`. A success closes the breaker unless it is older than the last failure.

    Attributes:
        num_failures: Failures in a row.
    """

    def __init__(self, clock: Clock, threshold: int, timeout_s: float) -> None:
        self._clock = clock
        self._threshold = threshold
        self._timeout_s = timeout_s
        self.num_failures = 0
        self._opened_s: float | None = None
        self._failed_s = float("-inf")
        self._trial_s: float | None = None

    @property
    def state(self) -> BreakerState:
        """The current state."""
        if self._opened_s is None:
            return BreakerState.CLOSED
        if self._clock.monotonic_s() - self._opened_s < self._timeout_s:
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN

    @property
    def allows(self) -> bool:
        """Whether a request may go through now."""
        match self.state:
            case BreakerState.CLOSED:
                return True
            case BreakerState.OPEN:
                return False
            case BreakerState.HALF_OPEN:
                trial_s = self._trial_s
                return trial_s is None or self._clock.monotonic_s() - trial_s >= self._timeout_s

    def begin(self) -> float | None:
        """Note that a request goes through; return the time if it is the trial request."""
        if self.state is not BreakerState.HALF_OPEN or not self.allows:
            return None
        self._trial_s = self._clock.monotonic_s()
        return self._trial_s

    def leave(self, trial_s: float | None) -> None:
        """Note that a request has ended, or can reveal nothing more.

        Args:
            trial_s: What `begin` returned. Requests from before the breaker opened may still run.
        """
        if trial_s is not None and trial_s == self._trial_s:
            self._trial_s = None

    def succeed(self, at_s: float = float("inf")) -> None:
        """Note a success at `at_s` (monotonic seconds), or just now."""
        if at_s >= self._failed_s:
            self.num_failures, self._opened_s, self._trial_s = 0, None, None

    def fail(self) -> None:
        """Note that a request failed and the engine is to blame."""
        self.num_failures += 1
        self._failed_s = self._clock.monotonic_s()
        if self.num_failures >= self._threshold:
            self._opened_s = self._failed_s


@dataclass(eq=False, slots=True, weakref_slot=True)
class Backend:
    """One engine.

    Attributes:
        url: Base URL, without a slash at the end; names the engine.
        is_static: Whether it is from the command line, and so stays without a lease.
        lease_end_s: When a registered engine is forgotten; monotonic seconds.
        pending_tokens: Prompt tokens of requests in flight that were not in its cache;
            counted only for policies that look at prefixes.
        num_foreign: Number of its requests that are from other senders, as of `load_s`.
        models: Entries of its `/v1/models`.
        legs: Exchanges in flight.
        is_watched: Whether its health is being checked.
        is_gone: Whether it was forgotten; requests running there go on.
        logged_s: When its state was last logged; monotonic seconds.
        snapshot: Its last report, with the life it is from.
        is_idle: Whether it held no request, and no KV for others to read, as of `load_s`; true
            if it does not say.
        is_draining: Whether it is being drained, or was; it is sent no requests.
        home_role: The preferred role, under this load, of an engine with both; None: either.
        ahead_s: Lower bound on how far its host's wall clock is ahead of this one's; 0 if no
            difference can be shown.
    """

    url: str
    role: Role
    is_static: bool
    breaker: Breaker
    info: EngineInfo | None = None
    health: Health = Health.UNKNOWN
    reason: str = "not checked yet"
    lease_end_s: float = float("inf")
    in_flight: int = 0
    pending_tokens: int = 0
    num_foreign: int = 0
    kv_usage: float = 0.0
    load_s: float = float("-inf")
    num_late_checks: int = 0
    models: list[dict[str, Any]] = field(default_factory=list)
    legs: set[Leg] = field(default_factory=set)
    is_watched: bool = False
    is_gone: bool = False
    logged_s: float = float("inf")
    snapshot: tuple[str, EngineStats] | None = None
    is_idle: bool = True
    is_draining: bool = False
    home_role: Role | None = None
    ahead_s: float = 0.0

    @property
    def layout(self) -> str | None:
        """Digest of its KV's meaning, weights included; None if it does not say."""
        return None if self.info is None else self.info.layout_digest

    @property
    def available(self) -> bool:
        """Whether a request may be sent to it now."""
        return self.health is Health.READY and self.breaker.allows and not self.is_draining

    @property
    def absence(self) -> str:
        """The reason why no request may be sent to it, if it is not available."""
        return "it is drained" if self.is_draining else self.reason or "its breaker is open"

    @property
    def home(self) -> Role:
        """Its preferred role: its own, or for now one half of it."""
        return self.home_role or self.role

    def prefills(self) -> bool:
        """Whether its role includes prefill for others."""
        return self.role is not Role.DECODE

    def decodes(self) -> bool:
        """Whether its role includes decode for others."""
        return self.role is not Role.PREFILL

    def heard(self, load: RoutingLoad, now_s: float) -> None:
        """Record the load it reports, summed over its cores."""
        self.load_s = now_s
        self.num_foreign = max(0, load.num_requests - self.in_flight)
        self.kv_usage = load.kv_usage

    def lose_legs(self) -> None:
        """Fail every exchange with it, as it was found dead."""
        for leg in list(self.legs):
            leg.lose(WorkerError(f"{leg.url}: the engine stopped answering", reason="lost"))
