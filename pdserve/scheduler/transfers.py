"""What the connector is asked and told of requests, and what its news make of them.

Before they are taken, when a step is built, when they have ended, and above all when a load has
arrived or failed, or a hold is over. What it raises ends the request that it was about, and no
other. Plans nothing and sends nothing: instructions go from the connector to the workers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, assert_never

from pdserve.connectors.base import ConnectorNews, Hold, KVSource
from pdserve.connectors.views import ScheduledRequest, StepView
from pdserve.errors import HandoffRefusedError, InternalError
from pdserve.kvcache.lease import BlockUser
from pdserve.scheduler.counts import Rung
from pdserve.scheduler.refusal import refusal_of_handoff
from pdserve.scheduler.request import State, Wait
from pdserve.scheduler.stopping import finish_reason
from pdserve.wire.request import ErrorCode, FinishReason
from pdserve.wire.transfer import (
    ConnectorReport,
    Failed,
    LoadFailure,
    Registered,
    Withdrawn,
)

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
    from pdserve.wire.transfer import ConnectorMetadata, Fact, KVHandoff, Received, Settled

_log = logging.getLogger(__name__)

_UNFINISHED = (State.WAITING, State.RECEIVING, State.RUNNING)


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

    def arrive(self, request: Request) -> str | None:
        """Tell of a request that is about to be taken; why it cannot be, or None."""
        try:
            request.source = self._connector.request_arrived(request)
        except HandoffRefusedError as error:
            return f"{'handoff' if request.handoff is not None else 'ticket'} refused: {error}"
        request.remote_decode = request.remote_decode and self._connector.hands_over
        return None

    def leave(self, request: Request) -> None:
        """Tell of the end of a request that has no blocks."""
        self._tell_end(request, FinishReason.ERROR)

    def begin(self, request: Request, now_s: float) -> None:
        """`request` waits now, with what came with its handoff. It may be over already."""
        if request.handoff is not None:
            self._take_handed_over_tokens(request, request.handoff, now_s)

    def end(self, request: Request, now_s: float, why: str, reason: FinishReason) -> None:
        """End a request; its blocks are free as soon as nothing reads or writes them.

        If the connector fails over it, those that a peer may be written from stay out of use.
        """
        hold = self._tell_end(request, reason)
        request.hold_id = "" if hold is None else hold.hold_id
        self._roster.end(request, now_s, why, is_held=hold is not None)

    def end_broken(
        self, request_id: RequestId, error: Exception, now_s: float, *, what: str = "take"
    ) -> None:
        """End a request over which we, or its connector, have failed; tell its story.

        Args:
            what: Was being done to it.
        """
        request = self._roster.requests.get(request_id)
        story = f"request {request_id}" if request is None else request.story()
        _log.error("request ended, could not %s it: %s", what, story, exc_info=error)
        if request is not None and request.state not in _UNFINISHED:
            return
        if request is not None:
            self.end(request, now_s, f"could not {what} it", FinishReason.ERROR)
        self._outbox.refusal(
            request_id, f"the engine could not {what} the request: {type(error).__name__}: {error}"
        )

    def _tell_end(self, request: Request, reason: FinishReason) -> Hold | None:
        try:
            return self._finish(request, reason)
        except Exception:  # noqa: BLE001 - whatever it is, others go on
            _log.exception("the connector failed over the end of %s", request.story())
            is_read = request.state is State.RUNNING and request.is_pinned
            return Hold("") if is_read else None

    def _finish(self, request: Request, reason: FinishReason) -> Hold | None:
        request.finish_reason = reason
        blocks = () if request.holding is None else request.holding.blocks
        generations = self._kv.pool.generations_of(blocks)
        return self._connector.request_finished(request, blocks, generations)

    def hand_over(self, request: Request, now_s: float) -> None:
        """Finish a prefill by leasing its blocks out.

        Raises:
            Exception: The connector's; nothing has changed.
        """
        hold = self._finish(request, FinishReason.HANDOFF)
        if hold is None or hold.handoff is None:
            raise InternalError(f"the connector made no handoff\n{request.story()}")
        assert request.holding is not None
        request.hold_id, request.handoff = hold.hold_id, hold.handoff
        request.holding.become(BlockUser.LEASED)
        self._roster.move(request, State.LEASED, now_s, f"leased as {hold.hold_id}")

    def give_up(self, hold_id: str, now_s: float) -> None:
        """Tell that nobody will read what is leased as `hold_id`."""
        try:
            news = self._connector.update_connector_output(ConnectorReport(given_up=[hold_id]))
        except Exception:  # noqa: BLE001 - whatever it is, a lease ends by itself
            _log.exception("the connector failed over a lease that was given up")
            return
        self._apply(news, now_s)

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
            if finish is not None:
                self.end(request, now_s, finish.value, finish)
                return

    # ---- steps -----------------------------------------------------------------------

    def metadata_for(
        self, scheduled: dict[RequestId, int], now_s: float
    ) -> ConnectorMetadata | None:
        """What goes with the step that computes `scheduled`.

        If the connector fails over one of them, that one is ended and taken out; if nobody can say
        over which, all are.
        """
        while True:
            step = StepView(scheduled, lambda each: self._scheduled(each, scheduled[each]))
            try:
                return self._connector.build_connector_meta(step)
            except Exception as error:  # noqa: BLE001 - whatever it is, others go on
                broken = [step.asked_about] if step.asked_about in scheduled else list(scheduled)
                if not broken:
                    _log.exception("the connector failed over a step without requests")
                    return None
                for request_id in broken:
                    del scheduled[request_id]
                    self.end_broken(request_id, error, now_s, what="run")

    def _scheduled(self, request_id: RequestId, num_tokens: int) -> ScheduledRequest:
        request = self._roster.running[request_id]
        assert request.holding is not None
        blocks, start = request.holding.blocks, request.num_computed_tokens
        generations = self._kv.pool.generations_of(blocks)
        return ScheduledRequest(request, blocks, generations, start, start + num_tokens)

    def load_in_step(self, request: Request, failed: Failed | None, now_s: float) -> None:
        """The load inside a step is over; what of it failed is computed from the next step on."""
        num_hit, num_external = request.num_cached_tokens, request.num_external_tokens
        if failed is not None:
            whole = failed.num_valid_tokens - failed.num_valid_tokens % self._kv.block_size
            num_external = min(max(0, whole - num_hit), num_external)
            self._note_failure(request, failed, now_s)
            self._counts.climbed(Rung.RECOMPUTE)
            num_known = len(request.prompt_token_ids) + len(request.output_token_ids)
            self._roster.begin_again(request, min(num_hit + num_external, num_known - 1))
        self._counts.prompt(request, num_hit=num_hit, num_external=num_external)

    # ---- the connector's news --------------------------------------------------------

    def apply_report(self, report: ConnectorReport, now_s: float) -> None:
        """Take what the workers' connector halves saw. Unknown ids are ignored."""
        self._counts.faults.update(report.faults)
        for fact, single in report.one_by_one():
            try:
                news = self._connector.update_connector_output(single)
            except Exception as error:  # noqa: BLE001 - whatever it is, others go on
                self._fail_over(fact, error, now_s)
                news = ConnectorNews.of(single)  # it has happened all the same
            self._apply(news, now_s)

    def _fail_over(self, fact: Fact, error: Exception, now_s: float) -> None:
        if isinstance(fact, Registered | Withdrawn):
            broken = self._roster.waiting.aside  # one of them, and nobody can say which
        else:
            broken = [fact.request_id]
        for request_id in broken:
            if request_id in self._roster.requests:
                self.end_broken(request_id, error, now_s, what="go on with")

    def _apply(self, news: ConnectorNews, now_s: float) -> None:
        for settled in news.released:
            self._settle(settled, now_s)
        for request_id, why in news.ready:
            self._come_back(request_id, why, now_s)
        for received in news.loaded:
            self._receive(received, now_s)
        for failed in news.retried:
            self._load_again(failed, now_s)
        for failed in news.failed:
            self._fail_load(failed, now_s)

    def _come_back(self, request_id: RequestId, why: str, now_s: float) -> None:
        """A request is to be asked about again; it may have stood aside."""
        request = self._roster.requests.get(request_id)
        if request is None:
            return
        request.note(now_s, why)
        if self._roster.waiting.come_back(request):
            request.times.queue_again(now_s)

    def _settle(self, settled: Settled, now_s: float) -> None:
        if self._roster.release_parked(settled.nonce):
            return
        request = self._roster.requests.get(settled.request_id)
        if request is None or settled.nonce not in ("", request.hold_id):
            return  # of another request under this id, or of a push that never began
        if request.state is State.LEASED:
            self._counts.lease_ends[settled.end.value] += 1
            self._roster.close(request, now_s, f"lease ended: {settled.end.value}")
        elif request.state is State.CLOSING:
            self._roster.stop_waiting(request, Wait.HOLD, now_s)

    def _receive(self, received: Received, now_s: float) -> None:
        request = self._roster.receiving.get(received.request_id)
        if request is None:
            self._settle_load(received.request_id, now_s)
            return
        brought = received.handoff
        refusal = brought and refusal_of_handoff(brought, vocab_size=self._vocab_size)
        if refusal:
            detail = f"what was written is refused: {refusal}"
            reason, load_id = LoadFailure.INCOMPATIBLE, received.load_id
            self._fail_load(
                Failed(
                    request_id=request.request_id, reason=reason, detail=detail, load_id=load_id
                ),
                now_s,
            )
            return
        assert request.holding is not None
        self._counts.arrived(received)
        request.kv_mode = received.mode
        num_tokens = request.num_tokens
        if brought is not None:
            num_tokens += len(brought.first_token_ids)
            request.source_id = brought.request_id
            request.note_cached(brought.num_cached_tokens)
        # Without a token behind them, the last one has to be computed again to sample it.
        request.num_computed_tokens = min(request.num_computed_tokens, num_tokens - 1)
        request.times.receive(received, now_s)
        request.handoff, request.source, request.is_pinned = None, KVSource.LOCAL, False
        request.holding.become(BlockUser.REQUEST)
        self._prefixes.publish(request, request.num_computed_tokens)
        self._counts.prompt(
            request, num_hit=request.num_cached_tokens, num_external=request.num_external_tokens
        )
        what = f"received {received.num_bytes} bytes by {received.mode.value}"
        self._roster.move(request, State.RUNNING, now_s, what)
        if brought is not None:
            self._take_handed_over_tokens(request, brought, now_s)

    def _load_again(self, failed: Failed, now_s: float) -> None:
        request = self._roster.receiving.get(failed.request_id)
        if request is not None:
            self._note_failure(request, failed, now_s)
            self._counts.climbed(Rung.RETRY)
            request.times.begin_load_again(now_s)
            request.note(now_s, "loads once more from the same engine")

    def _fail_load(self, failed: Failed, now_s: float) -> None:
        request = self._roster.receiving.get(failed.request_id)
        if request is None:
            self._settle_load(failed.request_id, now_s)
            return
        self._note_failure(request, failed, now_s)
        # They were confirmed and checked, so whoever computes the rest need not begin at 0.
        self._prefixes.publish(request, min(failed.num_valid_tokens, len(request.prompt_token_ids)))
        self._end_load(request, f"{failed.reason.value} {failed.detail}".rstrip(), now_s)

    def _note_failure(self, request: Request, failed: Failed, now_s: float) -> None:
        self._counts.load_failures[failed.reason.value] += 1
        request.load_failures.append(failed.reason.value)
        request.note(now_s, f"load failed: {failed.reason.value} {failed.detail}".rstrip())

    def _end_load(self, request: Request, why: str, now_s: float) -> None:
        """Its KV will not come, and nothing writes its blocks: take the next rung."""
        self._roster.give_back(request)
        request.num_computed_tokens = 0
        request.num_cached_tokens = request.num_external_tokens = 0
        num_missing = self._prefixes.num_missing(request)
        verdict = self._ladder.after_failure(request, num_missing, now_s)
        request.handoff, request.source, request.is_pinned = None, KVSource.LOCAL, False
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
                self.leave(request)
                self._roster.close(request, now_s, "reported to its sender")
            case Rung.SHED:
                self._outbox.error(
                    request,
                    f"the KV did not arrive ({why}), and {self._ladder.over_budget}",
                    ErrorCode.RECOMPUTE_BUDGET_EXHAUSTED,
                    retry_after_s=verdict.retry_after_s,
                )
                self.leave(request)
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
