"""An engine in virtual time: the real scheduler, prefix cache and KV events, modelled steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from pdserve.config.kv_events import KVEventsConfig
from pdserve.config.schema import CacheConfig, SchedulerConfig
from pdserve.connectors.base import KVConnectorScheduler, KVSource, Match
from pdserve.planner.work import output_token
from pdserve.scheduler.scheduler import Scheduler
from pdserve.scheduler.state import Dimensions
from pdserve.wire.step import ModelRunnerOutput
from pdserve.wire.transfer import ConnectorReport, Received

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.views import RequestView
    from pdserve.observe.clock import Clock
    from pdserve.planner.work import FleetCosts, FleetLayout
    from pdserve.wire.events import KVEvent, RoutingLoad
    from pdserve.wire.ids import BlockId, RequestId
    from pdserve.wire.request import EngineOutput, GenerateRequest
    from pdserve.wire.step import SchedulerOutput

_BLOCK_TOKENS = 64
_NUM_IDS = 1 << 31
"""Prompts may be of any vocabulary."""


@dataclass
class FleetLeg:
    """A request at one engine.

    Attributes:
        on_first: Called with its first output at this engine.
        token_s: Receives the time of each of its tokens.
        on_wire: Called when a KV transfer for it begins, with its tokens and its seconds.
        on_reserved: Called when blocks for KV of another engine have been taken: that engine may
            begin to compute, and writes into them (a push). None: the KV is there, and is read
            (a pull).
        added_s: Time at which the engine got it.
        num_last: Prompt tokens computed in the last step that computed any.
        num_external: Tokens whose KV another engine writes into its blocks.
    """

    request: GenerateRequest
    on_first: Callable[[EngineOutput], None]
    on_end: Callable[[], None]
    token_s: list[float] = field(default_factory=list)
    on_wire: Callable[[int, float], None] = lambda num_tokens, seconds: None
    on_reserved: Callable[[], None] | None = None
    added_s: float = 0.0
    num_tokens: int = 0
    num_computed: int = 0
    num_last: int = 0
    num_external: int = 0
    has_begun: bool = False


@dataclass(frozen=True)
class FleetTime:
    """Virtual time, and a way to schedule calls.

    Attributes:
        after: Calls a function after some seconds.
    """

    clock: Clock
    costs: FleetCosts
    after: Callable[[float, Callable[[], None]], None]


class _Wire(KVConnectorScheduler):
    """Connector for KV of prompts that comes from other engines."""

    def __init__(self, begin: Callable[[RequestId, int], None]) -> None:
        self._begin = begin
        self.expected: dict[RequestId, int] = {}

    def request_arrived(self, request: RequestView) -> KVSource:
        return KVSource.READY if request.request_id in self.expected else KVSource.LOCAL

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        num_tokens = self.expected.get(request.request_id, 0) - num_computed_tokens
        return Match(max(0, num_tokens), is_async=num_tokens > 0)

    def update_state_after_alloc(
        self,
        request: RequestView,
        block_ids: Sequence[BlockId],
        num_external_tokens: int,
        *,
        generations: Sequence[int] = (),
    ) -> None:
        if num_external_tokens:
            self._begin(request.request_id, num_external_tokens)


class FleetEngine:
    """An engine that runs steps one after the other.

    Args:
        tell: Receives the events of the cache; None if nobody reads them.
    """

    def __init__(
        self, layout: FleetLayout, time: FleetTime, tell: Callable[[list[KVEvent]], None] | None
    ) -> None:
        self._time = time
        self._tell = tell
        self._wire = _Wire(self._load)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=layout.max_num_seqs, max_num_batched_tokens=layout.step_tokens
            ),
            CacheConfig(
                events=KVEventsConfig(enable_kv_cache_events=tell is not None),
            ),
            Dimensions(
                num_blocks=-(-layout.kv_tokens // _BLOCK_TOKENS),
                block_size=_BLOCK_TOKENS,
                max_model_len=layout.max_model_len,
                vocab_size=_NUM_IDS,
            ),
            self._wire,
            time.clock,
        )
        self._idle_load = self.scheduler.stats().in_brief()
        self._legs: dict[RequestId, FleetLeg] = {}
        self._is_stepping = False

    def load(self) -> RoutingLoad:
        """Return its load as it tells proxies; without requests it is always the same."""
        is_idle = self.scheduler.is_idle
        return self._idle_load if is_idle else self.scheduler.stats().in_brief()

    def add(self, leg: FleetLeg, *, num_received: int = 0) -> None:
        """Add a request.

        Args:
            num_received: Tokens of its prompt whose KV comes from another engine.
        """
        leg.added_s = self._time.clock.monotonic_s()
        leg.num_tokens = len(leg.request.prompt_token_ids)
        self._legs[leg.request.request_id] = leg
        if num_received:
            self._wire.expected[leg.request.request_id] = num_received
        self.scheduler.add(leg.request)
        self._turn()

    def _load(self, request_id: RequestId, num_tokens: int) -> None:
        leg = self._legs[request_id]
        if leg.on_reserved is not None:
            leg.num_external = num_tokens
            self._time.after(0.0, leg.on_reserved)
            return
        self._transfer(leg, num_tokens, self._time.costs.of_wire(num_tokens))

    def receive(self, leg: FleetLeg, num_last: int) -> None:
        """Receive the last tokens of a push; those before were written while they were computed.

        Args:
            num_last: Tokens that the other engine computed in its last step.
        """
        seconds = self._time.costs.of_wire(min(num_last, leg.num_external))
        self._transfer(leg, leg.num_external, seconds)

    def _transfer(self, leg: FleetLeg, num_tokens: int, seconds: float) -> None:
        leg.on_wire(num_tokens, seconds)
        self._time.after(seconds, lambda: self._loaded(leg.request.request_id))

    def _loaded(self, request_id: RequestId) -> None:
        received = Received(
            request_id=request_id, num_bytes=1, num_descriptors=1, wait_s=0.0, transfer_s=0.0
        )
        self.scheduler.apply_report(ConnectorReport(received=[received]))
        self._turn()

    def _turn(self) -> None:
        if self._is_stepping:
            self.scheduler.admit_loads()  # they need no step
            return
        while not self._is_stepping:
            step = self.scheduler.schedule()
            self._publish()
            if step is None:
                return
            self._is_stepping = True
            self._time.after(self._begin(step), partial(self._end, step))

    def _begin(self, step: SchedulerOutput) -> float:
        """Record what a step computes; return its duration in seconds."""
        legs, costs = self._legs, self._time.costs
        for new in step.new_requests:
            legs[new.request_id].num_computed = new.num_computed_tokens
        for request_id, num in zip(step.known_ids, step.num_computed_tokens, strict=True):
            legs[request_id].num_computed = num
        num_decoding, context, num_prefill, pairs = 0, 0, 0, 0.0
        for request_id, num in step.num_scheduled_tokens.items():
            leg = legs[request_id]
            if leg.has_begun and num == 1:
                num_decoding += 1
                context += leg.num_computed
            else:
                leg.num_last = num
                num_prefill += num
                pairs += num * (leg.num_computed + num / 2)
        if not step.num_scheduled_tokens:
            return 0.0
        total_s = costs.prefill_token * num_prefill + costs.prefill_pair * pairs
        return total_s + (costs.of_step(num_decoding, context) if num_decoding else costs.prefill)

    def _end(self, step: SchedulerOutput) -> None:
        self._is_stepping = False
        sampled = {
            request_id: self._token(leg)
            for request_id, num in step.num_scheduled_tokens.items()
            if (leg := self._legs[request_id]).num_computed + num >= leg.num_tokens
        }
        self.scheduler.update(
            ModelRunnerOutput(
                step_id=step.step_id,
                request_ids=list(sampled),
                sampled_token_ids=[[token] for token in sampled.values()],
            )
        )
        self._publish()
        for output in self.scheduler.drain_outputs():
            self._told(output)
        self._turn()

    @staticmethod
    def _token(leg: FleetLeg) -> int:
        """Return the next token; it follows from the seed, so that later turns can repeat it."""
        return output_token(leg.request.sampling.seed, leg.num_tokens)

    def _told(self, output: EngineOutput) -> None:
        leg = self._legs[output.request_id]
        leg.num_tokens += len(output.new_token_ids)
        there_s = self._time.clock.monotonic_s() + self._time.costs.hop
        leg.token_s += [there_s] * len(output.new_token_ids)
        if output.new_token_ids and not leg.has_begun:
            leg.has_begun = True
            leg.on_first(output)
        if output.finish_reason is not None:
            self._wire.expected.pop(output.request_id, None)
            del self._legs[output.request_id]
            leg.on_end()

    def _publish(self) -> None:
        if self._tell is not None and (events := self.scheduler.take_events()):
            self._tell(events)
