"""Plans a step, applies the plan, and takes the results: the one owner of every request.

No clock of its own, no I/O, no tensors: a deterministic state machine. Per step it is
called `schedule` -> (the workers run) -> `update`, with `apply_report` whenever a
connector has news. Here is the step: what it is made of, and what comes of it. Where each
request stands is the roster's, who of the batch is in a step is decided by batching, who starts
by admission, and what becomes of KV that travels by transfers.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from pdserve.connectors.base import KVSource
from pdserve.kvcache.manager import KVCacheManager, SharedPrompt
from pdserve.observe.trace import Recorder
from pdserve.scheduler.admission import Admitter
from pdserve.scheduler.batching import Batcher
from pdserve.scheduler.counts import Counts, Rung
from pdserve.scheduler.deadlines import Deadlines
from pdserve.scheduler.inflight import InFlight, Step
from pdserve.scheduler.ladder import Ladder
from pdserve.scheduler.outbox import Outbox
from pdserve.scheduler.prefixes import Prefixes
from pdserve.scheduler.recording import Recording
from pdserve.scheduler.refusal import refusal_of
from pdserve.scheduler.request import Request, State, Wait
from pdserve.scheduler.roster import Roster
from pdserve.scheduler.steps import StepBuilder
from pdserve.scheduler.stopping import finish_reason
from pdserve.scheduler.transfers import Transfers
from pdserve.wire.request import EngineStats, ErrorCode, FinishReason
from pdserve.wire.transfer import LoadFailure

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve.config.schema import CacheConfig, SchedulerConfig
    from pdserve.connectors.base import KVConnectorScheduler
    from pdserve.observe.clock import Clock
    from pdserve.wire.ids import BlockId, RequestId
    from pdserve.wire.outputs import TokenLogprobs
    from pdserve.wire.request import EngineOutput, GenerateRequest
    from pdserve.wire.step import ExpertBalance, ModelRunnerOutput, SchedulerOutput
    from pdserve.wire.trace import EngineRequest
    from pdserve.wire.transfer import ConnectorMetadata, ConnectorReport, Failed


class Scheduler:
    """Continuous batching with chunked prefill, prefix caching and preemption.

    Args:
        num_blocks: Size of the KV pool.
        max_model_len: Tokens of prompt and output together, at most; must fit the pool.
        vocab_size: Every token id is below it.
        connector: The scheduler half; the null connector if KV never leaves.
        num_stages: Pipeline stages of the engine. With several, only the last one learns what
            it samples: a request goes on when its token has come back, which the next step
            tells all of them, and the decoding requests are shared out over as many steps.
        kv_bytes_per_token: To count, for traces, what is on its way here.

    Attributes:
        recorder: What traces are made from.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        vocab_size: int,
        connector: KVConnectorScheduler,
        clock: Clock,
        num_stages: int = 1,
        kv_bytes_per_token: int = 0,
    ) -> None:
        self.recorder = Recorder()
        is_pipelined = num_stages > 1
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._connector = connector
        self._clock = clock
        self.kv = KVCacheManager(
            num_blocks=num_blocks,
            block_size=cache.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
        )
        self._ladder = Ladder(
            config.recompute_tokens_per_s,
            max_model_len=max_model_len,
            now_s=clock.monotonic_s(),
        )
        self._may_admit = True
        self._inflight = InFlight()
        self._steps = StepBuilder(is_pipelined=is_pipelined)
        self._outbox = Outbox()
        self._num_arrivals = 0
        self._experts: ExpertBalance | None = None
        self._counts = Counts()
        self._prefixes = Prefixes(self.kv)
        self._roster = Roster(
            config.policy,
            steps=self._steps,
            inflight=self._inflight,
            ladder=self._ladder,
            recorder=self.recorder,
        )
        self._recording = Recording(
            self.recorder,
            roster=self._roster,
            kv=self.kv,
            kv_bytes_per_token=kv_bytes_per_token,
            is_pipelined=is_pipelined,
        )
        self._requests = self._roster.requests
        self._deadlines = Deadlines(self._requests)
        self._transfers = Transfers(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            kv=self.kv,
            prefixes=self._prefixes,
            roster=self._roster,
            connector=connector,
            ladder=self._ladder,
            counts=self._counts,
            outbox=self._outbox,
        )
        self._batcher = Batcher(
            config,
            max_model_len=max_model_len,
            num_stages=num_stages,
            kv=self.kv,
            roster=self._roster,
            inflight=self._inflight,
            connector=connector,
            counts=self._counts,
            end_broken=self._transfers.end_broken,
        )
        self._admitter = Admitter(
            config,
            kv=self.kv,
            prefixes=self._prefixes,
            roster=self._roster,
            connector=connector,
            ladder=self._ladder,
            counts=self._counts,
            end_broken=self._transfers.end_broken,
        )

    # ---- requests come and go -------------------------------------------------------

    def add(self, wire: GenerateRequest, shared: SharedPrompt | None = None) -> None:
        """Take a request. What cannot be served ends at once with an ERROR output.

        So does what nobody thought of: others must not pay for it.

        Args:
            shared: What it shares with other requests of this prompt and salt, if there are any.
        """
        now_s = self._clock.monotonic_s()
        try:
            self._take(wire, shared, now_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this request alone
            self._transfers.end_broken(wire.request_id, error, now_s)

    def _take(self, wire: GenerateRequest, shared: SharedPrompt | None, now_s: float) -> None:
        if wire.request_id in self._requests:
            self.refuse(wire.request_id, "a request with this id is already being served")
            return
        refusal = refusal_of(wire, vocab_size=self._vocab_size, max_model_len=self._max_model_len)
        if refusal is not None:
            self._outbox.refusal(wire.request_id, refusal, ErrorCode.BAD_REQUEST)
            return
        shared = shared or SharedPrompt()
        request = Request(
            wire,
            self.kv.chain(wire.cache_salt, shared),
            shared,
            order=self._num_arrivals,
            now_s=now_s,
        )
        self._num_arrivals += 1
        refusal = self._transfers.arrive(request)
        if refusal is not None:
            self._counts.load_failures[LoadFailure.INCOMPATIBLE.value] += 1
            self._outbox.refusal(wire.request_id, refusal, ErrorCode.HANDOFF_REFUSED)
            return
        if wire.is_fallback and request.source is KVSource.LOCAL:
            verdict = self._ladder.compute_here(request, self._prefixes.num_missing(request), now_s)
            self._counts.climbed(verdict.rung)
            if verdict.rung is Rung.SHED:
                self._transfers.leave(request)
                self._outbox.refusal(
                    wire.request_id,
                    self._ladder.over_budget,
                    ErrorCode.RECOMPUTE_BUDGET_EXHAUSTED,
                    retry_after_s=verdict.retry_after_s,
                )
                return
            request.note(now_s, "computed here in place of another engine")
        self._roster.add(request)
        self._deadlines.add(request)
        self._transfers.begin(request, now_s)

    def refuse(self, request_id: RequestId, why: str) -> None:
        """Answer a request that was not taken."""
        self._outbox.refusal(request_id, why)

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        """Forget requests. Ids that are unknown or over are ignored.

        The blocks are free at once, or as soon as nothing can write or read them.
        """
        now_s = self._clock.monotonic_s()
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            match request.state:
                case State.WAITING | State.RECEIVING | State.RUNNING:
                    self._transfers.end(request, now_s, "aborted", FinishReason.ABORT)
                case State.LEASED:
                    # The client left before it got the handoff: nobody else knows of it.
                    self._transfers.give_up(request.hold_id, now_s)
                case State.CLOSING | State.DONE:
                    pass

    def release_lease(self, nonce: str) -> None:
        """Nobody will read this lease."""
        self._transfers.give_up(nonce, self._clock.monotonic_s())

    def abort_all(self, why: str) -> None:
        """End every request that has not finished, with an ABORT output."""
        for request in list(self._requests.values()):
            self._give_up(request, why)

    # ---- one step ------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step and apply the plan. None = nothing to do now."""
        now_s = self._clock.monotonic_s()
        self._end_late()
        scheduled: dict[RequestId, int] = {}
        grown: dict[RequestId, list[BlockId]] = {}
        budget = self._batcher.fill(now_s, scheduled, grown)
        self._may_admit = budget is not None
        if budget is not None:
            scheduled.update(self._admitter.admit(now_s, budget))
        if not scheduled and not self._steps.has_gone:
            return None
        return self._build_step(now_s, scheduled, grown)

    def admit_loads(self) -> None:
        """Start the loads that are next in the queue: they need blocks and a seat, but no step.

        For when there is no room for another step. What `schedule` found last holds: if the
        running requests lacked blocks then, none are given away.
        """
        self._end_late()
        if self._may_admit:
            self._admitter.admit(self._clock.monotonic_s(), 0)

    def empty_step(self) -> SchedulerOutput:
        """A step without tokens, for engines that must step together; it is in flight then."""
        return self._build_step(self._clock.monotonic_s(), {}, {})

    def update(self, result: ModelRunnerOutput) -> None:
        """Take a step's results. Outputs are there for `drain_outputs`."""
        now_s = self._clock.monotonic_s()
        step = self._inflight.retire(result.step_id, now_s)
        self._counts.forward_s += result.forward_s
        self._recording.step(step, result.forward_s, now_s)
        if result.experts is not None:
            self._experts = result.experts
        self._take_loads(step, result.failed_loads, now_s)
        running: Mapping[RequestId, Request] = self._roster.running
        if step.void:
            running = {each: request for each, request in running.items() if each not in step.void}
        for request_id in result.non_finite_ids:
            request = running.get(request_id)
            if request is not None:
                self._lose(request, now_s)
        for request_id, entries in result.prompt_logprobs.items():
            request = running.get(request_id)
            # Computed once more after a preemption, they may be out already.
            if request is not None and not request.output_token_ids:
                request.prompt_logprobs.extend(entries)
        for request_id, num_computed in step.num_computed_after.items():
            request = running.get(request_id)
            if request is not None:
                self._retire_step_of(request, num_computed, now_s)
        for request_id, token_id in zip(result.request_ids, result.sampled_token_ids, strict=True):
            request = running.get(request_id)
            if request is not None:
                self._take_token(request, token_id, result.logprobs.get(request_id), now_s)
        for request in step.closing:
            self._roster.stop_waiting(request, Wait.STEP, now_s)

    def apply_report(self, report: ConnectorReport) -> None:
        """Take what the workers' connector halves saw. Unknown ids are ignored."""
        now_s = self._clock.monotonic_s()
        self._transfers.apply_report(report, now_s)
        if report.slices:
            self._recording.ranks(report, now_s)

    def sample_counters(self) -> None:
        """Record, for traces, how full everything is. To be called whenever that may change."""
        self._recording.sample(self._clock.monotonic_s())

    def take_instructions(self) -> ConnectorMetadata | None:
        """What the workers' connector halves are to do now, whether or not a step runs.

        To be asked for, and posted, after every call that can change a request.
        """
        return self._connector.take_instructions()

    def drain_outputs(self) -> list[EngineOutput]:
        """Outputs since the last call."""
        return self._outbox.drain()

    # ---- questions -----------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Steps submitted and not retired."""
        return len(self._inflight)

    @property
    def num_unfinished(self) -> int:
        """Requests whose client still waits for tokens."""
        return self._roster.num_unfinished

    @property
    def num_runnable(self) -> int:
        """Requests that need steps: those that wait for one, and those that run."""
        return self._roster.num_runnable

    @property
    def is_idle(self) -> bool:
        """Whether no request is left in any state, leased ones included."""
        return not self._requests

    def stats(self) -> EngineStats:
        """A snapshot."""
        counts = self._counts
        return EngineStats(
            num_running=len(self._roster.running),
            num_waiting=len(self._roster.waiting),
            num_receiving=len(self._roster.receiving),
            blocks=self.kv.ledger.blocks_by_state(),
            num_blocks=self.kv.pool.num_blocks,
            num_preemptions=counts.preemptions,
            num_steps=self._steps.num_built,
            prefix_cache_queries=counts.prompt_tokens,
            prefix_cache_hits=counts.local_cache_hit_tokens,
            prompt_tokens=counts.prompt_tokens,
            generation_tokens=counts.generation_tokens,
            local_compute_tokens=counts.local_compute_tokens,
            local_cache_hit_tokens=counts.local_cache_hit_tokens,
            external_kv_tokens=counts.external_kv_tokens,
            kv_bytes_received=counts.kv_bytes,
            kv_descriptors=counts.kv_descriptors,
            kv_load_failures=dict(counts.load_failures),
            kv_faults=dict(counts.faults + Counter(self._connector.faults)),
            lease_ends=dict(counts.lease_ends),
            forward_s=counts.forward_s,
            experts=self._experts,
            kv_loads=dict(counts.loads),
            kv_ladder=dict(counts.ladder),
            recompute_tokens=counts.recompute_tokens,
            kv_seconds=counts.kv_seconds,
        )

    def trace_of_running(self) -> list[EngineRequest]:
        """The time of each request that is not forgotten yet, until now."""
        now_s = self._clock.monotonic_s()
        return [request.traced(now_s) for request in self._requests.values()]

    def assert_nothing_held(self) -> None:
        """Raise AssertionError, with the stories, if anything of any request is left."""
        self._roster.assert_empty()
        assert not self._steps.known
        assert not len(self._inflight)
        assert not self.kv.ledger.holdings
        assert self.kv.pool.num_free == self.kv.pool.num_blocks
        self.kv.pool.check()

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. O(requests + blocks)."""
        self.kv.pool.check()
        self.kv.ledger.check()
        refs: Counter[BlockId] = Counter()
        for holding in self.kv.ledger.holdings:
            refs.update(holding.blocks)
        held = {request.holding for request in self._requests.values() if request.holding}
        held |= set(self._roster.parked.values())
        assert held == self.kv.ledger.holdings, "a holding belongs to no request"
        assert len(refs) == self.kv.pool.num_blocks - self.kv.pool.num_free
        self._roster.check()
        for request in self._roster.running.values():
            assert request.holding is not None
            capacity = len(request.holding.blocks) * self.kv.block_size
            assert request.num_computed_tokens <= capacity, request.story()

    # ---- building a step -------------------------------------------------------------

    def _build_step(
        self,
        now_s: float,
        scheduled: dict[RequestId, int],
        grown: dict[RequestId, list[BlockId]],
    ) -> SchedulerOutput:
        metadata = self._transfers.metadata_for(scheduled, now_s)
        batch = [(self._roster.running[request_id], num) for request_id, num in scheduled.items()]
        output = self._steps.build(batch, grown)
        after: dict[RequestId, int] = {}
        loading: list[RequestId] = []
        num_prefill = 0
        for request, num_tokens in batch:
            times = request.times
            if times.first_step_at_s is None:
                times.first_step_at_s = now_s
                if times.load_ready_s is not None:
                    times.step_wait_s = self._inflight.step_wait_s(times.load_ready_s, now_s)
            num_computed = request.num_computed_tokens
            num_prompt = len(request.prompt_token_ids)
            if num_computed < num_prompt:
                num_prefill += min(num_prompt - num_computed, num_tokens)
            if request.is_loading:
                request.is_loading = False
                loading.append(request.request_id)
            num_computed += num_tokens
            request.num_computed_tokens = after[request.request_id] = num_computed
            # `request.num_tokens`, spelled out: this runs for each request in each step.
            num_output = len(request.output_token_ids) + request.num_pending_tokens
            if num_computed == num_prompt + num_output:
                request.num_pending_tokens += 1
        self._inflight.submit(
            Step(
                output.step_id,
                after,
                now_s,
                num_prefill_tokens=num_prefill,
                num_decode_tokens=output.num_tokens - num_prefill,
                loading=loading,
            )
        )
        if metadata is None and not loading:
            return output
        return msgspec.structs.replace(
            output, connector_metadata=metadata, loading_request_ids=loading
        )

    # ---- taking results ------------------------------------------------------------

    def _take_loads(self, step: Step, failed_loads: list[Failed], now_s: float) -> None:
        """What was to be loaded inside a step has come, or what was computed from it is void."""
        if not step.loading:
            return
        failed = {each.request_id: each for each in failed_loads}
        for request_id in step.loading:
            if request_id in failed:
                step.void.add(request_id)
            request = self._roster.running.get(request_id)
            if request is not None:
                self._transfers.load_in_step(request, failed.get(request_id), now_s)

    def _retire_step_of(self, request: Request, num_computed: int, now_s: float) -> None:
        if request.times.first_step_end_s is None:
            request.times.first_step_end_s = now_s
        if request.holding is not None:
            self._prefixes.publish(request, num_computed)

    def _take_token(
        self, request: Request, token_id: int, logprobs: TokenLogprobs | None, now_s: float
    ) -> None:
        request.num_pending_tokens -= 1
        request.output_token_ids.append(token_id)
        self._counts.generation_tokens += 1
        prompt_logprobs = None
        if len(request.output_token_ids) == 1:
            request.first_logprobs = None if logprobs is None else [logprobs]
            if request.sampling.prompt_logprobs is not None:
                # A prompt of one token has no entry but the first one's.
                prompt_logprobs = [None, *request.prompt_logprobs]
                request.prompt_logprobs = []
        if request.times.first_token_s is None:
            request.times.first_token_s = now_s
        finish, stop_reason = finish_reason(request, token_id, max_model_len=self._max_model_len)
        if finish is None and request.remote_decode:
            try:
                self._transfers.hand_over(request, now_s)
            except Exception as error:  # noqa: BLE001 - whatever it is, others go on
                self._transfers.end_broken(request.request_id, error, now_s, what="hand over")
                return
            finish = FinishReason.HANDOFF
        self._outbox.token(
            request,
            logprobs,
            prompt_logprobs=prompt_logprobs,
            finish=finish,
            stop_reason=stop_reason,
        )
        if finish is not None and finish is not FinishReason.HANDOFF:
            self._transfers.end(request, now_s, finish.value, finish)

    # ---- endings -------------------------------------------------------------------

    def _end_late(self) -> None:
        """Nobody waits for what is late any more, wherever it stands."""
        for request in self._deadlines.take_late(self._clock.monotonic_s()):
            state = {State.RECEIVING: "its KV was on its way", State.RUNNING: "it ran"}
            during = state.get(request.state, "it waited")
            self._give_up(request, f"the deadline passed while {during}")

    def _lose(self, request: Request, now_s: float) -> None:
        """End a request that has become NaN, before anything of this step is published.

        What it was given of others may be what is wrong: nobody is given it again.
        """
        assert request.holding is not None
        self.kv.pool.forget(request.holding.blocks)
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        self._outbox.error(
            request,
            f"the model makes NaN or infinite values of this request, after {num_tokens} tokens: "
            "its weights are corrupt, or they overflow; try another --dtype",
            ErrorCode.NON_FINITE_LOGITS,
        )
        self._transfers.end(request, now_s, "its logits are not finite", FinishReason.ERROR)

    def _give_up(self, request: Request, why: str) -> None:
        """End a request that could have been served, had there been time."""
        if request.state in (State.WAITING, State.RECEIVING, State.RUNNING):
            self._outbox.abort(request, why)
            self._transfers.end(request, self._clock.monotonic_s(), why, FinishReason.ABORT)
