"""The leases that D keeps alive at one rank of P: which, and when it says so next. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.connectors.transfer.protocol import Heartbeat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.connectors.handover.instructions import Watch

_PER_LEASE = 6
_NONCES_PER_MESSAGE = 4096  # a frame has at most 1 MiB
_NEVER = float("inf")


class Heartbeats:
    """Leases by nonce, and one clock for all of them: that of the shortest.

    Attributes:
        due_s: When `messages` are to be said next (monotonic seconds); inf = never.
    """

    def __init__(self) -> None:
        self.due_s = _NEVER
        self._watches: dict[str, Watch] = {}

    def __bool__(self) -> bool:
        """Whether there is any lease."""
        return bool(self._watches)

    def add(self, watch: Watch, now_s: float) -> None:
        """Keep this lease alive, too. That it begins now is said by whoever adds it."""
        self._watches[watch.nonce] = watch
        self.due_s = min(self.due_s, now_s + watch.lease_s / _PER_LEASE)

    def remove(self, nonce: str) -> None:
        """Let a lease live on without heartbeats; unknown nonces are ignored."""
        self._watches.pop(nonce, None)
        if not self._watches:
            self.due_s = _NEVER

    def clear(self) -> None:
        """Let all of them."""
        self._watches.clear()
        self.due_s = _NEVER

    def messages(self) -> Iterator[Heartbeat]:
        """What renews all leases, in messages that fit into a frame."""
        nonces = list(self._watches)
        for start in range(0, len(nonces), _NONCES_PER_MESSAGE):
            yield Heartbeat(nonces[start : start + _NONCES_PER_MESSAGE])

    def plan(self, now_s: float) -> None:
        """They were said, or could not be: say them again after a sixth of the shortest lease."""
        lease_s = min((watch.lease_s for watch in self._watches.values()), default=_NEVER)
        self.due_s = now_s + lease_s / _PER_LEASE
