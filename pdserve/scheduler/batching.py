"""Fills a step: running requests first, then waiting ones with the remaining budget.

Budget and blocks are divided over the running requests; where blocks run out, the last of them is
preempted. Prompts of tenants over their share yield to others between two chunks, and leave steps
short. Waiting requests then start one after the other: the connector is asked what KV it can
bring, the request gets its blocks, and it moves into the batch, or to where its blocks are being
filled. `plan` decides; this module gathers what the decision needs and applies it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pdserve.connectors.base import KVSource
from pdserve.scheduler.drafts import RARELY, DraftWish, RowBudget
from pdserve.scheduler.life import State
from pdserve.scheduler.plan import Candidate, Room, plan_admission, plan_running

if TYPE_CHECKING:
    from pdserve.kvcache.manager import PrefixHit
    from pdserve.scheduler.drafts import DraftRecord
    from pdserve.scheduler.plan import Rank
    from pdserve.scheduler.request import Request
    from pdserve.scheduler.state import SchedulerState
    from pdserve.scheduler.steps import Filling
    from pdserve.scheduler.transfers import Transfers
    from pdserve.wire.ids import RequestId


class Batcher:
    """Fills steps.

    Args:
        transfers: Ends a request when the connector fails on it, and no other.
    """

    def __init__(self, state: SchedulerState, transfers: Transfers) -> None:
        self._state = state
        self._transfers = transfers
        self._kv = state.kv
        self._config = config = state.config
        self._max_model_len = state.dimensions.max_model_len
        self._num_stages = state.dimensions.num_stages
        self._is_pipelined = self._num_stages > 1
        # A prompt that may not be spread over steps must fit into one.
        self._token_budget = max(
            config.max_num_batched_tokens,
            0 if config.enable_chunked_prefill else self._max_model_len,
        )
        # Prompts that yield leave steps short, so that others need not wait long for the next.
        self._max_yielding = self._token_budget
        if config.enable_chunked_prefill:
            self._max_yielding = -(-self._token_budget // 2)
        self._yielding_left = 0
        self._first: Rank | None = None
        self._min_reserved_blocks = self._kv.pool.num_blocks // 100
        self._max_drafted = state.dimensions.max_drafted
        self._plans_ahead = state.dimensions.max_in_flight > self._num_stages
        costs, draft_cost = state.dimensions.row_costs, state.dimensions.draft_cost
        self._row_budget = RowBudget(costs, draft_cost) if self._max_drafted else None

    # ---- running requests ----------------------------------------------------------

    @property
    def is_making_way(self) -> bool:
        """Whether prompts that yield sit out the step being filled, for one that does not."""
        return self._first is not None

    def fill(self, now_s: float, filling: Filling, *, makes_way: bool = True) -> int | None:
        """Put running requests into a step.

        Args:
            filling: The step, which is empty.
            makes_way: Whether prompts that yield make way for others.

        Returns:
            The budget left; None if it must stay unspent because a running request lacks blocks,
            or a preemption has just freed some: waiting requests must not take those blocks.
        """
        running = self._state.running
        batch = list(running.values())

        def freed_by(index: int) -> int:
            holding = batch[index].holding
            return 0 if holding is None else self._kv.pool.num_exclusive_among(holding.blocks)

        self._first = None
        candidates = [self._candidate(request) for request in batch]
        if makes_way and self._state.num_yielding:
            candidates = self._made_way(batch, candidates)
        # Blocks that a save still reads come soon: until then, no other request loses its own.
        may_preempt = not self._state.steps.is_computing and not self._state.holds
        plan = plan_running(
            candidates,
            self._room(self._token_budget, self._config.long_prefill_token_threshold),
            freed_by=freed_by if may_preempt else None,
            max_decodes=self._max_decodes(batch),
        )
        if self._state.num_yielding:
            self._yielding_left = self._max_yielding - sum(
                num for index, num in plan.num_tokens.items() if _yields(batch[index])
            )
        are_free = [
            self._transfers.attempt(
                partial(self._preempt, each, now_s), each.request_id, now_s, otherwise=False
            )
            for each in map(batch.__getitem__, plan.preempted)
        ]
        if not all(are_free):
            self.fill(now_s, filling, makes_way=makes_way)  # with the blocks that are free
            return None
        for index, num_tokens in plan.num_tokens.items():
            request = batch[index]
            assert request.holding is not None
            num_blocks = plan.num_new_blocks[index]
            if num_blocks:
                filling.grown[request.request_id] = request.holding.grow(num_blocks)
            filling.num_tokens[request.request_id] = num_tokens
            if self._is_pipelined:
                # Requests that were not in this step come first in the next.
                running[request.request_id] = running.pop(request.request_id)
        if plan.preempted or plan.is_short_of_blocks:
            return None
        if self._row_budget is None:
            return plan.budget_left
        return plan.budget_left - self._grant_drafts(self._row_budget, filling, plan.budget_left)

    def _made_way(self, batch: list[Request], candidates: list[Candidate]) -> list[Candidate]:
        """Have prompts that yield sit out a step with a prompt that does not and ranks before them.

        That is a prompt of the batch, or the next one that waits. Tokens of prompts that yield and
        go on are limited. Blocks may be taken from all of them.
        """
        first = [
            request.rank
            for request, candidate in zip(batch, candidates, strict=True)
            if candidate.num_wanted and not (request.wire.yields_s or request.is_decoding)
        ]
        head = self._state.waiting.peek()
        if head is not None and not head.wire.yields_s and self._may_start(head):
            first.append(head.rank)
        self._first = min(first, default=None)
        return [
            msgspec.structs.replace(
                candidate,
                num_wanted=0
                if self._sits_out(request)
                else min(candidate.num_wanted, self._max_yielding),
            )
            if _yields(request)
            else candidate
            for request, candidate in zip(batch, candidates, strict=True)
        ]

    def _sits_out(self, request: Request) -> bool:
        return self._first is not None and self._first < request.rank

    def _budget_of(self, request: Request, budget: int) -> int:
        """Return how much of a step's budget is left for a waiting request."""
        if not _yields(request):
            return budget
        return 0 if self._sits_out(request) else max(0, min(budget, self._yielding_left))

    def _may_start(self, request: Request) -> bool:
        """Return whether a waiting prompt has room now, without the prefix cache's help."""
        need = self._kv.blocks_for(request.num_tokens) + self._num_reserved_blocks()
        return (
            request.source is KVSource.LOCAL
            and self._state.num_admitted < self._config.max_num_seqs
            and need <= self._kv.pool.num_free
        )

    # ---- drafts --------------------------------------------------------------------

    def _grant_drafts(self, budget: RowBudget, filling: Filling, max_rows: int) -> int:
        """Give requests that decode rows for their drafts, and blocks for them.

        Args:
            max_rows: Maximum number of rows to give out.

        Returns:
            The number of rows given out.
        """
        running = self._state.running
        able: list[tuple[Request, DraftRecord]] = []
        wishes: list[DraftWish] = []
        num_built, hopeless = self._state.steps.num_built, budget.hopeless
        for request_id in filling.num_tokens:
            request = running[request_id]
            record = request.drafts
            if record is None or (record.level <= hopeless and num_built % record.trial_interval):
                continue
            num = min(self._max_draft_rows(request), max_rows)
            if num > 0:
                # No step is planned behind one with drafts before its results are known.
                is_worth_it = record.found > RARELY or not self._plans_ahead
                able.append((request, record))
                wishes.append(DraftWish(record.acceptance, record.found, num if is_worth_it else 0))
        if not able:
            return 0
        shares = budget.share(
            wishes,
            num_rows=sum(filling.num_tokens.values()),
            num_requests=len(filling.num_tokens),
        )
        num_left = max_rows
        for (request, record), share in zip(able, shares, strict=True):
            trial = int(num_built % record.trial_interval == 0)
            wanted = min(share or trial, num_left)
            num = self._room_for_drafts(request, wanted, filling) if wanted else 0
            if num:
                filling.num_draft_rows[request.request_id] = num
                num_left -= num
                if not share:
                    record.begin_trial()
        return max_rows - num_left

    def _max_draft_rows(self, request: Request) -> int:
        """Return the maximum draft length of `request` in a step that computes its last token."""
        num_tokens = request.num_tokens
        num_output = num_tokens - len(request.prompt_token_ids)
        is_spoiled = request.drafts is not None and request.drafts.spoiled_at == num_tokens
        if is_spoiled or not num_output or request.num_computed_tokens != num_tokens - 1:
            return 0
        # The step may yield one token more than the draft has.
        return min(
            self._max_drafted,
            request.sampling.max_tokens - num_output - 1,
            self._max_model_len - num_tokens - 1,
        )

    def _room_for_drafts(self, request: Request, num_rows: int, filling: Filling) -> int:
        """Take blocks for `num_rows` behind the last token; return how many rows have one.

        One free block is left for each request of the step, which may need it soon.
        """
        assert request.holding is not None
        end, block_size = request.num_tokens, self._kv.block_size
        num_held = len(request.holding.blocks)
        num_spare = self._kv.pool.num_free - len(filling.num_tokens)
        num_lacking = min(self._kv.blocks_for(end + num_rows) - num_held, num_spare)
        if num_lacking > 0:
            blocks = request.holding.grow(num_lacking)
            filling.grown.setdefault(request.request_id, []).extend(blocks)
            num_held += num_lacking
        return min(num_rows, num_held * block_size - end)

    def _room(self, token_budget: int, max_of_one: int) -> Room:
        return Room(
            token_budget=token_budget,
            num_free_blocks=self._kv.pool.num_free,
            block_size=self._kv.block_size,
            may_split=self._config.enable_chunked_prefill,
            max_of_one=max_of_one,
        )

    def _candidate(self, request: Request) -> Candidate:
        num_computed = request.num_computed_tokens
        holding = request.holding
        is_pipelined = self._is_pipelined
        sits_out = request.num_pending_tokens > 0 and (
            is_pipelined or self._state.steps.has_drafts or self._is_complete(request)
        )
        return Candidate(
            0 if sits_out else request.num_tokens - num_computed,
            num_computed,
            0 if holding is None else len(holding.blocks),
            request.rank,
            is_pipelined and request.is_decoding,
            request.is_pinned,
        )

    def _is_complete(self, request: Request) -> bool:
        """Return whether it needs no more computation; its last tokens may be pending."""
        return request.num_tokens >= self._max_model_len or request.is_output_complete

    def _max_decodes(self, batch: list[Request]) -> int | None:
        """Return how many requests may decode in one step so that every stage gets a share."""
        if not self._is_pipelined:
            return None
        num_decoding = sum(r.is_decoding and not self._is_complete(r) for r in batch)
        return -(-num_decoding // self._num_stages)

    def _preempt(self, request: Request, now_s: float) -> bool:
        """Take a request's blocks from it; return False if they are not free yet."""
        assert request.holding is not None
        blocks = request.holding.blocks
        generations = self._kv.pool.generations_of(blocks)
        hold = self._state.connector.preempted(request, blocks, generations)
        self._state.counters.count_preemption()
        if hold is None:
            self._state.free(request)
        else:
            self._state.hold(request, hold)
        request.preempt()
        self._state.move(request, State.WAITING, now_s, "preempted")
        return hold is None

    # ---- waiting requests ----------------------------------------------------------

    def admit(self, now_s: float, budget: int) -> dict[RequestId, int]:
        """Start waiting requests.

        A load need not wait behind a prompt that lacks nothing but a step's budget, as long as
        it leaves that prompt its room.

        Args:
            budget: Tokens that they may compute in the step being built. Loads cost none.

        Returns:
            The tokens to compute in that step, by request that starts to run.
        """
        scheduled: dict[RequestId, int] = {}
        state = self._state
        passed: Request | None = None
        while state.num_admitted + (passed is not None) < self._config.max_num_seqs:
            request = state.waiting.peek(without_prompts=passed is not None)
            if request is None:
                break
            own = self._budget_of(request, budget)
            admit = partial(self._admit_next, request, now_s, own, passed)
            num_tokens = self._transfers.attempt(admit, request.request_id, now_s, otherwise=0)
            if num_tokens is None:
                if passed is not None or not self._may_start(request):
                    break
                passed = request
                continue
            if num_tokens:
                scheduled[request.request_id] = num_tokens
                budget -= num_tokens
                self._yielding_left -= num_tokens if request.wire.yields_s else 0
        return scheduled

    def _admit_next(
        self, request: Request, now_s: float, budget: int, passed: Request | None
    ) -> int | None:
        """Start the next request, or take it out of the line for now.

        Args:
            passed: The prompt that it passes, whose blocks stay free.

        Returns:
            The tokens that it computes in the step; None if there is no room for it.
        """
        waiting = self._state.waiting
        hit = self._state.match_prefix(request)
        match = self._transfers.match(request, hit.num_tokens)
        if match is None:
            waiting.stand_aside(request, now_s)
            return 0
        is_load = match.num_tokens > 0 and match.is_async
        # A pinned request is not preempted for growth: its first token's block is taken now, too.
        num_to_hold = request.num_tokens + match.is_pinned
        # If all tokens are found, the last is computed again for its logits; but a pinned load also
        # brings the token behind it.
        num_to_find = num_to_hold if is_load else request.num_tokens
        computed = min(hit.num_tokens + match.num_tokens, num_to_find - 1)
        num_kept = 0 if passed is None else self._kv.blocks_for(passed.num_tokens)
        num_tokens = plan_admission(
            self._room(
                num_to_hold if is_load else budget,
                0 if is_load else self._config.long_prefill_token_threshold,
            ),
            num_tokens=num_to_hold,
            num_computed=computed,
            num_hit_blocks=len(hit.blocks),
            num_hit_free=hit.num_free,
            num_reserved_blocks=self._num_reserved_blocks() + num_kept,
        )
        if not num_tokens:
            return None
        waiting.note_start(request)
        if is_load:
            holding = self._kv.open(hit, num_to_hold)
            request.open(holding, hit.num_tokens + match.num_tokens, is_pinned=match.is_pinned)
            request.expect(hit.num_tokens, match.num_tokens)
            self._transfers.load(request, match.num_tokens, now_s)
            return 0
        num_tokens = min(num_tokens, request.num_tokens - computed)
        holding = self._kv.open(hit, num_to_hold if match.is_pinned else computed + num_tokens)
        request.open(holding, computed, is_pinned=match.is_pinned)
        self._start(request, hit, match.num_tokens, now_s)
        return num_tokens

    def _num_reserved_blocks(self) -> int:
        """Count the blocks to keep free: each request of the batch may need one soon."""
        num_growing = self._state.num_admitted
        return max(self._min_reserved_blocks, num_growing) if num_growing else 0

    def _start(self, request: Request, hit: PrefixHit, num_external: int, now_s: float) -> None:
        state = self._state
        self._transfers.tell_start(request, num_external)
        if num_external:  # counted once it has come
            request.expect(hit.num_tokens, num_external, in_step=True)
        else:
            state.counters.prompt(request, num_hit=hit.num_tokens, num_external=0)
        num_missing = max(0, len(request.prompt_token_ids) - hit.num_tokens - num_external)
        state.settle_charge(request, num_missing)
        request.times.start(now_s)
        why = f"{hit.num_tokens} tokens from the prefix cache"
        state.move(request, State.RUNNING, now_s, why)


def _yields(request: Request) -> bool:
    """Return whether it is a prompt, or a preempted request, that lets others pass."""
    return request.wire.yields_s > 0 and not request.is_decoding
