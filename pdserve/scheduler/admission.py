"""Who of the waiting requests starts now: one after the other, while budget, seats and blocks last.

Asks the connector of each what comes from elsewhere, gives it its blocks, and moves it: into the
batch, or to where its blocks are filled. Knows no steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.kvcache.lease import BlockUser
from pdserve.scheduler.plan import plan_admission
from pdserve.scheduler.request import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config.schema import SchedulerConfig
    from pdserve.connectors.base import KVConnectorScheduler, Match
    from pdserve.kvcache.manager import KVCacheManager, PrefixHit
    from pdserve.scheduler.counts import Counts
    from pdserve.scheduler.ladder import Ladder
    from pdserve.scheduler.prefixes import Prefixes
    from pdserve.scheduler.request import Request
    from pdserve.scheduler.roster import Roster
    from pdserve.wire.ids import RequestId


class Admitter:
    """Takes from the head of the queue of `roster`.

    Args:
        end_broken: Ends a request alone, with its blocks, over which this has failed.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        kv: KVCacheManager,
        prefixes: Prefixes,
        roster: Roster,
        connector: KVConnectorScheduler,
        ladder: Ladder,
        counts: Counts,
        end_broken: Callable[[RequestId, Exception, float], None],
    ) -> None:
        self._config = config
        self._kv = kv
        self._prefixes = prefixes
        self._roster = roster
        self._connector = connector
        self._ladder = ladder
        self._counts = counts
        self._end_broken = end_broken
        self._min_reserved_blocks = kv.pool.num_blocks // 100

    def admit(self, now_s: float, budget: int) -> dict[RequestId, int]:
        """Start waiting requests.

        Args:
            budget: Tokens that they may compute in the step that is being built. Loads cost none.

        Returns:
            The tokens that those which run now compute in it.
        """
        scheduled: dict[RequestId, int] = {}
        roster, waiting = self._roster, self._roster.waiting
        while roster.num_seats < self._config.max_num_seqs:
            request = waiting.peek()
            if request is None:
                break
            try:
                num_tokens = self._admit_next(request, now_s, budget)
            except Exception as error:  # noqa: BLE001 - whatever it is, it ends this request alone
                self._end_broken(request.request_id, error, now_s)
                continue
            if num_tokens is None:
                break
            if num_tokens:
                scheduled[request.request_id] = num_tokens
                budget -= num_tokens
        return scheduled

    def _admit_next(self, request: Request, now_s: float, budget: int) -> int | None:
        """Start the request that comes next, or take it out of the line for now.

        Returns:
            The tokens that it computes in the step; None if there is no room for it.
        """
        waiting = self._roster.waiting
        hit = self._prefixes.match(request)
        match = self._match(request, hit)
        if match is None:
            waiting.stand_aside(request)
            request.times.wait_for_peer(now_s)
            request.note(now_s, "waits for its peer")
            return 0
        is_load = match.num_tokens > 0 and match.is_async
        request.is_pinned = match.is_pinned
        # What is pinned is not moved to make it grow: its first token has its block, too.
        num_to_hold = request.num_tokens + match.is_pinned
        # The last token is computed again if all are found, so that there are logits behind it.
        computed = min(hit.num_tokens + match.num_tokens, num_to_hold - 1)
        admission = plan_admission(
            num_tokens=num_to_hold,
            num_computed=computed,
            num_hit_blocks=len(hit.blocks),
            num_hit_free=hit.num_free,
            token_budget=num_to_hold if is_load else budget,
            num_free_blocks=self._kv.pool.num_free,
            num_reserved_blocks=self._num_reserved_blocks(),
            block_size=self._kv.block_size,
            may_split=self._config.enable_chunked_prefill,
            max_of_one=0 if is_load else self._config.long_prefill_token_threshold,
        )
        if admission is None or admission.num_tokens == 0:
            return None
        waiting.note_start(request)
        if is_load:
            self._start_load(request, hit, match.num_tokens, num_to_hold, now_s)
            return 0
        num_tokens = min(admission.num_tokens, request.num_tokens - computed)
        request.holding = self._kv.open(
            hit, num_to_hold if match.is_pinned else computed + num_tokens
        )
        request.num_computed_tokens = computed
        self._start(request, hit, match.num_tokens, now_s)
        return num_tokens

    def _match(self, request: Request, hit: PrefixHit) -> Match | None:
        """What comes from elsewhere behind what is here; None if that is not known yet."""
        match = self._connector.get_num_new_matched_tokens(request, hit.num_tokens)
        # Only who computes a prompt has its logprobs; and what has failed is not tried for ever.
        is_computed = request.sampling.prompt_logprobs is not None or bool(request.load_failures)
        if match is None or not match.num_tokens or not is_computed:
            return match
        return msgspec.structs.replace(match, num_tokens=0)

    def _num_reserved_blocks(self) -> int:
        """Blocks that stay free: whoever runs, or will once its KV is here, may need one soon."""
        num_growing = self._roster.num_seats
        return max(self._min_reserved_blocks, num_growing) if num_growing else 0

    def _start(self, request: Request, hit: PrefixHit, num_external: int, now_s: float) -> None:
        assert request.holding is not None
        blocks = request.holding.blocks
        self._connector.update_state_after_alloc(
            request, blocks, num_external, generations=self._kv.pool.generations_of(blocks)
        )
        if num_external:
            request.is_loading = True  # counted once it has come
            request.num_cached_tokens = hit.num_tokens
            request.num_external_tokens = num_external
        else:
            self._counts.prompt(request, num_hit=hit.num_tokens, num_external=0)
        num_missing = max(0, len(request.prompt_token_ids) - hit.num_tokens - num_external)
        self._counts.recompute_tokens += self._ladder.start(request, num_missing)
        request.times.start(now_s)
        why = f"{hit.num_tokens} tokens from the prefix cache"
        self._roster.move(request, State.RUNNING, now_s, why)

    def _start_load(
        self, request: Request, hit: PrefixHit, num_external: int, num_to_hold: int, now_s: float
    ) -> None:
        request.holding = self._kv.open(hit, num_to_hold)
        request.num_computed_tokens = hit.num_tokens + num_external
        request.num_cached_tokens = hit.num_tokens
        request.num_external_tokens = num_external
        self._connector.update_state_after_alloc(request, request.holding.blocks, num_external)
        request.times.start(now_s)
        request.holding.become(BlockUser.RECEIVING)
        why = f"loads {num_external} tokens behind {hit.num_tokens}"
        self._roster.move(request, State.RECEIVING, now_s, why)
