"""The state that all parts of one scheduler share: requests, their states and their blocks.

A request is in exactly one place, from its arrival until nothing is held for it: the waiting
queue, `running` (the batch), `receiving` (a load or a peer fills its blocks), `leased` (a peer may
read its blocks), or closing (over, while a transfer or a step may still touch its blocks). The
methods here move it and free its blocks. Others decide why it moves, and talk to the connector.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

import msgspec

from pdserve.connectors.base import KVSource
from pdserve.errors import InternalError
from pdserve.kvcache.lease import BlockUser
from pdserve.kvcache.manager import KVCacheManager, PrefixHit
from pdserve.observe.trace import Recorder
from pdserve.scheduler.drafts import DraftHistory
from pdserve.scheduler.ladder import Ladder
from pdserve.scheduler.life import State, Wait
from pdserve.scheduler.outputs import Counters, OutputBuffer
from pdserve.scheduler.plan import next_line
from pdserve.scheduler.steps import StepQueue

if TYPE_CHECKING:
    from pdserve.config.schema import CacheConfig, SchedulerConfig
    from pdserve.connectors.base import Hold, HoldKey, KVConnectorScheduler
    from pdserve.kvcache.lease import Holding
    from pdserve.scheduler.request import Request
    from pdserve.wire.ids import RequestId

_NO_HIT = PrefixHit((), 0, 0)
_MIN_TO_SWEEP = 1024
_MAX_GONE = 32


class Dimensions(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of one engine.

    Attributes:
        num_blocks: Size of the KV pool.
        block_size: Tokens per block.
        max_model_len: Maximum tokens of prompt and output together; must fit the pool.
        vocab_size: Every token id is below it.
        num_stages: Pipeline stages.
        kv_bytes_per_token: Size of a token's KV, by which traces count KV on its way here.
        max_drafted: Maximum tokens of a draft; 0: nothing is drafted.
        row_costs, draft_cost: See `RowBudget`.
        max_in_flight: Maximum number of steps in flight together.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    num_stages: int = 1
    kv_bytes_per_token: int = 0
    max_drafted: int = 0
    row_costs: tuple[tuple[int, float], ...] = ()
    draft_cost: float = 0.0
    max_in_flight: int = 1


class WaitingQueue:
    """A priority queue by rank.

    A preempted request keeps its rank, so it comes before everything that arrived after it. Push
    and pop are O(log n); removal is O(1), paid at a later pop, or by a sweep over what has gone.

    A request whose KV is ready may take the place of one whose KV is only planned:
    the other engine may need the blocks that it keeps for the ready KV.

    A request may stand aside until its connector has news of it: it still waits, but outside the
    line, so that no request waits behind it and it is not looked at.

    Attributes:
        num_in_line: Requests that do not stand aside.
    """

    def __init__(self) -> None:
        self._heaps: dict[KVSource, list[tuple[int, float, int, int, Request]]] = {
            source: [] for source in KVSource
        }
        self._entries = itertools.count()
        self.num_in_line = self._num_aside = 0

    def __len__(self) -> int:
        return self.num_in_line + self._num_aside

    def push(self, request: Request) -> None:
        """Add a request."""
        entry = next(self._entries)
        heapq.heappush(self._heaps[request.source], (*request.rank, entry, request))
        request.line_up(entry)
        self.num_in_line += 1

    def peek(self, *, without_prompts: bool = False) -> Request | None:
        """Return the next request without removing it.

        Args:
            without_prompts: Whether requests whose prompt is computed here are passed.
        """
        heads = {source: self.head(source) for source in KVSource}
        if without_prompts:
            heads[KVSource.LOCAL] = None
        planned = heads[KVSource.PLANNED]
        line = next_line(
            {line: head.rank for line, head in heads.items() if head is not None},
            num_overtaken=0 if planned is None else planned.num_overtaken,
        )
        return None if line is None else heads[line]

    def note_start(self, request: Request) -> None:
        """Note that `request`, which was next, starts, perhaps in a planned one's place."""
        planned = self.head(KVSource.PLANNED)
        if planned is not None and planned.rank < request.rank:
            planned.overtaken()

    def remove(self, request: Request) -> None:
        """Remove a request, whether it is in line or stands aside."""
        if request.times.is_aside:
            self._num_aside -= 1
            return
        request.line_up(None)
        self.num_in_line -= 1
        if not self.num_in_line:
            for heap in self._heaps.values():
                heap.clear()
        # Those that leave behind others would be kept, with their prompts, until those start.
        heap = self._heaps[request.source]
        if len(heap) > 2 * self.num_in_line + _MAX_GONE:
            heap[:] = [each for each in heap if each[-1].queue_entry == each[-2]]
            heapq.heapify(heap)

    def stand_aside(self, request: Request, now_s: float) -> None:
        """Take a request out of the line, until `come_back`."""
        self.remove(request)
        request.times.wait_for_peer(now_s)
        self._num_aside += 1

    def come_back(self, request: Request, now_s: float) -> None:
        """Put a request back in line by its rank if it stands aside."""
        if request.times.is_aside:
            self.remove(request)
            request.times.queue_again(now_s)
            self.push(request)

    def head(self, source: KVSource) -> Request | None:
        """Return the first request in line whose KV comes from there."""
        heap = self._heaps[source]
        while heap:
            *_, entry, request = heap[0]
            # A request that was removed and pushed again also has an older, void entry.
            if request.queue_entry == entry:
                return request
            heapq.heappop(heap)
        return None


class SchedulerState:
    """The state that all parts of a scheduler share.

    Args:
        connector: The scheduler half; the null connector if KV never leaves.
        now_s: Monotonic seconds.

    Attributes:
        kv: The blocks, and the prefix cache.
        ladder: Decides about requests whose KV did not come, within the recompute budget.
        steps: Steps in flight, and which requests the workers know.
        drafts: Recent success of drafts; None where nothing is drafted.
        outputs: Outputs for clients, until they are fetched.
        recorder: Events from which traces are made.
        requests: All requests, by id.
        waiting: Requests that wait, in line or aside.
        running: The batch, in the order in which it is served.
        receiving: Requests whose blocks are being filled.
        leased: Requests that have finished here, and whose blocks may be read.
        num_yielding: Requests in any state that let other tenants' prompts pass (`yields_s`).
        prompts: Ids of requests without a token whose prompt no other engine computes.
        holds: Blocks that a preempted request lost and a save still reads, by connector and id of
            the hold; the same blocks may be under several.
        deadlines: A heap: monotonic seconds, order of arrival, id. Entries of requests that are
            over are void.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        dimensions: Dimensions,
        connector: KVConnectorScheduler,
        *,
        now_s: float,
    ) -> None:
        self.config = config
        self.dimensions = dimensions
        self.connector = connector
        self.kv = KVCacheManager(
            num_blocks=dimensions.num_blocks,
            block_size=dimensions.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
            log_events=cache.events.enable_kv_cache_events,
        )
        self.ladder = Ladder(
            config.recompute_tokens_per_s, max_model_len=dimensions.max_model_len, now_s=now_s
        )
        self.counters = Counters(max_drafted=dimensions.max_drafted)
        self.steps = StepQueue(is_pipelined=dimensions.num_stages > 1)
        self.drafts = DraftHistory() if dimensions.max_drafted else None
        self.outputs = OutputBuffer()
        self.recorder = Recorder()
        self.requests: dict[RequestId, Request] = {}
        self.waiting = WaitingQueue()
        self.running: dict[RequestId, Request] = {}
        self.receiving: dict[RequestId, Request] = {}
        self.leased: dict[RequestId, Request] = {}
        self.num_yielding = 0
        self.prompts: set[RequestId] = set()
        self.holds: dict[HoldKey, Holding] = {}
        self.deadlines: list[tuple[float, int, RequestId]] = []

    @property
    def num_admitted(self) -> int:
        """Requests that are in the batch, or will be as soon as their KV is here."""
        return len(self.running) + len(self.receiving)

    @property
    def num_unfinished(self) -> int:
        """Requests whose client still waits for tokens."""
        return len(self.waiting) + self.num_admitted

    @property
    def num_runnable(self) -> int:
        """Requests that need steps: those that wait for one, and those that run."""
        return self.waiting.num_in_line + len(self.running)

    # ---- the prefix cache ----------------------------------------------------------

    def match_prefix(self, request: Request) -> PrefixHit:
        """Return the longest cached prefix that `request` may begin with. Takes no blocks."""
        if request.sampling.needs_whole_prompt:
            return _NO_HIT
        # At least one token is computed, so that there are logits to sample from; the whole
        # prompt of a handed-over request may be cached, since its next token is known.
        limit = request.num_tokens - 1
        return self.kv.match(request.chain, max_tokens=limit)

    def num_missing(self, request: Request) -> int:
        """Count the prompt tokens that `request` would compute if it started now."""
        return max(0, len(request.prompt_token_ids) - self.match_prefix(request).num_tokens)

    def publish_prefix(self, request: Request, num_tokens: int) -> None:
        """Make the blocks filled by the first `num_tokens` tokens of `request` findable."""
        holding = request.holding
        assert holding is not None
        # Most steps fill no block of a request: this runs for each request in each step.
        if num_tokens // self.kv.block_size > holding.num_published:
            self.kv.publish(holding, request.chain, num_computed_tokens=num_tokens)

    # ---- moves ---------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a waiting request, under an id that no other has."""
        self.requests[request.request_id] = request
        self.num_yielding += request.wire.yields_s > 0
        self.waiting.push(request)
        if request.source is KVSource.LOCAL:
            self.prompts.add(request.request_id)
        if request.wire.deadline_s is not None:
            self._watch(request.wire.deadline_s, request)

    def _watch(self, deadline_s: float, request: Request) -> None:
        if len(self.deadlines) >= max(_MIN_TO_SWEEP, 2 * len(self.requests)):
            self.deadlines = [entry for entry in self.deadlines if self._find(entry) is not None]
            heapq.heapify(self.deadlines)
        heapq.heappush(self.deadlines, (deadline_s, request.rank[2], request.request_id))

    def take_late(self, now_s: float) -> list[Request]:
        """Return each request whose deadline lies before `now_s`, once, the latest last.

        O(1) while there is none.
        """
        late: list[Request] = []
        while self.deadlines and self.deadlines[0][0] < now_s:
            request = self._find(heapq.heappop(self.deadlines))
            if request is not None:
                late.append(request)
        return late

    def _find(self, entry: tuple[float, int, RequestId]) -> Request | None:
        _, order, request_id = entry
        request = self.requests.get(request_id)
        # Another request may have arrived under the same id.
        return request if request is not None and request.rank[2] == order else None

    def move(self, request: Request, state: State, now_s: float, why: str) -> None:
        """Move a request from one place to another.

        Raises:
            InternalError: The move is not legal; the message is the request's story.
        """
        self._take_out(request)
        request.move(state, now_s, why)
        match state:
            case State.WAITING:
                self.waiting.push(request)
            case State.RECEIVING:
                self.receiving[request.request_id] = request
            case State.RUNNING:
                self.running[request.request_id] = request
            case State.LEASED:
                self.leased[request.request_id] = request
            case State.CLOSING | State.DONE:
                self.prompts.discard(request.request_id)

    def _take_out(self, request: Request) -> None:
        match request.state:
            case State.WAITING:
                self.waiting.remove(request)
            case State.RECEIVING:
                del self.receiving[request.request_id]
            case State.RUNNING:
                del self.running[request.request_id]
                self.steps.forget(request)
            case State.LEASED:
                del self.leased[request.request_id]
            case State.CLOSING | State.DONE:
                pass

    def begin_again(self, request: Request, num_computed_tokens: int) -> None:
        """Discard steps' results for `request` beyond its first `num_computed_tokens` tokens."""
        self.steps.void(request.request_id)
        self.steps.forget(request)
        request.begin_again(num_computed_tokens)

    def settle_charge(self, request: Request, num_computed: int) -> None:
        """Settle the charge of a request that starts, or ends before that; most have none.

        Args:
            num_computed: Prompt tokens that it computes here.
        """
        if request.num_budgeted is not None:
            self.ladder.settle(request, num_computed)
            self.counters.recompute_tokens += num_computed

    # ---- endings -------------------------------------------------------------------

    def end(self, request: Request, now_s: float, why: str, *, is_held: bool = False) -> None:
        """End a request for its client, and free its blocks as soon as that is safe.

        Args:
            is_held: Whether a read that its connector began may still use its blocks.

        Raises:
            InternalError: It is over already.
        """
        waits: set[Wait] = set()
        match request.state:
            case State.WAITING:
                is_held = False
            case State.RECEIVING:
                waits.add(Wait.LOAD)
            case State.RUNNING:
                if self.steps.close_after(request):
                    waits.add(Wait.STEP)
            case State.LEASED | State.CLOSING | State.DONE:
                raise InternalError(f"ended twice ({why})\n{request.story()}")
        if is_held:
            waits.add(Wait.HOLD)
        if not waits:
            self.close(request, now_s, why)
            return
        assert request.holding is not None
        request.wait_for(waits)
        if waits != {Wait.STEP}:
            request.holding.become(BlockUser.QUARANTINED)
        names = ", ".join(sorted(each.value for each in waits))
        self.move(request, State.CLOSING, now_s, f"{why}; waits for: {names}")

    def stop_waiting(self, request: Request, wait: Wait, now_s: float) -> None:
        """Note that `wait` is over for a closing request, and close it if that was the last."""
        if not request.stop_waiting(wait):
            return
        if not request.waits_for:
            self.close(request, now_s, f"its {wait.value} settled")
            return
        request.times.note(now_s, f"its {wait.value} settled")
        if request.waits_for == {Wait.STEP} and request.holding is not None:
            request.holding.become(BlockUser.REQUEST)

    def close(self, request: Request, now_s: float, why: str) -> None:
        """Free the blocks of a request that nothing touches any more, and forget it."""
        self.free(request)
        self.settle_charge(request, 0)
        self.move(request, State.DONE, now_s, why)
        self.recorder.add(request.traced(now_s))
        del self.requests[request.request_id]
        self.num_yielding -= request.wire.yields_s > 0

    def free(self, request: Request) -> None:
        """Free the blocks of `request`, if it has any."""
        holding = request.let_go()
        if holding is not None:
            holding.end()

    def hold(self, request: Request, hold: Hold) -> None:
        """Take a preempted request's blocks from it, and keep them until `release` of all keys."""
        holding = request.let_go()
        assert holding is not None
        holding.become(BlockUser.QUARANTINED)
        self.holds.update(dict.fromkeys(hold.keys, holding))

    def release(self, key: HoldKey) -> bool:
        """End a hold on a preempted request's blocks, and free them if it was the last.

        Returns False if there is no such hold.
        """
        holding = self.holds.pop(key, None)
        if holding is not None and holding not in self.holds.values():
            holding.end()
        return holding is not None
