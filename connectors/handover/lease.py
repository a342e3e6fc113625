"""P's leases: who may still read which request's blocks, and until when.

A lease is granted once, lives as long as heartbeats come, and ends once: read, released,
expired or aborted. It *settles* (its blocks may be freed) when it has ended and its blocks have
no users left. There are two kinds of users. Readers (a D that pulls) use them from `begin_read`
until `confirm`, `end_read` or their own deadline. Writers (this engine, pushing from the blocks
to a D) use them from `begin_write` until `end_write`, without a deadline, because only this
engine knows when its NIC has let go of them.

`confirm` alone decides whether a read was valid: the lease must be live after the reader's last
byte. A settled lease is not live, so reads of freed blocks are never confirmed. A confirmation
does not end the lease: all ranks of D need one, and a read that failed on the way may be retried.

Writers are counted by request and not by lease: they begin before there is a lease, and keep
whichever lease the request's blocks end up under from settling.

Pure: time comes in as `now_s` (monotonic seconds). It knows neither peers nor sockets; a
reader or writer is any hashable name.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from pdserve.connectors.remembered import LEASES_REMEMBERED, Remembered
from pdserve.wire.transfer import LeaseEnd, Settled

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from pdserve.wire.ids import BlockId, RequestId

K = TypeVar("K")
V = TypeVar("V")


class ReadVerdict(enum.Enum):
    """P's verdict on a read that has ended.

    UNKNOWN is not yet a refusal: if a step runs in between, the handoff may reach D before the
    grant gets from P's scheduler to its worker.
    """

    VALID = "valid"
    LOST = "lost"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class _Lease:
    request_id: RequestId
    expires_s: float
    blocks: dict[BlockId, int] = field(default_factory=dict)
    end: LeaseEnd | None = None
    readers: dict[Hashable, float] = field(default_factory=dict)


class LeaseTable:
    """Leases by nonce.

    Args:
        lease_s: Seconds from a lease's grant or last heartbeat until it expires.
        remembered_s: Seconds for which the table remembers that a lease is over, or was released
            before its grant, from the latest time passed in; `LEASES_REMEMBERED` lease lengths by
            default. Later its nonce is unknown, which is not valid either.

    Attributes:
        due_s: Time before which `expire` changes nothing; it may be earlier than necessary.
        num_reused: Leases that were lost because one of their blocks turned up in another
            generation while they were live. The engine must not free a block before its lease has
            settled, so this stays 0.
    """

    def __init__(self, lease_s: float, *, remembered_s: float | None = None) -> None:
        self._lease_s = lease_s
        self._remembered_s = LEASES_REMEMBERED * lease_s if remembered_s is None else remembered_s
        self._seen_s = float("-inf")
        self._leases: dict[str, _Lease] = {}
        self._by_block: dict[BlockId, set[str]] = {}
        self._by_request: dict[RequestId, set[str]] = {}
        self._writers: dict[RequestId, set[Hashable]] = {}
        self._ended: Remembered[None] = Remembered()
        self._released_early: Remembered[LeaseEnd] = Remembered()
        self._settled: list[Settled] = []
        self.due_s = float("inf")
        self.num_reused = 0

    def __len__(self) -> int:
        """Number of leases that have not settled."""
        return len(self._leases)

    def grant(
        self,
        nonce: str,
        request_id: RequestId,
        now_s: float,
        *,
        block_ids: Sequence[BlockId] = (),
        generations: Sequence[int] = (),
    ) -> bool:
        """Start a lease. False: the nonce was granted before, and nothing has changed.

        Args:
            block_ids, generations: The leased blocks, and how often each has been handed out.
        """
        self._seen_s = now_s
        if nonce in self._leases or nonce in self._ended:
            return False
        self.hand_out(block_ids, generations)
        lease = self._add(nonce, request_id, now_s)
        lease.blocks = dict(zip(block_ids, generations, strict=True))
        for block_id in lease.blocks:
            self._by_block.setdefault(block_id, set()).add(nonce)
        self.due_s = min(self.due_s, lease.expires_s)
        early = self._released_early.pop(nonce)
        if early is not None:
            self._finish(nonce, lease, early)
        return True

    def hand_out(self, block_ids: Sequence[BlockId], generations: Sequence[int]) -> None:
        """Note that blocks were handed out: leases of their earlier generations are lost."""
        for block_id, generation in zip(block_ids, generations, strict=True):
            for nonce in list(self._by_block.get(block_id, ())):
                lease = self._leases[nonce]
                if lease.blocks[block_id] < generation and lease.end is None:
                    self.num_reused += 1
                    self._finish(nonce, lease, LeaseEnd.ABORTED)

    def heartbeat(self, nonces: Iterable[str], now_s: float) -> None:
        """Renew the leases that are still live; ignore the others."""
        for nonce in nonces:
            lease = self._live(nonce, now_s)
            if lease is not None:
                lease.expires_s = now_s + self._lease_s

    def begin_read(self, nonce: str, reader: Hashable, now_s: float, *, until_s: float) -> None:
        """Renew the lease for `reader`, which is about to read, and delay its settling.

        Args:
            until_s: When the reader is presumed gone.
        """
        lease = self._live(nonce, now_s)
        if lease is not None:
            lease.expires_s = now_s + self._lease_s
            lease.readers[reader] = until_s
            self.due_s = min(self.due_s, until_s)

    def end_read(self, nonce: str, reader: Hashable) -> None:
        """Remove a reader that gave up. This does not end the lease."""
        lease = self._leases.get(nonce)
        if lease is not None and lease.readers.pop(reader, None) is not None:
            self._settle_if_over(nonce, lease)

    def begin_write(self, request_id: RequestId, writer: Hashable) -> None:
        """Delay the settling of leases while `writer` pushes from the request's blocks."""
        self._writers.setdefault(request_id, set()).add(writer)

    def end_write(self, request_id: RequestId, writer: Hashable) -> None:
        """Remove a writer that has nothing in flight any more; unknown ones are ignored."""
        writers = self._writers.get(request_id)
        if writers is None:
            return
        writers.discard(writer)
        if not writers:
            del self._writers[request_id]
            for nonce in list(self._by_request.get(request_id, ())):
                self._settle_if_over(nonce, self._leases[nonce])

    def stop(self, nonce: str, request_id: RequestId, now_s: float) -> None:
        """End a push from this side: `Settled` follows once its writers have finished.

        It follows even if the nonce was not granted, which it cannot be any more. A nonce that has
        settled is ignored.
        """
        self._seen_s = now_s
        if nonce in self._ended:
            return
        self._released_early.pop(nonce)
        lease = self._leases.get(nonce) or self._add(nonce, request_id, now_s)
        self._finish(nonce, lease, LeaseEnd.ABORTED)

    def confirm(self, nonce: str, reader: Hashable, now_s: float) -> ReadVerdict:
        """Return the verdict on a read after its last byte; this does not end the lease."""
        lease = self._leases.get(nonce)
        if lease is None:
            return ReadVerdict.LOST if nonce in self._ended else ReadVerdict.UNKNOWN
        lease.readers.pop(reader, None)
        if self._live(nonce, now_s) is None:
            self._settle_if_over(nonce, lease)
            return ReadVerdict.LOST
        return ReadVerdict.VALID

    def release(self, nonce: str, now_s: float, end: LeaseEnd = LeaseEnd.RELEASED) -> None:
        """End a lease that no reader needs. A release that overtakes its grant is remembered."""
        self._seen_s = now_s
        lease = self._leases.get(nonce)
        if lease is not None:
            self._finish(nonce, lease, end)
        elif nonce not in self._ended:
            self._remember(self._released_early, nonce, end)

    def expire(self, now_s: float) -> None:
        """End overdue leases and drop readers past their deadline. O(leases) when due."""
        self._seen_s = now_s
        if now_s < self.due_s:
            return
        for nonce, lease in list(self._leases.items()):
            for reader in [r for r, until_s in lease.readers.items() if until_s <= now_s]:
                del lease.readers[reader]
            if lease.end is None and lease.expires_s <= now_s:
                lease.end = LeaseEnd.EXPIRED
            self._settle_if_over(nonce, lease)
        self.due_s = min(
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

    @property
    def has_settled(self) -> bool:
        """Whether `take_settled` would return anything."""
        return bool(self._settled)

    def take_settled(self) -> list[Settled]:
        """Return the leases that have settled since the last call, each once."""
        settled, self._settled = self._settled, []
        return settled

    def _add(self, nonce: str, request_id: RequestId, now_s: float) -> _Lease:
        lease = self._leases[nonce] = _Lease(request_id, now_s + self._lease_s)
        self._by_request.setdefault(request_id, set()).add(nonce)
        return lease

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
        if lease.end is None or lease.readers or lease.request_id in self._writers:
            return
        del self._leases[nonce]
        for block_id in lease.blocks:
            _discard(self._by_block, block_id, nonce)
        _discard(self._by_request, lease.request_id, nonce)
        self._remember(self._ended, nonce, None)
        self._settled.append(Settled(request_id=lease.request_id, end=lease.end, nonce=nonce))

    def _remember(self, book: Remembered[V], nonce: str, value: V) -> None:
        book.add(nonce, value, now_s=self._seen_s, until_s=self._seen_s + self._remembered_s)


def _discard(book: dict[K, set[str]], key: K, nonce: str) -> None:
    book[key].discard(nonce)
    if not book[key]:
        del book[key]
