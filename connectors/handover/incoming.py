"""D's share of the scheduler half: requests whose KV another engine has, or is to write here.

Stages what the worker halves shall do about them, and takes what became of it. It checks nothing
(`checks` has), and knows neither tensors nor sockets nor time.

A request's entry, by what was staged for it last:

    (none) --queued--> WATCHED --alloc--> LOADING --received--> (none), lease released as read
                          |               |  |  `--failed--> (none), see `_give_up`
                          |               |  `--failed, `retry`--> LOADING, once, if pulled
                          |               `--aborted--> LOADING (its report settles it)
                          `--aborted, nothing to load--> (none), lease released
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.connectors.base import Match
from pdserve.connectors.handover.instructions import EndLease, Load, Reserve, Watch
from pdserve.errors import InternalError
from pdserve.wire.request import OnLoadFailure
from pdserve.wire.transfer import LeaseEnd, LoadFailure

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from pdserve.connectors.handover.instructions import Instructions
    from pdserve.connectors.views import RequestView
    from pdserve.wire.ids import BlockId, RequestId
    from pdserve.wire.transfer import EngineRef, Failed, KVHandoff, Received

_NO_MATCH: Final = Match(0, is_async=False)
# After these the lease may hold, and what went wrong need not go wrong again.
_TRIED_AGAIN: Final = (LoadFailure.DIGEST, LoadFailure.TIMEOUT, LoadFailure.PEER_LOST)


@dataclass(slots=True)
class _Entry:
    """`handoff` is None if the KV is pushed; `tried` is the load that was tried again."""

    request: RequestView
    nonce: str
    owner: EngineRef
    handoff: KVHandoff | None
    load: Load | Reserve | None = None
    tried: int | None = None
    is_aborted: bool = False

    @property
    def num_tokens(self) -> int:
        """Of which there is KV."""
        handoff = self.handoff
        return len(self.request.prompt_token_ids) if handoff is None else handoff.num_tokens


class Incoming:
    """Every request of this engine whose KV is to come from elsewhere.

    Args:
        block_size: Of this engine.
        staged: Where instructions go.
        faults: Where `report_unknown` is counted.
    """

    def __init__(self, block_size: int, *, staged: Instructions, faults: Counter[str]) -> None:
        self._block_size = block_size
        self._staged = staged
        self._faults = faults
        self._load_ids = itertools.count(1)
        self._entries: dict[RequestId, _Entry] = {}
        self._pushes: set[str] = set()

    def __len__(self) -> int:
        """Requests whose KV has neither come nor been given up."""
        return len(self._entries)

    # ---- what the scheduler asks and says ----------------------------------------------

    def watch(
        self,
        request: RequestView,
        nonce: str,
        owner: EngineRef,
        lease_s: float,
        handoff: KVHandoff | None,
    ) -> None:
        """A request is queued: meet `owner`, and keep what `nonce` names alive from now on.

        Args:
            handoff: None if its KV is pushed.
        """
        self._entries[request.request_id] = _Entry(request, nonce, owner, handoff)
        if handoff is None:
            self._pushes.add(nonce)
        self._staged.watches.append(Watch(nonce, owner, lease_s))

    def is_pushed(self, nonce: str) -> bool:
        """Whether a request of this engine waits for that push."""
        return nonce in self._pushes

    def match(self, request: RequestView, num_computed_tokens: int) -> Match:
        """What can be loaded behind so many tokens."""
        entry = self._entries.get(request.request_id)
        if entry is None or entry.load is not None:
            return _NO_MATCH
        num_tokens = entry.num_tokens - num_computed_tokens
        if num_tokens <= 0:
            return _NO_MATCH
        return Match(num_tokens, is_async=True, is_pinned=entry.handoff is None)

    def begin(
        self, request: RequestView, block_ids: Sequence[BlockId], num_external_tokens: int
    ) -> None:
        """`block_ids` are held for the request: load so many tokens, or with 0 release its lease.

        Raises:
            InternalError: They do not start at a block's edge, the table is too short for them,
                or nothing was offered.
        """
        entry = self._entries.get(request.request_id)
        if num_external_tokens == 0:
            if entry is not None and entry.load is None:
                self._end(request.request_id, entry, LeaseEnd.RELEASED)
            return
        if entry is None or entry.load is not None:
            raise InternalError(
                f"request {request.request_id}: {num_external_tokens} external tokens were "
                "planned, but no load was offered"
            )
        num_blocks = -(-entry.num_tokens // self._block_size)
        first_token = entry.num_tokens - num_external_tokens
        if first_token % self._block_size or first_token < 0 or len(block_ids) < num_blocks:
            raise InternalError(
                f"request {request.request_id}: cannot load {num_external_tokens} of "
                f"{entry.num_tokens} tokens into {len(block_ids)} blocks of "
                f"{self._block_size}: they must start at a block's edge and fit"
            )
        local = list(block_ids[:num_blocks])
        if entry.handoff is None:
            entry.load = Reserve(
                next(self._load_ids),
                request.request_id,
                entry.nonce,
                entry.owner,
                local,
                first_token,
                entry.num_tokens,
            )
            self._staged.reserves.append(entry.load)
        else:
            entry.load = Load(
                next(self._load_ids),
                request.request_id,
                entry.nonce,
                entry.owner,
                entry.handoff.block_ids,
                local,
                first_token,
                entry.num_tokens,
                entry.handoff.generations,
            )
            self._staged.loads.append(entry.load)

    def abort(self, request_id: RequestId) -> None:
        """The request is gone: release its lease, or have its load stopped, which still ends."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        if entry.load is None:
            self._end(request_id, entry, LeaseEnd.RELEASED)
        elif not entry.is_aborted:
            entry.is_aborted = True
            self._staged.aborts.append(request_id)

    # ---- what the workers say ------------------------------------------------------------

    def failing(self, failed: Failed) -> None:
        """What one rank has given up, the others need not wait for."""
        entry = self._entries.get(failed.request_id)
        if (
            entry is not None
            and entry.load is not None
            and entry.load.load_id == failed.load_id
            and failed.request_id not in self._staged.aborts
        ):
            self._staged.aborts.append(failed.request_id)

    def pushed_to(self, received: Received) -> RequestView | None:
        """The request that a push has brought what is to be checked; None if it is none."""
        entry = self._entries.get(received.request_id)
        return entry.request if entry is not None and entry.handoff is None else None

    def received(self, received: Received) -> bool:
        """Its KV is here: P's lease is not needed any more. False if it is of no load of ours."""
        entry = self._entry_of(received)
        if entry is not None:
            self._end(received.request_id, entry, LeaseEnd.READ)
        return entry is not None

    def retry(self, failed: Failed) -> bool:
        """Load once more from the same P what was not confirmed; False if that is not worth it."""
        entry = self._entries.get(failed.request_id)
        if (
            entry is None
            or not isinstance(entry.load, Load)
            or entry.load.load_id != failed.load_id
            or entry.tried is not None
            or entry.is_aborted
            or failed.reason not in _TRIED_AGAIN
        ):
            return False
        last_edge = self._edge_before(entry.num_tokens - 1)
        edge = min(self._edge_before(failed.num_valid_tokens), last_edge)
        entry.tried = failed.load_id
        if failed.request_id in self._staged.aborts:  # of the load that is over now
            self._staged.aborts.remove(failed.request_id)
        entry.load = msgspec.structs.replace(
            entry.load,
            load_id=next(self._load_ids),
            first_token=max(entry.load.first_token, edge),
        )
        self._staged.loads.append(entry.load)
        return True

    def failed(self, failed: Failed) -> bool:
        """Its KV will not come. False if it is of no load of ours."""
        entry = self._entry_of(failed)
        if entry is not None:
            self._give_up(failed.request_id, entry)
        return entry is not None

    def _entry_of(self, report: Received | Failed) -> _Entry | None:
        """Whose end this report is; None if of nothing that is under way."""
        entry = self._entries.get(report.request_id)
        if entry is not None and report.load_id:
            if report.load_id == entry.tried:
                return None
            if entry.load is None or report.load_id != entry.load.load_id:
                entry = None
        self._faults["report_unknown"] += entry is None
        return entry

    def _give_up(self, request_id: RequestId, entry: _Entry) -> None:
        """A load has failed for good.

        Whoever the failure is told to may have the same KV pulled under the same lease, by this
        engine or another: then it is left alive, and this engine only stops renewing it.
        """
        is_reported = entry.request.on_load_failure is OnLoadFailure.REPORT
        if entry.is_aborted or not (is_reported or entry.handoff is None):
            self._end(request_id, entry, LeaseEnd.RELEASED)
            return
        self._forget(request_id, entry)
        self._staged.unwatches.append(entry.nonce)

    def _forget(self, request_id: RequestId, entry: _Entry) -> None:
        del self._entries[request_id]
        if entry.handoff is None:
            self._pushes.discard(entry.nonce)

    def _end(self, request_id: RequestId, entry: _Entry, end: LeaseEnd) -> None:
        self._forget(request_id, entry)
        self._staged.releases.append(EndLease(entry.nonce, entry.owner, end))

    def _edge_before(self, token: int) -> int:
        return token - token % self._block_size
