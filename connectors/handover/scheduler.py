"""The scheduler half of every connector that hands KV over: decides, counts, moves nothing.

It makes and checks handoffs; what the worker half shall do is staged by its two shares, one for
each side of a transfer: `incoming` at D, `outgoing` at P. It knows neither tensors nor sockets nor
time; the randomness of nonces is passed in.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pdserve.connectors.base import KVConnectorScheduler
from pdserve.connectors.handover.checks import why_not_handoff, why_not_ticket
from pdserve.connectors.handover.incoming import Incoming
from pdserve.connectors.handover.instructions import Grant, Instructions, StepInstructions
from pdserve.connectors.handover.outgoing import Outgoing
from pdserve.errors import InternalError
from pdserve.wire.hashing import prompt_digest
from pdserve.wire.ids import EngineId
from pdserve.wire.transfer import KVHandoff

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.base import ConnectorContext, Match, RequestView
    from pdserve.observe.clock import Clock
    from pdserve.wire.ids import BlockId
    from pdserve.wire.step import SchedulerOutput
    from pdserve.wire.transfer import (
        ConnectorMetadata,
        ConnectorReport,
        Endpoint,
        Failed,
    )


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
        self._context = context
        self._endpoints = list(endpoints)
        self._new_nonce = new_nonce
        self._block_size = block_size = context.layout.block_size
        self.faults: Counter[str] = Counter()
        self._staged = Instructions()
        self._incoming = Incoming(block_size, staged=self._staged, faults=self.faults)
        self._outgoing = Outgoing(block_size, staged=self._staged, faults=self.faults, clock=clock)

    def check_handoff(self, request: RequestView) -> str | None:
        """See `KVConnectorScheduler`."""
        handoff, ticket = request.handoff, request.ticket
        if ticket is not None:
            why = why_not_ticket(ticket, self._context, is_prefill=request.remote_decode)
            if why is not None:
                return f"ticket: {why}"
        if handoff is None:
            return None
        return why_not_handoff(
            handoff,
            self._context,
            prompt_token_ids=request.prompt_token_ids,
            cache_salt=request.cache_salt,
            ticket=ticket,
        )

    def request_queued(self, request: RequestView) -> None:
        """See `KVConnectorScheduler`."""
        handoff, ticket = request.handoff, request.ticket
        if handoff is not None:
            self._incoming.watch(request, handoff.nonce, handoff.owner, handoff.lease_s, handoff)
        elif ticket is not None and request.remote_decode:
            self._outgoing.expect(request, ticket)
        elif ticket is not None:
            lease_s = self._context.config.transfer.lease_s
            self._incoming.watch(request, ticket.nonce, ticket.prefill, lease_s, None)

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> Match | None:
        """See `KVConnectorScheduler`."""
        if self._outgoing.is_expected(request):
            return None
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

    def chunk_planned(
        self,
        request: RequestView,
        block_ids: Sequence[BlockId],
        start_token: int,
        end_token: int,
        *,
        generations: Sequence[int],
    ) -> None:
        """See `KVConnectorScheduler`."""
        self._outgoing.plan_chunk(request, block_ids, start_token, end_token, generations)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ConnectorMetadata | None:
        """See `KVConnectorScheduler`. O(requests of the step) if any of them is pushed."""
        chunks = self._outgoing.take_chunks(scheduler_output)
        return StepInstructions(chunks=chunks).to_metadata() if chunks else None

    def take_instructions(self) -> ConnectorMetadata | None:
        """See `KVConnectorScheduler`."""
        return self._staged.drain()

    def request_finished(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> KVHandoff | None:
        """See `KVConnectorScheduler`.

        A handoff is made of a `remote_decode` request that has its first token. It names
        as many blocks as the prompt fills, the last one perhaps in part. A push that is live
        gives the lease its nonce.
        """
        if not request.remote_decode or not request.output_token_ids:
            return None
        num_tokens = len(request.prompt_token_ids)
        blocks = list(block_ids[: -(-num_tokens // self._block_size)])
        known = list(generations[: len(blocks)])
        pushed_as = self._outgoing.finish(request.request_id)
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
            first_token_ids=list(request.output_token_ids),
            first_logprobs=request.first_logprobs,
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
            )
        )
        return handoff

    def request_aborted(self, request: RequestView) -> bool:
        """See `KVConnectorScheduler`."""
        self._incoming.abort(request.request_id)
        return self._outgoing.abort(request.request_id)

    def holds_blocks(self, request: RequestView) -> bool:
        """See `KVConnectorScheduler`."""
        return self._outgoing.holds_blocks(request)

    def release_lease(self, nonce: str) -> None:
        """See `KVConnectorScheduler`."""
        self._outgoing.release(nonce)

    def retry_load(self, failed: Failed) -> bool:
        """See `KVConnectorScheduler`. The first rung of the ladder: the same P, once."""
        return self._incoming.retry(failed)

    def update_connector_output(self, report: ConnectorReport) -> None:
        """See `KVConnectorScheduler`."""
        for settled in report.settled:
            self._outgoing.settled(settled)
        for registered in report.registered:
            self._outgoing.registered(registered)
        for withdrawn in report.withdrawn:
            self._outgoing.withdrawn(withdrawn)
        for failing in report.failing:
            self._incoming.failing(failing)
        for received in report.received:
            self._incoming.received(received)
        for failed in report.failed:
            self._incoming.failed(failed)
