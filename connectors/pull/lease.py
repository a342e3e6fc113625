"""P's book of leases: who may still read which request's blocks, and until when.

A lease is granted once, lives as long as heartbeats come, and ends once: read, released,
expired or aborted. It *settles* (its blocks may be freed) when it has ended and no reader
is at work on it any more; a reader is at work from `begin_read` until `confirm`,
`end_read` or its own deadline. Whether a read was good is decided by
`confirm` alone: the lease must be live after the reader's last byte, and a settled lease
never is, so blocks that were freed can never be confirmed.

Pure: time comes in as `now_s` (monotonic seconds). It knows neither peers nor sockets; a
reader is any hashable name.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.errors import InternalError
from pdserve.wire.transfer import LeaseEnd, Settled

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from pdserve.wire.ids import RequestId

_MAX_REMEMBERED = 1 << 16


class Verdict(enum.Enum):
    """What P says of a read that has ended.

    UNKNOWN is not yet a refusal: the handoff travels to D faster than the grant travels
    from P's scheduler to its worker when a step is in between.
    """

    VALID = "valid"
    LOST = "lost"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class _Lease:
    request_id: RequestId
    expires_s: float
    end: LeaseEnd | None = None
    readers: dict[Hashable, float] = field(default_factory=dict)


class LeaseTable:
    """Leases by nonce.

    Args:
        lease_s: A lease expires so many seconds after its grant or last heartbeat.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._leases: dict[str, _Lease] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._released_early: OrderedDict[str, None] = OrderedDict()
        self._settled: list[Settled] = []
        self._due_s = float("inf")

    def __len__(self) -> int:
        """Number of leases that have not settled."""
        return len(self._leases)

    @property
    def due_s(self) -> float:
        """No call of `expire` before this time can change anything; may be too early."""
        return self._due_s

    def grant(self, nonce: str, request_id: RequestId, now_s: float) -> None:
        """Start a lease.

        Raises:
            InternalError: The nonce was granted before.
        """
        if nonce in self._leases or nonce in self._ended:
            raise InternalError(f"lease {nonce} of request {request_id} was granted twice")
        lease = _Lease(request_id, now_s + self._lease_s)
        self._leases[nonce] = lease
        self._due_s = min(self._due_s, lease.expires_s)
        if nonce in self._released_early:
            del self._released_early[nonce]
            self._finish(nonce, lease, LeaseEnd.RELEASED)

    def heartbeat(self, nonces: Iterable[str], now_s: float) -> None:
        """Renew what is still live; others are ignored."""
        for nonce in nonces:
            lease = self._live(nonce, now_s)
            if lease is not None:
                lease.expires_s = now_s + self._lease_s

    def begin_read(self, nonce: str, reader: Hashable, now_s: float, *, until_s: float) -> None:
        """`reader` is about to read: it renews the lease and holds off its settling.

        Args:
            until_s: The reader is taken for gone after this time.
        """
        lease = self._live(nonce, now_s)
        if lease is not None:
            lease.expires_s = now_s + self._lease_s
            lease.readers[reader] = until_s
            self._due_s = min(self._due_s, until_s)

    def end_read(self, nonce: str, reader: Hashable) -> None:
        """`reader` gave up. The lease, if it has not ended otherwise, goes on."""
        lease = self._leases.get(nonce)
        if lease is not None and lease.readers.pop(reader, None) is not None:
            self._settle_if_over(nonce, lease)

    def confirm(self, nonce: str, reader: Hashable, now_s: float) -> Verdict:
        """`reader` has all bytes. VALID ends the lease as READ, and is said at most once."""
        lease = self._leases.get(nonce)
        if lease is None:
            return Verdict.LOST if nonce in self._ended else Verdict.UNKNOWN
        lease.readers.pop(reader, None)
        if self._live(nonce, now_s) is None:
            self._settle_if_over(nonce, lease)
            return Verdict.LOST
        self._finish(nonce, lease, LeaseEnd.READ)
        return Verdict.VALID

    def release(self, nonce: str, end: LeaseEnd = LeaseEnd.RELEASED) -> None:
        """Nobody will read this lease. A release that overtakes its grant is remembered."""
        lease = self._leases.get(nonce)
        if lease is not None:
            self._finish(nonce, lease, end)
        elif nonce not in self._ended:
            _remember(self._released_early, nonce)

    def expire(self, now_s: float) -> None:
        """End what is overdue and forget readers past their deadline. O(leases) when due."""
        if now_s < self._due_s:
            return
        for nonce, lease in list(self._leases.items()):
            for reader in [r for r, until_s in lease.readers.items() if until_s <= now_s]:
                del lease.readers[reader]
            if lease.end is None and lease.expires_s <= now_s:
                lease.end = LeaseEnd.EXPIRED
            self._settle_if_over(nonce, lease)
        self._due_s = min(
            (
                due
                for lease in self._leases.values()
                for due in (
                    *lease.readers.values(),
                    *(() if lease.end is not None else (lease.expires_s,)),
                )
            ),
            default=float("inf"),
        )

    def take_settled(self) -> list[Settled]:
        """What has settled since the last call; each lease appears once."""
        settled, self._settled = self._settled, []
        return settled

    def _live(self, nonce: str, now_s: float) -> _Lease | None:
        lease = self._leases.get(nonce)
        if lease is None or lease.end is not None or lease.expires_s <= now_s:
            return None
        return lease

    def _finish(self, nonce: str, lease: _Lease, end: LeaseEnd) -> None:
        if lease.end is None:
            lease.end = end
        self._settle_if_over(nonce, lease)

    def _settle_if_over(self, nonce: str, lease: _Lease) -> None:
        if lease.end is not None and not lease.readers:
            del self._leases[nonce]
            _remember(self._ended, nonce)
            self._settled.append(Settled(request_id=lease.request_id, end=lease.end, nonce=nonce))


def _remember(book: OrderedDict[str, None], nonce: str) -> None:
    book[nonce] = None
    if len(book) > _MAX_REMEMBERED:
        book.popitem(last=False)
