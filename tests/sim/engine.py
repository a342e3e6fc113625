"""One engine of the simulation: everything of it is real but its model, its process and its wire.

The real API server over a client that calls the real scheduler; the real scheduler half, worker
halves of the memory connector inside faulty ones, and toy ranks. The core's loop follows
`EngineCore.step`: reports in, instructions out, steps submitted, steps collected, whichever is
possible first. A step takes virtual time; transfers go on meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.config.schema import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    Role,
    SchedulerConfig,
    ServerConfig,
    TransferConfig,
)
from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.faulty import FaultyFactory
from pdserve.connectors.memory import MemoryFactory
from pdserve.connectors.quorum import Quorum
from pdserve.engine.merge import MergedOutputs
from pdserve.errors import EngineDeadError
from pdserve.scheduler.scheduler import Scheduler
from pdserve.server.app import build_app
from pdserve.wire.ids import EngineId, Incarnation, client_id_of
from pdserve.wire.request import EngineInfo, EngineStats, with_siblings
from pdserve.wire.seal import PROTOCOL
from tests.sim.net import Host
from tests.sim.text import TEXT
from tests.sim.toy import VOCAB, ToyWorker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from pdserve.connectors.faulty import Plan
    from pdserve.wire.ids import RequestId
    from pdserve.wire.request import EngineOutput, GenerateRequest, Sibling
    from pdserve.wire.step import SchedulerOutput
    from pdserve.wire.trace import ProcessTrace
    from pdserve.wire.transfer import KVShape
    from tests.sim.world import World

SECRET = "simulated"
WIRE_S = 0.0004
MAX_IN_FLIGHT = 2
MAX_MODEL_LEN = 64
_CHECK_EVERY = 16


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What stays the same over an engine's lives."""

    name: str
    role: Role
    shape: KVShape
    max_num_seqs: int
    max_num_batched_tokens: int
    lease_s: float
    transfer_timeout_s: float
    recompute_tokens_per_s: float

    @property
    def address(self) -> str:
        return f"{self.name}:80"

    @property
    def url(self) -> str:
        return f"http://{self.address}"


class SimEngine:
    """One life of an engine.

    Attributes:
        speed: Steps take so many times their usual time.
    """

    def __init__(self, world: World, spec: EngineSpec, life: int, plan: Plan) -> None:
        self.world = world
        self.spec = spec
        self.speed = 1.0
        self.dead_reason: str | None = None
        self.stall_reason: str | None = None
        self.is_over = False
        self.news = asyncio.Event()
        self.config = EngineConfig(
            model=ModelConfig(model="toy"),
            role=spec.role,
            engine_id=spec.name,
            cache=CacheConfig(block_size=spec.shape.block_size),
            scheduler=SchedulerConfig(
                max_num_seqs=spec.max_num_seqs,
                max_num_batched_tokens=spec.max_num_batched_tokens,
                **world.scheduler_fields(spec),
            ),
            transfer=TransferConfig(
                kv_connector="memory",
                secret=SECRET,
                lease_s=spec.lease_s,
                transfer_timeout_s=spec.transfer_timeout_s,
            ),
        )
        self.worker = ToyWorker(spec.shape)
        layout = self.worker.ranks[0].layout
        whole = msgspec.structs.replace(
            layout, num_layers=spec.shape.num_layers, num_kv_heads=spec.shape.num_kv_heads
        )
        fields = whole.fields(model="toy", weights="toy")
        context = ConnectorContext(
            config=self.config,
            engine_id=EngineId(spec.name),
            incarnation=Incarnation(f"{spec.name}-life-{life}"),
            layout=layout,
            layout_digest="toy",
            layout_fields=fields,
            shape=spec.shape,
            num_ranks=spec.shape.num_ranks,
        )
        nonces = itertools.count()
        factory = FaultyFactory(
            MemoryFactory(
                world.exchange,
                clock=world.clock,
                new_nonce=lambda: f"{context.incarnation}-{next(nonces)}",
            ),
            plan,
            fabric=world.fabric,
        )
        self.halves, endpoints = [], []
        for number, rank in enumerate(self.worker.ranks):
            half = factory.worker(
                msgspec.structs.replace(context, layout=rank.layout, rank=number), self._woken
            )
            endpoint = half.register_kv_caches(rank.kv, rank.layout)
            assert endpoint is not None
            world.exchange.name(endpoint, spec.name)
            self.halves.append(half)
            endpoints.append(endpoint)
        self.scheduler_half = factory.scheduler(context, endpoints)
        self.quorum = Quorum(spec.shape.num_ranks)
        self.scheduler = Scheduler(
            self.config.scheduler,
            self.config.cache,
            num_blocks=spec.shape.num_blocks,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB,
            connector=self.scheduler_half,
            clock=world.clock,
        )
        self.info = EngineInfo(
            engine_id=EngineId(spec.name),
            incarnation=context.incarnation,
            role=spec.role.value,
            model="toy",
            dtype="int64",
            max_model_len=MAX_MODEL_LEN,
            block_size=spec.shape.block_size,
            num_blocks=spec.shape.num_blocks,
            max_num_seqs=spec.max_num_seqs,
            endpoints=endpoints,
            layout_digest="toy",
            layout=fields,
            can_push=self.halves[0].capabilities.push and world.may_push,
            kv_shape=spec.shape,
            protocol=PROTOCOL,
        )
        self._steps: deque[tuple[SchedulerOutput, float]] = deque()
        self._outputs: dict[RequestId, _Outputs] = {}
        self._num_turns = 0
        self._tick_s = spec.lease_s / 8
        self._is_waking = False
        app = build_app(
            self,
            TEXT,
            engine_config=self.config,
            server_config=ServerConfig(),
            clock=world.clock,
        )
        self.host = Host(app, world.violation)
        world.net.hosts[spec.address] = self.host
        self._core = asyncio.create_task(self._run())

    # --- the engine client, as the API server has it

    @property
    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    @property
    def core_stats(self) -> Sequence[EngineStats]:
        return [self.stats]

    async def generate(
        self, request: GenerateRequest, siblings: Sequence[Sibling] = ()
    ) -> AsyncGenerator[EngineOutput, None]:
        choices = with_siblings(request, siblings)
        outputs = MergedOutputs([self._generate(choice) for choice in choices])
        try:
            while (output := await outputs.next()) is not None:
                yield output
        finally:
            await outputs.close()

    async def abort(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            if request_id in self._outputs:
                self._outputs.pop(request_id).put(None)

    async def _generate(self, request: GenerateRequest) -> AsyncGenerator[EngineOutput, None]:
        if self.is_over:
            raise EngineDeadError("the engine has ended: it was killed")
        request = self.world.carried(request)
        outputs = self._outputs[request.request_id] = _Outputs()
        self.scheduler.add(request)
        self.news.set()
        has_ended = False
        try:
            while not has_ended:
                output = await outputs.next()
                if output is None:
                    return
                has_ended = output.finish_reason is not None
                if has_ended:
                    self._outputs.pop(request.request_id, None)
                yield output
        finally:
            self._outputs.pop(request.request_id, None)
            if not has_ended and not self.is_over:
                self.scheduler.abort([request.request_id])
                self.news.set()

    async def release_lease(self, nonce: str) -> None:
        if not self.is_over:
            self.scheduler.release_lease(nonce)
            self.news.set()

    async def reset_prefix_cache(self) -> None:
        self.scheduler.kv.pool.forget_all()

    async def trace(self, seconds: float) -> list[ProcessTrace]:
        return []

    async def close(self, *, timeout_s: float) -> None:
        self.die()

    # --- life and death

    def die(self) -> None:
        """As by SIGKILL: nothing is said to anybody."""
        self.is_over = True
        self._core.cancel()
        if self.world.net.hosts.get(self.spec.address) is self.host:
            del self.world.net.hosts[self.spec.address]
        self.host.die()
        for half in self.halves:
            half.close(0.0)

    # --- the core

    def _woken(self) -> None:
        """A transfer has news; it takes a moment to be seen."""
        if not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_later(WIRE_S, self._wake)

    def _wake(self) -> None:
        self._is_waking = False
        self.news.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                due_s = self._turn()
                self.news.clear()
                handle = loop.call_at(due_s, self.news.set)
                await self.news.wait()
                handle.cancel()
        except Exception as error:
            self.world.violation(error)

    def _turn(self) -> float:
        """All that can be done now; return when there is more to do, if nothing happens."""
        scheduler, now_s = self.scheduler, self.world.clock.monotonic_s()
        self._take_reports()
        self._post()
        self._submit(now_s)
        while self._steps and self._steps[0][1] <= now_s:
            step = self._steps.popleft()[0]
            scheduler.update(self._execute(step))
            self._take_reports()
            self._post()
            self._submit(now_s)
        self._post()
        for output in scheduler.drain_outputs():
            outputs = self._outputs.get(output.request_id)
            if outputs is not None:
                outputs.put(output)
        self._num_turns += 1
        if self._num_turns % _CHECK_EVERY == 0:
            scheduler.check()
        tick_s = now_s + self._tick_s
        return min(tick_s, self._steps[0][1]) if self._steps else tick_s

    def _take_reports(self) -> None:
        for number, half in enumerate(self.halves):
            with self.world.exchange.asked_by(self.spec.name):
                said = half.get_finished()
            report = self.quorum.add(number, said)
            if report:
                self.world.note(report)
                self.scheduler.apply_report(report)

    def _post(self) -> None:
        instructions = self.scheduler.take_instructions()
        if instructions is not None:
            with self.world.exchange.asked_by(self.spec.name):
                for half in self.halves:
                    half.post(instructions)

    def _submit(self, now_s: float) -> None:
        scheduler = self.scheduler
        if len(self._steps) >= MAX_IN_FLIGHT:
            scheduler.admit_loads()
        while len(self._steps) < MAX_IN_FLIGHT:
            step = scheduler.schedule()
            if step is None:
                return
            start_s = max(now_s, self._steps[-1][1]) if self._steps else now_s
            self._steps.append((step, start_s + self.speed * self.world.step_s(step.num_tokens)))

    def _execute(self, step: SchedulerOutput) -> Any:
        self.world.happened(
            self.spec.name,
            [(client_id_of(name), n) for name, n in step.num_scheduled_tokens.items()],
            [new.block_ids for new in step.new_requests],
            step.known_requests.new_block_ids,
        )
        with self.world.exchange.asked_by(self.spec.name):
            if step.connector_metadata is not None:
                for half in self.halves:
                    half.start_load_kv(step.connector_metadata)
            result = self.worker.execute(step)
            for half in self.halves:
                half.wait_for_save()
        return result


class _Outputs:
    """Outputs of one request on their way to its server."""

    def __init__(self) -> None:
        self._ready: deque[EngineOutput | None] = deque()
        self._event = asyncio.Event()

    def put(self, output: EngineOutput | None) -> None:
        """None: there will be no more of them."""
        self._ready.append(output)
        self._event.set()

    async def next(self) -> EngineOutput | None:
        while not self._ready:
            self._event.clear()
            await self._event.wait()
        return self._ready.popleft()
