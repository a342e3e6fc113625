"""Defects that are put in on purpose, to see that something notices.

Each takes away one thing that keeps tokens right or blocks owned. The product has more than one
line of defence, so what one lets through another may stop before it shows in a token. So some are
noticed by the simulation (by tokens, or by the connector's own count of blocks that were reused
under a transfer), others by the conformance kit or by the tests of the part that was broken.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from pdserve.connectors import digests, quorum
from pdserve.connectors.handover.lease import LeaseTable
from pdserve.connectors.handover.scheduler import HandoverScheduler
from pdserve.connectors.transfer import serving
from pdserve.scheduler.life import Wait
from pdserve.scheduler.state import SchedulerState
from pdserve.scheduler.transfers import Transfers
from pdserve.wire.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.connectors.base import Hold


@contextmanager
def reuse_at_lease_expiry() -> Iterator[None]:
    """A lease that has ended settles at once, whoever reads or writes from its blocks."""

    def settle(self: LeaseTable, nonce: str, lease: Any) -> None:
        if lease.end is not None:
            lease.readers.clear()
            self._writers.pop(lease.request_id, None)
        real(self, nonce, lease)

    real = LeaseTable._settle_if_over
    with mock.patch.object(LeaseTable, "_settle_if_over", settle):
        yield


@contextmanager
def digest_check_off() -> Iterator[None]:
    """D believes whatever has come."""

    def all_valid(*_: Any, num_tokens: int, **__: Any) -> int:
        return num_tokens

    with mock.patch.object(digests, "num_valid_tokens", all_valid):
        yield


@contextmanager
def epoch_ignored() -> Iterator[None]:
    """A rank is taken for the one that is meant, whichever of its lives it is in."""
    with mock.patch.object(serving, "refusal_of", return_value=None):
        yield


@contextmanager
def vote_counted_twice() -> Iterator[None]:
    """Reports are counted, and not who they are from."""

    def count(self: Any, key: Any, rank: int, fact: Any, faults: Any) -> Any:
        vote = self._open.setdefault(key, {})
        vote[len(vote)] = fact
        return self._open.pop(key) if len(vote) == self._num_ranks else vote

    with mock.patch.object(quorum.Quorum, "_vote", count):
        yield


@contextmanager
def free_on_abort_during_a_write() -> Iterator[None]:
    """P does not say that it is writing from the blocks of an aborted request."""
    real = HandoverScheduler.request_finished

    def finished(self: HandoverScheduler, request: Any, *table: Any) -> Hold | None:
        hold = real(self, request, *table)
        return hold if request.finish_reason is FinishReason.HANDOFF else None

    with mock.patch.object(HandoverScheduler, "request_finished", finished):
        yield


@contextmanager
def free_on_abort_while_written() -> Iterator[None]:
    """D lets go of its blocks when a request is aborted, although a peer may write them."""
    real = SchedulerState.end

    def end(self: SchedulerState, request: Any, now_s: float, why: str, **more: Any) -> None:
        real(self, request, now_s, why, **more)
        self.stop_waiting(request, Wait.LOAD, now_s)

    with mock.patch.object(SchedulerState, "end", end):
        yield


@contextmanager
def lost_chunks_believed() -> Iterator[None]:
    """What a store has lost by the time that it is loaded inside a step counts as loaded."""
    real = Transfers.load_in_step

    def load(self: Transfers, request: Any, failed: Any, now_s: float) -> None:
        real(self, request, None, now_s)

    with mock.patch.object(Transfers, "load_in_step", load):
        yield
