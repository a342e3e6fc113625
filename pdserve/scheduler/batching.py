"""What the running requests do in a step: budget and blocks are divided, and the last preempted.

Looks at the batch, lets `plan` decide, and applies it. Knows no waiting requests (`admission`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.scheduler.plan import Candidate, plan_running
from pdserve.scheduler.request import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config.schema import SchedulerConfig
    from pdserve.connectors.base import KVConnectorScheduler
    from pdserve.kvcache.manager import KVCacheManager
    from pdserve.scheduler.counts import Counts
    from pdserve.scheduler.inflight import InFlight
    from pdserve.scheduler.request import Request
    from pdserve.scheduler.roster import Roster
    from pdserve.wire.ids import BlockId, RequestId


class Batcher:
    """Fills steps with the batch of `roster`.

    Args:
        max_model_len: Tokens of prompt and output together, at most.
        num_stages: Pipeline stages; the decoding requests are shared out over as many steps.
        end_broken: Ends a request alone, over which the connector has failed.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        num_stages: int,
        kv: KVCacheManager,
        roster: Roster,
        inflight: InFlight,
        connector: KVConnectorScheduler,
        counts: Counts,
        end_broken: Callable[[RequestId, Exception, float], None],
    ) -> None:
        self._config = config
        self._max_model_len = max_model_len
        self._num_stages, self._is_pipelined = num_stages, num_stages > 1
        # A prompt that may not be spread over steps must fit into one.
        self._token_budget = max(
            config.max_num_batched_tokens, 0 if config.enable_chunked_prefill else max_model_len
        )
        self._kv = kv
        self._roster = roster
        self._inflight = inflight
        self._connector = connector
        self._counts = counts
        self._end_broken = end_broken

    def fill(
        self,
        now_s: float,
        scheduled: dict[RequestId, int],
        grown: dict[RequestId, list[BlockId]],
    ) -> int | None:
        """Put running requests into a step that is empty.

        Args:
            scheduled: Gets the tokens that each computes in it.
            grown: Gets the blocks that some are given for that.

        Returns:
            The budget left; None if it must stay unspent, because a running request
            lacks blocks, or a preemption just made room for one: neither may be given away.
        """
        batch = list(self._roster.running.values())
        candidates = [self._candidate(request) for request in batch]

        def freed_by(index: int) -> int:
            holding = batch[index].holding
            return 0 if holding is None else self._kv.pool.num_exclusive_among(holding.blocks)

        plan = plan_running(
            candidates,
            token_budget=self._token_budget,
            num_free_blocks=self._kv.pool.num_free,
            block_size=self._kv.block_size,
            may_split=self._config.enable_chunked_prefill,
            freed_by=None if self._inflight.is_computing else freed_by,
            max_decodes=self._max_decodes(batch),
            max_of_one=self._config.long_prefill_token_threshold,
        )
        are_free = [self._preempt(batch[index], now_s) for index in plan.preempted]
        if not all(are_free):
            self.fill(now_s, scheduled, grown)  # with the blocks that there are
            return None
        for index, num_tokens in plan.num_tokens.items():
            request = batch[index]
            assert request.holding is not None
            num_blocks = plan.num_new_blocks[index]
            if num_blocks:
                grown[request.request_id] = request.holding.grow(num_blocks)
            scheduled[request.request_id] = num_tokens
            if self._is_pipelined:
                # Who was not in this step comes first in the next.
                running = self._roster.running
                running[request.request_id] = running.pop(request.request_id)
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
            self._roster.waiting.rank(request),
            is_pipelined and request.is_decoding,
            request.is_pinned,
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

    def _preempt(self, request: Request, now_s: float) -> bool:
        """Take a request's blocks from it; False if they are not free yet."""
        assert request.holding is not None
        blocks = request.holding.blocks
        generations = self._kv.pool.generations_of(blocks)
        try:
            hold = self._connector.preempted(request, blocks, generations)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this request alone
            self._end_broken(request.request_id, error, now_s)
            return True
        self._counts.preemptions += 1
        request.num_preemptions += 1
        if hold is None:
            self._roster.give_back(request)
        else:
            self._roster.park(request, hold.hold_id)
        request.begin_again(0)
        self._roster.move(request, State.WAITING, now_s, "preempted")
        return hold is None
