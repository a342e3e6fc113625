"""The worker half of the memory connector: loads are copies, made inside `get_finished`.

A load that was posted before one call lands some calls later: it takes time, as on a wire,
and what is aborted meanwhile lands all the same before it is reported as failed.

It follows the protocol of the real thing (leases, nonces, heartbeats, a read that counts
only once its owner confirms it), and differs in when things happen: there is no thread, so
heartbeats and expiry happen when this half is called, by the clock that was passed in.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING

import torch

from pdserve.connectors.base import Capabilities, KVConnectorWorker
from pdserve.connectors.pull.instructions import PullInstructions
from pdserve.connectors.pull.lease import LeaseTable, Verdict
from pdserve.errors import InternalError
from pdserve.wire.transfer import ConnectorReport, Failed, LoadFailure, Received

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.connectors.base import ConnectorContext, KVLayout
    from pdserve.connectors.memory.exchange import Exchange
    from pdserve.connectors.pull.instructions import Load, Owner, Watch
    from pdserve.observe.clock import Clock
    from pdserve.wire.ids import RequestId
    from pdserve.wire.transfer import ConnectorMetadata, Endpoint

_HEARTBEATS_PER_LEASE = 6
_POLLS_ON_THE_WIRE = 3


class MemoryWorker(KVConnectorWorker):
    """See `KVConnectorWorker`. Thread-safe by the exchange's lock."""

    capabilities = Capabilities()

    def __init__(
        self,
        context: ConnectorContext,
        wake: Callable[[], None],
        *,
        exchange: Exchange,
        clock: Clock,
    ) -> None:
        self._context = context
        self._wake = wake
        self._exchange = exchange
        self._clock = clock
        self._kv: torch.Tensor | None = None
        self._endpoint: Endpoint | None = None
        self._watches: dict[str, Watch] = {}
        self._beat_s: dict[str, float] = {}
        self._posted: list[Load] = []
        self._wire: deque[list[Load]] = deque([[]] * (_POLLS_ON_THE_WIRE - 1))
        self._aborted: set[RequestId] = set()
        self.leases = LeaseTable(context.config.transfer.lease_s)

    def register_kv_caches(self, kv: torch.Tensor, layout: KVLayout) -> None:
        """See `KVConnectorWorker`."""
        if self._endpoint is not None:
            raise InternalError("KV memory was registered twice")
        self._kv = kv
        self._endpoint = self._exchange.join(self)

    @property
    def endpoint(self) -> Endpoint | None:
        """See `KVConnectorWorker`."""
        return self._endpoint

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        """See `KVConnectorWorker`."""
        todo = PullInstructions.from_metadata(metadata)
        with self._exchange.lock:
            now_s = self._clock.monotonic_s()
            for grant in todo.grants:
                self.leases.grant(grant.nonce, grant.request_id, now_s)
            for watch in todo.watches:
                self._watches[watch.nonce] = watch
                self._beat_s[watch.nonce] = now_s
            self._posted += todo.loads
            for release in todo.releases:
                self._release(release.nonce, release.owner)
            under_way = {load.request_id for load in chain(self._posted, *self._wire)}
            self._aborted |= under_way & set(todo.aborts)
            for end in todo.ends:
                self.leases.release(end.nonce, end.end)
            self._beat(now_s)
        if todo.grants or todo.loads or todo.aborts or todo.ends:
            self._wake()

    def get_finished(self) -> ConnectorReport:
        """See `KVConnectorWorker`."""
        received: list[Received] = []
        failed: list[Failed] = []
        with self._exchange.lock:
            self._beat(self._clock.monotonic_s())
            self._wire.append(self._posted)
            self._posted = []
            for load in self._wire.popleft():
                if load.request_id in self._aborted:
                    self._aborted.discard(load.request_id)
                    # Bytes of a real load go on landing until it has settled: so do these.
                    self._copy(load)
                    failed.append(_failed(load, LoadFailure.ABORTED))
                    self._release(load.nonce, load.owner)
                    continue
                match self._load(load):
                    case Received() as fact:
                        received.append(fact)
                        self._unwatch(load.nonce)
                    case Failed() as fact:
                        failed.append(fact)
                        self._release(load.nonce, load.owner)
            self.leases.expire(self._clock.monotonic_s())
            settled = self.leases.take_settled()
            if any(self._wire):
                self._wake()
        return ConnectorReport(settled=settled, received=received, failed=failed)

    def close(self, timeout_s: float) -> None:
        """See `KVConnectorWorker`."""
        if self._endpoint is not None:
            self._exchange.leave(self._endpoint)
        self._kv = None

    def _load(self, load: Load) -> Received | Failed:
        """Copy, then ask the owner whether what was copied was still leased."""
        owner = self._exchange.find(self._endpoint_of(load.owner))
        if owner is None or owner._kv is None or self._kv is None:
            return _failed(
                load, LoadFailure.PEER_LOST, f"{load.owner.engine_id} is not in this process"
            )
        theirs, mine = owner._context, self._context
        if theirs.incarnation != load.owner.incarnation:
            return _failed(
                load,
                LoadFailure.LEASE_LOST,
                f"the lease is of incarnation {load.owner.incarnation} of "
                f"{load.owner.engine_id}, which is now {theirs.incarnation}",
            )
        if theirs.rank != mine.rank:
            return _failed(
                load,
                LoadFailure.INCOMPATIBLE,
                f"rank {mine.rank} of {mine.engine_id} was led to rank {theirs.rank} of "
                f"{theirs.engine_id}",
            )
        if theirs.layout_digest != mine.layout_digest:
            return _failed(
                load,
                LoadFailure.INCOMPATIBLE,
                f"layout at {theirs.engine_id}: {theirs.layout_fields}, "
                f"at {mine.engine_id}: {mine.layout_fields}",
            )
        start_s = self._clock.monotonic_s()
        until_s = start_s + mine.config.transfer.transfer_timeout_s
        owner.leases.begin_read(load.nonce, self, start_s, until_s=until_s)
        self._copy(load)
        end_s = self._clock.monotonic_s()
        verdict = owner.leases.confirm(load.nonce, self, end_s)
        owner._wake()
        if verdict is not Verdict.VALID:
            return _failed(load, LoadFailure.LEASE_LOST, f"{theirs.engine_id} no longer leased it")
        return Received(
            request_id=load.request_id,
            num_bytes=len(load.local_block_ids) * mine.layout.block_bytes,
            num_descriptors=len(load.local_block_ids),
            wait_s=0.0,
            transfer_s=end_s - start_s,
            load_id=load.load_id,
        )

    def _copy(self, load: Load) -> None:
        """Move the bytes, if both ends of the load are still there."""
        owner = self._owner(load.owner)
        if owner is not None and owner._kv is not None and self._kv is not None:
            with torch.inference_mode():
                self._kv[load.local_block_ids] = owner._kv[load.remote_block_ids]

    def _beat(self, now_s: float) -> None:
        for nonce, watch in self._watches.items():
            if self._beat_s[nonce] <= now_s:
                self._beat_s[nonce] = now_s + watch.lease_s / _HEARTBEATS_PER_LEASE
                owner = self._owner(watch.owner)
                if owner is not None:
                    owner.leases.heartbeat([nonce], now_s)

    def _release(self, nonce: str, where: Owner) -> None:
        self._unwatch(nonce)
        owner = self._owner(where)
        if owner is not None:
            owner.leases.release(nonce)
            owner._wake()

    def _unwatch(self, nonce: str) -> None:
        self._watches.pop(nonce, None)
        self._beat_s.pop(nonce, None)

    def _owner(self, owner: Owner) -> MemoryWorker | None:
        worker = self._exchange.find(self._endpoint_of(owner))
        if worker is None or worker._context.incarnation != owner.incarnation:
            return None
        return worker if worker._context.rank == self._context.rank else None

    def _endpoint_of(self, owner: Owner) -> Endpoint:
        return owner.endpoints[self._context.rank]


def _failed(load: Load, reason: LoadFailure, detail: str = "") -> Failed:
    return Failed(request_id=load.request_id, reason=reason, detail=detail, load_id=load.load_id)
