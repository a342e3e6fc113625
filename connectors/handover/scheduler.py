"""The scheduler half of connectors that hand KV over: decides and counts, moves nothing.

It makes and checks handoffs, matches reports to their transfers (`transfers`), and stages
instructions for the worker halves. It knows neither tensors nor sockets; it reads the clock only
when a ticket arrives, and the randomness of nonces is passed in.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.connectors.base import ConnectorNews, Hold, KVConnectorScheduler, KVSource, Match
from pdserve.connectors.handover.checks import why_not_handoff, why_not_ticket
from pdserve.connectors.handover.instructions import (
    EndLease,
    Expect,
    Grant,
    Instructions,
    PushNews,
    Reserve,
    Stop,
    Watch,
)
from pdserve.connectors.handover.transfers import Incoming, Outgoing, PushStage
from pdserve.errors import HandoffRefusedError, InternalError
from pdserve.wire.ids import EngineId, prompt_digest
from pdserve.wire.request import FinishReason
from pdserve.wire.transfer import ConnectorMetadata, Failed, KVHandoff, LeaseEnd, LoadFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.handover.instructions import Registered, Withdrawn
    from pdserve.connectors.views import RequestView, StepView
    from pdserve.observe.clock import Clock
    from pdserve.wire.ids import BlockId, RequestId
    from pdserve.wire.transfer import ConnectorReport, Endpoint, PushTicket, Received, Settled

_TICKETS_REMEMBERED: Final = 1 << 13
"""How many recent tickets are remembered, to detect replays and reports about unknown pushes."""


class HandoverScheduler(KVConnectorScheduler):
    """See `KVConnectorScheduler`. Pushed requests are pinned, so no preempted blocks are read.

    Args:
        endpoints: Addresses of this engine's worker halves, in rank order; they go into the
            handoffs.
        new_nonce: Returns a string never returned before; unguessable outside of tests.
        clock: The clock by which tickets expire.

    Attributes:
        faults: `report_unknown` counts ignored reports about a request or nonce without a transfer,
            `report_repeated` and `report_of_unknown_rank` ignored reports about pushes.
            `ticket_replayed` counts requests at P whose ticket was seen before, `ticket_expired`
            those whose ticket came too late: both are pulled instead.
    """

    hands_over = True

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
        self._context = context
        self._endpoints = list(endpoints)
        self._new_nonce = new_nonce
        self._clock = clock
        self._block_size = context.layout.block_size
        self.faults: Counter[str] = Counter()
        self._staged = Instructions()
        self._load_ids = itertools.count(1)
        self._incoming: dict[RequestId, Incoming] = {}
        self._pushed_here: set[str] = set()
        # By request: those that have not ended. By nonce: pushes that are not over, and leases.
        self._outgoing: dict[RequestId, Outgoing] = {}
        self._by_nonce: dict[str, Outgoing] = {}
        self._tickets: dict[str, None] = {}

    def request_arrived(self, request: RequestView) -> KVSource:
        """See `KVConnectorScheduler`."""
        handoff, ticket = request.handoff, request.kv_transfer_params.ticket
        refusal = self._refusal_of(request)
        if refusal is not None:
            what = "ticket" if handoff is None else "handoff"
            raise HandoffRefusedError(f"{what} refused: {refusal}")
        if request.remote_decode:
            self._expect(request, ticket)
        if handoff is not None:
            named = handoff.nonce, handoff.owner, handoff.lease_s
        elif ticket is not None and not request.remote_decode:
            named = ticket.nonce, ticket.prefill, self._context.config.transfer.lease_s
            self._pushed_here.add(ticket.nonce)
        else:
            return KVSource.LOCAL
        self._incoming[request.request_id] = Incoming(
            request, self._block_size, *named[:2], handoff
        )
        self._staged.watches.append(Watch(*named))  # this keeps the lease alive from now on
        if handoff is None:
            return KVSource.PLANNED
        return KVSource.LOCAL if request.remote_decode else KVSource.READY

    def _expect(self, request: RequestView, ticket: PushTicket | None) -> None:
        """At P: wait for D's registration if the request has a ticket for a push.

        If the ticket has expired or was seen before, the request will be pulled; D is notified at
        once of an expired one.
        """
        request_id, num_tokens = request.request_id, len(request.prompt_token_ids)
        outgoing = self._outgoing[request_id] = Outgoing(request_id, num_tokens)
        if ticket is None:
            return
        nonce = ticket.nonce
        if nonce in self._tickets:
            self.faults["ticket_replayed"] += 1
            return
        self._tickets[nonce] = None
        if len(self._tickets) > _TICKETS_REMEMBERED:
            del self._tickets[next(iter(self._tickets))]
        if request.arrival_s + ticket.valid_s <= self._clock.monotonic_s():
            self.faults["ticket_expired"] += 1
            self._stop(Outgoing(request_id, num_tokens, nonce), "its ticket has expired")
            return
        outgoing.nonce, outgoing.stage = nonce, PushStage.EXPECTED
        self._by_nonce[nonce] = outgoing
        self._staged.expects.append(Expect(nonce, request_id, ticket.decode))

    def _stop(self, outgoing: Outgoing, why: str, *, is_answered: bool = False) -> None:
        """At P: end a push; it settles afterwards."""
        outgoing.stage = PushStage.STOPPED
        self._by_nonce[outgoing.nonce] = outgoing
        stop = Stop(outgoing.nonce, outgoing.request_id, why, is_answered)
        self._staged.stops.append(stop)

    def _refusal_of(self, request: RequestView) -> str | None:
        ticket = request.kv_transfer_params.ticket
        if ticket is not None:
            why = why_not_ticket(ticket, self._context, is_prefill=request.remote_decode)
            if why is not None:
                return f"ticket: {why}"
            is_pushed_here = request.handoff is None and not request.remote_decode
            if is_pushed_here and ticket.nonce in self._pushed_here:
                return "another request has its nonce"  # P can write to only one of them
        if request.handoff is None:
            return None
        return why_not_handoff(request.handoff, request, self._context)

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> Match | None:
        """See `KVConnectorScheduler`."""
        outgoing = self._outgoing.get(request.request_id)
        if outgoing is not None and outgoing.stage is PushStage.EXPECTED:
            return None
        if outgoing is not None and outgoing.was_live:
            return Match(0, is_async=False, is_pinned=True)
        incoming = self._incoming.get(request.request_id)
        return Match(0, is_async=False) if incoming is None else incoming.match(num_computed_tokens)

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
            InternalError: The tokens to load do not start at a block's edge, do not fit into the
                table, or were not offered; or the table of a request that will be pushed does not
                cover its whole prompt.
        """
        outgoing = self._outgoing.get(request.request_id)
        if outgoing is not None:
            outgoing.begin(block_ids, generations, self._block_size)
        incoming = self._incoming.get(request.request_id)
        if incoming is None or incoming.load is not None:
            if num_external_tokens:
                raise InternalError(
                    f"request {request.request_id}: {num_external_tokens} external tokens were "
                    "planned, but no load was offered"
                )
            return
        if not num_external_tokens:
            self._end(incoming, LeaseEnd.RELEASED)
            return
        load = incoming.begin(next(self._load_ids), block_ids, num_external_tokens)
        if isinstance(load, Reserve):
            self._staged.reserves.append(load)
        else:
            self._staged.loads.append(load)

    def _forget(self, incoming: Incoming) -> None:
        del self._incoming[incoming.request.request_id]
        if incoming.handoff is None:
            self._pushed_here.discard(incoming.nonce)

    def _end(self, incoming: Incoming, end: LeaseEnd) -> None:
        """At D: give up a lease that is no longer needed."""
        self._forget(incoming)
        self._staged.releases.append(EndLease(incoming.nonce, incoming.owner, end))

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata | None:
        """See `KVConnectorScheduler`. O(requests of the step) if any request is handed over."""
        if not self._outgoing:
            return None
        scheduled = [
            (self._outgoing[each], step.get(each)) for each in step if each in self._outgoing
        ]
        chunks = [outgoing.take_chunk(each, step.num_tokens) for outgoing, each in scheduled]
        due = [chunk for chunk in chunks if chunk is not None]
        return ConnectorMetadata(msgspec.msgpack.encode(due)) if due else None

    def take_instructions(self) -> ConnectorMetadata | None:
        """See `KVConnectorScheduler`."""
        if not self._staged:
            return None
        staged, self._staged = self._staged, Instructions()
        return staged.to_metadata()

    def request_finished(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> Hold | None:
        """See `KVConnectorScheduler`.

        A handoff names the blocks of all tokens but the last; the last block may be partly filled.
        A live push passes its nonce on to the lease.
        """
        if request.finish_reason is FinishReason.HANDOFF:
            handoff = self._hand_over(request, block_ids, generations)
            return Hold(handoff.nonce, handoff)
        incoming = self._incoming.get(request.request_id)
        if incoming is not None and incoming.load is None:
            self._end(incoming, LeaseEnd.RELEASED)
        elif incoming is not None and not incoming.is_aborted:
            incoming.is_aborted = True
            self._staged.aborts.append(request.request_id)  # it still ends in one report
        outgoing = self._outgoing.pop(request.request_id, None)
        if outgoing is None or outgoing.stage is PushStage.PULLED:
            return None
        if outgoing.stage is PushStage.WITHDRAWN and not outgoing.was_live:
            del self._by_nonce[outgoing.nonce]
        else:
            is_answered = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            why = (
                "the request ended with its first token" if is_answered else "aborted at its owner"
            )
            self._stop(outgoing, why, is_answered=is_answered)
        return Hold(outgoing.nonce) if outgoing.was_live else None

    def _hand_over(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> KVHandoff:
        first = list(request.output_token_ids)
        num_tokens = len(request.prompt_token_ids) + len(first) - 1
        blocks = list(block_ids[: -(-num_tokens // self._block_size)])
        known = list(generations[: len(blocks)])
        outgoing = self._outgoing.pop(request.request_id, None)
        if outgoing is None:
            outgoing = Outgoing(request.request_id, num_tokens)
        is_pushed = outgoing.stage is PushStage.LIVE
        if not is_pushed:  # D may already have released the nonce of a withdrawn push
            self._by_nonce.pop(outgoing.nonce, None)
            outgoing.nonce = self._new_nonce()
        outgoing.stage = PushStage.LEASED
        self._by_nonce[outgoing.nonce] = outgoing
        handoff = KVHandoff(
            engine_id=EngineId(self._context.engine_id),
            incarnation=self._context.incarnation,
            nonce=outgoing.nonce,
            request_id=request.request_id,
            endpoints=self._endpoints,
            block_ids=blocks,
            num_tokens=num_tokens,
            shape=self._context.shape,
            generations=known,
            layout_digest=self._context.layout_digest,
            lease_s=self._context.config.transfer.lease_s,
            prompt_digest=prompt_digest(request.prompt_token_ids, request.cache_salt),
            first_token_ids=first,
            first_logprobs=request.first_logprobs if len(first) == 1 else None,
            num_cached_tokens=request.num_cached_prompt_tokens,
        )
        self._staged.grants.append(
            Grant(
                outgoing.nonce,
                request.request_id,
                blocks,
                known,
                num_tokens,
                handoff if is_pushed else None,
                is_pushed and outgoing.num_announced < outgoing.num_tokens,
            )
        )
        return handoff

    def end_reservations(self) -> None:
        """See `KVConnectorScheduler`: at P, pushes that have not begun will be pulled."""
        for outgoing in self._outgoing.values():
            if outgoing.stage is PushStage.LIVE and not outgoing.block_ids:
                self._stop(
                    Outgoing(outgoing.request_id, outgoing.num_tokens, outgoing.nonce),
                    "all blocks that its prompt could have here are leased",
                )
                outgoing.nonce, outgoing.stage = "", PushStage.PULLED
                outgoing.was_live = False

    def update_connector_output(self, report: ConnectorReport) -> ConnectorNews:
        """See `KVConnectorScheduler`.

        A failed load may be tried once more, from the same P: the first rung of the ladder. A push
        whose handoff cannot be used has failed: its lease was not read, and is left to other
        engines.
        """
        self._staged.ends.extend(filter(self._is_leased, report.given_up))
        self._staged.keeps.extend(filter(self._is_leased, report.kept))
        ready = [
            each
            for payload in report.payloads
            for each in self._hear(PushNews.from_payload(payload))
        ]
        for settled in report.settled:
            self._settle(settled)
        for failing in report.failing:
            incoming = self._incoming.get(failing.request_id)
            is_known = incoming is not None and incoming.is_loading(failing.load_id)
            if is_known and failing.request_id not in self._staged.aborts:
                self._staged.aborts.append(failing.request_id)  # the other ranks need not wait
        usable, refused = self._checked(report.received)
        loaded = []
        for received in usable:
            incoming = self._incoming_of(received)
            if incoming is not None:
                self._end(incoming, LeaseEnd.READ)
                loaded.append(received)
        failed, retried = [], []
        for lost in (*report.failed, *refused):
            if self._retry(lost):
                retried.append(lost)
            elif self._give_up(lost):
                failed.append(lost)
        return ConnectorNews(
            loaded=loaded, failed=failed, retried=retried, released=report.settled, ready=ready
        )

    def _is_leased(self, nonce: str) -> bool:
        outgoing = self._by_nonce.get(nonce)
        return outgoing is not None and outgoing.stage is PushStage.LEASED

    def _hear(self, news: PushNews) -> list[tuple[RequestId, str]]:
        """At P: take a rank's news of pushes; return the requests that may go on, and why."""
        rank, num_ranks = news.rank, self._context.num_ranks
        if not 0 <= rank < num_ranks:
            self.faults["report_of_unknown_rank"] += 1
            return []
        ready = []
        facts: list[Registered | Withdrawn] = [*news.registered, *news.withdrawn]
        for fact in facts:
            self.faults["report_unknown"] += fact.nonce not in self._tickets
            outgoing = self._by_nonce.get(fact.nonce)
            if outgoing is not None:  # otherwise the push is over
                why, is_repeated = outgoing.hear(fact, rank, num_ranks)
                self.faults["report_repeated"] += is_repeated
                ready += [] if why is None else [(outgoing.request_id, why)]
        return ready

    def _settle(self, settled: Settled) -> None:
        """At P: forget a lease or a stopped push that is over."""
        outgoing = self._by_nonce.get(settled.nonce)
        is_known = outgoing is not None and outgoing.stage in (PushStage.LEASED, PushStage.STOPPED)
        self.faults["report_unknown"] += not is_known
        if is_known:
            del self._by_nonce[settled.nonce]

    def _incoming_of(self, report: Received | Failed) -> Incoming | None:
        """At D: return the transfer that this report ends; None if none is in flight."""
        incoming = self._incoming.get(report.request_id)
        if incoming is not None and report.load_id:
            if report.load_id == incoming.tried:
                return None
            if not incoming.is_loading(report.load_id):
                incoming = None
        self.faults["report_unknown"] += incoming is None
        return incoming

    def _retry(self, failed: Failed) -> bool:
        """At D: load the missing tokens once more; False if that is not worth it."""
        incoming = self._incoming.get(failed.request_id)
        again = None if incoming is None else incoming.again(failed, next(self._load_ids))
        if again is None:
            return False
        if failed.request_id in self._staged.aborts:  # it was for the load that is over now
            self._staged.aborts.remove(failed.request_id)
        self._staged.loads.append(again)
        return True

    def _give_up(self, failed: Failed) -> bool:
        """At D: give up a load whose KV will not arrive. False if there is no such load."""
        incoming = self._incoming_of(failed)
        if incoming is None:
            return False
        if incoming.leaves_lease:
            self._forget(incoming)
            self._staged.unwatches.append(incoming.nonce)
        else:
            self._end(incoming, LeaseEnd.RELEASED)
        return True

    def _checked(self, received: Sequence[Received]) -> tuple[list[Received], list[Failed]]:
        """Split into usable loads, and failures for pushes whose handoff cannot be used."""
        usable, refused = [], []
        for each in received:
            incoming = self._incoming.get(each.request_id)
            why = None
            if incoming is not None and incoming.handoff is None:  # it was pushed
                why = "it came without a handoff"
                if each.handoff is not None:
                    why = why_not_handoff(each.handoff, incoming.request, self._context)
            if why is None:
                usable.append(each)
                continue
            refused.append(
                Failed(
                    request_id=each.request_id,
                    reason=LoadFailure.INCOMPATIBLE,
                    detail=f"what was written is refused: {why}",
                    load_id=each.load_id,
                )
            )
        return usable, refused
