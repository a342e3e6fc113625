"""The state that all parts of one scheduler share: every request, where it stands, what it holds.

A request is in exactly one place, from its arrival until nothing is held for it: the waiting
queue, `running` (the batch), `receiving` (a load or a peer fills its blocks), `leased` (a peer may
read its blocks), or closing (over, while a transfer or a step may still touch its blocks). The
methods here move it and free its blocks. Others decide why it moves, and talk to the connector.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from pdserve.connectors.base import KVSource
from pdserve.errors import InternalError
from pdserve.kvcache.lease import BlockUser
from pdserve.kvcache.manager import KVCacheManager, PrefixHit
from pdserve.observe.trace import Recorder
from pdserve.scheduler.counts import Counters
from pdserve.scheduler.drafts import DraftHistory
from pdserve.scheduler.ladder import Ladder
from pdserve.scheduler.outputs import OutputBuffer
from pdserve.scheduler.queue import WaitingQueue
from pdserve.scheduler.states import State, Wait
from pdserve.scheduler.step_learner import StepLearner
from pdserve.scheduler.steps import StepQueue

if TYPE_CHECKING:
    from pdserve.config.schema import CacheConfig, SchedulerConfig
    from pdserve.connectors.base import Hold, HoldKey, KVConnectorScheduler
    from pdserve.kvcache.lease import Holding
    from pdserve.scheduler.request import Request
    from pdserve.wire.ids import BlockId, RequestId

_NO_HIT = PrefixHit((), 0, 0)


class Dimensions(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of one engine.

    Attributes:
        num_blocks: Size of the KV pool.
        block_size: Tokens per block.
        max_model_len: Tokens of prompt and output together, at most; must fit the pool.
        vocab_size: Every token id is below it.
        num_stages: Pipeline stages.
        kv_bytes_per_token: To count, for traces, what is on its way here.
        max_drafted: Tokens of a draft, at most; 0: nothing is drafted.
        row_costs, draft_cost: See `RowBudget`.
        max_in_flight: Steps that are in flight together, at most.
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


class SchedulerState:
    """The state that every part of a scheduler is given.

    Args:
        connector: The scheduler half; the null connector if KV never leaves.
        now_s: Monotonic seconds.

    Attributes:
        kv: The blocks, and the prefix cache.
        ladder: Decides about requests whose KV did not come, within the recompute budget.
        steps: Those in flight, and what the workers know.
        drafts: How those of its requests have done lately.
        outputs: For clients, until they are fetched.
        recorder: What traces are made from.
        learner: Learns what steps take, where proxies are told of KV; None also with several
            stages and with drafts, where a step is not the time between two tokens.
        requests: All of them, by id.
        waiting: Those that wait, in line or aside.
        running: The batch, in the order in which it is served.
        receiving: Those whose blocks are being filled.
        leased: Those that have finished here, and whose blocks may be read.
        prompts: Ids of those that have no token yet, and whose prompt no other engine computes.
        holds: By connector and id of a hold, blocks that a preempted request lost and a save still
            reads; they may be under several.
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
        self.drafts = DraftHistory()
        self.outputs = OutputBuffer()
        self.recorder = Recorder()
        is_told = cache.events.enable_kv_cache_events
        is_plain = dimensions.num_stages == 1 and not dimensions.max_drafted
        self.learner = StepLearner() if is_told and is_plain else None
        self.requests: dict[RequestId, Request] = {}
        self.waiting = WaitingQueue()
        self.running: dict[RequestId, Request] = {}
        self.receiving: dict[RequestId, Request] = {}
        self.leased: dict[RequestId, Request] = {}
        self.prompts: set[RequestId] = set()
        self.holds: dict[HoldKey, Holding] = {}

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
        # At least one token is computed, so that there are logits to sample from; the
        # prompt of a handed-over request may be covered whole, for its next token is out.
        limit = request.num_tokens - 1
        return self.kv.match(
            request.chain, request.prompt_token_ids, request.output_token_ids, max_tokens=limit
        )

    def num_missing(self, request: Request) -> int:
        """Count the prompt tokens to compute if `request` started now."""
        return max(0, len(request.prompt_token_ids) - self.match_prefix(request).num_tokens)

    def publish_prefix(self, request: Request, num_tokens: int) -> None:
        """Let others find the blocks that the first `num_tokens` tokens of `request` fill."""
        holding = request.holding
        assert holding is not None
        # Most steps fill no block of a request: this runs for each request in each step.
        if num_tokens // self.kv.block_size > holding.num_published:
            self.kv.publish(
                holding,
                request.chain,
                request.prompt_token_ids,
                request.output_token_ids,
                num_computed_tokens=num_tokens,
            )

    # ---- moves ---------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a request that waits, under an id that no other has."""
        self.requests[request.request_id] = request
        self.waiting.push(request)
        if request.source is KVSource.LOCAL:
            self.prompts.add(request.request_id)

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
                self.steps.forget(request.request_id)
            case State.LEASED:
                del self.leased[request.request_id]
            case State.CLOSING | State.DONE:
                pass

    def begin_again(self, request: Request, num_computed_tokens: int) -> None:
        """Void what steps compute of `request` beyond its first `num_computed_tokens` tokens."""
        self.steps.void(request.request_id)
        self.steps.forget(request.request_id)
        request.begin_again(num_computed_tokens)

    # ---- endings -------------------------------------------------------------------

    def end(self, request: Request, now_s: float, why: str, *, is_held: bool = False) -> None:
        """End a request for its client, and free its blocks as soon as that is safe.

        Args:
            is_held: Its connector still has something read from its blocks.

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
        request.note(now_s, f"its {wait.value} settled")
        if request.waits_for == {Wait.STEP} and request.holding is not None:
            request.holding.become(BlockUser.REQUEST)

    def close(self, request: Request, now_s: float, why: str) -> None:
        """Free the blocks of a request that nothing touches any more, and forget it."""
        self.free(request)
        self.ladder.leave(request)
        self.move(request, State.DONE, now_s, why)
        self.recorder.add(request.traced(now_s))
        del self.requests[request.request_id]

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
        """End a hold on what a preempted request left, and free that if it was the last.

        False if there is none.
        """
        holding = self.holds.pop(key, None)
        if holding is not None and holding not in self.holds.values():
            holding.end()
        return holding is not None

    # ---- invariants ----------------------------------------------------------------

    def assert_nothing_held(self) -> None:
        """Raise AssertionError, with the stories, if anything of any request is left."""
        stories = "\n".join(request.story() for request in self.requests.values())
        assert not self.requests, f"requests are left:\n{stories}"
        assert not self.running
        assert not self.receiving
        assert not self.leased
        assert not self.prompts
        assert not self.holds, f"blocks of preempted requests are held: {list(self.holds)}"
        assert not len(self.waiting)
        assert not self.steps.known
        assert not len(self.steps)
        assert not self.kv.ledger.holdings
        assert self.kv.pool.num_free == self.kv.pool.num_blocks
        self.kv.pool.check()

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. O(requests + blocks)."""
        self._check_blocks()
        num_waiting = 0
        places = {
            State.RECEIVING: self.receiving,
            State.RUNNING: self.running,
            State.LEASED: self.leased,
        }
        for request in self.requests.values():
            is_waiting = request.state is State.WAITING
            num_waiting += is_waiting
            assert (request.holding is None) == is_waiting, request.story()
            assert bool(request.waits_for) == (request.state is State.CLOSING), request.story()
            is_prompt = request.request_id in self.prompts
            assert not (is_prompt and request.output_token_ids), request.story()
            for state, place in places.items():
                is_there = place.get(request.request_id) is request
                assert is_there == (request.state is state), request.story()
            if request.holding is None:
                continue
            is_quarantined = request.holding.user is BlockUser.QUARANTINED
            assert is_quarantined == bool(request.waits_for - {Wait.STEP}), request.story()
        assert num_waiting == len(self.waiting)
        for place in places.values():
            assert place.keys() <= self.requests.keys(), "a request that is gone has a place"

    def _check_blocks(self) -> None:
        self.kv.pool.check()
        self.kv.ledger.check()
        refs: Counter[BlockId] = Counter()
        for holding in self.kv.ledger.holdings:
            refs.update(holding.blocks)
        held = {request.holding for request in self.requests.values() if request.holding}
        held |= set(self.holds.values())
        assert held == self.kv.ledger.holdings, "a holding belongs to no request"
        assert len(refs) == self.kv.pool.num_blocks - self.kv.pool.num_free
        for request in self.running.values():
            assert request.holding is not None
            capacity = len(request.holding.blocks) * self.kv.block_size
            assert request.num_computed_tokens <= capacity, request.story()
