"""Plans a step, applies the plan, and takes the results: the one owner of every request.

No clock of its own, no I/O, no tensors: a deterministic state machine. The calls per step are
`schedule` -> (the workers run) -> `update`; `apply_report` follows any news of a connector. All
parts share `state`; `batching` decides what a step computes, `transfers` handles KV that travels.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pdserve.config.schema import SchedulingPolicy
from pdserve.connectors.base import KVSource
from pdserve.kvcache.manager import SharedPrompt
from pdserve.scheduler.batching import Batcher
from pdserve.scheduler.ladder import Remedy
from pdserve.scheduler.life import State, Wait
from pdserve.scheduler.plan import refusal_of
from pdserve.scheduler.request import Request
from pdserve.scheduler.state import SchedulerState
from pdserve.scheduler.steps import Filling
from pdserve.scheduler.stuck import StuckKV
from pdserve.scheduler.telemetry import Telemetry
from pdserve.scheduler.transfers import Transfers
from pdserve.wire.request import ErrorCode, FinishReason
from pdserve.wire.transfer import ConnectorReport, LoadFailure

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdserve.config.schema import CacheConfig, SchedulerConfig
    from pdserve.connectors.base import KVConnectorScheduler
    from pdserve.observe.clock import Clock
    from pdserve.scheduler.state import Dimensions
    from pdserve.scheduler.steps import Step
    from pdserve.wire.events import KVEvent
    from pdserve.wire.ids import RequestId
    from pdserve.wire.request import EngineOutput, EngineStats, GenerateRequest
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
    from pdserve.wire.transfer import ConnectorMetadata, Failed


class Scheduler:
    """Continuous batching with chunked prefill, prefix caching and preemption.

    With several pipeline stages, only the last one knows the sampled tokens: a request continues
    once its token has come back and the next step tells all stages of it, and the decoding requests
    are divided over as many steps as there are stages.

    Args:
        connector: The scheduler half; the null connector if KV never leaves.

    Attributes:
        state: State shared by its parts; read-only for others.
        telemetry: Its statistics and traces.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        dimensions: Dimensions,
        connector: KVConnectorScheduler,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self.state = state = SchedulerState(
            config, cache, dimensions, connector, now_s=clock.monotonic_s()
        )
        self.kv = state.kv
        self.recorder = state.recorder
        self.telemetry = Telemetry(state, is_reported=cache.events.enable_kv_cache_events)
        self._is_by_priority = config.policy is SchedulingPolicy.PRIORITY
        self._max_model_len = dimensions.max_model_len
        self._outputs = state.outputs
        self._counters = state.counters
        self._num_arrivals = 0
        self._may_admit = True
        self._stuck = StuckKV(state)
        self._transfers = Transfers(state)
        self._batcher = Batcher(state, self._transfers)

    # ---- requests come and go -------------------------------------------------------

    def add(self, wire: GenerateRequest, shared: SharedPrompt | None = None) -> None:
        """Take a request. One that cannot be served ends at once with an ERROR output.

        So does a request that raises an exception here: others must not suffer from it.

        Args:
            shared: Data shared with other requests of this prompt and salt, if there are any.
        """
        now_s = self._clock.monotonic_s()
        take = partial(self._take, wire, shared, now_s)
        self._transfers.attempt(take, wire.request_id, now_s, otherwise=None)

    def _take(self, wire: GenerateRequest, shared: SharedPrompt | None, now_s: float) -> None:
        if wire.request_id in self.state.requests:
            self.refuse(wire.request_id, "a request with this id is already being served")
            return
        vocab_size = self.state.dimensions.vocab_size
        refusal = refusal_of(wire, vocab_size=vocab_size, max_model_len=self._max_model_len)
        if refusal is not None:
            self._outputs.error(wire.request_id, refusal, ErrorCode.BAD_REQUEST)
            return
        shared, history = shared or SharedPrompt(), self.state.drafts
        request = Request(
            wire,
            self.kv.chain(wire.prompt_token_ids, wire.cache_salt, shared),
            shared,
            drafts=None
            if history is None
            else history.begin(has_prediction=bool(wire.prediction_token_ids)),
            rank=(
                wire.priority if self._is_by_priority else 0,
                now_s + wire.yields_s,
                self._num_arrivals,
            ),
            now_s=now_s,
        )
        self._num_arrivals += 1
        refusal = self._transfers.arrive(request)
        if refusal is not None:
            self._counters.count_failure(LoadFailure.INCOMPATIBLE)
            self._outputs.error(wire.request_id, refusal, ErrorCode.HANDOFF_REFUSED)
            return
        if wire.is_fallback and request.source is KVSource.LOCAL:
            ladder = self.state.ladder
            decision = ladder.compute_here(request, self.state.num_missing(request), now_s)
            self._counters.count_remedy(decision.remedy)
            if decision.remedy is Remedy.SHED:
                self._transfers.leave(request)
                self._outputs.error(
                    wire.request_id,
                    ladder.over_budget,
                    ErrorCode.RECOMPUTE_BUDGET_EXHAUSTED,
                    retry_after_s=decision.retry_after_s,
                )
                return
            request.times.note(now_s, "computed here in place of another engine")
        self.state.add(request)
        self._transfers.begin(request, now_s)

    def refuse(self, request_id: RequestId, why: str) -> None:
        """Answer a request that was not taken."""
        self._outputs.error(request_id, why)

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        """Forget requests. Ids that are unknown or over are ignored.

        The blocks are free at once, or as soon as nothing can write or read them.
        """
        now_s = self._clock.monotonic_s()
        for request_id in request_ids:
            request = self.state.requests.get(request_id)
            if request is None:
                continue
            match request.state:
                case State.WAITING | State.RECEIVING | State.RUNNING:
                    self._transfers.end(request, now_s, "aborted", FinishReason.ABORT)
                case State.LEASED:
                    # The client left before it got the handoff, which no one else knows.
                    assert request.handoff is not None
                    self.release_lease(request.handoff.nonce)
                case State.CLOSING | State.DONE:
                    pass

    def release_lease(self, nonce: str) -> None:
        """Give up a lease that will not be read."""
        self._transfers.tell(ConnectorReport(given_up=[nonce]), self._clock.monotonic_s())

    def keep_leases(self, nonces: list[str]) -> None:
        """Keep leases whose handoffs have not been delivered yet."""
        self._transfers.tell(ConnectorReport(kept=nonces), self._clock.monotonic_s())

    def hand_over(self, request_ids: Iterable[RequestId]) -> None:
        """Lease running requests out; ids of other requests, and unknown ids, are ignored."""
        for request_id in request_ids:
            request = self.state.running.get(request_id)
            if request is not None and self.state.connector.hands_over:
                self._transfers.give_away(request, self._clock.monotonic_s())

    def abort_all(self, why: str) -> None:
        """End every request that has not finished, with an ABORT output."""
        for request in list(self.state.requests.values()):
            self._give_up(request, why)

    # ---- one step ------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step and apply the plan. None = nothing to do now."""
        now_s = self._clock.monotonic_s()
        self._end_late()
        filling = Filling()
        budget = self._batcher.fill(now_s, filling)
        self._may_admit = budget is not None
        if budget is not None:
            filling.num_tokens.update(self._batcher.admit(now_s, budget))
        if not filling.num_tokens and self._batcher.is_making_way:  # for one that cannot start
            self._batcher.fill(now_s, filling, makes_way=False)
        if filling.num_tokens:
            self._stuck.went_on()
        elif not self.state.steps.has_gone:
            self._stuck.end_reservations(now_s)
            stuck = self._stuck.next_to_end(now_s)
            if stuck is not None:
                self._fail(stuck, self._stuck.why, ErrorCode.KV_TRANSFER_FAILED, now_s)
            return None
        return self._build_step(now_s, filling)

    def admit_loads(self) -> None:
        """Start the loads that are next in the queue, which need no step.

        Used when there is no room for another step. The last result of `schedule` still holds: if
        the running requests lacked blocks then, no load gets any.
        """
        self._end_late()
        if self._may_admit:
            self._batcher.admit(self._clock.monotonic_s(), 0)

    def empty_step(self) -> SchedulerOutput:
        """Return a step without tokens, for engines that must step together."""
        return self._build_step(self._clock.monotonic_s(), Filling())

    def update(self, result: ModelRunnerOutput) -> None:
        """Take a step's results. `drain_outputs` then returns its outputs."""
        now_s = self._clock.monotonic_s()
        step = self.state.steps.retire(result.step_id, now_s)
        num_drafted = sum(result.num_drafted.values())
        num_tokens = step.num_prefill_tokens + step.num_decode_tokens + num_drafted
        self._counters.step(num_tokens, result.forward_s)
        self.telemetry.step(step, result, now_s)
        self._take_loads(step, result.failed_loads, now_s)
        for request in self._running(step, result.non_finite_ids):
            self._lose(request, now_s)
        for request in self._running(step, result.prompt_logprobs):
            request.add_prompt_logprobs(result.prompt_logprobs[request.request_id])
        self._publish(step, result.ids_without_token, now_s)
        if step.num_draft_rows:
            self._count_drafts(step, result)
        sampled = dict(zip(result.request_ids, result.sampled_token_ids, strict=True))
        for request in self._running(step, sampled):
            self._take_tokens(request, sampled[request.request_id], result, now_s)
        self._take_no_tokens(step, result, now_s)
        for request in step.closing:
            self.state.stop_waiting(request, Wait.STEP, now_s)

    def apply_report(self, report: ConnectorReport) -> None:
        """Take a report of the workers' connector halves. Unknown ids are ignored."""
        now_s = self._clock.monotonic_s()
        self._transfers.apply_report(report, now_s)
        if report.slices:
            self.telemetry.ranks(report, now_s)

    def take_instructions(self) -> ConnectorMetadata | None:
        """Return instructions for the workers' connector halves, whether or not a step runs.

        Call this, and post the result, after every call that can change a request.
        """
        return self.state.connector.take_instructions()

    def drain_outputs(self) -> list[EngineOutput]:
        """Return the outputs since the last call."""
        return self._outputs.drain()

    def take_events(self) -> list[KVEvent]:
        """Return the caches' gains and losses since the last call, if events are enabled."""
        log = self.kv.events
        return [] if log is None else [*log.drain(), *self.state.connector.take_events()]

    # ---- questions -----------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Steps submitted and not retired."""
        return len(self.state.steps)

    @property
    def num_unfinished(self) -> int:
        """Requests whose client still waits for tokens."""
        return self.state.num_unfinished

    @property
    def num_runnable(self) -> int:
        """Requests that need steps: those that wait for one, and those that run."""
        return self.state.num_runnable

    @property
    def num_requests(self) -> int:
        """Requests in any state, leased ones included."""
        return len(self.state.requests)

    @property
    def is_idle(self) -> bool:
        """Whether no request is left in any state."""
        return not self.state.requests

    def stats(self) -> EngineStats:
        """Return a snapshot of the statistics."""
        return self.telemetry.stats()

    # ---- building a step -------------------------------------------------------------

    def _build_step(self, now_s: float, filling: Filling) -> SchedulerOutput:
        metadata = self._transfers.metadata_for(filling.num_tokens, now_s)
        return self.state.steps.submit(self.state.running, filling, metadata, now_s)

    # ---- taking results ------------------------------------------------------------

    def _running(self, step: Step, request_ids: Iterable[RequestId]) -> Iterator[Request]:
        """Yield those whose results in a step count: they run when their turn comes."""
        for request_id in request_ids:
            request = self.state.running.get(request_id)
            if request is not None and request_id not in step.void:
                yield request

    def _take_loads(self, step: Step, failed_loads: list[Failed], now_s: float) -> None:
        """Take the outcome of loads inside a step; results from a failed load are discarded."""
        if not step.loading:
            return
        failed = {each.request_id: each for each in failed_loads}
        for request_id in step.loading:
            if request_id in failed:
                step.void.add(request_id)
            request = self.state.running.get(request_id)
            if request is not None:
                self._transfers.load_in_step(request, failed.get(request_id), now_s)

    def _publish(self, step: Step, ids_without_token: Iterable[RequestId], now_s: float) -> None:
        """Let others find the KV that a step has computed."""
        for request_id in ids_without_token:
            step.num_computed_after[request_id] -= 1  # nobody may find the KV of its last token
        for request in self._running(step, step.num_computed_after):
            if request.times.first_step_end_s is None:
                request.times.end_step(now_s)
            if request.holding is not None:
                self.state.publish_prefix(request, step.num_computed_after[request.request_id])

    def _count_drafts(self, step: Step, result: ModelRunnerOutput) -> None:
        """Note the success of the step's drafts."""
        history = self.state.drafts
        assert history is not None
        num_sampled = dict(zip(result.request_ids, map(len, result.sampled_token_ids), strict=True))
        num_sampled |= dict.fromkeys(result.spoiled_ids, 1)  # nothing of their drafts was right
        for request_id in step.num_draft_rows:
            request = self.state.running.get(request_id)
            record = None if request is None else request.drafts
            if record is None or request_id not in num_sampled:
                continue
            num_drafted = result.num_drafted.get(request_id, 0)
            num_accepted = num_sampled[request_id] - 1
            history.note(record, num_drafted, num_accepted)
            if num_drafted:
                self._counters.draft(num_drafted, num_accepted)

    def _take_tokens(
        self,
        request: Request,
        token_ids: list[int],
        result: ModelRunnerOutput,
        now_s: float,
    ) -> None:
        logprobs = result.logprobs.get(request.request_id)
        num_tokens, finish, stop_reason = request.sample(
            token_ids, logprobs, now_s, max_model_len=self._max_model_len
        )
        self._counters.generation_tokens += num_tokens
        if num_tokens > 1:
            self.state.publish_prefix(request, request.num_computed_tokens)
        prompt_logprobs = None
        if len(request.output_token_ids) == num_tokens:  # its first
            prompt_logprobs = request.take_prompt_logprobs()
            self.state.prompts.discard(request.request_id)
        if finish is None and request.remote_decode and not request.num_pending_tokens:
            if not self._transfers.hand_over(request, now_s):
                return
            finish = FinishReason.HANDOFF
        self._outputs.tokens(
            request,
            num_tokens,
            logprobs,
            prompt_logprobs=prompt_logprobs,
            pooled=result.pooled.get(request.request_id),
            finish=finish,
            stop_reason=stop_reason,
        )
        if finish is not None and finish is not FinishReason.HANDOFF:
            self._transfers.end(request, now_s, finish.value, finish)

    def _take_no_tokens(self, step: Step, result: ModelRunnerOutput, now_s: float) -> None:
        """Take what a step says of requests for which it sampled nothing."""
        for request in self._running(step, result.unready_ids):
            self.state.steps.take_back(request)
            self._counters.num_sat_out += 1
        for request in self._running(step, result.spoiled_ids):
            self.state.steps.take_back(request)
            if request.drafts is not None:
                request.drafts.spoil(request.num_tokens)
        for request in self._running(step, result.dead_ends):
            num, why = len(request.output_token_ids), result.dead_ends[request.request_id]
            why = f"the grammar allows nothing behind {num} tokens of output: {why}"
            self._fail(request, why, ErrorCode.GRAMMAR_DEAD_END, now_s)
        for request in self._running(step, result.rejected_ids):
            self._reject(request, now_s)

    # ---- endings -------------------------------------------------------------------

    def _end_late(self) -> None:
        """End the requests whose deadline has passed, wherever they stand."""
        for request in self.state.take_late(self._clock.monotonic_s()):
            state = {State.RECEIVING: "its KV was on its way", State.RUNNING: "it ran"}
            during = state.get(request.state, "it waited")
            self._give_up(request, f"the deadline passed while {during}")

    def _lose(self, request: Request, now_s: float) -> None:
        """End a request whose logits are not finite, before anything of this step is published.

        A cached block may be at fault, so the cache forgets the blocks that it used.
        """
        assert request.holding is not None
        self._counters.num_corrupted += 1
        self.kv.pool.forget(request.holding.blocks)
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        why = (
            f"the model makes NaN or infinite values of this request, after {num_tokens} tokens: "
            "its weights are corrupt, or they overflow; try another --dtype"
        )
        self._fail(request, why, ErrorCode.NON_FINITE_LOGITS, now_s)

    def _reject(self, request: Request, now_s: float) -> None:
        """End a request whose grammar does not allow the first token that its handoff brought."""
        self._counters.count_failure(LoadFailure.INCOMPATIBLE)
        why = (
            "the grammar does not allow the first token that another engine sampled: see that both "
            "have the same tokenizer and release of llguidance"
        )
        self._fail(request, why, ErrorCode.HANDOFF_REFUSED, now_s)

    def _fail(self, request: Request, why: str, code: ErrorCode, now_s: float) -> None:
        failures = request.load_failures
        self._outputs.error(request.request_id, why, code, load_failures=failures)
        self._transfers.end(request, now_s, why, FinishReason.ERROR)

    def _give_up(self, request: Request, why: str) -> None:
        """End a request that lacked only the time to be served."""
        if request.state in (State.WAITING, State.RECEIVING, State.RUNNING):
            self._outputs.abort(request, why)
            self._transfers.end(request, self._clock.monotonic_s(), why, FinishReason.ABORT)
