"""D's side of pulls: a load reads from the ranks of P that have something for this rank of D.

Each poll lets a part of the bytes arrive. Only once all of them have, P's ranks are asked
whether they leased them until now, and what their digests should be; then it is KV, or it has
failed. An aborted load goes on arriving before it is reported.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.connectors import digests
from pdserve.connectors.handover.lease import Verdict
from pdserve.connectors.memory.copying import Copy
from pdserve.connectors.slicing import pieces, routes_to
from pdserve.errors import PeerError
from pdserve.wire.transfer import ConnectorReport, Failed, KVMode, LoadFailure, Received

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.connectors.handover.instructions import Load
    from pdserve.connectors.memory.worker import MemoryWorker
    from pdserve.connectors.slicing import Route
    from pdserve.wire.ids import BlockId, RequestId


@dataclass(slots=True)
class _Leg:
    """What comes from one rank of P."""

    route: Route
    copy: Copy
    is_here: bool = False


@dataclass(slots=True, eq=False)
class _Pull:
    load: Load
    posted_s: float
    begun_s: float = 0.0
    legs: list[_Leg] = field(default_factory=list)
    is_aborted: bool = False


class Pulls:
    """All loads of one rank of D."""

    def __init__(self, here: MemoryWorker) -> None:
        self._here = here
        self._posted: list[_Pull] = []
        self._under_way: deque[_Pull] = deque()

    def __len__(self) -> int:
        """Number of loads that have not been reported."""
        return len(self._posted) + len(self._under_way)

    @property
    def blocks(self) -> Iterable[BlockId]:
        """Blocks that bytes of a load may still land in."""
        size = self._here.context.layout.block_size
        for pull in (*self._posted, *self._under_way):
            yield from pull.load.local_block_ids[pull.load.first_token // size :]

    def post(self, load: Load, now_s: float) -> None:
        """Begin with the next poll."""
        self._posted.append(_Pull(load, now_s))

    def abort(self, request_ids: set[RequestId]) -> None:
        """What of these is under way is reported as aborted, once it has arrived."""
        for pull in (*self._posted, *self._under_way):
            pull.is_aborted |= pull.load.request_id in request_ids

    def poll(self, now_s: float) -> ConnectorReport:
        """Let a part of each load arrive; return what is over."""
        received: list[Received] = []
        failed: list[Failed] = []
        self._under_way += self._posted
        self._posted = []
        for pull in list(self._under_way):
            outcome = self._advance(pull, now_s)
            if outcome is None:
                continue
            self._under_way.remove(pull)
            if isinstance(outcome, Failed):
                for leg in pull.legs:
                    owner = self._here.peer(pull.load.owner, leg.route.source_rank)
                    if owner is not None:
                        owner.leases.end_read(pull.load.nonce, self._reader(pull))
                        owner.wake()
                failed.append(outcome)
            else:
                received.append(outcome)
        return ConnectorReport(received=received, failed=failed)

    def _advance(self, pull: _Pull, now_s: float) -> Received | Failed | None:
        load, kv = pull.load, self._here.kv
        if not pull.legs:
            why = self._begin(pull, now_s)
            if why is not None:
                return why
        if kv is None:
            return _failed(pull, LoadFailure.PEER_LOST, "this engine is closed")
        for leg in pull.legs:
            owner = self._here.peer(load.owner, leg.route.source_rank)
            if owner is None or owner.kv is None:
                return _failed(pull, LoadFailure.PEER_LOST, f"{load.owner.engine_id} is gone")
            leg.is_here = leg.is_here or leg.copy.land(owner.kv, kv)
        if not all(leg.is_here for leg in pull.legs):
            return None
        if pull.is_aborted:
            return _failed(pull, LoadFailure.ABORTED)
        num_valid = min(self._num_valid(pull, leg, now_s) for leg in pull.legs)
        if num_valid < 0:
            return _failed(
                pull, LoadFailure.LEASE_LOST, f"{load.owner.engine_id} leased it no more"
            )
        if num_valid < load.num_tokens:
            detail = f"the KV is good up to token {num_valid}"
            return _failed(pull, LoadFailure.DIGEST, detail, num_valid)
        return Received(
            request_id=load.request_id,
            num_bytes=sum(leg.copy.num_bytes for leg in pull.legs),
            num_descriptors=sum(leg.copy.num_descriptors for leg in pull.legs),
            wait_s=pull.begun_s - pull.posted_s,
            transfer_s=now_s - pull.begun_s,
            load_id=load.load_id,
            mode=KVMode.PULL,
        )

    def _begin(self, pull: _Pull, now_s: float) -> Failed | None:
        load, mine = pull.load, self._here.context
        until_s = now_s + mine.config.transfer.transfer_timeout_s
        try:
            legs = [
                _Leg(
                    route,
                    Copy(
                        pieces(
                            load.owner.shape,
                            mine.shape,
                            route,
                            load.remote_block_ids,
                            load.local_block_ids,
                            first_token=load.first_token,
                            num_tokens=load.num_tokens,
                        )
                    ),
                )
                for route in routes_to(load.owner.shape, mine.shape, mine.rank)
            ]
        except PeerError as error:
            return _failed(pull, LoadFailure.INCOMPATIBLE, str(error))
        owners = []
        for leg in legs:
            owner = self._here.exchange.find(load.owner.endpoints[leg.route.source_rank])
            if owner is None:
                return _failed(pull, LoadFailure.PEER_LOST, f"{load.owner.engine_id} is not here")
            why = self._here.why_not(owner, load.owner, leg.route.source_rank)
            if why is not None:
                return _failed(pull, *why)
            owners.append(owner)
        for owner in owners:
            owner.leases.begin_read(load.nonce, self._reader(pull), now_s, until_s=until_s)
        pull.legs, pull.begun_s = legs, now_s
        return None

    def _num_valid(self, pull: _Pull, leg: _Leg, now_s: float) -> int:
        """Tokens that are KV, as far as this leg goes; -1 if its lease did not last."""
        load, kv, rank = pull.load, self._here.kv, leg.route.source_rank
        owner = self._here.peer(load.owner, rank)
        assert owner is not None
        assert kv is not None
        verdict = owner.leases.confirm(load.nonce, self._reader(pull), now_s)
        owner.wake()
        if verdict is not Verdict.VALID:
            return -1
        return digests.num_valid_tokens(
            load.owner.shape,
            owner.digests_of_lease(load.nonce, leg.route, first_token=load.first_token),
            digests.digests_of(
                kv,
                load.owner.shape,
                self._here.context.shape,
                leg.route,
                load.local_block_ids,
                first_token=load.first_token,
                num_tokens=load.num_tokens,
            ),
            first_token=load.first_token,
            num_tokens=load.num_tokens,
        )

    def _reader(self, pull: _Pull) -> tuple[MemoryWorker, int]:
        return (self._here, pull.load.load_id)


def _failed(
    pull: _Pull, reason: LoadFailure, detail: str = "", num_valid_tokens: int | None = None
) -> Failed:
    load = pull.load
    if pull.is_aborted:
        reason = LoadFailure.ABORTED
    return Failed(
        request_id=load.request_id,
        reason=reason,
        detail=detail,
        load_id=load.load_id,
        num_valid_tokens=load.first_token if num_valid_tokens is None else num_valid_tokens,
    )
