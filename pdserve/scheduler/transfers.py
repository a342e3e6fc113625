"""Requests whose KV comes from another engine, or goes to one: what their connector makes of them.

Before they are taken (is the handoff or the ticket any good), when they have finished here and are
leased out, and above all its news: loads that arrived or failed, leases and pushes that are over.
Plans nothing and sends nothing: instructions go from the connector to the workers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, assert_never

import msgspec

from pdserve.errors import InternalError
from pdserve.kvcache.lease import Hold
from pdserve.scheduler.counts import Rung
from pdserve.scheduler.refusal import refusal_of_handoff
from pdserve.scheduler.request import State, Wait
from pdserve.scheduler.stopping import finish_reason
from pdserve.wire.request import ErrorCode
from pdserve.wire.transfer import Failed, LoadFailure

if TYPE_CHECKING:
    from pdserve.connectors.base import KVConnectorScheduler
    from pdserve.kvcache.manager import KVCacheManager
    from pdserve.scheduler.counts import Counts
    from pdserve.scheduler.ladder import Ladder, Verdict
    from pdserve.scheduler.outbox import Outbox
    from pdserve.scheduler.prefixes import Prefixes
    from pdserve.scheduler.request import Request
    from pdserve.scheduler.roster import Roster
    from pdserve.wire.ids import RequestId
    from pdserve.wire.transfer import ConnectorReport, KVHandoff, Received, Settled

_log = logging.getLogger(__name__)


class Transfers:
    """Moves requests of `roster` as their transfers go.

    Args:
        vocab_size: Every token id is below it.
        max_model_len: Tokens of prompt and output together, at most.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        kv: KVCacheManager,
        prefixes: Prefixes,
        roster: Roster,
        connector: KVConnectorScheduler,
        ladder: Ladder,
        counts: Counts,
        outbox: Outbox,
    ) -> None:
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._kv = kv
        self._prefixes = prefixes
        self._roster = roster
        self._connector = connector
        self._ladder = ladder
        self._counts = counts
        self._outbox = outbox

    # ---- requests come and go --------------------------------------------------------

    def refusal_of(self, request: Request) -> str | None:
        """Why what a request refers to cannot be used; None = it can."""
        ticket = request.ticket
        if request.is_pushed_here and ticket is not None and self._roster.of_ticket(ticket.nonce):
            return "ticket refused: another request has its nonce"  # P can write to one of them
        refusal = self._connector.check_handoff(request)
        if refusal is None:
            return None
        return f"{'handoff' if request.handoff is not None else 'ticket'} refused: {refusal}"

    def queued(self, request: Request, now_s: float) -> None:
        """`request`, which was not refused, waits now. It may be over already."""
        self._connector.request_queued(request)
        if request.handoff is not None:
            self._take_handed_over_tokens(request, request.handoff, now_s)

    def drop(self, request: Request, now_s: float, why: str) -> None:
        """End a request that its connector still counts on.

        If that one fails over it, blocks that it was told of stay out of use.
        """
        try:
            is_read = self._connector.request_aborted(request)
        except Exception:  # noqa: BLE001 - whatever it is, others go on
            _log.exception("the connector failed over the end of %s", request.story())
            is_read = request.state is State.RUNNING and request.ticket is not None
        self._roster.end(request, now_s, why, is_read=is_read)

    def tell_of_chunk(self, request: Request, num_tokens: int) -> None:
        """The step that is built computes so many tokens of it; a prompt's last are its lease's."""
        start = request.num_computed_tokens
        if request.holding is not None and start + num_tokens < len(request.prompt_token_ids):
            blocks = request.holding.blocks
            generations = self._kv.pool.generations_of(blocks)
            self._connector.chunk_planned(
                request, blocks, start, start + num_tokens, generations=generations
            )

    def lease(self, request: Request, now_s: float) -> bool:
        """Finish a prefill by leasing its blocks out; False if the connector does not."""
        assert request.holding is not None
        blocks = request.holding.blocks
        generations = self._kv.pool.generations_of(blocks)
        handoff = self._connector.request_finished(request, blocks, generations)
        if handoff is None:
            request.remote_decode = False
            return False
        request.handoff = handoff
        request.holding.become(Hold.LEASED)
        self._roster.move(request, State.LEASED, now_s, f"leased as {handoff.nonce}")
        return True

    def _take_handed_over_tokens(self, request: Request, handoff: KVHandoff, now_s: float) -> None:
        """The tokens that came with a handoff are this request's first outputs."""
        for index, token_id in enumerate(handoff.first_token_ids):
            request.output_token_ids.append(token_id)
            finish, stop_reason = finish_reason(
                request, token_id, max_model_len=self._max_model_len
            )
            logprobs = handoff.first_logprobs
            self._outbox.handed_over(
                request,
                None if logprobs is None else logprobs[index],
                finish=finish,
                stop_reason=stop_reason,
            )
            if finish is None:
                continue
            if request.state is State.WAITING:
                self.drop(request, now_s, finish.value)
            else:
                self._roster.end(request, now_s, finish.value)
            return

    # ---- the connector's news --------------------------------------------------------

    def apply_report(self, report: ConnectorReport, now_s: float) -> None:
        """Take what the workers' connector halves saw. Unknown ids are ignored."""
        report = self._without_refused(report)
        for settled in report.settled:
            self._settle(settled, now_s)
        for received in report.received:
            self._receive(received, now_s)
        for failed in report.failed:
            self._fail_load(failed, now_s)
        for registered in report.registered:
            self._come_back(registered.nonce, "its blocks at D are registered", now_s)
        for withdrawn in report.withdrawn:
            self._come_back(withdrawn.nonce, f"push withdrawn: {withdrawn.reason}", now_s)
        self._counts.faults.update(report.faults)
        self._connector.update_connector_output(report)

    def _come_back(self, nonce: str, why: str, now_s: float) -> None:
        """Something was reported of the push `nonce`; its request may have waited for it."""
        request = self._roster.of_ticket(nonce)
        if request is None:
            return
        request.note(now_s, why)
        if self._roster.waiting.come_back(request):
            request.times.queue_again(now_s)

    def _settle(self, settled: Settled, now_s: float) -> None:
        request = self._roster.requests.get(settled.request_id)
        if request is None:
            return
        match request.state:
            case State.LEASED:
                handoff = request.handoff
                assert handoff is not None
                if settled.nonce in ("", handoff.nonce):
                    self._counts.lease_ends[settled.end.value] += 1
                    self._roster.close(request, now_s, f"lease ended: {settled.end.value}")
            case State.CLOSING:
                nonce = "" if request.ticket is None else request.ticket.nonce
                if settled.nonce in ("", nonce):
                    self._roster.stop_waiting(request, Wait.PUSH, now_s)
            case State.WAITING | State.RECEIVING | State.RUNNING | State.DONE:
                pass  # of another request under this id, or of a push that never began

    def _receive(self, received: Received, now_s: float) -> None:
        request = self._roster.receiving.get(received.request_id)
        if request is None:
            self._settle_load(received.request_id, now_s)
            return
        pushed = received.handoff if request.is_pushed_here else None
        assert request.holding is not None
        self._counts.arrived(received)
        request.kv_mode = received.mode
        if pushed is not None:
            request.source_id = pushed.request_id
            request.note_cached(pushed.num_cached_tokens)
        request.times.receive(received, now_s)
        request.handoff = None
        request.holding.become(Hold.REQUEST)
        self._prefixes.publish(request, request.num_computed_tokens)
        self._counts.prompt(
            request, num_hit=request.num_cached_tokens, num_external=request.num_external_tokens
        )
        what = f"received {received.num_bytes} bytes by {received.mode.value}"
        self._roster.move(request, State.RUNNING, now_s, what)
        if pushed is not None:
            self._take_handed_over_tokens(request, pushed, now_s)

    def _without_refused(self, report: ConnectorReport) -> ConnectorReport:
        """The report, with each push that came with what cannot be used as one that has failed.

        The connector has to know it so, too: its lease was not read, and is left to others.
        """
        received, failed = [], list(report.failed)
        for each in report.received:
            request = self._roster.receiving.get(each.request_id)
            refusal = None
            if request is not None and request.is_pushed_here:
                refusal = self._refusal_of_pushed(request, each.handoff)
            if request is None or refusal is None:
                received.append(each)
                continue
            failed.append(
                Failed(
                    request_id=each.request_id,
                    reason=LoadFailure.INCOMPATIBLE,
                    detail=f"what was written is refused: {refusal}",
                    load_id=each.load_id,
                    num_valid_tokens=request.num_cached_tokens,
                )
            )
        return msgspec.structs.replace(report, received=received, failed=failed)

    def _refusal_of_pushed(self, request: Request, handoff: KVHandoff | None) -> str | None:
        """Why a request cannot go on from what came with its KV."""
        assert request.ticket is not None
        if handoff is None:
            return "it came without a handoff"
        if handoff.nonce != request.ticket.nonce:
            return "its handoff is of another push"
        request.handoff = handoff
        refusal = self._connector.check_handoff(request)
        return refusal or refusal_of_handoff(handoff, vocab_size=self._vocab_size)

    def _fail_load(self, failed: Failed, now_s: float) -> None:
        request = self._roster.receiving.get(failed.request_id)
        if request is None:
            self._settle_load(failed.request_id, now_s)
            return
        self._note_failure(request, failed.reason, failed.detail, now_s)
        if self._connector.retry_load(failed):
            self._counts.climbed(Rung.RETRY)
            request.times.begin_load_again(now_s)
            request.note(now_s, "loads once more from the same engine")
            return
        # They were confirmed and checked, so whoever computes the rest need not begin at 0.
        self._prefixes.publish(request, min(failed.num_valid_tokens, len(request.prompt_token_ids)))
        self._end_load(request, f"{failed.reason.value} {failed.detail}".rstrip(), now_s)

    def _note_failure(
        self, request: Request, reason: LoadFailure, detail: str, now_s: float
    ) -> None:
        self._counts.load_failures[reason.value] += 1
        request.load_failures.append(reason.value)
        request.note(now_s, f"load failed: {reason.value} {detail}".rstrip())

    def _end_load(self, request: Request, why: str, now_s: float) -> None:
        """Its KV will not come, and nothing writes its blocks: take the next rung."""
        request.handoff = None
        self._roster.give_back(request)
        request.num_computed_tokens = 0
        request.num_cached_tokens = request.num_external_tokens = 0
        num_missing = self._prefixes.num_missing(request)
        verdict = self._ladder.after_failure(request, num_missing, now_s)
        self._counts.climbed(verdict.rung)
        self._apply_verdict(request, verdict, why, now_s)

    def _apply_verdict(self, request: Request, verdict: Verdict, why: str, now_s: float) -> None:
        match verdict.rung:
            case Rung.RECOMPUTE:
                self._roster.move(request, State.WAITING, now_s, "computed here")
                request.times.queue_again(now_s)
            case Rung.REPORT:
                error = f"the KV did not arrive: {why}"
                self._outbox.error(request, error, ErrorCode.KV_TRANSFER_FAILED)
                self._roster.close(request, now_s, "reported to its sender")
            case Rung.SHED:
                self._outbox.error(
                    request,
                    f"the KV did not arrive ({why}), and {self._ladder.over_budget}",
                    ErrorCode.RECOMPUTE_BUDGET_EXHAUSTED,
                    retry_after_s=verdict.retry_after_s,
                )
                self._roster.close(request, now_s, "shed: over the recompute budget")
            case Rung.RETRY:
                raise InternalError(f"a load cannot be tried again now\n{request.story()}")
            case _:
                assert_never(verdict.rung)

    def _settle_load(self, request_id: RequestId, now_s: float) -> None:
        """A load was reported that no receiving request waits for."""
        request = self._roster.requests.get(request_id)
        if request is not None and request.state is State.CLOSING:
            self._roster.stop_waiting(request, Wait.LOAD, now_s)
