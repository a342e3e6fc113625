"""The worker half of the memory connector: transfers are copies, made inside `get_finished`.

A transfer that was posted before one call arrives over some calls: it takes time, as on a
wire, and what is given up meanwhile arrives all the same before it is reported as over.

It follows the protocol of the real thing (leases, nonces, heartbeats, registrations, digests, a
read that counts only once its owner confirms it), and differs in when things happen: there is
no thread, so nothing moves and no time is noticed but when this half is called, by the clock
that was passed in. What a peer says is a call under the exchange's lock.

Both sides of both directions are in here: `pulls` and `reserves` at D, `pushes` and `leases`
at P.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pdserve.connectors.base import KVConnectorWorker
from pdserve.connectors.digests import BlockDigests
from pdserve.connectors.handover.instructions import Instructions, StepInstructions
from pdserve.connectors.handover.lease import LeaseTable
from pdserve.connectors.memory.pulls import Pulls
from pdserve.connectors.memory.pushes import Pushes
from pdserve.connectors.memory.reserves import Reserves
from pdserve.connectors.slicing import mismatch, routes_to
from pdserve.errors import InternalError
from pdserve.wire.transfer import ConnectorReport, LoadFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from pdserve.connectors.base import ConnectorContext, KVLayout
    from pdserve.connectors.handover.instructions import Chunk, Grant, Watch
    from pdserve.connectors.memory.exchange import Exchange
    from pdserve.connectors.slicing import Route
    from pdserve.observe.clock import Clock
    from pdserve.wire.ids import BlockId
    from pdserve.wire.transfer import (
        ConnectorMetadata,
        Endpoint,
        EngineRef,
        Failed,
        LeaseEnd,
    )

_HEARTBEATS_PER_LEASE = 6


class MemoryWorker(KVConnectorWorker):
    """See `KVConnectorWorker`. Thread-safe by the exchange's lock.

    Other ranks reach into it, with the lock held.

    Attributes:
        kv: None before it is registered, and once this half is closed.
        endpoint: None before it is registered.
    """

    def __init__(
        self,
        context: ConnectorContext,
        wake: Callable[[], None],
        *,
        exchange: Exchange,
        clock: Clock,
    ) -> None:
        self.context = context
        self.wake = wake
        self.exchange = exchange
        self.kv: torch.Tensor | None = None
        self.leases = LeaseTable(context.config.transfer.lease_s)
        self.pulls = Pulls(self)
        self.reserves = Reserves(self)
        self.pushes = Pushes(self, clock.monotonic_s())
        self._clock = clock
        self.endpoint: Endpoint | None = None
        self._digests: BlockDigests | None = None
        self._watches: dict[str, Watch] = {}
        self._beat_s: dict[str, float] = {}
        self._grants: dict[str, Grant] = {}
        self._chunks: list[Chunk] = []
        self._faults: Counter[str] = Counter()
        self._num_reported: Counter[str] = Counter()

    def register_kv_caches(self, kv: torch.Tensor, layout: KVLayout) -> Endpoint:
        """See `KVConnectorWorker`."""
        if self.endpoint is not None:
            raise InternalError("KV memory was registered twice")
        self.kv = kv
        self._digests = BlockDigests(kv, self.context.shape, self.context.rank)
        self.endpoint = self.exchange.join(self)
        return self.endpoint

    @property
    def digests(self) -> BlockDigests:
        """Of this rank's own blocks.

        Raises:
            InternalError: There is no KV memory.
        """
        if self._digests is None:
            raise InternalError("instructions came before KV memory was registered")
        return self._digests

    def post(self, metadata: ConnectorMetadata) -> None:
        """See `KVConnectorWorker`."""
        todo = Instructions.from_metadata(metadata)
        with self.exchange.lock:
            now_s = self._clock.monotonic_s()
            for expect in todo.expects:
                self.pushes.expect(expect, now_s)
            for grant in todo.grants:
                self._grant(grant, now_s)
            for watch in todo.watches:
                self._watches[watch.nonce] = watch
                self._beat_s[watch.nonce] = now_s
            for reserve in todo.reserves:
                first = reserve.first_token // self.context.layout.block_size
                self._check_unused(reserve.local_block_ids[first:])
                self.reserves.post(reserve, now_s)
            for load in todo.loads:
                first = load.first_token // self.context.layout.block_size
                self._check_unused(load.local_block_ids[first:])
                self.pulls.post(load, now_s)
            for release in todo.releases:
                self._release(release.nonce, release.owner, release.end)
            for nonce in todo.unwatches:
                self.unwatch(nonce)
            if todo.aborts:
                self.pulls.abort(set(todo.aborts))
                self.reserves.abort(set(todo.aborts))
            for stop in todo.stops:
                self.pushes.stop(stop)
                self.leases.stop(stop.nonce, stop.request_id, now_s)
            for end in todo.ends:
                self.leases.release(end.nonce, now_s, end.end)
            self._beat(now_s)
        self.wake()

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        """See `KVConnectorWorker`."""
        self._chunks = StepInstructions.from_metadata(metadata).chunks

    def wait_for_save(self) -> Sequence[Failed]:
        """See `KVConnectorWorker`."""
        chunks, self._chunks = self._chunks, []
        self.pushes.last_step_s = self._clock.monotonic_s()
        if chunks:
            with self.exchange.lock:
                self.pushes.complete(chunks, self._clock.monotonic_s())
            self.wake()
        return ()

    def get_finished(self) -> ConnectorReport:
        """See `KVConnectorWorker`."""
        with self.exchange.lock:
            now_s = self._clock.monotonic_s()
            self._beat(now_s)
            loads, reserved = self.pulls.poll(now_s), self.reserves.poll(now_s)
            pushed = self.pushes.poll(now_s)
            self.leases.expire(now_s)
            settled = self.leases.take_settled()
            for lease in settled:
                self._grants.pop(lease.nonce, None)
            if len(self.pulls) or self.pushes.is_moving:
                self.wake()
            return ConnectorReport(
                settled=settled,
                received=[*loads.received, *reserved.received],
                failed=[*loads.failed, *reserved.failed],
                faults=self._take_faults(),
                payloads=pushed.to_payloads(),
            )

    def close(self, timeout_s: float) -> None:
        """See `KVConnectorWorker`."""
        with self.exchange.lock:
            if self.endpoint is not None:
                self.exchange.leave(self.endpoint)
            self.pushes.close()
            self.kv = None

    # ---- what this rank's other parts, and other ranks, ask for --------------------------

    def peer(self, ref: EngineRef, rank: int) -> MemoryWorker | None:
        """The rank of another engine's life; None if it cannot be reached."""
        if rank >= len(ref.endpoints):
            return None
        worker = self.exchange.find(ref.endpoints[rank])
        if worker is None or worker.context.incarnation != ref.incarnation:
            return None
        return worker

    def why_not(
        self, worker: MemoryWorker, ref: EngineRef, rank: int
    ) -> tuple[LoadFailure, str] | None:
        """Why `worker` is not to be taken for that rank of the engine."""
        theirs, mine = worker.context, self.context
        if theirs.incarnation != ref.incarnation:
            detail = (
                f"the lease is of incarnation {ref.incarnation} of {ref.engine_id}, which is "
                f"now {theirs.incarnation}"
            )
            return LoadFailure.LEASE_LOST, detail
        if theirs.rank != rank or theirs.shape != ref.shape:
            detail = (
                f"rank {mine.rank} of {mine.engine_id} was led to rank {theirs.rank} of "
                f"{theirs.engine_id} for rank {rank} of {ref.shape}; it is of {theirs.shape}"
            )
            return LoadFailure.INCOMPATIBLE, detail
        if theirs.layout_digest != mine.layout_digest:
            detail = (
                f"layout at {theirs.engine_id}: {theirs.layout_fields}, "
                f"at {mine.engine_id}: {mine.layout_fields}"
            )
            return LoadFailure.INCOMPATIBLE, detail
        return None

    def digests_of_lease(self, nonce: str, route: Route, *, first_token: int) -> bytes:
        """What a reader of a live lease must have found on `route`."""
        grant = self._grants[nonce]
        return self.digests.of(
            grant.block_ids, grant.generations, grant.num_tokens, route, first_token=first_token
        )

    def unwatch(self, nonce: str) -> None:
        """Renew this lease no more. Unknown ones are ignored."""
        self._watches.pop(nonce, None)
        self._beat_s.pop(nonce, None)

    def fault(self, name: str, is_one: bool = True) -> None:
        """Count what should not happen."""
        if is_one:
            self._faults[name] += 1

    # ---- the rest ------------------------------------------------------------------------

    def _grant(self, grant: Grant, now_s: float) -> None:
        self.pushes.hand_out(grant.block_ids, grant.generations)
        is_new = self.leases.grant(
            grant.nonce,
            grant.request_id,
            now_s,
            block_ids=grant.block_ids,
            generations=grant.generations,
        )
        if is_new:
            self.digests.take(grant.block_ids, grant.generations, grant.num_tokens)
            self._grants[grant.nonce] = grant
            self.pushes.grant(grant)

    def _check_unused(self, block_ids: list[BlockId]) -> None:
        """No two transfers may write one block: its first one is not over, then."""
        taken = {*self.pulls.blocks, *self.reserves.blocks}
        self.fault("block_reused_under_load", not taken.isdisjoint(block_ids))

    def _beat(self, now_s: float) -> None:
        for nonce, watch in self._watches.items():
            if self._beat_s[nonce] <= now_s:
                self._beat_s[nonce] = now_s + watch.lease_s / _HEARTBEATS_PER_LEASE
                for owner in self._owners(watch.owner):
                    owner.leases.heartbeat([nonce], now_s)
                    owner.pushes.heard(nonce, now_s)

    def _release(self, nonce: str, where: EngineRef, end: LeaseEnd) -> None:
        self.unwatch(nonce)
        for owner in self._owners(where):
            owner.leases.release(nonce, self._clock.monotonic_s(), end)
            owner.wake()

    def _owners(self, ref: EngineRef) -> Iterator[MemoryWorker]:
        """The ranks of P that this rank of D talks to."""
        if mismatch(ref.shape, self.context.shape) is not None:
            return
        for route in routes_to(ref.shape, self.context.shape, self.context.rank):
            worker = self.peer(ref, route.source_rank)
            if worker is not None:
                yield worker

    def _take_faults(self) -> dict[str, int]:
        totals = self._faults.copy()
        totals["lease_granted_twice"] = self.leases.num_regrants
        totals["lease_block_reused"] = self.leases.num_reused
        new = totals - self._num_reported
        self._num_reported = totals
        return dict(new)
