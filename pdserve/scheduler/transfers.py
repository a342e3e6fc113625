"""Calls the connector about requests, and applies its news.

It does so before requests are taken, when a step is built, when they have ended, and above all when
a load has arrived or failed, or a hold is over. An exception of the connector ends the request that
it concerns, and no other. Plans nothing and sends nothing: instructions go from the connector to
the workers.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, TypeVar, assert_never

import msgspec

from pdserve.connectors.base import ConnectorNews, Hold, guarded
from pdserve.connectors.views import ScheduledRequest, StepView
from pdserve.errors import HandoffRefusedError, InternalError
from pdserve.kvcache.lease import BlockUser
from pdserve.scheduler.ladder import Remedy
from pdserve.scheduler.life import State, Wait
from pdserve.scheduler.plan import refusal_of_handoff
from pdserve.wire.request import ErrorCode, FinishReason
from pdserve.wire.transfer import ConnectorReport, Failed, LoadFailure

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.connectors.base import Match
    from pdserve.scheduler.ladder import Decision
    from pdserve.scheduler.request import Request
    from pdserve.scheduler.state import SchedulerState
    from pdserve.wire.ids import RequestId
    from pdserve.wire.transfer import (
        ConnectorMetadata,
        Fact,
        Fetched,
        KVHandoff,
        Received,
        Settled,
    )

_log = logging.getLogger(__name__)

T = TypeVar("T")
F = TypeVar("F")

_UNFINISHED = (State.WAITING, State.RECEIVING, State.RUNNING)


class Transfers:
    """Moves requests as their transfers progress."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._kv = state.kv
        self._connector = state.connector
        self._ladder = state.ladder
        self._counters = state.counters
        self._outputs = state.outputs
        self._vocab_size = state.dimensions.vocab_size
        self._max_model_len = state.dimensions.max_model_len

    # ---- requests come and go --------------------------------------------------------

    def arrive(self, request: Request) -> str | None:
        """Tell the connector of a new request; return why it cannot be taken, or None."""
        if not self._connector.hands_over:
            what = "handoff" if request.handoff else request.kv_transfer_params.ticket and "ticket"
            if what:
                return f"{what} refused: the KV connector of this engine takes none"
        try:
            source = self._connector.request_arrived(request)
        except HandoffRefusedError as error:
            return str(error)
        request.accept(source, hands_over=self._connector.hands_over)
        return None

    def leave(self, request: Request) -> None:
        """Tell the connector of the end of a request that has no blocks."""
        self._tell_end(request, FinishReason.ERROR)

    def begin(self, request: Request, now_s: float) -> None:
        """Take the tokens in the handoff of a request that now waits, which may end it."""
        if request.handoff is not None:
            self._take_handed_over_tokens(request, request.handoff, now_s)

    def end(self, request: Request, now_s: float, why: str, reason: FinishReason) -> None:
        """End a request; its blocks are free as soon as nothing reads or writes them.

        If the connector fails, blocks from which a peer may still be written stay out of use.
        """
        hold = self._tell_end(request, reason)
        request.hold(hold)
        self._state.end(request, now_s, why, is_held=hold is not None)

    def attempt(
        self,
        do: Callable[[], T],
        request_id: RequestId,
        now_s: float,
        *,
        otherwise: F,
        what: str = "take",
    ) -> T | F:
        """Call `do` on a request; an exception ends only that request, by `end_broken`.

        Returns `otherwise` after an exception, else the result of `do`.
        """
        done = guarded(do)
        if isinstance(done, Exception):
            self.end_broken(request_id, done, now_s, what=what)
            return otherwise
        return done

    def end_broken(
        self, request_id: RequestId, error: Exception, now_s: float, *, what: str = "take"
    ) -> None:
        """End a request on which we, or its connector, have failed; log its story.

        Args:
            what: Verb of the failed operation.
        """
        request = self._state.requests.get(request_id)
        story = f"request {request_id}" if request is None else request.story()
        _log.error("request ended, could not %s it: %s", what, story, exc_info=error)
        if request is not None and request.state not in _UNFINISHED:
            return
        if request is not None:
            self.end(request, now_s, f"could not {what} it", FinishReason.ERROR)
        self._outputs.error(
            request_id, f"the engine could not {what} the request: {type(error).__name__}: {error}"
        )

    def _tell_end(self, request: Request, reason: FinishReason) -> Hold | None:
        hold = guarded(partial(self._finish, request, reason))
        if isinstance(hold, Exception):
            _log.error("the connector failed over the end of %s", request.story(), exc_info=hold)
            is_read = request.state is State.RUNNING and request.is_pinned
            return Hold("") if is_read else None
        return hold

    def _finish(self, request: Request, reason: FinishReason) -> Hold | None:
        request.finish(reason)
        blocks = () if request.holding is None else request.holding.blocks
        generations = self._kv.pool.generations_of(blocks)
        return self._connector.request_finished(request, blocks, generations)

    def hand_over(self, request: Request, now_s: float) -> bool:
        """Finish a request by leasing its blocks out; False if it has ended with an error."""
        lease = partial(self._lease, request, now_s)
        return self.attempt(lease, request.request_id, now_s, otherwise=False, what="hand over")

    def give_away(self, request: Request, now_s: float) -> None:
        """Hand over a running request as it is, once no step computes it."""
        request.give_away()
        is_at_rest = request.is_decoding and not self._state.steps.has(request)
        if is_at_rest and self.hand_over(request, now_s):
            self._outputs.tokens(request, 0, None, finish=FinishReason.HANDOFF, stop_reason=None)

    def _lease(self, request: Request, now_s: float) -> bool:
        hold = self._finish(request, FinishReason.HANDOFF)
        if hold is None or hold.handoff is None:
            raise InternalError(f"the connector made no handoff\n{request.story()}")
        assert request.holding is not None
        request.hold(hold)
        request.holding.become(BlockUser.LEASED)
        self._state.move(request, State.LEASED, now_s, f"leased as {hold.hold_id}")
        return True

    def tell(self, report: ConnectorReport, now_s: float) -> None:
        """Tell the connector of holds that the engine has `given_up` or `kept`."""
        news = guarded(partial(self._connector.update_connector_output, report))
        if isinstance(news, Exception):  # the lease expires later
            _log.error("the connector failed over what it was told of leases", exc_info=news)
            return
        self._apply(news, now_s)

    def _take_handed_over_tokens(self, request: Request, handoff: KVHandoff, now_s: float) -> None:
        """Make the tokens that came with a handoff this request's first outputs."""
        self._state.prompts.discard(request.request_id)
        for index, token_id in enumerate(handoff.first_token_ids):
            request.take_over(token_id)
            finish, stop_reason = request.finish_of_last_token(self._max_model_len)
            logprobs = handoff.first_logprobs
            self._outputs.handed_over(
                request,
                None if logprobs is None else logprobs[index],
                finish=finish,
                stop_reason=stop_reason,
            )
            if finish is not None:
                self.end(request, now_s, finish.value, finish)
                return

    # ---- starts ----------------------------------------------------------------------

    def match(self, request: Request, num_computed_tokens: int) -> Match | None:
        """Ask what KV can be loaded beyond the computed tokens; None if not known yet."""
        match = self._connector.get_num_new_matched_tokens(request, num_computed_tokens)
        if match is None or not match.num_tokens or request.may_load:
            return match
        return msgspec.structs.replace(match, num_tokens=0)

    def load(self, request: Request, num_tokens: int, now_s: float) -> None:
        """Load the last `num_tokens` of its computed tokens beside the steps."""
        assert request.holding is not None
        self._connector.update_state_after_alloc(request, request.holding.blocks, num_tokens)
        request.times.start(now_s)
        request.holding.become(BlockUser.RECEIVING)
        why = f"loads {num_tokens} tokens behind {request.num_computed_tokens - num_tokens}"
        self._state.move(request, State.RECEIVING, now_s, why)

    def tell_start(self, request: Request, num_tokens: int) -> None:
        """Tell the connector that a request starts, and how many tokens its step loads."""
        assert request.holding is not None
        blocks = request.holding.blocks
        generations = self._kv.pool.generations_of(blocks)
        self._connector.update_state_after_alloc(
            request, blocks, num_tokens, generations=generations
        )

    # ---- steps -----------------------------------------------------------------------

    def metadata_for(
        self, scheduled: dict[RequestId, int], now_s: float
    ) -> ConnectorMetadata | None:
        """Return the connector's message for the step that computes `scheduled`.

        If the connector fails on one of the requests, that one is ended and removed; if it is
        unknown which, all are.
        """
        while True:
            step = StepView(scheduled, lambda each: self._scheduled(each, scheduled[each]))
            made = guarded(partial(self._connector.build_connector_meta, step))
            if not isinstance(made, Exception):
                return made
            broken = [step.asked_about] if step.asked_about in scheduled else list(scheduled)
            if not broken:
                _log.error("the connector failed over a step without requests", exc_info=made)
                return None
            for request_id in broken:
                del scheduled[request_id]
                self.end_broken(request_id, made, now_s, what="run")

    def _scheduled(self, request_id: RequestId, num_tokens: int) -> ScheduledRequest:
        request = self._state.running[request_id]
        assert request.holding is not None
        blocks, start = request.holding.blocks, request.num_computed_tokens
        generations = self._kv.pool.generations_of(blocks)
        return ScheduledRequest(request, blocks, generations, start, start + num_tokens)

    def load_in_step(self, request: Request, failed: Failed | None, now_s: float) -> None:
        """End a load inside a step; the part that failed is computed from the next step on."""
        num_hit, num_external = request.num_cached_tokens, request.num_external_tokens
        request.prove()
        if failed is not None:
            whole = failed.num_valid_tokens - failed.num_valid_tokens % self._kv.block_size
            num_external = min(max(0, whole - num_hit), num_external)
            self._note_failure(request, failed, now_s)
            self._counters.count_remedy(Remedy.RECOMPUTE)
            report = ConnectorReport(failed=[failed])
            error = guarded(partial(self._connector.update_connector_output, report))
            if isinstance(error, Exception):
                self.end_broken(request.request_id, error, now_s, what="go on with")
                return
            num_known = len(request.prompt_token_ids) + len(request.output_token_ids)
            self._state.begin_again(request, min(num_hit + num_external, num_known - 1))
        self._counters.prompt(request, num_hit=num_hit, num_external=num_external)

    # ---- the connector's news --------------------------------------------------------

    def apply_report(self, report: ConnectorReport, now_s: float) -> None:
        """Take a report of the workers' connector halves. Unknown ids are ignored."""
        self._counters.kv_faults.update(report.faults)
        for fact, single in report.one_by_one():
            news = guarded(partial(self._connector.update_connector_output, single))
            if isinstance(news, Exception):
                self._fail_over(fact, news, now_s)
                news = ConnectorNews.of(single)  # it has happened nevertheless
            self._apply(news, now_s)

    def _fail_over(self, fact: Fact | None, error: Exception, now_s: float) -> None:
        # If none is named, it is one of those aside, and which one is unknown.
        aside = (each for each, request in self._state.requests.items() if request.times.is_aside)
        broken = list(aside) if fact is None else [fact.request_id]
        for request_id in broken:
            if request_id in self._state.requests:
                self.end_broken(request_id, error, now_s, what="go on with")

    def _apply(self, news: ConnectorNews, now_s: float) -> None:
        for settled in news.released:
            self._settle(settled, now_s)
        for request_id, why in news.ready:
            self._come_back(request_id, why, now_s)
        for received in news.loaded:
            self._receive(received, now_s)
        for fetched in news.fetched:
            self._note_fetched(fetched, now_s)
        for failed in news.retried:
            self._load_again(failed, now_s)
        for failed in news.elsewhere:
            self._fail_load(failed, now_s, is_elsewhere=True)
        for failed in news.failed:
            self._fail_load(failed, now_s)

    def _come_back(self, request_id: RequestId, why: str, now_s: float) -> None:
        """Ask about a request again, which may have stood aside."""
        request = self._state.requests.get(request_id)
        if request is not None:
            request.times.note(now_s, why)
            self._state.waiting.come_back(request, now_s)

    def _note_fetched(self, fetched: Fetched, now_s: float) -> None:
        request = self._state.requests.get(fetched.request_id)
        if request is not None:
            request.times.fetch(fetched)
            request.times.note(now_s, f"{fetched.num_tokens} tokens from the store")

    def _settle(self, settled: Settled, now_s: float) -> None:
        if self._state.release((settled.connector, settled.nonce)):
            return
        request = self._state.requests.get(settled.request_id)
        if request is None or not request.settle(settled):
            return  # another request under this id, or a hold that never began
        handoff = request.handoff if request.state is State.LEASED else None
        if handoff is not None and settled.nonce in ("", handoff.nonce):
            self._counters.lease_ends[settled.end.value] += 1
        if request.holds:
            return
        if request.state is State.LEASED:
            self._state.close(request, now_s, f"lease ended: {settled.end.value}")
        elif request.state is State.CLOSING:
            self._state.stop_waiting(request, Wait.HOLD, now_s)

    def _receive(self, received: Received, now_s: float) -> None:
        request = self._state.receiving.get(received.request_id)
        if request is None:
            self._settle_load(received.request_id, now_s)
            return
        brought = received.handoff
        refusal = brought and refusal_of_handoff(brought, vocab_size=self._vocab_size)
        if refusal:
            detail = f"what was written is refused: {refusal}"
            name, load_id = received.request_id, received.load_id
            reason = LoadFailure.INCOMPATIBLE
            failed = Failed(request_id=name, reason=reason, detail=detail, load_id=load_id)
            self._fail_load(failed, now_s)
            return
        assert request.holding is not None
        self._counters.loaded(received)
        request.receive(received, now_s)
        request.holding.become(BlockUser.REQUEST)
        self._state.publish_prefix(request, request.num_computed_tokens)
        what = f"received {received.num_bytes} bytes by {received.mode.value}"
        self._state.move(request, State.RUNNING, now_s, what)
        go_on = partial(self._go_on, request, now_s)
        is_here = self.attempt(go_on, request.request_id, now_s, otherwise=False, what="go on with")
        if is_here and brought is not None:
            self._take_handed_over_tokens(request, brought, now_s)

    def _go_on(self, request: Request, now_s: float) -> bool:
        """Load what can follow a load that has arrived; return whether that was the last."""
        num_hit, num_external = request.num_cached_tokens, request.num_external_tokens
        match = self.match(request, num_hit + num_external)
        if match is not None and match.num_tokens and match.is_async:
            request.expect_more(match.num_tokens, now_s)
            self.load(request, match.num_tokens, now_s)
            return False
        self.tell_start(request, 0)
        request.forget_source(is_pinned=match is not None and match.is_pinned)
        self._counters.prompt(request, num_hit=num_hit, num_external=num_external)
        num_missing = max(0, len(request.prompt_token_ids) - num_hit - num_external)
        self._state.settle_charge(request, num_missing)
        return True

    def _load_again(self, failed: Failed, now_s: float) -> None:
        request = self._state.receiving.get(failed.request_id)
        if request is not None:
            self._note_failure(request, failed, now_s)
            self._counters.count_remedy(Remedy.RETRY)
            request.times.begin_load_again(now_s)
            request.times.note(now_s, "loads once more from the same engine")

    def _fail_load(self, failed: Failed, now_s: float, *, is_elsewhere: bool = False) -> None:
        request = self._state.receiving.get(failed.request_id)
        if request is None:
            self._settle_load(failed.request_id, now_s)
            return
        self._note_failure(request, failed, now_s, may_load=is_elsewhere)
        # These tokens were confirmed and checked, so that only the rest must be computed.
        num_valid = min(failed.num_valid_tokens, len(request.prompt_token_ids))
        self._state.publish_prefix(request, num_valid)
        if is_elsewhere:
            self._state.free(request)
            request.lose_load()
            self._state.move(request, State.WAITING, now_s, "another source has it")
            request.times.queue_again(now_s)
            return
        self._end_load(request, f"{failed.reason.value} {failed.detail}".rstrip(), now_s)

    def _note_failure(
        self, request: Request, failed: Failed, now_s: float, *, may_load: bool = False
    ) -> None:
        self._counters.count_failure(failed.reason)
        request.note_failure(failed, now_s, may_load=may_load)

    def _end_load(self, request: Request, why: str, now_s: float) -> None:
        """Take the next rung for a request whose KV will not come; nothing writes its blocks."""
        self._state.free(request)
        num_missing = self._state.num_missing(request)
        decision = self._ladder.after_failure(request, num_missing, now_s)
        request.lose_load()
        request.forget_source()
        self._counters.count_remedy(decision.remedy)
        self._apply_decision(request, decision, why, now_s)

    def _apply_decision(self, request: Request, decision: Decision, why: str, now_s: float) -> None:
        match decision.remedy:
            case Remedy.RECOMPUTE:
                self._state.move(request, State.WAITING, now_s, "computed here")
                request.times.queue_again(now_s)
                return
            case Remedy.REPORT:
                error, code = f"the KV did not arrive: {why}", ErrorCode.KV_TRANSFER_FAILED
                outcome = "reported to its sender"
            case Remedy.SHED:
                error = f"the KV did not arrive ({why}), and {self._ladder.over_budget}"
                code = ErrorCode.RECOMPUTE_BUDGET_EXHAUSTED
                outcome = "shed: over the recompute budget"
            case Remedy.RETRY:
                raise InternalError(f"a load cannot be tried again now\n{request.story()}")
            case _:
                assert_never(decision.remedy)
        self._outputs.error(
            request.request_id,
            error,
            code,
            retry_after_s=decision.retry_after_s,
            load_failures=request.load_failures,
        )
        self.leave(request)
        self._state.close(request, now_s, outcome)

    def _settle_load(self, request_id: RequestId, now_s: float) -> None:
        """Settle a reported load for which no receiving request waits."""
        request = self._state.requests.get(request_id)
        if request is not None and request.state is State.CLOSING:
            self._state.stop_waiting(request, Wait.LOAD, now_s)
