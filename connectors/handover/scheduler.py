"""The scheduler half of every connector that hands KV over: decides, counts, moves nothing.

It makes and checks handoffs, and stages what the worker half shall do. It knows neither
tensors nor sockets nor time; the randomness of nonces is passed in.

A request's entry at D, by what was staged for it last:

    (none) --queued--> WATCHED --alloc--> LOADING --received--> (none), lease released as read
                          |               |  |  `--failed--> (none), see `_give_up`
                          |               |  `--failed, `retry_load`--> LOADING, once, if pulled
                          |               `--aborted--> LOADING (its report settles it)
                          `--aborted, nothing to load--> (none), lease released

A push's entry at P, by its nonce:

    (none) --queued--> EXPECTED --registered--> LIVE --finished--> (none), leased under the nonce
                          |                      |`--aborted--> STOPPED --settled--> (none)
                          |                      `--withdrawn--> WITHDRAWN --finished--> (none),
                          |                                         |       leased under another
                          |                                         `--aborted--> STOPPED
                          |--withdrawn--> WITHDRAWN
                          `--aborted--> STOPPED

A withdrawn push that was never live has nothing to settle: it is forgotten when it is aborted.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.connectors.base import KVConnectorScheduler, Match
from pdserve.connectors.bygone import Bygone
from pdserve.connectors.handover.checks import why_not_handoff, why_not_ticket
from pdserve.connectors.handover.instructions import (
    Chunk,
    End,
    Expect,
    Grant,
    Instructions,
    Load,
    Release,
    Reserve,
    StepInstructions,
    Stop,
    Watch,
)
from pdserve.connectors.handover.secret import check_secret
from pdserve.errors import InternalError
from pdserve.wire.hashing import prompt_digest
from pdserve.wire.ids import EngineId, RequestId
from pdserve.wire.request import OnLoadFailure
from pdserve.wire.transfer import KVHandoff, LeaseEnd, LoadFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.base import ConnectorContext, RequestView
    from pdserve.observe.clock import Clock
    from pdserve.wire.ids import BlockId
    from pdserve.wire.step import SchedulerOutput
    from pdserve.wire.transfer import (
        ConnectorMetadata,
        ConnectorReport,
        Endpoint,
        EngineRef,
        Failed,
        PushTicket,
        Received,
    )

_NO_MATCH: Final = Match(0, is_async=False)
# After these the lease may hold, and what went wrong need not go wrong again.
_TRIED_AGAIN: Final = (LoadFailure.DIGEST, LoadFailure.TIMEOUT, LoadFailure.PEER_LOST)


@dataclass(slots=True)
class _Incoming:
    """At D. `handoff` is None if the KV is pushed; `tried` is the load that was tried again."""

    nonce: str
    owner: EngineRef
    num_tokens: int
    handoff: KVHandoff | None
    is_reported: bool
    load: Load | Reserve | None = None
    tried: int | None = None
    is_aborted: bool = False


class _Stage(enum.Enum):
    EXPECTED = enum.auto()
    LIVE = enum.auto()
    WITHDRAWN = enum.auto()
    STOPPED = enum.auto()


@dataclass(slots=True)
class _Push:
    """At P. `num_told` tokens of the prompt were announced to the workers."""

    nonce: str
    request_id: RequestId
    num_tokens: int
    stage: _Stage = _Stage.EXPECTED
    was_live: bool = False
    block_ids: list[BlockId] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    num_told: int = 0


class HandoverScheduler(KVConnectorScheduler):
    """See `KVConnectorScheduler`.

    Args:
        endpoints: Where this engine's worker halves listen, in rank order; they go into the
            handoffs.
        new_nonce: Returns a string never returned before; unguessable outside of tests.
        clock: Its wall clock tells which tickets have expired.

    Attributes:
        faults: `report_unknown`, about a request or nonce that has no entry: it is ignored.
            `ticket_replayed`, a request at P whose ticket was seen before: it is pulled.
            `ticket_expired`, likewise, whose ticket came after its time.
    """

    def __init__(
        self,
        context: ConnectorContext,
        endpoints: Sequence[Endpoint],
        *,
        new_nonce: Callable[[], str],
        clock: Clock,
    ) -> None:
        if len(endpoints) != context.num_ranks:
            raise InternalError(
                f"{len(endpoints)} side channels for {context.num_ranks} ranks: each rank has one"
            )
        transfer = context.config.transfer
        self._context = context
        self._endpoints = list(endpoints)
        self._new_nonce = new_nonce
        self._clock = clock
        self._block_size = context.layout.block_size
        self._secret = check_secret(host=transfer.host, secret=transfer.secret)
        self._incoming: dict[RequestId, _Incoming] = {}
        self._pushes: dict[str, _Push] = {}
        self._push_of: dict[RequestId, _Push] = {}
        self._tickets: Bygone[None] = Bygone()
        self._leased: dict[RequestId, str] = {}
        self._leased_by_nonce: dict[str, RequestId] = {}
        self._staged = Instructions()
        self._chunks: list[Chunk] = []
        self._load_ids = itertools.count(1)
        self.faults: Counter[str] = Counter()

    def check_handoff(self, request: RequestView) -> str | None:
        """See `KVConnectorScheduler`."""
        handoff, ticket = request.handoff, request.ticket
        if ticket is not None:
            why = why_not_ticket(
                ticket, self._context, secret=self._secret, is_prefill=request.remote_decode
            )
            if why is not None:
                return f"ticket: {why}"
        if handoff is None:
            return None
        return why_not_handoff(
            handoff,
            self._context,
            secret=self._secret,
            prompt_token_ids=request.prompt_token_ids,
            cache_salt=request.cache_salt,
            ticket=ticket,
        )

    def request_queued(self, request: RequestView) -> None:
        """See `KVConnectorScheduler`."""
        handoff, ticket = request.handoff, request.ticket
        if handoff is not None:
            self._watch(request, handoff.nonce, handoff.owner, handoff.lease_s, handoff)
        elif ticket is not None and request.remote_decode:
            self._expect(request, ticket)
        elif ticket is not None:
            lease_s = self._context.config.transfer.lease_s
            self._watch(request, ticket.nonce, ticket.prefill, lease_s, None)

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> Match | None:
        """See `KVConnectorScheduler`."""
        push = self._push_of.get(request.request_id)
        if push is not None and push.stage is _Stage.EXPECTED:
            return None
        entry = self._incoming.get(request.request_id)
        if entry is None or entry.load is not None:
            return _NO_MATCH
        num_tokens = entry.num_tokens - num_computed_tokens
        return Match(num_tokens, is_async=True) if num_tokens > 0 else _NO_MATCH

    def update_state_after_alloc(
        self,
        request: RequestView,
        block_ids: Sequence[BlockId],
        num_external_tokens: int,
        *,
        generations: Sequence[int] = (),
    ) -> None:
        """See `KVConnectorScheduler`.

        Raises:
            InternalError: The tokens to load do not start at a block's edge, the table is
                too short for them, or nothing was offered; or a request is to be pushed whose
                table is not that of its whole prompt.
        """
        push = self._push_of.get(request.request_id)
        if push is not None and push.stage is _Stage.LIVE:
            self._take_table(push, block_ids, generations)
        entry = self._incoming.get(request.request_id)
        if num_external_tokens == 0:
            if entry is not None and entry.load is None:
                self._end(request.request_id, entry, LeaseEnd.RELEASED)
            return
        if entry is None or entry.load is not None:
            raise InternalError(
                f"request {request.request_id}: {num_external_tokens} external tokens were "
                "planned, but no load was offered"
            )
        num_blocks = self._blocks_of(entry.num_tokens)
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

    def chunk_planned(
        self,
        request: RequestView,
        block_ids: Sequence[BlockId],
        start_token: int,
        end_token: int,
        *,
        generations: Sequence[int],
    ) -> None:
        """See `KVConnectorScheduler`. A live push has chunks of its own."""
        push = self._push_of.get(request.request_id)
        if push is None or push.stage is not _Stage.LIVE:
            self._chunks.append(
                Chunk(
                    nonce="",
                    request_id=request.request_id,
                    block_ids=list(block_ids),
                    generations=list(generations),
                    start_token=start_token,
                    end_token=end_token,
                    num_tokens=len(request.prompt_token_ids),
                    num_step_tokens=0,
                )
            )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ConnectorMetadata | None:
        """See `KVConnectorScheduler`. O(requests of the step) if any of them is pushed.

        The first chunk of a push begins with token 0, whatever it found in the prefix cache:
        D needs that, too.
        """
        scheduled = scheduler_output.num_scheduled_tokens
        pushes = [
            push
            for request_id, push in self._push_of.items()
            if push.stage is _Stage.LIVE
            and request_id in scheduled
            and push.num_told < push.num_tokens
        ]
        chunks, self._chunks = self._chunks, []
        if not (pushes or chunks):
            return None
        known = scheduler_output.known_requests
        computed = dict(zip(known.request_ids, known.num_computed_tokens, strict=True))
        computed |= {
            new.request_id: new.num_computed_tokens for new in scheduler_output.new_requests
        }
        for push in pushes:
            request_id = push.request_id
            end_token = min(computed[request_id] + scheduled[request_id], push.num_tokens)
            chunks.append(
                Chunk(
                    push.nonce,
                    request_id,
                    push.block_ids,
                    push.generations,
                    push.num_told,
                    end_token,
                    push.num_tokens,
                    scheduler_output.num_tokens,
                )
            )
            push.num_told = end_token
        return StepInstructions(chunks=chunks).to_metadata()

    def take_instructions(self) -> ConnectorMetadata | None:
        """See `KVConnectorScheduler`."""
        staged, self._staged = self._staged, Instructions()
        return staged.to_metadata() if staged else None

    def request_finished(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> KVHandoff | None:
        """See `KVConnectorScheduler`.

        A handoff is made of a `remote_decode` request that has its first token. It names
        as many blocks as the prompt fills, the last one perhaps in part. A push that is live
        gives the lease its nonce; one that was withdrawn does not, because its D may have
        released that already.
        """
        if not request.remote_decode or not request.output_token_ids:
            return None
        num_tokens = len(request.prompt_token_ids)
        blocks = list(block_ids[: self._blocks_of(num_tokens)])
        push = self._push_of.get(request.request_id)
        is_pushed = push is not None and push.stage is _Stage.LIVE
        nonce = push.nonce if push is not None and is_pushed else self._new_nonce()
        if push is not None:
            self._forget_push(push)
        self._leased[request.request_id] = nonce
        self._leased_by_nonce[nonce] = request.request_id
        known = list(generations[: len(blocks)])
        handoff = KVHandoff(
            engine_id=EngineId(self._context.engine_id),
            incarnation=self._context.incarnation,
            nonce=nonce,
            request_id=request.request_id,
            endpoints=self._endpoints,
            block_ids=blocks,
            num_tokens=num_tokens,
            shape=self._context.shape,
            generations=known,
            layout_digest=self._context.layout_digest,
            lease_s=self._context.config.transfer.lease_s,
            prompt_digest=prompt_digest(request.prompt_token_ids, request.cache_salt),
            first_token_ids=list(request.output_token_ids),
            first_logprobs=request.first_logprobs,
        ).signed(self._secret)
        self._staged.grants.append(
            Grant(
                nonce,
                request.request_id,
                blocks,
                known,
                num_tokens,
                handoff if is_pushed else None,
            )
        )
        return handoff

    def request_aborted(self, request: RequestView) -> bool:
        """See `KVConnectorScheduler`."""
        entry = self._incoming.get(request.request_id)
        if entry is not None:
            if entry.load is None:
                self._end(request.request_id, entry, LeaseEnd.RELEASED)
            elif not entry.is_aborted:
                entry.is_aborted = True
                self._staged.aborts.append(request.request_id)
        nonce = self._leased.get(request.request_id)
        if nonce is not None:
            self._staged.ends.append(End(nonce, LeaseEnd.ABORTED))
        push = self._push_of.get(request.request_id)
        return self._stop(push) if push is not None else nonce is not None

    def holds_blocks(self, request: RequestView) -> bool:
        """See `KVConnectorScheduler`."""
        push = self._push_of.get(request.request_id)
        return push is not None and push.was_live

    def release_lease(self, nonce: str) -> None:
        """See `KVConnectorScheduler`."""
        if nonce in self._leased_by_nonce:
            self._staged.ends.append(End(nonce, LeaseEnd.RELEASED))

    def retry_load(self, failed: Failed) -> bool:
        """See `KVConnectorScheduler`. The first rung of the ladder: the same P, once.

        What was confirmed and checked is not read again.
        """
        entry = self._incoming.get(failed.request_id)
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

    def update_connector_output(self, report: ConnectorReport) -> None:
        """See `KVConnectorScheduler`."""
        for settled in report.settled:
            self._settle(settled.request_id, settled.nonce)
        for registered in report.registered:
            push = self._pushes.get(registered.nonce)
            if push is None:
                self.faults["report_unknown"] += registered.nonce not in self._tickets
            elif push.stage is _Stage.EXPECTED:
                push.stage, push.was_live = _Stage.LIVE, True
        for withdrawn in report.withdrawn:
            push = self._pushes.get(withdrawn.nonce)
            if push is None:
                # A push that is over here may be pulled: its lease is for anybody.
                self.faults["report_unknown"] += withdrawn.nonce not in self._tickets
            elif push.stage is not _Stage.STOPPED:
                push.stage = _Stage.WITHDRAWN
        for failing in report.failing:
            entry = self._incoming.get(failing.request_id)
            if (
                entry is not None
                and entry.load is not None
                and entry.load.load_id == failing.load_id
                and failing.request_id not in self._staged.aborts
            ):
                # What one rank has given up, the others need not wait for.
                self._staged.aborts.append(failing.request_id)
        for received in report.received:
            entry = self._entry_of(received)
            if entry is not None:
                self._end(received.request_id, entry, LeaseEnd.READ)
        for failed in report.failed:
            entry = self._entry_of(failed)
            if entry is not None:
                self._give_up(failed.request_id, entry)

    # ---- at D ------------------------------------------------------------------------

    def _watch(
        self,
        request: RequestView,
        nonce: str,
        owner: EngineRef,
        lease_s: float,
        handoff: KVHandoff | None,
    ) -> None:
        is_reported = request.on_load_failure is OnLoadFailure.REPORT
        self._incoming[request.request_id] = _Incoming(
            nonce, owner, len(request.prompt_token_ids), handoff, is_reported
        )
        self._staged.watches.append(Watch(nonce, owner, lease_s))

    def _entry_of(self, report: Received | Failed) -> _Incoming | None:
        """Whose end this report is; None if of nothing that is under way."""
        entry = self._incoming.get(report.request_id)
        if entry is not None and report.load_id:
            if report.load_id == entry.tried:
                return None
            if entry.load is None or report.load_id != entry.load.load_id:
                entry = None
        self.faults["report_unknown"] += entry is None
        return entry

    def _give_up(self, request_id: RequestId, entry: _Incoming) -> None:
        """A load has failed for good.

        Whoever the failure is told to may have the same KV pulled under the same lease, by this
        engine or another: then it is left alive, and this engine only stops renewing it.
        """
        if entry.is_aborted or not (entry.is_reported or entry.handoff is None):
            self._end(request_id, entry, LeaseEnd.RELEASED)
            return
        del self._incoming[request_id]
        self._staged.unwatches.append(entry.nonce)

    def _end(self, request_id: RequestId, entry: _Incoming, end: LeaseEnd) -> None:
        del self._incoming[request_id]
        self._staged.releases.append(Release(entry.nonce, entry.owner, end))

    # ---- at P ------------------------------------------------------------------------

    def _expect(self, request: RequestView, ticket: PushTicket) -> None:
        nonce, now_s = ticket.nonce, self._clock.wall_s()
        if ticket.expires_s <= now_s:
            self.faults["ticket_expired"] += 1
            return
        if nonce in self._tickets:
            self.faults["ticket_replayed"] += 1
            return
        self._tickets.add(nonce, None, now_s=now_s, until_s=ticket.expires_s)
        push = _Push(nonce, request.request_id, len(request.prompt_token_ids))
        self._pushes[nonce] = self._push_of[request.request_id] = push
        self._staged.expects.append(Expect(nonce, request.request_id, ticket.decode))

    def _take_table(
        self, push: _Push, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> None:
        num_blocks = self._blocks_of(push.num_tokens)
        if not len(generations) == len(block_ids) >= num_blocks:
            raise InternalError(
                f"request {push.request_id} is pushed: its {push.num_tokens} tokens need "
                f"{num_blocks} blocks with their generations at once, not {len(block_ids)} with "
                f"{len(generations)}"
            )
        push.block_ids = list(block_ids[:num_blocks])
        push.generations = list(generations[:num_blocks])

    def _stop(self, push: _Push) -> bool:
        """Stop a push; return whether its blocks may be in use until it has settled."""
        if push.stage is _Stage.WITHDRAWN and not push.was_live:
            self._forget_push(push)
            return False
        if push.stage is not _Stage.STOPPED:
            push.stage = _Stage.STOPPED
            del self._push_of[push.request_id]
            self._staged.stops.append(Stop(push.nonce, push.request_id, "aborted at its owner"))
        return push.was_live

    def _settle(self, request_id: RequestId, nonce: str) -> None:
        stopped = self._pushes.get(nonce)
        if stopped is not None:
            self._forget_push(stopped)
            return
        nonce = nonce or self._leased.get(request_id, "")
        if self._leased.get(request_id) != nonce or not nonce:
            self.faults["report_unknown"] += 1
            return
        del self._leased[request_id], self._leased_by_nonce[nonce]

    def _forget_push(self, push: _Push) -> None:
        del self._pushes[push.nonce]
        if self._push_of.get(push.request_id) is push:
            del self._push_of[push.request_id]

    def _edge_before(self, token: int) -> int:
        return token - token % self._block_size

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
