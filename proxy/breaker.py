"""One circuit breaker. Asked and told; sends nothing.

CLOSED -> OPEN -(timeout)-> HALF_OPEN -> CLOSED or OPEN
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.observe.clock import Clock


class BreakerState(enum.Enum):
    """See the drawing above."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Stops sending to what fails: `threshold` failures in a row open it for `timeout_s`.

    After that one request at a time may try; its success closes the breaker.
    """

    def __init__(self, clock: Clock, threshold: int, timeout_s: float) -> None:
        self._clock = clock
        self._threshold = threshold
        self._timeout_s = timeout_s
        self._failures = 0
        self._opened_s: float | None = None
        self._trying = False

    @property
    def state(self) -> BreakerState:
        """The state as of now."""
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
                return not self._trying

    def begin(self) -> None:
        """A request goes through."""
        self._trying = self.state is BreakerState.HALF_OPEN

    def leave(self) -> None:
        """A request ended without saying anything about the engine."""
        self._trying = False

    def succeed(self) -> None:
        """A request went well."""
        self._failures, self._opened_s, self._trying = 0, None, False

    def fail(self) -> None:
        """A request failed, and the engine is to blame."""
        self._failures += 1
        self._trying = False
        if self._failures >= self._threshold:
            self._opened_s = self._clock.monotonic_s()
