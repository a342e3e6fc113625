"""A proxy in virtual time: the real router and policies, without HTTP."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import msgspec

from pdserve.config.http import KVTransfer
from pdserve.config.policies import PREDICTED
from pdserve.errors import OverloadedError
from pdserve.planner.engine import FleetLeg
from pdserve.planner.work import output_token
from pdserve.proxy.admission import OUTPUT_WEIGHT, FairPlaces
from pdserve.proxy.backend import Health
from pdserve.proxy.backends import Backends
from pdserve.proxy.brain.homes import HomeRoles
from pdserve.proxy.brain.index import Holder
from pdserve.proxy.brain.model import ServiceModel
from pdserve.proxy.brain.pairing import Pairing
from pdserve.proxy.brain.prefixes import make_prefixes
from pdserve.proxy.brain.prompt import RoutePrompt
from pdserve.proxy.brain.work import prompt_work
from pdserve.proxy.breakers import Breakers
from pdserve.proxy.gate import Gate
from pdserve.proxy.metrics import Metrics
from pdserve.proxy.routing import Disaggregate, Router, RunLocally
from pdserve.wire.ids import RequestId, grain_hashes
from pdserve.wire.request import GenerateRequest
from pdserve.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.config.http import ProxyConfig
    from pdserve.planner.engine import FleetEngine, FleetTime
    from pdserve.planner.work import FleetLayout, FleetOutcome, Work
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.brain.index import PrefixIndex
    from pdserve.proxy.brain.ledger import LedgerEntry
    from pdserve.proxy.brain.work import ServiceTimes
    from pdserve.wire.event_reader import ReaderState
    from pdserve.wire.request import EngineOutput

Listeners: TypeAlias = tuple[Callable[["EngineOutput"], None], Callable[[], None]]
"""Callbacks for a request's first token and for its end."""
_EVENT_S: Final = 0.005
_MIN_GAPS: Final = 4
_NUM_TAUGHT: Final = 40


class _LosslessFeed:
    """A feed of events that are never lost. See `Feed`."""

    num_resyncs = 0

    def __init__(self, index: PrefixIndex) -> None:
        self.holders: dict[str, Holder] = {}
        self._index = index

    def start(self) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Do nothing."""

    def states(self) -> list[ReaderState]:
        """See `Feed`; not used in simulations."""
        return []

    def lags_s(self) -> dict[str, float]:
        """See `Feed`; not used in simulations."""
        return {}

    def resyncs(self) -> dict[str, int]:
        """See `Feed`; not used in simulations."""
        return {}

    def holder(self, url: str) -> Holder:
        """Return an engine's part of the index."""
        holder = self.holders[url] = Holder(self._index, url)
        return holder

    def exact(self, url: str) -> tuple[int, ...]:
        """See `Feed`."""
        return (self.holders[url].bit,)


@dataclass(frozen=True)
class FleetFaults:
    """Faults in the proxy's knowledge.

    Attributes:
        predicted: Factor of all predicted times.
        event_s: Delay of KV events, in seconds.
        lost_events: Share of KV events that are lost.
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
    """One of the proxies in front of a fleet: it decides as the real proxy does, without HTTP.

    Args:
        engines: Engines by URL; they may be added later.
        on_over: Called for each finished request: the work, its number, and whether it was
            answered.
    """

    def __init__(
        self,
        config: ProxyConfig,
        time: FleetTime,
        engines: Mapping[str, FleetEngine],
        faults: FleetFaults,
        on_over: Callable[[Work, int, bool], None],
    ) -> None:
        self._time = time
        self._engines = engines
        self._on_over = on_over
        clock, metrics = time.clock, Metrics()
        self._breakers = Breakers(config, clock, metrics)
        self.backends = Backends(config, clock, self._breakers)
        for backend in self.backends:
            backend.health = Health.READY
        self.feed: _LosslessFeed | None = None

        def make_feed(index: PrefixIndex) -> _LosslessFeed:
            self.feed = _LosslessFeed(index)
            return self.feed

        self._prefixes = make_prefixes(
            config, self.backends, clock, metrics.prefixes, make_feed=make_feed
        )
        self._places = FairPlaces(config.max_concurrent_requests, clock.monotonic_s)
        self.pairing: Pairing | None = None
        self.homes: HomeRoles | None = None
        if config.split_policy == PREDICTED:
            self.pairing = Pairing(config, clock, metrics.route, on_change=self._places.look)
            self.pairing.model = ScaledModel(faults.predicted)
            self.homes = HomeRoles(config, self.backends, self.pairing, clock, metrics.route)
        self._pulls = config.kv_mode is KVTransfer.PULL
        self._router = Router(config, self.backends, self._prefixes, self.pairing)
        self._gate = Gate(
            config,
            self._router,
            self.backends,
            self.pairing,
            self._places,
            metrics.gate,
        )

    def teach(self, workload: Sequence[Work], layout: FleetLayout) -> None:
        """Teach it the engines' times, as if it had served such requests."""
        if self.pairing is None:
            return
        model, costs, rng = self.pairing.model, self._time.costs, random.Random(0)
        for _ in range(_NUM_TAUGHT):
            work = rng.choice(workload)
            num, streams = len(work.prompt), rng.randint(1, layout.max_num_seqs)
            model.learn_prompts(prompt_work(num, 0), costs.of_prompt(num))
            kv_tokens = streams * (num + work.num_output // 2)
            model.learn_step(streams, kv_tokens, costs.of_step(streams, kv_tokens))
            model.learn_wire(
                num, costs.of_wire(num if self._pulls else min(num, layout.step_tokens))
            )
            model.learn_output(work.num_output)

    def hear(self) -> None:
        """Read every engine's load and learned times, as `EventFeed` does."""
        now_s = self._time.clock.monotonic_s()
        for backend in self.backends:
            engine = self._engines[backend.url]
            load, learned = engine.load(), engine.scheduler.telemetry.learned(now_s)
            backend.heard(load, now_s)
            if self.pairing is not None:
                self.pairing.heard(backend, load)
                if learned is not None:
                    self.pairing.model.hear(backend.url, [learned])

    def arrive(self, work: Work, outcome: FleetOutcome, number: int) -> None:
        """Accept a request."""
        at_s = outcome.at_s = self._time.clock.monotonic_s()
        outcome.num_prompt = len(work.prompt)
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
        try:
            claim = self._gate.claim(prompt)
        except OverloadedError:
            outcome.is_rejected = True
            self._on_over(work, number, False)
            return

        def first(output: EngineOutput) -> None:
            outcome.num_cached = output.num_cached_tokens
            outcome.ttft_s = self._time.clock.monotonic_s() - at_s + self._time.costs.hop
            predicted_s, times = outcome.predicted_s, outcome.times
            if self.pairing is not None and predicted_s is not None and times is not None:
                served_s = outcome.ttft_s - outcome.sent_s
                self.pairing.model.learn_first(predicted_s, served_s, times)

        def end() -> None:
            outcome.end_s = self._time.clock.monotonic_s() - at_s + self._time.costs.hop
            computed = len(work.prompt) - outcome.num_cached
            self._places.take_back(claim, computed + OUTPUT_WEIGHT * work.num_output)
            self._on_over(work, number, True)

        def granted() -> None:
            outcome.sent_s = self._time.clock.monotonic_s() - at_s
            plan = self._router.plan(prompt, decision=claim.decision)
            self._serve(work, outcome, number, prompt, plan, (first, end))

        claim.grant = granted
        self._places.ask(claim)

    def _serve(
        self,
        work: Work,
        outcome: FleetOutcome,
        number: int,
        prompt: RoutePrompt,
        plan: Disaggregate | RunLocally,
        on: Listeners,
    ) -> None:
        first, end = on
        asked = partial(self._request, seed=number, yields_s=self._gate.yields_s(prompt))
        times = outcome.token_s
        if plan.decision is not None:
            outcome.predicted_s = plan.decision.chosen.ttft_s
            outcome.times = plan.decision.question.times
        if not isinstance(plan, Disaggregate):
            request = asked(f"{number}", work.prompt, work.num_output)
            self._send("local", plan.engine, prompt, FleetLeg(request, first, end, times))
            return
        outcome.was_split = True
        ours = FleetLeg(asked(f"{number}p", work.prompt, 1), first, end, times)
        if work.num_output < 2:
            self._send("prefill", plan.prefill, prompt, ours)
            return
        token = output_token(number, len(work.prompt))
        rest = asked(f"{number}d", [*work.prompt, token], work.num_output - 1)
        theirs = FleetLeg(rest, lambda _: None, end, times)
        hand_over = self._pull if self._pulls else self._push
        hand_over(prompt, plan, ours, theirs)

    def _pull(
        self, prompt: RoutePrompt, plan: Disaggregate, ours: FleetLeg, theirs: FleetLeg
    ) -> None:
        """Compute the prompt, then send the request to a decode engine, which reads the KV."""
        half_s = self._time.costs.handover / 2

        def hand_over() -> None:
            chosen = plan.preferred or self._router.decode_for(plan.prefill, prompt, ())
            assert chosen is not None
            self._hold("decode", chosen, prompt, theirs)
            num_received = len(ours.request.prompt_token_ids)
            engine = self._engines[chosen.url]
            self._time.after(half_s, lambda: engine.add(theirs, num_received=num_received))

        ours.on_end = lambda: self._time.after(half_s, hand_over)
        self._send("prefill", plan.prefill, prompt, ours)

    def _push(
        self, prompt: RoutePrompt, plan: Disaggregate, ours: FleetLeg, theirs: FleetLeg
    ) -> None:
        """Send the request to both; the prompt is computed once the decode engine has room."""
        chosen = plan.preferred or self._router.decode_for(plan.prefill, prompt, ())
        assert chosen is not None
        costs, num_received = self._time.costs, len(ours.request.prompt_token_ids)
        entry = self._hold("decode", chosen, prompt, theirs, is_coming=True)
        on_first = ours.on_first

        def first(output: EngineOutput) -> None:
            if entry is not None:
                entry.computed()
            on_first(output)

        ours.on_first = first
        ours.on_end = lambda: self._time.after(
            costs.handover, lambda: self._engines[chosen.url].receive(theirs, ours.num_last)
        )
        self._hold("prefill", plan.prefill, prompt, ours)
        theirs.on_reserved = lambda: self._engines[plan.prefill.url].add(ours)
        engine = self._engines[chosen.url]
        self._time.after(costs.hop, lambda: engine.add(theirs, num_received=num_received))

    def _send(self, kind: str, engine: Backend, prompt: RoutePrompt, leg: FleetLeg) -> None:
        self._hold(kind, engine, prompt, leg)
        self._time.after(self._time.costs.hop, lambda: self._engines[engine.url].add(leg))

    def _hold(
        self,
        kind: str,
        engine: Backend,
        prompt: RoutePrompt,
        leg: FleetLeg,
        *,
        is_coming: bool = False,
    ) -> LedgerEntry | None:
        """Begin an exchange with an engine, as `Legs` does; it ends with the leg."""
        entry = None
        num_tokens = num_known = 0
        if self._prefixes is not None:
            num_known = self._prefixes.sent(prompt, engine).num_tokens
            num_tokens = prompt.num_tokens - num_known
        stack = ExitStack()
        if self.pairing is not None:
            work = "receive" if is_coming else kind
            entry = stack.enter_context(self.pairing.hold(engine, work, prompt, num_known))
            self._learn(kind, leg, entry, num_known)
        stack.enter_context(
            self._breakers.exchange(
                engine,
                cast("Any", leg.request.request_id),
                kind=kind,
                num_tokens=num_tokens,
            )
        )
        on_end = leg.on_end

        def end() -> None:
            stack.close()
            on_end()

        leg.on_end = end
        return entry

    def _learn(self, kind: str, leg: FleetLeg, entry: LedgerEntry, num_known: int) -> None:
        """Teach the model what the real proxy learns from a leg's own report."""
        on_first, on_end, pairing = leg.on_first, leg.on_end, self.pairing
        assert pairing is not None
        first_s = 0.0

        def first(output: EngineOutput) -> None:
            nonlocal first_s
            first_s = self._time.clock.monotonic_s()
            entry.computed()
            if kind != "decode":
                num_tokens = len(leg.request.prompt_token_ids)
                cached = output.num_cached_tokens
                pairing.learn_prompt(entry, prompt_work(num_tokens, cached), first_s - leg.added_s)
                pairing.model.learn_hit(num_known, cached)
                pairing.model.learn_hop(2 * self._time.costs.hop)
            on_first(output)

        def end() -> None:
            num = leg.request.sampling.max_tokens
            if kind != "prefill" and num > _MIN_GAPS:
                gap_s = (self._time.clock.monotonic_s() - first_s) / (num - 1)
                entry.end()
                pairing.learn_step(entry, gap_s, num)
                pairing.model.learn_output(num)
            on_end()

        leg.on_first, leg.on_end, leg.on_wire = first, end, pairing.model.learn_wire

    def _request(
        self, name: str, prompt: Sequence[int], num_output: int, *, seed: int, yields_s: float
    ) -> GenerateRequest:
        return GenerateRequest(
            request_id=RequestId(name),
            prompt_token_ids=list(prompt),
            sampling=SamplingParams(max_tokens=num_output, seed=seed, ignore_eos=True),
            arrival_s=self._time.clock.monotonic_s(),
            yields_s=yields_s,
        )
