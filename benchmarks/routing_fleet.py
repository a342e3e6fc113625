"""Engines in virtual time behind real routers: what a routing policy makes of a workload.

Real are the router of each proxy, its policies and what they look at (backends, prefix index,
pending work, what engines say of others'), and of each engine the scheduler, the prefix cache and
the KV events. A step takes the time that a formula gives it, KV on its way to a decode engine the
time of its bytes; a hop and an event take a constant. There is no HTTP, no text and no model: a run
of minutes takes seconds, and the same again each time.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec

from pdserve.config.http import ProxyConfig
from pdserve.config.kv_events import KVEventsConfig
from pdserve.config.policies import PREDICTED
from pdserve.config.schema import CacheConfig, SchedulerConfig
from pdserve.connectors.base import KVConnectorScheduler, KVSource, Match
from pdserve.errors import OverloadedError
from pdserve.kvcache.grains import GrainTracker
from pdserve.observe.clock import ManualClock
from pdserve.proxy.backend import Health
from pdserve.proxy.backends import Backends
from pdserve.proxy.brain.fairness import OUTPUT_WEIGHT, FairPlaces
from pdserve.proxy.brain.homes import SAMPLE_S, HomeRoles
from pdserve.proxy.brain.index import Holder
from pdserve.proxy.brain.model import ServiceModel
from pdserve.proxy.brain.pairing import Pairing
from pdserve.proxy.brain.prefixes import make_prefixes
from pdserve.proxy.brain.prompt import RoutePrompt
from pdserve.proxy.brain.work import prompt_work
from pdserve.proxy.breakers import Breakers
from pdserve.proxy.gate import Gate
from pdserve.proxy.metrics import Metrics
from pdserve.proxy.outlook import Outlook
from pdserve.proxy.routing import Disaggregate, Router
from pdserve.scheduler.scheduler import Scheduler
from pdserve.scheduler.state import Dimensions
from pdserve.wire.hashing import grain_hashes
from pdserve.wire.ids import RequestId
from pdserve.wire.request import GenerateRequest
from pdserve.wire.sampling import SamplingParams
from pdserve.wire.step import ModelRunnerOutput
from pdserve.wire.transfer import ConnectorReport, Received

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.connectors.views import RequestView
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.brain.index import PrefixIndex
    from pdserve.proxy.brain.ledger import LedgerEntry
    from pdserve.proxy.brain.times import ServiceTimes
    from pdserve.wire.ids import BlockId
    from pdserve.wire.request import EngineOutput
    from pdserve.wire.step import SchedulerOutput

Listeners = tuple[Callable[["EngineOutput"], None], Callable[[], None]]
"""What is told of a request's first token, and of its end."""
VOCAB_SIZE = 50_000
_BLOCK_TOKENS = 64
_EVENT_S = 0.005
_MIN_GAPS = 4


@dataclass(frozen=True)
class Costs:
    """What takes how long, in seconds.

    Attributes:
        prefill, prefill_token, prefill_pair: Of a step with prompt tokens alone: constant, each
            token, each pair of a token and one before it.
        decode, decode_request, decode_token: Of a step with output tokens: constant, each
            request, each token of its context.
        hop: From engine to engine through the proxy.
        wire, wire_token: Of KV: constant, each token.
    """

    prefill: float = 4e-3
    prefill_token: float = 45e-6
    prefill_pair: float = 2.5e-9
    decode: float = 7e-3
    decode_request: float = 60e-6
    decode_token: float = 6e-8
    hop: float = 3e-3
    wire: float = 1e-3
    wire_token: float = 8e-6

    def of_prompt(self, num_tokens: int, num_cached: int = 0) -> float:
        """Seconds to compute a prompt, with nothing beside it."""
        num = num_tokens - num_cached
        pairs = num * (num_cached + num / 2)
        return self.prefill + self.prefill_token * num + self.prefill_pair * pairs


@dataclass(frozen=True)
class Layout:
    """How many engines of each role there are, and how large they are.

    Attributes:
        kv_tokens: Room of one engine's cache.
        step_tokens: Token budget of one step.
    """

    num_prefill: int
    num_decode: int
    num_both: int = 0
    kv_tokens: int = 700_000
    step_tokens: int = 2048
    max_model_len: int = 131_072


@dataclass(frozen=True)
class Work:
    """One request of a workload."""

    at_s: float
    prompt: Sequence[int]
    num_output: int
    tenant: str = ""
    session: str = ""


@dataclass
class Outcome:
    """What became of one request.

    Attributes:
        num_cached: Tokens of its prompt that were not computed for it.
        ttft_s, end_s: Since its arrival; None: it was refused, or not over at the end.
        was_split: Whether its prompt was computed by another engine than the rest.
        is_rejected: It was turned away as it came.
        predicted_s: To the first token, from when it was sent on; as it was `sent_s` after it came.
        error: Mean relative error of what that was predicted by, of late.
    """

    num_prompt: int
    num_output: int
    tenant: str = ""
    num_cached: int = 0
    ttft_s: float | None = None
    end_s: float | None = None
    was_split: bool = False
    is_rejected: bool = False
    predicted_s: float | None = None
    error: float = 0.0
    sent_s: float = 0.0

    @property
    def tpot_s(self) -> float:
        """Mean time of each token behind the first one, the hand-over included."""
        if self.ttft_s is None or self.end_s is None or self.num_output < 2:
            return 0.0
        return (self.end_s - self.ttft_s) / (self.num_output - 1)


@dataclass
class _Leg:
    """A request at one engine."""

    request: GenerateRequest
    on_first: Callable[[EngineOutput], None]
    on_end: Callable[[], None]
    on_wire: Callable[[int, float], None] = lambda num_tokens, seconds: None
    num_tokens: int = 0
    num_computed: int = 0
    has_begun: bool = False


class _Wire(KVConnectorScheduler):
    """KV of prompts that come from another engine."""

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


class _Engine:
    """One engine: steps one after the other."""

    def __init__(self, fleet: Fleet, holders: Sequence[Holder], layout: Layout) -> None:
        self._fleet = fleet
        self._holders = holders
        self._tracker = GrainTracker()
        self._wire = _Wire(self._load)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=layout.step_tokens),
            CacheConfig(
                block_size=_BLOCK_TOKENS,
                events=KVEventsConfig(enable_kv_cache_events=bool(holders)),
            ),
            Dimensions(
                num_blocks=layout.kv_tokens // _BLOCK_TOKENS,
                max_model_len=layout.max_model_len,
                vocab_size=VOCAB_SIZE,
            ),
            self._wire,
            fleet.clock,
        )
        self._legs: dict[RequestId, _Leg] = {}
        self._is_stepping = False

    def add(self, leg: _Leg, *, num_received: int = 0) -> None:
        """Take a request.

        Args:
            num_received: Tokens of its prompt whose KV comes from another engine.
        """
        leg.num_tokens = len(leg.request.prompt_token_ids)
        self._legs[leg.request.request_id] = leg
        if num_received:
            self._wire.expected[leg.request.request_id] = num_received
        self.scheduler.add(leg.request)
        self._turn()

    def _load(self, request_id: RequestId, num_tokens: int) -> None:
        costs = self._fleet.costs
        seconds = costs.wire + costs.wire_token * num_tokens
        self._legs[request_id].on_wire(num_tokens, seconds)
        self._fleet.after(seconds, lambda: self._loaded(request_id))

    def _loaded(self, request_id: RequestId) -> None:
        received = Received(
            request_id=request_id, num_bytes=1, num_descriptors=1, wait_s=0.0, transfer_s=0.0
        )
        self.scheduler.apply_report(ConnectorReport(received=[received]))
        self._turn()

    def _turn(self) -> None:
        while not self._is_stepping:
            step = self.scheduler.schedule()
            self._publish()
            if step is None:
                return
            self._is_stepping = True
            self._fleet.after(self._begin(step), lambda step=step: self._end(step))

    def _begin(self, step: SchedulerOutput) -> float:
        """Take note of what a step computes; return how long it takes."""
        legs, costs = self._legs, self._fleet.costs
        for new in step.new_requests:
            legs[new.request_id].num_computed = new.num_computed_tokens
        known = step.known_requests
        for request_id, num in zip(known.request_ids, known.num_computed_tokens, strict=True):
            legs[request_id].num_computed = num
        num_decoding, context, num_prefill, pairs = 0, 0, 0, 0.0
        for request_id, num in step.num_scheduled_tokens.items():
            leg = legs[request_id]
            if leg.has_begun and num == 1:
                num_decoding += 1
                context += leg.num_computed
            else:
                num_prefill += num
                pairs += num * (leg.num_computed + num / 2)
        if not step.num_scheduled_tokens:
            return 0.0
        total_s = costs.prefill_token * num_prefill + costs.prefill_pair * pairs
        if num_decoding:
            total_s += costs.decode + costs.decode_request * num_decoding
            return total_s + costs.decode_token * context
        return total_s + costs.prefill

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
    def _token(leg: _Leg) -> int:
        """Output tokens of a request follow from its seed, so that its next turn has them."""
        return output_token(leg.request.sampling.seed, leg.num_tokens)

    def _told(self, output: EngineOutput) -> None:
        leg = self._legs[output.request_id]
        leg.num_tokens += len(output.new_token_ids)
        if output.new_token_ids and not leg.has_begun:
            leg.has_begun = True
            leg.on_first(output)
        if output.finish_reason is not None:
            self._wire.expected.pop(output.request_id, None)
            leg.on_end()

    def _publish(self) -> None:
        """Tell the proxies' indexes, a moment later, what the cache has gained and lost."""
        if not self._holders:
            return
        faults = self._fleet.faults
        for event in self._tracker.apply(self.scheduler.take_events()):
            for holder in self._holders:
                if self._fleet.rng.random() >= faults.lost_events:
                    apply = functools.partial(holder.apply, event)
                    self._fleet.after(faults.event_s, apply)


class _Told:
    """Events that are never lost. See `Feed`."""

    num_resyncs = 0

    def __init__(self, index: PrefixIndex) -> None:
        self.holders: dict[str, Holder] = {}
        self._index = index

    def start(self) -> None:
        """Nothing is to be done."""

    async def stop(self) -> None:
        """Nothing is to be done."""

    def states(self) -> list[Any]:
        """Nobody asks."""
        return []

    def lags_s(self) -> dict[str, float]:
        """Nobody asks."""
        return {}

    def resyncs(self) -> dict[str, int]:
        """Nobody asks."""
        return {}

    def holder(self, url: str) -> Holder:
        """An engine's part of the index."""
        holder = self.holders[url] = Holder(self._index, url)
        return holder

    def exact(self, url: str) -> tuple[int, ...]:
        """See `Feed`."""
        return (self.holders[url].bit,)


@dataclass(frozen=True)
class Faults:
    """What is wrong with what the proxy knows.

    Attributes:
        predicted: All times are predicted so many times as long.
        event_s: How late KV events are.
        lost_events: Share of them that never come.
    """

    predicted: float = 1.0
    event_s: float = _EVENT_S
    lost_events: float = 0.0


class ScaledModel(ServiceModel):
    """A model that is off by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def times(self) -> ServiceTimes:
        """See `ServiceModel`."""
        times, x = super().times(), self._factor
        a, b, c = times.prefill
        d, e, f = times.step
        r, t = times.wire
        return msgspec.structs.replace(
            times, prefill=(a * x, b * x, c * x), step=(d * x, e * x, f * x), wire=(r * x, t * x)
        )


class VirtualProxy:
    """One of the proxies before a fleet's engines: what decides of the real one, and no HTTP."""

    def __init__(self, fleet: Fleet, config: ProxyConfig) -> None:
        self._fleet = fleet
        clock, metrics = fleet.clock, Metrics()
        self._breakers = Breakers(config, clock, metrics)
        self.backends = Backends(config, clock, self._breakers)
        for backend in self.backends:
            backend.health = Health.READY
        self.feed: _Told | None = None

        def make_feed(index: PrefixIndex) -> _Told:
            self.feed = _Told(index)
            return self.feed

        self._prefixes = make_prefixes(
            config, self.backends, clock, metrics.prefixes, make_feed=make_feed
        )
        self._places = FairPlaces(config.max_concurrent_requests, clock.monotonic_s)
        self.pairing = self.homes = None
        if config.split_policy == PREDICTED:
            self.pairing = Pairing(config, clock, metrics.route, on_change=self._places.look)
            self.pairing.model = ScaledModel(fleet.faults.predicted)
            self.homes = HomeRoles(config, self.backends, self.pairing, clock, metrics.route)
        self._router = Router(config, self.backends, self._prefixes, self.pairing)
        before = self._places.tokens_before
        outlook = Outlook(self._router, self.backends, self._prefixes, self.pairing)
        self._gate = Gate(config, outlook, before, self.pairing, metrics.gate)

    def hear(self) -> None:
        """Ask every engine how much it has to do, as `HealthChecks` does."""
        for backend in self.backends:
            stats = self._fleet.engines[backend.url].scheduler.stats()
            num = stats.num_running + stats.num_waiting + stats.num_receiving
            backend.num_foreign = max(0, num - backend.in_flight)
            backend.kv_usage, backend.load_s = stats.kv_usage, self._fleet.clock.monotonic_s()
            if self.pairing is not None:
                self.pairing.heard(backend, stats)

    def arrive(self, work: Work, outcome: Outcome, number: int) -> None:
        """Take a request."""
        grains = tuple(grain_hashes(work.prompt, "")) if self._prefixes else ()
        known_tokens = len(work.prompt) if self._prefixes else 0
        prompt = RoutePrompt(
            4 * len(work.prompt),
            known_tokens,
            grains,
            request_id=str(number),
            tenant=work.tenant,
            session=work.session,
        )
        at_s = self._fleet.clock.monotonic_s()
        try:
            self._gate.require_promising(prompt)
        except OverloadedError:
            outcome.is_rejected = True
            self._fleet.ended()
            return
        claim = self._gate.claim(prompt)

        def first(output: EngineOutput) -> None:
            outcome.num_cached = output.num_cached_tokens
            outcome.ttft_s = self._fleet.clock.monotonic_s() - at_s + self._fleet.costs.hop

        def end() -> None:
            outcome.end_s = self._fleet.clock.monotonic_s() - at_s + self._fleet.costs.hop
            self._fleet.ended()
            computed = len(work.prompt) - outcome.num_cached
            self._places.release(claim, computed + OUTPUT_WEIGHT * work.num_output)

        def granted() -> None:
            outcome.sent_s = self._fleet.clock.monotonic_s() - at_s
            self._serve(work, outcome, number, prompt, (first, end))

        claim.grant = granted
        self._places.ask(claim)

    def _serve(
        self, work: Work, outcome: Outcome, number: int, prompt: RoutePrompt, on: Listeners
    ) -> None:
        first, end = on
        plan = self._router.plan(prompt)
        if plan.decision is not None:
            outcome.predicted_s = plan.decision.chosen.ttft_s
            outcome.error = plan.decision.question.times.prefill_error
        if not isinstance(plan, Disaggregate):
            request = self._request(f"{number}", work.prompt, work.num_output, number)
            self._send("local", plan.engine, prompt, _Leg(request, first, end))
            return
        outcome.was_split = True
        prefill = plan.prefill

        def hand_over() -> None:
            if work.num_output < 2:
                end()
                return
            decode = plan.preferred or self._router.decode_for(prefill, prompt, ())
            assert decode is not None
            token = output_token(number, len(work.prompt))
            rest = self._request(f"{number}d", [*work.prompt, token], work.num_output - 1, number)
            leg = _Leg(rest, lambda _: None, end)
            self._send("decode", decode, prompt, leg, num_received=len(work.prompt))

        request = self._request(f"{number}p", work.prompt, 1, number)
        leg = _Leg(request, first, lambda: self._fleet.after(self._fleet.costs.hop, hand_over))
        self._send("prefill", prefill, prompt, leg)

    def _send(
        self, kind: str, engine: Backend, prompt: RoutePrompt, leg: _Leg, *, num_received: int = 0
    ) -> None:
        """Begin an exchange with an engine, as `Legs` does; it ends with the leg."""
        num_tokens = num_known = 0
        if self._prefixes is not None:
            num_known = self._prefixes.sent(prompt, engine).num_tokens
            num_tokens = prompt.num_tokens - num_known
        stack = ExitStack()
        if self.pairing is not None:
            entry = stack.enter_context(self.pairing.hold(engine, kind, prompt, num_known))
            self._learn(kind, leg, entry, self.pairing)
        stack.enter_context(
            self._breakers.exchange(
                engine,
                cast("Any", leg.request.request_id),
                kind=kind,
                request_id=leg.request.request_id,
                num_tokens=num_tokens,
            )
        )
        on_end = leg.on_end

        def end() -> None:
            stack.close()
            on_end()

        leg.on_end = end
        self._fleet.after(
            self._fleet.costs.hop,
            lambda: self._fleet.engines[engine.url].add(leg, num_received=num_received),
        )

    def _learn(self, kind: str, leg: _Leg, entry: LedgerEntry, pairing: Pairing) -> None:
        """Have the model learn what the real proxy learns from a leg's account of itself."""
        on_first, on_end = leg.on_first, leg.on_end
        sent_s, first_s = self._fleet.clock.monotonic_s(), 0.0

        def first(output: EngineOutput) -> None:
            nonlocal first_s
            first_s = self._fleet.clock.monotonic_s()
            entry.computed()
            if kind != "decode":
                num_tokens = len(leg.request.prompt_token_ids)
                cached = output.num_cached_tokens
                took_s = first_s - sent_s - self._fleet.costs.hop
                pairing.learn_prompt(entry, prompt_work(num_tokens, cached), took_s)
            on_first(output)

        def end() -> None:
            num = leg.request.sampling.max_tokens
            if kind != "prefill" and num > _MIN_GAPS:
                gap_s = (self._fleet.clock.monotonic_s() - first_s) / (num - 1)
                entry.end()
                pairing.learn_step(entry, gap_s, num)
                pairing.model.learn_output(num)
            on_end()

        leg.on_first, leg.on_end, leg.on_wire = first, end, pairing.model.learn_wire

    def _request(
        self, name: str, prompt: Sequence[int], num_output: int, seed: int
    ) -> GenerateRequest:
        return GenerateRequest(
            request_id=RequestId(name),
            prompt_token_ids=list(prompt),
            sampling=SamplingParams(max_tokens=num_output, seed=seed, ignore_eos=True),
            arrival_s=self._fleet.clock.monotonic_s(),
        )


@dataclass
class Fleet:
    """A deployment under one policy.

    Args:
        settings: Fields of `ProxyConfig` that name the policies.
        num_proxies: Before the same engines; requests come to each in turn.
        report_s: How often each asks the engines how much they have to do; as often as the real
            one, unless told otherwise.
    """

    layout: Layout
    settings: dict[str, Any]
    costs: Costs = field(default_factory=Costs)
    faults: Faults = field(default_factory=Faults)
    num_proxies: int = 1
    report_s: float = ProxyConfig().health_check_interval_s

    def __post_init__(self) -> None:
        layout = self.layout
        self.clock = ManualClock(0.0)
        self.rng = random.Random(0)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._num_left = 0
        both = [f"http://b{i}" for i in range(layout.num_both)]
        prefill = [f"http://p{i}" for i in range(layout.num_prefill)] + both
        decode = [f"http://d{i}" for i in range(layout.num_decode)] + both
        config = ProxyConfig(prefill=tuple(prefill), decode=tuple(decode), **self.settings)
        self.proxies = [VirtualProxy(self, config) for _ in range(self.num_proxies)]
        feeds = [proxy.feed for proxy in self.proxies if proxy.feed is not None]
        self.engines = {
            url: _Engine(self, [feed.holder(url) for feed in feeds], layout)
            for url in dict.fromkeys((*prefill, *decode))
        }

    @property
    def first(self) -> VirtualProxy:
        """The only proxy, where there is one."""
        return self.proxies[0]

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something later."""
        at_s = self.clock.monotonic_s() + seconds
        heapq.heappush(self._queue, (at_s, next(self._numbers), do))

    def ended(self) -> None:
        """Note that a request is over."""
        self._num_left -= 1

    def run(self, workload: Sequence[Work], *, patience_s: float = 600.0) -> list[Outcome]:
        """Serve a workload, until all is over or so long after its last arrival."""
        outcomes = []
        self._num_left = len(workload)
        for number, work in enumerate(workload):
            outcome = Outcome(len(work.prompt), work.num_output, work.tenant)
            outcomes.append(outcome)
            proxy = self.proxies[number % self.num_proxies]
            self.after(work.at_s, functools.partial(proxy.arrive, work, outcome, number))
        for i, proxy in enumerate(self.proxies):
            if proxy.homes is not None:
                self._every(SAMPLE_S, proxy.homes.sample)
            hear = functools.partial(self._every, self.report_s, proxy.hear)
            self.after(i * self.report_s / self.num_proxies, hear)
        end_s = max(work.at_s for work in workload) + patience_s
        while self._queue and self._queue[0][0] <= end_s:
            at_s, _, do = heapq.heappop(self._queue)
            self.clock.now_s = max(self.clock.now_s, at_s)
            do()
        return outcomes

    def _every(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something now and again, for as long as requests are to come or are not over."""
        if self._num_left:
            do()
            self.after(seconds, lambda: self._every(seconds, do))


def output_token(seed: int, position: int) -> int:
    """The token that a request of this seed has at a position."""
    return 1 + (seed * 7919 + position * 104_729) % (VOCAB_SIZE - 1)
