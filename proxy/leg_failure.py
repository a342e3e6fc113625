"""A leg that failed, as a value: what it says of its engine, of the KV, and of the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.proxy.errors import (
    DrainedError,
    KvFailedError,
    MovedError,
    RefusedError,
    WorkerError,
)

if TYPE_CHECKING:
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.breakers import TransferAttempt


@dataclass(frozen=True, slots=True)
class LegFailure:
    """A leg that failed.

    Attributes:
        leg: prefill, decode or local.
        was_idle: It had nothing of the request to compute yet: it waited for another's KV.
    """

    leg: str
    backend: Backend
    error: WorkerError | RefusedError
    was_idle: bool = False

    @property
    def reason(self) -> str:
        """One of `metrics.FAILURES`, or why it was refused: busy or refused."""
        if isinstance(self.error, RefusedError):
            return "busy" if self.is_busy else "refused"
        return self.error.reason

    @property
    def is_busy(self) -> bool:
        """Whether the engine has no room: no failure, but another may have some."""
        return isinstance(self.error, RefusedError) and self.error.status == 429

    @property
    def is_moved(self) -> bool:
        """Whether the engine has given a handoff, from which another one goes on."""
        return isinstance(self.error, MovedError)

    @property
    def is_drained(self) -> bool:
        """Whether the engine is well, and the request was taken away from it."""
        return isinstance(self.error, DrainedError)

    @property
    def is_kv(self) -> bool:
        """Whether the engine is well and only the KV did not get there."""
        return isinstance(self.error, KvFailedError)

    @property
    def load_failures(self) -> tuple[str, ...]:
        """Labels of the KV loads that failed there, if it tells."""
        return self.error.load_failures if isinstance(self.error, KvFailedError) else ()

    def blame(self, transfer: TransferAttempt) -> None:
        """Hold it against the pair, not an engine, if the KV did not get there."""
        if isinstance(self.error, KvFailedError):
            transfer.failed(self.error, kind=self.leg)
