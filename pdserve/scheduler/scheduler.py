"""Plans a step, applies the plan, and takes the results: the one owner of every request.

No clock of its own, no I/O, no tensors: a deterministic state machine. Per step it is
called `schedule` -> (the workers run) -> `update`, with `apply_report` whenever a
connector has news. A request is in exactly one place: the waiting queue, the running
batch, `_receiving` (a load fills its blocks), `_leased` (a peer may read its blocks), or
closing (over, but a load or a step may still write its blocks).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import InternalError
from pdserve.kvcache.lease import Hold
from pdserve.kvcache.manager import KVCacheManager, PrefixHit
from pdserve.scheduler.inflight import InFlight, Step
from pdserve.scheduler.plan import Candidate, plan_admission, plan_running
from pdserve.scheduler.queue import WaitingQueue
from pdserve.scheduler.refusal import refusal_of
from pdserve.scheduler.request import Request, State
from pdserve.wire.request import EngineOutput, EngineStats, FinishReason
from pdserve.wire.step import KnownRequests, NewRequest, SchedulerOutput
from pdserve.wire.transfer import ConnectorReport, Failed, LeaseEnd, LoadFailure, Received, Settled

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.config.schema import CacheConfig, SchedulerConfig
    from pdserve.connectors.base import KVConnectorScheduler
    from pdserve.observe.clock import Clock
    from pdserve.wire.ids import BlockId, RequestId
    from pdserve.wire.outputs import TokenLogprobs
    from pdserve.wire.request import GenerateRequest
    from pdserve.wire.step import ExpertBalance, ModelRunnerOutput

_NO_HIT = PrefixHit((), 0, 0)


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
    ) -> None:
        self._config = config
        self._num_stages, self._is_pipelined = num_stages, num_stages > 1
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        # A prompt that may not be spread over steps must fit into one.
        self._token_budget = max(
            config.max_num_batched_tokens, 0 if config.enable_chunked_prefill else max_model_len
        )
        self._connector = connector
        self._clock = clock
        self.kv = KVCacheManager(
            num_blocks=num_blocks,
            block_size=cache.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
        )
        self._num_reserved_blocks = num_blocks // 100
        self._requests: dict[RequestId, Request] = {}
        self._waiting = WaitingQueue(config.policy)
        self._running: dict[RequestId, Request] = {}
        self._receiving: dict[RequestId, Request] = {}
        self._leased: dict[RequestId, Request] = {}
        self._known_to_worker: set[RequestId] = set()
        self._gone: list[RequestId] = []
        self._inflight = InFlight()
        self._outputs: list[EngineOutput] = []
        self._prompt_logprobs: dict[RequestId, list[TokenLogprobs | None]] = {}
        self._step_id = 0
        self._num_arrivals = 0
        self._forward_s = 0.0
        self._experts: ExpertBalance | None = None
        self._counts: Counter[str] = Counter()
        self._load_failures: Counter[str] = Counter({f.value: 0 for f in LoadFailure})
        self._lease_ends: Counter[str] = Counter({e.value: 0 for e in LeaseEnd})
        self._kv_faults: Counter[str] = Counter()

    # ---- requests come and go -------------------------------------------------------

    def add(self, wire: GenerateRequest) -> None:
        """Take a request. What cannot be served ends at once with an ERROR output."""
        now_s = self._clock.monotonic_s()
        if wire.request_id in self._requests:
            self.refuse(wire.request_id, "a request with this id is already being served")
            return
        refusal = refusal_of(wire, vocab_size=self._vocab_size, max_model_len=self._max_model_len)
        if refusal is not None:
            self.refuse(wire.request_id, refusal)
            return
        request = Request(
            wire, self.kv.chain(wire.cache_salt), order=self._num_arrivals, now_s=now_s
        )
        self._num_arrivals += 1
        if wire.handoff is not None:
            refusal = self._connector.check_handoff(request)
            if refusal is not None:
                self._load_failures[LoadFailure.INCOMPATIBLE.value] += 1
                self.refuse(wire.request_id, f"handoff refused: {refusal}")
                return
        self._requests[wire.request_id] = request
        self._waiting.push(request)
        if wire.handoff is not None:
            self._connector.request_queued(request)
            self._take_handed_over_tokens(request)

    def refuse(self, request_id: RequestId, why: str) -> None:
        """Answer a request that was not taken."""
        self._outputs.append(
            EngineOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=why)
        )

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        """Forget requests. Ids that are unknown or over are ignored.

        The blocks are free at once, or as soon as nothing can write or read them.
        """
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            match request.state:
                case State.WAITING | State.RECEIVING | State.RUNNING:
                    self._connector.request_aborted(request)
                    self._end(request, "aborted")
                case State.LEASED:
                    # The client left before it got the handoff: nobody else knows of it.
                    assert request.handoff is not None
                    self._connector.release_lease(request.handoff.nonce)
                case State.CLOSING | State.DONE:
                    pass

    def release_lease(self, nonce: str) -> None:
        """Nobody will read this lease."""
        self._connector.release_lease(nonce)

    def abort_all(self, why: str) -> None:
        """End every request that has not finished, with an ABORT output."""
        for request in list(self._requests.values()):
            if request.state in (State.WAITING, State.RECEIVING, State.RUNNING):
                self._give_up(request, why)

    # ---- one step ------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step and apply the plan. None = nothing to do now."""
        now_s = self._clock.monotonic_s()
        scheduled: dict[RequestId, int] = {}
        grown: dict[RequestId, list[BlockId]] = {}
        budget = self._schedule_running(now_s, scheduled, grown)
        if budget is not None:
            self._admit(now_s, budget, scheduled)
        if not scheduled and not self._gone and not self._connector.has_staged():
            return None
        return self._build_step(now_s, scheduled, grown)

    def empty_step(self) -> SchedulerOutput:
        """A step without tokens, for engines that must step together; it is in flight then."""
        return self._build_step(self._clock.monotonic_s(), {}, {})

    def update(self, result: ModelRunnerOutput) -> None:
        """Take a step's results. Outputs are there for `drain_outputs`."""
        now_s = self._clock.monotonic_s()
        step = self._inflight.retire(result.step_id)
        self._forward_s += result.forward_s
        if result.experts is not None:
            self._experts = result.experts
        for request_id, entries in result.prompt_logprobs.items():
            request = self._running.get(request_id)
            # Computed once more after a preemption, they may be out already.
            if request is not None and not request.output_token_ids:
                self._prompt_logprobs.setdefault(request_id, [None]).extend(entries)
        for request_id, num_computed in step.num_computed_after.items():
            request = self._running.get(request_id)
            if request is not None:
                self._retire_step_of(request, num_computed, now_s)
        for request_id, token_id in zip(result.request_ids, result.sampled_token_ids, strict=True):
            request = self._running.get(request_id)
            if request is not None:
                self._take_token(request, token_id, result.logprobs.get(request_id), now_s)
        for request in step.closing:
            self._close(request, now_s, "its last step retired")
        if result.connector_report is not None:
            self.apply_report(result.connector_report)

    def apply_report(self, report: ConnectorReport) -> None:
        """Take what the workers' connector halves saw. Unknown ids are ignored."""
        now_s = self._clock.monotonic_s()
        for settled in report.settled:
            self._settle(settled, now_s)
        for received in report.received:
            self._receive(received, now_s)
        for failed in report.failed:
            self._fail_load(failed, now_s)
        self._kv_faults.update(report.faults)
        self._connector.update_connector_output(report)

    def drain_outputs(self) -> list[EngineOutput]:
        """Outputs since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # ---- questions -----------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Steps submitted and not retired."""
        return len(self._inflight)

    @property
    def num_unfinished(self) -> int:
        """Requests whose client still waits for tokens."""
        return len(self._waiting) + len(self._receiving) + len(self._running)

    @property
    def num_runnable(self) -> int:
        """Requests that need steps: those that wait for one, and those that run."""
        return len(self._waiting) + len(self._running)

    @property
    def is_idle(self) -> bool:
        """Whether no request is left in any state, leased ones included."""
        return not self._requests

    def stats(self) -> EngineStats:
        """A snapshot."""
        counts = self._counts
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_receiving=len(self._receiving),
            blocks=self.kv.ledger.blocks_by_state(),
            num_blocks=self.kv.pool.num_blocks,
            num_preemptions=counts["preemptions"],
            num_steps=self._step_id,
            prefix_cache_queries=counts["prefix_cache_queries"],
            prefix_cache_hits=counts["prefix_cache_hits"],
            prompt_tokens=counts["prompt_tokens"],
            generation_tokens=counts["generation_tokens"],
            local_compute_tokens=counts["local_compute"],
            local_cache_hit_tokens=counts["local_cache_hit"],
            external_kv_tokens=counts["external_kv"],
            kv_bytes_received=counts["kv_bytes"],
            kv_descriptors=counts["kv_descriptors"],
            kv_load_failures=dict(self._load_failures),
            kv_faults=dict(self._kv_faults),
            lease_ends=dict(self._lease_ends),
            forward_s=self._forward_s,
            experts=self._experts,
        )

    def assert_nothing_held(self) -> None:
        """Raise AssertionError, with the stories, if anything of any request is left."""
        stories = "\n".join(request.story() for request in self._requests.values())
        assert not self._requests, f"requests are left:\n{stories}"
        assert not self._running
        assert not self._receiving
        assert not self._leased
        assert not len(self._waiting)
        assert not self._prompt_logprobs
        assert not self._known_to_worker
        assert not len(self._inflight)
        assert not self.kv.ledger.holdings
        assert self.kv.pool.num_free == self.kv.pool.num_blocks
        self.kv.pool.check()

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. O(requests + blocks)."""
        self.kv.pool.check()
        refs: Counter[BlockId] = Counter()
        for holding in self.kv.ledger.holdings:
            refs.update(holding.blocks)
        by_state = self.kv.ledger.blocks_by_state()
        assert min(by_state.values()) >= 0, by_state
        assert sum(by_state.values()) == self.kv.pool.num_blocks, by_state
        held = {request.holding for request in self._requests.values() if request.holding}
        assert held == self.kv.ledger.holdings, "a holding belongs to no request"
        assert len(refs) == self.kv.pool.num_blocks - self.kv.pool.num_free
        for request in self._requests.values():
            assert (request.holding is None) == (request.state is State.WAITING), request.story()
            if request.state is State.RUNNING and request.holding is not None:
                capacity = len(request.holding.blocks) * self.kv.block_size
                assert request.num_computed_tokens <= capacity, request.story()

    # ---- planning and applying -------------------------------------------------------

    def _schedule_running(
        self,
        now_s: float,
        scheduled: dict[RequestId, int],
        grown: dict[RequestId, list[BlockId]],
    ) -> int | None:
        """Fill the step with running requests.

        Returns the budget left; None if it must stay unspent, because a running request
        lacks blocks, or a preemption just made room for one: neither may be given away.
        """
        batch = list(self._running.values())
        candidates = [self._candidate(request) for request in batch]

        def freed_by(index: int) -> int:
            holding = batch[index].holding
            return 0 if holding is None else self.kv.pool.num_exclusive_among(holding.blocks)

        plan = plan_running(
            candidates,
            token_budget=self._token_budget,
            num_free_blocks=self.kv.pool.num_free,
            block_size=self.kv.block_size,
            may_split=self._config.enable_chunked_prefill,
            freed_by=None if self._inflight.is_computing else freed_by,
            max_decodes=self._max_decodes(batch),
        )
        for index in plan.preempted:
            self._preempt(batch[index], now_s)
        for index, num_tokens in plan.num_tokens.items():
            request = batch[index]
            assert request.holding is not None
            num_blocks = plan.num_new_blocks[index]
            if num_blocks:
                grown[request.request_id] = request.holding.grow(num_blocks)
            scheduled[request.request_id] = num_tokens
            if self._is_pipelined:
                # Who was not in this step comes first in the next.
                self._running[request.request_id] = self._running.pop(request.request_id)
        return None if plan.preempted or plan.is_short_of_blocks else plan.budget_left

    def _candidate(self, request: Request) -> Candidate:
        num_computed = request.num_computed_tokens
        holding = request.holding
        is_pipelined = self._is_pipelined
        sits_out = request.num_pending_tokens > 0 and (is_pipelined or self._is_complete(request))
        return Candidate(
            0 if sits_out else request.num_tokens - num_computed,
            num_computed,
            0 if holding is None else len(holding.blocks),
            self._waiting.rank(request),
            is_pipelined and request.is_decoding,
        )

    def _is_complete(self, request: Request) -> bool:
        """Whether nothing more is computed for it, although its last tokens may be pending."""
        return request.num_tokens >= self._max_model_len or request.is_output_complete

    def _max_decodes(self, batch: list[Request]) -> int | None:
        """The share of the decoding requests that each stage has while all of them work."""
        if not self._is_pipelined:
            return None
        num_decoding = sum(r.is_decoding and not self._is_complete(r) for r in batch)
        return -(-num_decoding // self._num_stages)

    def _admit(self, now_s: float, budget: int, scheduled: dict[RequestId, int]) -> None:
        """Start waiting requests while budget, seats and blocks last."""
        asked_to_wait: list[Request] = []
        while len(self._running) + len(self._receiving) < self._config.max_num_seqs:
            request = self._waiting.peek()
            if request is None:
                break
            if self._is_late(request):
                self._give_up(request, "the deadline passed while it waited")
                continue
            hit = self._match(request)
            match = self._connector.get_num_new_matched_tokens(request, hit.num_tokens)
            if match is None:
                self._waiting.remove(request)
                asked_to_wait.append(request)
                continue
            is_load = match.num_tokens > 0 and match.is_async
            admission = plan_admission(
                num_tokens=request.num_tokens,
                num_computed=hit.num_tokens + match.num_tokens,
                num_hit_blocks=len(hit.blocks),
                num_hit_free=hit.num_free,
                token_budget=request.num_tokens if is_load else budget,
                num_free_blocks=self.kv.pool.num_free,
                num_reserved_blocks=self._num_reserved_blocks if self._running else 0,
                block_size=self.kv.block_size,
                may_split=self._config.enable_chunked_prefill,
            )
            if admission is None or admission.num_tokens == 0:
                break
            self._waiting.remove(request)
            if is_load:
                self._start_load(request, hit, match.num_tokens, now_s)
                continue
            self._start(request, hit, match.num_tokens, admission.num_tokens, now_s)
            scheduled[request.request_id] = admission.num_tokens
            budget -= admission.num_tokens
        for request in asked_to_wait:
            self._waiting.push(request)

    def _match(self, request: Request) -> PrefixHit:
        if request.sampling.prompt_logprobs is not None:
            return _NO_HIT
        # At least one token is computed, so that there are logits to sample from; the
        # prompt of a handed-over request may be covered whole, for its next token is out.
        limit = request.num_tokens - 1
        return self.kv.match(
            request.chain, request.prompt_token_ids, request.output_token_ids, max_tokens=limit
        )

    def _start(
        self, request: Request, hit: PrefixHit, num_external: int, num_tokens: int, now_s: float
    ) -> None:
        computed = hit.num_tokens + num_external
        request.holding = self.kv.open(hit, computed + num_tokens)
        request.num_computed_tokens = computed
        self._connector.update_state_after_alloc(request, request.holding.blocks, num_external)
        self._count_sources(request, hit.num_tokens, num_external)
        if request.times.started_s is None:
            request.times.started_s = now_s
        request.move(State.RUNNING, now_s, f"{hit.num_tokens} tokens from the prefix cache")
        self._running[request.request_id] = request

    def _start_load(
        self, request: Request, hit: PrefixHit, num_external: int, now_s: float
    ) -> None:
        request.holding = self.kv.open(hit, request.num_tokens)
        request.num_computed_tokens = hit.num_tokens + num_external
        request.num_cached_tokens = hit.num_tokens
        request.num_external_tokens = num_external
        self._connector.update_state_after_alloc(request, request.holding.blocks, num_external)
        request.times.started_s = now_s
        request.holding.become(Hold.RECEIVING)
        request.move(State.RECEIVING, now_s, f"loads {num_external} tokens behind {hit.num_tokens}")
        self._receiving[request.request_id] = request

    def _count_sources(self, request: Request, num_hit: int, num_external: int) -> None:
        if request.num_preemptions:
            return
        num_prompt = len(request.prompt_token_ids)
        num_hit = min(num_hit, num_prompt)
        request.num_cached_tokens = num_hit + num_external
        request.num_external_tokens = num_external
        self._counts["prompt_tokens"] += num_prompt
        self._counts["prefix_cache_queries"] += num_prompt
        self._counts["prefix_cache_hits"] += num_hit
        self._counts["local_cache_hit"] += num_hit
        self._counts["external_kv"] += num_external
        self._counts["local_compute"] += num_prompt - num_hit - num_external

    def _preempt(self, request: Request, now_s: float) -> None:
        self._counts["preemptions"] += 1
        request.num_preemptions += 1
        self._leave_batch(request)
        self._give_back(request)
        request.num_computed_tokens = 0
        self._prompt_logprobs.pop(request.request_id, None)
        request.move(State.WAITING, now_s, "preempted")
        self._waiting.push(request)

    def _build_step(
        self,
        now_s: float,
        scheduled: dict[RequestId, int],
        grown: dict[RequestId, list[BlockId]],
    ) -> SchedulerOutput:
        new: list[NewRequest] = []
        known_ids: list[RequestId] = []
        known_blocks: list[list[BlockId]] = []
        known_computed: list[int] = []
        known_sampled: list[list[int]] = []
        after: dict[RequestId, int] = {}
        for request_id, num_tokens in scheduled.items():
            request = self._running[request_id]
            assert request.holding is not None
            if request_id in self._known_to_worker:
                known_ids.append(request_id)
                known_blocks.append(grown.get(request_id, []))
                known_computed.append(request.num_computed_tokens)
                if self._is_pipelined:
                    known_sampled.append(request.output_token_ids[request.num_told_tokens :])
                    request.num_told_tokens = len(request.output_token_ids)
            else:
                new.append(self._introduce(request))
            if request.times.first_step_at_s is None:
                request.times.first_step_at_s = now_s
            request.num_computed_tokens += num_tokens
            after[request_id] = request.num_computed_tokens
            if request.num_computed_tokens == request.num_tokens:
                request.num_pending_tokens += 1
        output = SchedulerOutput(
            step_id=self._step_id,
            new_requests=new,
            known_requests=KnownRequests(
                request_ids=known_ids,
                new_block_ids=known_blocks,
                num_computed_tokens=known_computed,
                sampled_token_ids=known_sampled,
            ),
            num_scheduled_tokens=scheduled,
            gone_request_ids=self._gone,
        )
        metadata = self._connector.build_connector_meta(output)
        self._gone = []
        self._inflight.submit(Step(self._step_id, after, now_s))
        self._step_id += 1
        if metadata is None:
            return output
        return msgspec.structs.replace(output, connector_metadata=metadata)

    def _introduce(self, request: Request) -> NewRequest:
        holding = request.holding
        assert holding is not None
        self._known_to_worker.add(request.request_id)
        request.num_told_tokens = len(request.output_token_ids)
        return NewRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=list(request.output_token_ids),
            sampling=request.sampling,
            block_ids=list(holding.blocks),
            num_computed_tokens=request.num_computed_tokens,
        )

    # ---- taking results ------------------------------------------------------------

    def _retire_step_of(self, request: Request, num_computed: int, now_s: float) -> None:
        if request.times.first_step_end_s is None:
            request.times.first_step_end_s = now_s
        if request.holding is not None:
            self.kv.publish(
                request.holding,
                request.chain,
                request.prompt_token_ids,
                request.output_token_ids,
                num_computed_tokens=num_computed,
            )

    def _take_token(
        self, request: Request, token_id: int, logprobs: TokenLogprobs | None, now_s: float
    ) -> None:
        request.num_pending_tokens -= 1
        request.output_token_ids.append(token_id)
        self._counts["generation_tokens"] += 1
        is_first = len(request.output_token_ids) == 1
        prompt_logprobs = None
        if is_first:
            request.first_logprobs = None if logprobs is None else [logprobs]
            if request.sampling.prompt_logprobs is not None:
                # A prompt of one token has no entry but the first one's.
                prompt_logprobs = self._prompt_logprobs.pop(request.request_id, [None])
        if request.times.first_token_s is None:
            request.times.first_token_s = now_s
        finish, stop_reason = self._finish_reason(request, token_id)
        handoff = None
        if finish is None and request.remote_decode:
            handoff = self._lease(request, now_s)
            if handoff:
                finish = FinishReason.HANDOFF
        num_new = len(request.output_token_ids)
        self._outputs.append(
            EngineOutput(
                request_id=request.request_id,
                new_token_ids=[token_id],
                logprobs=None if logprobs is None else [logprobs],
                prompt_logprobs=prompt_logprobs,
                finish_reason=finish,
                stop_reason=stop_reason,
                handoff=request.handoff if handoff else None,
                num_cached_tokens=request.num_cached_tokens,
                num_external_tokens=request.num_external_tokens,
                stages=(request.times.stages() if finish or num_new <= 2 else None),
                load_failures=request.load_failures if finish else [],
            )
        )
        if finish is not None and finish is not FinishReason.HANDOFF:
            self._end(request, finish.value)

    def _take_handed_over_tokens(self, request: Request) -> None:
        """The tokens that came with a handoff are this request's first outputs."""
        handoff = request.handoff
        assert handoff is not None
        for index, token_id in enumerate(handoff.first_token_ids):
            request.output_token_ids.append(token_id)
            finish, stop_reason = self._finish_reason(request, token_id)
            logprobs = handoff.first_logprobs
            self._outputs.append(
                EngineOutput(
                    request_id=request.request_id,
                    new_token_ids=[token_id],
                    logprobs=None if logprobs is None else [logprobs[index]],
                    finish_reason=finish,
                    stop_reason=stop_reason,
                )
            )
            if finish is not None:
                self._connector.request_aborted(request)
                self._end(request, finish.value)
                return

    def _finish_reason(
        self, request: Request, token_id: int
    ) -> tuple[FinishReason | None, int | None]:
        sampling = request.sampling
        num_output = len(request.output_token_ids)
        if num_output >= sampling.min_tokens:
            if not sampling.ignore_eos and token_id in sampling.eos_token_ids:
                return FinishReason.STOP, None
            if token_id in sampling.stop_token_ids:
                return FinishReason.STOP, token_id
        if num_output >= sampling.max_tokens:
            return FinishReason.LENGTH, None
        if len(request.prompt_token_ids) + num_output >= self._max_model_len:
            return FinishReason.LENGTH, None
        return None, None

    def _lease(self, request: Request, now_s: float) -> bool:
        """Finish a prefill by leasing its blocks out; False if the connector does not."""
        assert request.holding is not None
        handoff = self._connector.request_finished(request, request.holding.blocks)
        if handoff is None:
            request.remote_decode = False
            return False
        request.handoff = handoff
        self._leave_batch(request)
        request.holding.become(Hold.LEASED)
        request.move(State.LEASED, now_s, f"leased as {handoff.nonce}")
        self._leased[request.request_id] = request
        return True

    # ---- the connector's news --------------------------------------------------------

    def _settle(self, settled: Settled, now_s: float) -> None:
        request = self._leased.pop(settled.request_id, None)
        if request is None:
            return
        self._lease_ends[settled.end.value] += 1
        self._close(request, now_s, f"lease ended: {settled.end.value}")

    def _receive(self, received: Received, now_s: float) -> None:
        request = self._receiving.pop(received.request_id, None)
        if request is None:
            self._close_if_closing(received.request_id, now_s)
            return
        assert request.holding is not None
        self._counts["kv_bytes"] += received.num_bytes
        self._counts["kv_descriptors"] += received.num_descriptors
        times = request.times
        times.load_wait_s, times.load_transfer_s = received.wait_s, received.transfer_s
        times.load_bytes = received.num_bytes
        if times.started_s is not None:
            # What lies between the last byte and this report is part of the hand-over.
            times.load_ready_s = times.started_s + received.wait_s + received.transfer_s
        request.handoff = None
        request.holding.become(Hold.REQUEST)
        self.kv.publish(
            request.holding,
            request.chain,
            request.prompt_token_ids,
            request.output_token_ids,
            num_computed_tokens=request.num_computed_tokens,
        )
        self._count_sources(request, request.num_cached_tokens, request.num_external_tokens)
        request.move(State.RUNNING, now_s, f"received {received.num_bytes} bytes")
        self._running[request.request_id] = request

    def _fail_load(self, failed: Failed, now_s: float) -> None:
        request = self._receiving.pop(failed.request_id, None)
        if request is None:
            self._close_if_closing(failed.request_id, now_s)
            return
        self._load_failures[failed.reason.value] += 1
        request.load_failures.append(failed.reason.value)
        request.handoff = None
        self._give_back(request)
        request.num_computed_tokens = 0
        request.num_cached_tokens = request.num_external_tokens = 0
        why = f"load failed: {failed.reason.value} {failed.detail}; computing it here"
        request.move(State.WAITING, now_s, why)
        self._waiting.push(request)

    def _close_if_closing(self, request_id: RequestId, now_s: float) -> None:
        request = self._requests.get(request_id)
        if request is None or request.state is not State.CLOSING or request.holding is None:
            return
        # What closes behind a step is no concern of a load.
        if request.holding.hold is Hold.RECEIVING:
            self._close(request, now_s, "its load settled")

    # ---- endings -------------------------------------------------------------------

    def _end(self, request: Request, why: str) -> None:
        """The request is over for its client; free its blocks as soon as that is safe."""
        now_s = self._clock.monotonic_s()
        self._prompt_logprobs.pop(request.request_id, None)
        match request.state:
            case State.WAITING:
                self._waiting.remove(request)
                self._close(request, now_s, why)
            case State.RECEIVING:
                del self._receiving[request.request_id]
                request.move(State.CLOSING, now_s, why)
            case State.RUNNING:
                self._leave_batch(request)
                if self._inflight.close_after(request):
                    request.move(State.CLOSING, now_s, why)
                else:
                    self._close(request, now_s, why)
            case State.LEASED | State.CLOSING | State.DONE:
                raise InternalError(f"ended twice ({why})\n{request.story()}")

    def _close(self, request: Request, now_s: float, why: str) -> None:
        self._give_back(request)
        request.move(State.DONE, now_s, why)
        del self._requests[request.request_id]

    def _leave_batch(self, request: Request) -> None:
        del self._running[request.request_id]
        if request.request_id in self._known_to_worker:
            self._known_to_worker.discard(request.request_id)
            self._gone.append(request.request_id)

    def _give_back(self, request: Request) -> None:
        if request.holding is not None:
            request.holding.end()
            request.holding = None

    def _is_late(self, request: Request) -> bool:
        deadline_s = request.wire.deadline_s
        return deadline_s is not None and self._clock.wall_s() > deadline_s

    def _give_up(self, request: Request, why: str) -> None:
        """End a request that could have been served, had there been time."""
        self._connector.request_aborted(request)
        self._outputs.append(
            EngineOutput(request_id=request.request_id, finish_reason=FinishReason.ABORT, error=why)
        )
        self._end(request, why)
