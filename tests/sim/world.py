"""One run: engines, a proxy and clients in virtual time, and what must hold at its end.

Three things must be zero: answers with a wrong token, blocks that are not free when everything
is over, requests without a final state. What went wrong is collected, not raised, so that one
run tells all of it.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import itertools
import json
import logging
import random
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pdserve.config.http import ProxyConfig
from pdserve.config.schema import Role
from pdserve.connectors.multi.scheduler import MultiScheduler
from pdserve.observe.clock import ManualClock
from pdserve.proxy.app import Proxy
from pdserve.proxy.brain.work import prompt_work
from pdserve.server.sampling import choice_seed
from pdserve.wire.drain import PATH, DrainReport, DrainRequest
from pdserve.wire.sampling import SamplingParams
from tests.faulty import FaultKind, Plan
from tests.scheduler.invariants import assert_nothing_held
from tests.sim import virtual_time
from tests.sim.engine import SECRET, SimEngine
from tests.sim.net import Host, Net, Response, chunks_of
from tests.sim.scenario import Scenario, draw
from tests.sim.text import BOUND, TOOL, answer_of, text_of
from tests.sim.wire import SimExchange
from tests.toy_executor import TOY_EOS, WrongKVError, expected_output
from tests.toy_store import STORE, ToyStore, Trouble

if TYPE_CHECKING:
    from pdserve.proxy.brain.model import ServiceModel
    from pdserve.wire.request import GenerateRequest
    from pdserve.wire.transfer import ConnectorReport, KVHandoff
    from tests.sim.engine import EngineSpec
    from tests.sim.scenario import Cut, Death, LifeSpec, Restart, Slowness, StoreSpec

T = TypeVar("T")

PROXY = "http://proxy:80"
OPERATOR = "the operator's key"
_TENANT = "X-Tenant"
REQUEST_TIMEOUT_S = 20.0
_REUSE_FAULTS = {"block_reused", "block_reused_under_write", "block_reused_under_load"}
PATIENCE_S = REQUEST_TIMEOUT_S + 2.0
SETTLE_S = 40.0
DRAIN_SLACK_S = 0.01


class Broken(enum.Enum):
    """What must never be."""

    WRONG_TOKEN = "wrong token"
    BLOCKS_HELD = "blocks not free"
    REUSED = "block reused under a transfer"
    NO_END = "no final state"
    CRASH = "crash"


@dataclass
class Result:
    """What came of a run.

    Attributes:
        digest: Over every step of an engine and every answer, in their order, with their times.
    """

    seed: int
    digest: str = ""
    lives: int = 0
    violations: list[tuple[Broken, str]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    reached: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    rungs: Counter[str] = field(default_factory=Counter)
    kv_bytes: int = 0
    virtual_s: float = 0.0


class _InOrder(dict[T, None]):
    """A set that is gone through in the order in which things came into it.

    A set of objects is gone through by their addresses, which differ from process to process.
    """

    def add(self, item: T) -> None:
        self[item] = None

    def discard(self, item: T) -> None:
        self.pop(item, None)


class World:
    """See the module."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.may_push = scenario.may_push
        self.clock = ManualClock()
        self.net = Net()
        self.exchange = SimExchange(is_direct=scenario.is_direct, is_driven=scenario.is_driven)
        self.result = Result(scenario.seed)
        self.engines: dict[str, SimEngine] = {}
        self._former: list[SimEngine] = []
        self._plans: list[Plan] = []
        self.store = ToyStore()
        self._troubles: list[Trouble] = []
        self._num_lives_of_engines = 0
        self._handoffs: dict[str, KVHandoff] = {}
        self._rng = random.Random(scenario.seed ^ 0x5EED)
        self._log = _Errors(self)
        self._happened = hashlib.blake2b(digest_size=8)
        nonces = itertools.count()
        config = ProxyConfig(
            prefill=tuple(e.url for e in scenario.engines if e.role is Role.PREFILL),
            decode=tuple(e.url for e in scenario.engines if e.role is Role.DECODE),
            secret=SECRET,
            operator_keys=(OPERATOR,),
            request_timeout_s=REQUEST_TIMEOUT_S,
            queue_timeout_s=REQUEST_TIMEOUT_S,
            health_check_interval_s=0.25,
            health_check_timeout_s=0.5,
            cb_timeout_s=0.5,
            split_policy=scenario.split_policy,
            tenant_header=_TENANT,
        )
        self.proxy = Proxy(
            config,
            clock=self.clock,
            rng=random.Random(scenario.seed),
            new_nonce=lambda: f"proxy-{next(nonces)}",
        )
        if self.proxy.pairing is not None:
            self._teach(self.proxy.pairing.model)
        for backend in self.proxy.backends:
            backend.legs = _InOrder()  # type: ignore[assignment]

    # --- what engines ask

    @staticmethod
    def step_s(num_tokens: int) -> float:
        return 0.001 + 0.0002 * num_tokens

    def _teach(self, model: ServiceModel) -> None:
        """What engines take, so that pairs are chosen from the first request on."""
        for number in range(1, 30):
            model.learn_prompts(prompt_work(number, 0), self.step_s(number))
            model.learn_step(1 + number % 4, 10 * number, self.step_s(1 + number % 4))

    def violation(self, error: BaseException) -> None:
        """Something raised that must not."""
        kind = Broken.WRONG_TOKEN if isinstance(error, WrongKVError) else Broken.CRASH
        said = "".join(traceback.format_exception(error)[-6:])
        self.result.violations.append((kind, said))

    def happened(self, *what: object) -> None:
        """Take an event into the digest; the same in every process."""
        self._happened.update(repr((self.clock.monotonic_s(), *what)).encode())

    def new_trouble(self, spec: StoreSpec) -> Trouble:
        """What goes wrong with the store as one life of an engine sees it."""
        seed = self.scenario.seed * 1013 + len(self._troubles)
        self._troubles.append(Trouble(seed=seed, loses=spec.loses, is_late=spec.is_late))
        return self._troubles[-1]

    def note(self, report: ConnectorReport) -> None:
        """Take note of what came of transfers."""
        reached = self.result.reached
        for received in report.received:
            is_store = received.connector == STORE
            reached["store received" if is_store else f"{received.mode.value} received"] += 1
            self.result.kv_bytes += received.num_bytes
        for failed in report.failed:
            is_store = failed.connector == STORE
            reached[f"{'store' if is_store else 'load'} failed: {failed.reason.value}"] += 1
        for settled in report.settled:
            reached[f"lease {settled.end.value}"] += 1

    def carried(self, request: GenerateRequest) -> GenerateRequest:
        """A request as it comes to an engine; its handoff may be an earlier one of its prompt."""
        handoff = request.handoff
        if handoff is None:
            return request
        earlier = self._handoffs.get(handoff.prompt_digest)
        self._handoffs[handoff.prompt_digest] = handoff
        if (
            earlier is None
            or earlier.first_token_ids != handoff.first_token_ids
            or self._rng.random() >= self.scenario.replayed_handoffs
        ):
            return request
        self.result.faults["replay_handoff"] += earlier != handoff
        return msgspec.structs.replace(request, handoff=earlier)

    # --- the run

    def run(self) -> Result:
        """Do it all; collect what broke."""
        with self._log:
            try:
                virtual_time.run(self.clock, self._main())
            except virtual_time.StuckError as error:
                self.result.violations.append((Broken.NO_END, str(error)))
        self.result.digest = self._happened.hexdigest()
        return self.result

    async def _main(self) -> None:
        start_s = self.clock.monotonic_s()
        scenario = self.scenario
        for spec in scenario.engines:
            self._start(spec)
        self.proxy._http._opened = self.net.session()  # type: ignore[assignment]
        self.net.hosts["proxy:80"] = Host(self.proxy.build_app(), self.violation)
        await self.proxy.checks.start()
        troubles = [
            asyncio.create_task(each)
            for each in (
                *(self._death(death) for death in scenario.deaths),
                *(self._restart(restart) for restart in scenario.restarts),
                *(self._cut(cut) for cut in scenario.cuts),
                *(self._slowness(slowness) for slowness in scenario.slownesses),
            )
        ]
        await asyncio.gather(*(self._live(life) for life in scenario.lives))
        await asyncio.gather(*troubles)
        for plan in self._plans:
            self.result.faults.update({k.value: n for k, n in plan.num_struck.items() if n})
            plan.quiet()
        for trouble in self._troubles:
            trouble.quiet()
        await self._settle()
        for engine in [*self._former, *self.engines.values()]:
            stats = engine.stats
            self.result.rungs.update(stats.kv_ladder)
            for name in _REUSE_FAULTS & set(stats.kv_faults):
                said = f"{engine.spec.name}: {name} {stats.kv_faults[name]}"
                self.result.violations.append((Broken.REUSED, said))
            self.result.reached["preempted"] += stats.num_preemptions
            for name, number in stats.kv_source_tokens.items():
                self.result.reached[f"tokens from {name}"] += number
        self._count_proxy()
        self.result.virtual_s = self.clock.monotonic_s() - start_s
        await self.proxy.checks.stop()
        for engine in self.engines.values():
            engine.die()

    def _start(self, spec: EngineSpec) -> None:
        self._num_lives_of_engines += 1
        number = self._num_lives_of_engines
        plan = Plan(
            seed=self.scenario.seed * 1009 + number,
            rates={FaultKind(name): rate for name, rate in self.scenario.rates.items()},
        )
        self._plans.append(plan)
        self.engines[spec.name] = SimEngine(self, spec, number, plan)

    # --- trouble

    async def _death(self, death: Death) -> None:
        await asyncio.sleep(death.at_s)
        engine = self.engines[death.engine]
        if engine.is_over:
            return
        self._note_death(engine)
        engine.die()
        self._former.append(engine)
        await asyncio.sleep(death.down_s)
        self._start(engine.spec)

    async def _restart(self, restart: Restart) -> None:
        await asyncio.sleep(restart.at_s)
        engine = self.engines[restart.engine]
        if engine.is_over:
            return
        asked_s = self.clock.monotonic_s()
        report = await self._drain(engine.spec.url, restart.deadline_s)
        took_s = self.clock.monotonic_s() - asked_s
        if took_s > restart.deadline_s + DRAIN_SLACK_S:
            said = f"{engine.spec.name} is drained after {took_s} s of {restart.deadline_s}"
            self.result.violations.append((Broken.NO_END, said))
        self.result.reached["drained"] += 1
        self.result.reached["drained: moved"] += report.num_moved
        self.result.reached["drained: finished"] += report.num_finished
        if engine.is_over:
            return
        engine.die()
        self._former.append(engine)
        await asyncio.sleep(restart.down_s)
        self._start(engine.spec)

    async def _drain(self, url: str, deadline_s: float) -> DrainReport:
        response: Response = await self.net.session().post(
            PROXY + PATH,
            data=msgspec.json.encode(DrainRequest(url, deadline_s)),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {OPERATOR}"},
        )
        assert response.status == 200
        return msgspec.json.decode(await response.read(), type=DrainReport)

    def _note_death(self, engine: SimEngine) -> None:
        reached = self.result.reached
        reached["deaths"] += 1
        stages = {story.stage.value for story in self.proxy.live.stories}
        for stage in stages or {"idle"}:
            reached[f"{engine.spec.role.value} died during {stage}"] += 1

    async def _cut(self, cut: Cut) -> None:
        await asyncio.sleep(cut.at_s)
        self.result.reached["cuts"] += 1
        edge = frozenset(cut.engines)
        self.exchange.cut.add(edge)
        await asyncio.sleep(cut.for_s)
        self.exchange.cut.discard(edge)

    async def _slowness(self, slowness: Slowness) -> None:
        await asyncio.sleep(slowness.at_s)
        self.engines[slowness.engine].speed = slowness.factor
        await asyncio.sleep(slowness.for_s)
        self.engines[slowness.engine].speed = 1.0

    # --- clients

    async def _live(self, life: LifeSpec) -> None:
        await asyncio.sleep(life.at_s)
        self.result.lives += 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                outcome = await self._ask(life)
        except TimeoutError:
            outcome = "none"
            self._broke(Broken.NO_END, life, f"nothing within {PATIENCE_S} s")
        self.result.outcomes[outcome] += 1
        self.happened(life.number, outcome)

    async def _ask(self, life: LifeSpec) -> str:
        prompt: dict[str, object] = {"prompt": life.prompt}
        if life.has_tool:
            content = text_of(life.prompt, ignore_eos=True)
            tool = {"type": "function", "function": {"name": TOOL, "parameters": {}}}
            prompt = {"messages": [{"role": "user", "content": content}], "tools": [tool]}
        body = {
            "model": "toy",
            **prompt,
            "seed": life.seed,
            "max_tokens": life.max_tokens,
            "ignore_eos": life.ignore_eos,
            "stream": life.stream,
        }
        if life.is_bound:
            body["guided_regex"] = BOUND.text
        answer = _Answer()
        try:
            async with asyncio.timeout(life.leaves_after_s):
                response: Response = await self.net.session().post(
                    f"{PROXY}/v1/{'chat/' if life.has_tool else ''}completions",
                    data=json.dumps(body).encode(),
                    headers={
                        "Content-Type": "application/json",
                        "X-Request-Id": f"{life.number}",
                        _TENANT: "greedy" if life.number % 8 else "modest",
                    },
                )
                try:
                    answer.status, answer.kind = response.status, response.content_type
                    async for chunk in chunks_of(response):
                        answer.data += chunk
                finally:
                    response.close()
        except TimeoutError:
            if life.leaves_after_s is None:
                raise
            answer.is_cut = True
        except Exception as error:
            self._broke(Broken.NO_END, life, f"the proxy hung up: {error!r}")
            return "hung up"
        return self._judge(life, answer)

    def _judge(self, life: LifeSpec, answer: _Answer) -> str:
        """Compare with the one right answer."""
        output = expected_output(
            life.prompt,
            SamplingParams(
                seed=choice_seed(life.seed, 0),
                max_tokens=life.max_tokens,
                ignore_eos=life.ignore_eos,
                eos_token_ids=(TOY_EOS,),
                grammar=BOUND if life.is_bound else None,
            ),
        )
        wanted = text_of(output, ignore_eos=life.ignore_eos)
        ended = output[-1] == TOY_EOS and not life.ignore_eos
        reason = "stop" if ended else "length"
        wanted_calls: list[str] = []
        if life.has_tool:
            wanted, wanted_calls, num_whole = answer_of(wanted, is_cut=not ended)
            self.result.reached["calls"] += num_whole
            reason = "tool_calls" if num_whole and ended else reason
            if not life.stream:
                wanted_calls = wanted_calls[:num_whole]
        try:
            answer.parse()
        except (AssertionError, ValueError, KeyError) as error:
            self._broke(Broken.CRASH, life, f"an answer that cannot be read: {error!r}")
            return "garbled"
        if not (wanted.startswith(answer.text) and _are_begun(answer.calls, wanted_calls)):
            said = f"{answer.text!r} {answer.calls} is not {wanted!r} {wanted_calls}"
            self._broke(Broken.WRONG_TOKEN, life, said)
            return "wrong"
        if answer.is_cut:
            return "left"
        if answer.error is not None:
            return f"error: {answer.error}"
        if not answer.is_done:
            self._broke(Broken.NO_END, life, f"the stream broke off after {answer.text!r}")
            return "broken off"
        if (answer.text, answer.calls, answer.reason) != (wanted, wanted_calls, reason):
            said = f"{answer.text!r} {answer.calls} ({answer.reason})"
            all_of_it = f"{wanted!r} {wanted_calls} ({reason})"
            self._broke(Broken.WRONG_TOKEN, life, f"{said} is not all of {all_of_it}")
            return "wrong"
        return "ok"

    def _broke(self, kind: Broken, life: LifeSpec, what: str) -> None:
        self.result.violations.append((kind, f"life {life.number}: {what}"))

    # --- the end

    async def _settle(self) -> None:
        """Let everything come to rest, and see that nothing is left."""
        deadline_s = self.clock.monotonic_s() + SETTLE_S
        while self.clock.monotonic_s() < deadline_s:
            if self._is_at_rest():
                break
            await asyncio.sleep(0.1)
        for engine in self.engines.values():
            try:
                assert_nothing_held(engine.scheduler)
            except AssertionError as error:
                said = f"{engine.spec.name}: {error or traceback.format_exc(limit=2)}"
                self.result.violations.append((Broken.BLOCKS_HELD, said))
        for engine in self.engines.values():
            half = engine.scheduler.state.connector
            if isinstance(half, MultiScheduler) and half.num_open:
                said = f"{engine.spec.name}: {half.num_open} requests are known to its connector"
                self.result.violations.append((Broken.NO_END, said))
            if engine.executor.quorum.num_open:
                said = f"{engine.spec.name}: {engine.executor.quorum.num_open} votes lack a rank"
                self.result.violations.append((Broken.NO_END, said))
        left = self.proxy.num_background_tasks, self.proxy.admission.num_running
        if any(left):
            said = f"the proxy has {left[0]} tasks and {left[1]} requests left"
            self.result.violations.append((Broken.NO_END, said))
        if self.proxy.pairing is not None:
            for engine in self.engines.values():
                work = self.proxy.pairing.ledger.of(engine.spec.url)
                if work.num_prompts or work.num_streams:
                    said = f"the ledger has work at {engine.spec.name}: {work}"
                    self.result.violations.append((Broken.NO_END, said))

    def _is_at_rest(self) -> bool:
        return (
            all(
                engine.scheduler.is_idle
                and not engine.scheduler.num_in_flight
                and not engine.executor.quorum.num_open
                for engine in self.engines.values()
            )
            and not self.proxy.num_background_tasks
            and not self.proxy.admission.num_running
        )

    def _count_proxy(self) -> None:
        metrics = self.proxy.metrics
        series_of = metrics.decisions, metrics.retries, metrics.leg_failures, metrics.migrations
        for series in series_of:
            for sample in next(iter(series.collect())).samples:
                if sample.name.endswith("_total") and sample.value:
                    labels = ", ".join(sample.labels.values())
                    name = sample.name.removeprefix("pdserve_").removesuffix("_total")
                    self.result.rungs[f"{name} ({labels})"] += int(sample.value)


def _are_begun(calls: list[str], wanted: list[str]) -> bool:
    """Whether calls are the first of those that are wanted, and the last one is a part of its."""
    return (
        len(calls) <= len(wanted)
        and calls[:-1] == wanted[: max(0, len(calls) - 1)]
        and all(whole.startswith(call) for call, whole in zip(calls, wanted, strict=False))
    )


@dataclass
class _Answer:
    """What a client got."""

    status: int = 0
    kind: str = ""
    data: bytes = b""
    is_cut: bool = False
    text: str = ""
    calls: list[str] = field(default_factory=list)
    reason: str | None = None
    error: str | None = None
    is_done: bool = False

    def parse(self) -> None:
        """Read it as OpenAI's clients do."""
        if self.kind == "application/json":
            if not self.is_cut:
                whole = json.loads(self.data)
                self._take(whole)
                self.is_done = True
                if self.status != 200:
                    self.error = f"{self.status} {whole['error']['code']}"
            return
        *events, rest = self.data.split(b"\n\n")
        assert not rest or self.is_cut, rest
        for event in events:
            said = event.removeprefix(b"data: ")
            if said == b"[DONE]":
                self.is_done = True
            else:
                self._take(json.loads(said))

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = f"in stream {chunk['error']['code']}"
            return
        assert not any(name.startswith("pdserve") for name in chunk), chunk
        for choice in chunk["choices"]:
            said = choice.get("message") or choice.get("delta") or {}
            self.text += choice.get("text") or said.get("content") or ""
            for index, call in enumerate(said.get("tool_calls") or ()):
                at = call.get("index", index)
                self.calls += [""] * (at + 1 - len(self.calls))
                assert call["function"].get("name", TOOL) == TOOL
                self.calls[at] += call["function"].get("arguments") or ""
            self.reason = choice["finish_reason"] or self.reason


class _Errors(logging.Handler):
    """Takes what the product logs of exceptions that it did not expect."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def __enter__(self) -> None:
        self._logger = logging.getLogger("pdserve")
        self._before = self._logger.level, self._logger.propagate
        self._logger.addHandler(self)
        self._logger.setLevel(logging.ERROR)
        self._logger.propagate = False

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._before[0])
        self._logger.propagate = self._before[1]

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._world.violation(record.exc_info[1])


def run_seed(seed: int) -> Result:
    """Run the scenario of a seed."""
    return World(draw(seed)).run()
