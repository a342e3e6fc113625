"""Combines the reports of an engine's ranks: a fact counts once every rank has reported it.

A block is freed, or read, on all ranks at once. So a lease has settled once it has settled on
the last rank, and a load is over once the last rank has received it or given it up: until then
some rank's NIC may still write into its share of the blocks. If one rank's part of a load is
missing, the whole load has failed. Payloads are passed on unread; only their connector can
decode them.

Pure: it knows neither how reports arrive nor what the engine does with them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from pdserve.wire.transfer import (
    ConnectorReport,
    Failed,
    LeaseEnd,
    LoadFailure,
    Received,
    Settled,
)

if TYPE_CHECKING:
    from collections.abc import Hashable

    from pdserve.wire.ids import RequestId

F = TypeVar("F")

# From the best to the worst: nothing was wasted, D did not want the lease, this engine took it
# back, no heartbeat came for the length of a lease.
_SEVERITY: Final = {
    end: severity
    for severity, end in enumerate(
        (LeaseEnd.READ, LeaseEnd.RELEASED, LeaseEnd.ABORTED, LeaseEnd.EXPIRED)
    )
}
# From the least to the most telling: an engine withdrew, and the ranks of both sides only follow;
# failures that an immediate retry may avoid; failures that it will not; and wrong bytes, which no
# other reason may hide.
_TELLING: Final = {
    LoadFailure.ABORTED: 0,
    LoadFailure.WITHDRAWN: 0,
    LoadFailure.TIMEOUT: 1,
    LoadFailure.HANDSHAKE: 2,
    LoadFailure.PEER_LOST: 3,
    LoadFailure.INCOMPATIBLE: 4,
    LoadFailure.LEASE_LOST: 5,
    LoadFailure.DIGEST: 6,
}
MAX_OPEN = 1 << 16
MAX_REMEMBERED = 1 << 12


class Quorum:
    """The votes of one engine's ranks, by fact.

    Votes are per lease and per load, as named in reports (`Settled.nonce`, `Received.load_id`),
    not per request: a request may be loaded again. Each connector has its own votes. A repeated
    report of a rank is ignored and counted as the fault `report_repeated`, even after the vote is
    over or with a single rank; for a connector that does not name its loads, a report after the
    vote opens another one.

    Memory is bounded: beyond 65536 votes that lack a rank, the oldest is given up and counted as
    the fault `report_incomplete`.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        # Each rank's vote, by lease or load; a lease's key ends in a nonce, a load's in a number.
        self._open: OrderedDict[Hashable, dict[int, Any]] = OrderedDict()
        self._over: OrderedDict[Hashable, None] = OrderedDict()

    @property
    def num_open(self) -> int:
        """Number of leases and loads that some ranks, but not all, have reported."""
        return len(self._open)

    def add(self, rank: int, report: ConnectorReport) -> ConnectorReport:
        """Add a report of `rank`; return the facts that it completes.

        Faults need no other rank and are returned at once. A report of a rank that the engine
        does not have is ignored and counted as the fault `report_of_unknown_rank`.
        """
        if not 0 <= rank < self._num_ranks:
            return ConnectorReport(faults={"report_of_unknown_rank": 1})
        if not report:
            return report
        faults = Counter(report.faults)
        settled: list[Settled] = []
        received: list[Received] = []
        failed: list[Failed] = []
        failing: list[Failed] = []
        for lease in report.settled:
            name = lease.connector, lease.request_id, lease.nonce
            ends = self._vote(name, rank, lease, faults)
            if ends is not None and len(ends) == self._num_ranks:
                settled.append(max(ends.values(), key=lambda each: _SEVERITY[each.end]))
        loads: list[Received | Failed] = [*report.received, *report.failed]
        for load in loads:
            key = load.connector, load.request_id, load.load_id
            parts = self._vote(key, rank, load, faults)
            if parts is None:
                continue
            if len(parts) < self._num_ranks:
                # The others may still wait for a peer that only this rank knows to be gone.
                failures = [part for part in parts.values() if isinstance(part, Failed)]
                failing += failures if failures == [load] else []
                continue
            match _whole(parts):
                case Received() as whole:
                    received.append(whole)
                case Failed() as whole:
                    failed.append(whole)
        return ConnectorReport(
            settled=settled,
            received=received,
            failed=failed,
            faults=dict(faults),
            failing=failing,
            payloads=report.payloads,
            slices=report.slices,
            clock_id=report.clock_id,
        )

    def _vote(
        self, key: tuple[str, RequestId, str | int], rank: int, fact: F, faults: Counter[str]
    ) -> dict[int, F] | None:
        """Take a vote; return those so far, by rank, in order of arrival. None = not counted."""
        vote = self._open.get(key)
        if (vote is None and key in self._over) or (vote is not None and rank in vote):
            faults["report_repeated"] += 1
            return None
        if vote is None:
            vote = self._open[key] = {}
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
                faults["report_incomplete"] += 1
        vote[rank] = fact
        if len(vote) == self._num_ranks:
            del self._open[key]
            if key[-1]:  # this name is never used for another vote
                self._over[key] = None
                if len(self._over) > MAX_REMEMBERED:
                    self._over.popitem(last=False)
        return vote


def _whole(parts: dict[int, Received | Failed]) -> Received | Failed:
    """Combine the ranks' parts of one load, given in the order of their reports."""
    failed = {rank: part for rank, part in parts.items() if isinstance(part, Failed)}
    if failed:
        worst = max(failed.values(), key=lambda part: _TELLING[part.reason])
        return Failed(
            request_id=worst.request_id,
            reason=worst.reason,
            detail="; ".join(
                f"rank {rank}: {part.reason.value} {part.detail}".rstrip()
                for rank, part in failed.items()
            ),
            load_id=worst.load_id,
            # A rank that has all tokens does not lower the minimum over the others.
            num_valid_tokens=min(part.num_valid_tokens for part in failed.values()),
            connector=worst.connector,
        )
    received = [part for part in parts.values() if isinstance(part, Received)]
    first_part = received[0]
    for what in ("handoff", "mode"):
        values = {rank: getattr(part, what) for rank, part in parts.items()}
        if any(value != getattr(first_part, what) for value in values.values()):
            return Failed(
                request_id=first_part.request_id,
                reason=LoadFailure.DIGEST,
                detail=f"ranks differ in {what}: {values}",
                load_id=first_part.load_id,
                connector=first_part.connector,
            )
    return msgspec.structs.replace(
        first_part,
        num_bytes=sum(part.num_bytes for part in received),
        num_descriptors=sum(part.num_descriptors for part in received),
        wait_s=max(part.wait_s for part in received),
        transfer_s=max(part.transfer_s for part in received),
        digest_s=max(part.digest_s for part in received),
        elapsed_s=max(part.elapsed_s for part in received),
    )
