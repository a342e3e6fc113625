"""The scheduler half of every connector that hands KV over: decides, counts, moves nothing.

It makes and checks handoffs; what the worker half shall do is staged by its two shares, one for
each side of a transfer: `incoming` at D, `outgoing` at P. It knows neither tensors nor sockets nor
time; the randomness of nonces is passed in.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pdserve.connectors.base import ConnectorNews, Hold, KVConnectorScheduler, KVSource, Match
from pdserve.connectors.handover.checks import why_not_handoff, why_not_ticket
from pdserve.connectors.handover.incoming import Incoming
from pdserve.connectors.handover.instructions import Grant, Instructions, StepInstructions
from pdserve.connectors.handover.news import PushNews, PushQuorum
from pdserve.connectors.handover.outgoing import Outgoing
from pdserve.errors import HandoffRefusedError, InternalError
from pdserve.wire.hashing import prompt_digest
from pdserve.wire.ids import EngineId
from pdserve.wire.request import FinishReason
from pdserve.wire.transfer import Failed, KVHandoff, LoadFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.views import RequestView, StepView
    from pdserve.observe.clock import Clock
    from pdserve.wire.ids import BlockId, RequestId
    from pdserve.wire.transfer import ConnectorMetadata, ConnectorReport, Endpoint, Received


class HandoverScheduler(KVConnectorScheduler):
    """See `KVConnectorScheduler`.

    Args:
        endpoints: Where this engine's worker halves listen, in rank order; they go into the
            handoffs.
        new_nonce: Returns a string never returned before; unguessable outside of tests.
        clock: Tells which tickets have expired.

    Attributes:
        faults: `report_unknown`, about a request or nonce that has no entry: it is ignored.
            `ticket_replayed`, a request at P whose ticket was seen before: it is pulled.
            `ticket_expired`, likewise, whose ticket came after its time.
        push_quorum: Puts together what the ranks say of pushes.
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
        self._block_size = block_size = context.layout.block_size
        self.faults: Counter[str] = Counter()
        self._staged = Instructions()
        self._incoming = Incoming(block_size, staged=self._staged, faults=self.faults)
        self.push_quorum = PushQuorum(context.num_ranks, self.faults)
        self._outgoing = Outgoing(block_size, staged=self._staged, faults=self.faults, clock=clock)

    def request_arrived(self, request: RequestView) -> KVSource:
        """See `KVConnectorScheduler`."""
        handoff, ticket = request.handoff, request.kv_transfer_params.ticket
        refusal = self._refusal_of(request)
        if refusal is not None:
            what = "ticket" if handoff is None else "handoff"
            raise HandoffRefusedError(f"{what} refused: {refusal}")
        if request.remote_decode:
            self._outgoing.arrived(request)
        if handoff is not None:
            self._incoming.watch(request, handoff.nonce, handoff.owner, handoff.lease_s, handoff)
            return KVSource.LOCAL if request.remote_decode else KVSource.READY
        if ticket is None or request.remote_decode:
            return KVSource.LOCAL
        lease_s = self._context.config.transfer.lease_s
        self._incoming.watch(request, ticket.nonce, ticket.prefill, lease_s, None)
        return KVSource.PLANNED

    def _refusal_of(self, request: RequestView) -> str | None:
        ticket = request.kv_transfer_params.ticket
        if ticket is not None:
            why = why_not_ticket(ticket, self._context, is_prefill=request.remote_decode)
            if why is not None:
                return f"ticket: {why}"
            is_pushed_here = request.handoff is None and not request.remote_decode
            if is_pushed_here and self._incoming.is_pushed(ticket.nonce):
                return "another request has its nonce"  # P can write to one of them
        if request.handoff is None:
            return None
        return self._refusal_of_handoff(request, request.handoff)

    def _refusal_of_handoff(self, request: RequestView, handoff: KVHandoff) -> str | None:
        return why_not_handoff(
            handoff,
            self._context,
            prompt_token_ids=request.prompt_token_ids,
            cache_salt=request.cache_salt,
            ticket=request.kv_transfer_params.ticket,
        )

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> Match | None:
        """See `KVConnectorScheduler`."""
        if self._outgoing.is_expected(request):
            return None
        if self._outgoing.holds_blocks(request):
            return Match(0, is_async=False, is_pinned=True)
        return self._incoming.match(request, num_computed_tokens)

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
        self._outgoing.begin(request, block_ids, generations)
        self._incoming.begin(request, block_ids, num_external_tokens)

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata | None:
        """See `KVConnectorScheduler`."""
        chunks = self._outgoing.plan_chunks(step)
        return StepInstructions(chunks=chunks).to_metadata() if chunks else None

    def take_instructions(self) -> ConnectorMetadata | None:
        """See `KVConnectorScheduler`."""
        return self._staged.drain()

    def preempted(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> Hold | None:
        """See `KVConnectorScheduler`. What is written from is pinned: nobody reads the others."""
        return None

    def request_finished(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> Hold | None:
        """See `KVConnectorScheduler`.

        A handoff names as many blocks as all tokens but the last fill, the last one perhaps in
        part. A push that is live gives the lease its nonce.
        """
        if request.finish_reason is FinishReason.HANDOFF:
            handoff = self._hand_over(request, block_ids, generations)
            return Hold(handoff.nonce, handoff)
        self._incoming.abort(request.request_id)
        nonce = self._outgoing.abort(request.request_id)
        return None if nonce is None else Hold(nonce)

    def _hand_over(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> KVHandoff:
        first = list(request.output_token_ids)
        num_tokens = len(request.prompt_token_ids) + len(first) - 1
        blocks = list(block_ids[: -(-num_tokens // self._block_size)])
        known = list(generations[: len(blocks)])
        pushed_as, is_unproven = self._outgoing.finish(request.request_id)
        nonce = self._new_nonce() if pushed_as is None else pushed_as
        self._outgoing.lease(request.request_id, nonce)
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
            first_token_ids=first,
            first_logprobs=request.first_logprobs if len(first) == 1 else None,
            num_cached_tokens=request.num_cached_prompt_tokens,
        )
        self._staged.grants.append(
            Grant(
                nonce,
                request.request_id,
                blocks,
                known,
                num_tokens,
                None if pushed_as is None else handoff,
                is_unproven,
            )
        )
        return handoff

    def update_connector_output(self, report: ConnectorReport) -> ConnectorNews:
        """See `KVConnectorScheduler`.

        A load that failed may be tried once more, from the same P: the first rung of the ladder.
        A push that came with a handoff that cannot be used has failed: its lease was not read, and
        is left to others.
        """
        for nonce in report.given_up:
            self._outgoing.release(nonce)
        self._outgoing.keep(report.kept)
        ready: list[tuple[RequestId | None, str]] = []
        for payload in report.payloads:
            news = self.push_quorum.add(PushNews.from_payload(payload))
            ready += [
                (self._outgoing.registered(each), "its blocks at D are registered")
                for each in news.registered
            ]
            ready += [
                (self._outgoing.withdrawn(each), f"push withdrawn: {each.reason}")
                for each in news.withdrawn
            ]
        for settled in report.settled:
            self._outgoing.settled(settled)
            self.push_quorum.settle(settled.nonce)
        for failing in report.failing:
            self._incoming.failing(failing)
        usable, refused = self._checked(report.received)
        loaded = [each for each in usable if self._incoming.received(each)]
        failed, retried = [], []
        for each in (*report.failed, *refused):
            if self._incoming.retry(each):
                retried.append(each)
            elif self._incoming.failed(each):
                failed.append(each)
        return ConnectorNews(
            loaded=loaded,
            failed=failed,
            retried=retried,
            released=report.settled,
            ready=[(request_id, why) for request_id, why in ready if request_id is not None],
        )

    def _checked(self, received: Sequence[Received]) -> tuple[list[Received], list[Failed]]:
        """What can be used of it, and what came with a handoff that cannot."""
        usable, refused = [], []
        for each in received:
            request = self._incoming.pushed_to(each)
            why = None
            if request is not None and each.handoff is None:
                why = "it came without a handoff"
            elif request is not None and each.handoff is not None:
                why = self._refusal_of_handoff(request, each.handoff)
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
