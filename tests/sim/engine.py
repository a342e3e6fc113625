"""One engine of the simulation: everything of it is real but its model, its process and its wire.

The real API server over a client that turns the real core; the real scheduler half, worker
halves of the memory connector inside faulty ones, and toy ranks. A step takes virtual time;
transfers go on meanwhile.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.config.http import ServerConfig
from pdserve.config.schema import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    Role,
    SchedulerConfig,
    TransferConfig,
)
from pdserve.config.speculative import SpeculativeConfig
from pdserve.connectors.memory import MemoryConnector
from pdserve.connectors.multi import MultiConnector
from pdserve.engine.loading import start_engine
from pdserve.server.app import build_app
from pdserve.server.service import SERVICE
from pdserve.wire.ids import EngineId, Incarnation, client_id_of
from tests.faulty import FaultyConnector
from tests.local_engine import LocalEngine, TimedExecutor
from tests.scheduler.invariants import check
from tests.sim.net import Host
from tests.sim.text import TEXT, ToyChecks
from tests.toy_drafts import TOY_DRAFTERS
from tests.toy_store import ToyStoreConnector

if TYPE_CHECKING:
    from pdserve.connectors.base import KVConnectorBase
    from pdserve.wire.request import GenerateRequest
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
    from pdserve.wire.transfer import ConnectorReport, KVShape
    from tests.faulty import Plan
    from tests.sim.world import World

SECRET = "simulated"
MAX_MODEL_LEN = 64
_CHECK_EVERY = 16


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What stays the same over an engine's lives.

    Attributes:
        drafter: One of `TOY_DRAFTERS`; empty drafts nothing.
    """

    name: str
    role: Role
    shape: KVShape
    max_num_seqs: int
    max_num_batched_tokens: int
    lease_s: float
    transfer_timeout_s: float
    recompute_tokens_per_s: float
    drafter: str = ""

    @property
    def address(self) -> str:
        return f"{self.name}:80"

    @property
    def url(self) -> str:
        return f"http://{self.address}"


class SimExecutor(TimedExecutor):
    """Tells the world what its ranks do."""

    def __init__(self, world: World, engine: str, *args: Any, **named: Any) -> None:
        super().__init__(*args, clock=world.clock, **named)
        self._world, self._engine = world, engine

    def poll_report(self) -> ConnectorReport | None:
        report = super().poll_report()
        if report is not None:
            self._world.note(report)
        return report

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._world.happened(
            self._engine,
            [(client_id_of(name), n) for name, n in step.num_scheduled_tokens.items()],
            [new.block_ids for new in step.new_requests],
            list(step.new_block_ids.values()),
        )
        result = super()._execute(step)
        self._world.result.reached["sat out"] += len(result.unready_ids)
        return result


class SimEngine(LocalEngine):
    """One life of an engine.

    Attributes:
        speed: Steps take so many times their usual time.
    """

    def __init__(self, world: World, spec: EngineSpec, life: int, plan: Plan) -> None:
        self.world = world
        self.spec = spec
        self.speed = 1.0
        self._num_turns = 0
        config = EngineConfig(
            model=ModelConfig(model="toy"),
            role=spec.role,
            engine_id=spec.name,
            cache=CacheConfig(block_size=spec.shape.block_size),
            scheduler=SchedulerConfig(
                max_num_seqs=spec.max_num_seqs,
                max_num_batched_tokens=spec.max_num_batched_tokens,
                recompute_tokens_per_s=spec.recompute_tokens_per_s,
            ),
            transfer=TransferConfig(
                kv_connector="memory",
                secret=SECRET,
                lease_s=spec.lease_s,
                transfer_timeout_s=spec.transfer_timeout_s,
            ),
            speculative=SpeculativeConfig(method="ngram" if spec.drafter else ""),
        )
        identity = EngineId(spec.name), Incarnation(f"{spec.name}-life-{life}")
        nonces = itertools.count()
        connector: KVConnectorBase = FaultyConnector.around(
            MemoryConnector(
                exchange=world.exchange,
                clock=world.clock,
                new_nonce=lambda: f"{identity[1]}-{next(nonces)}",
                piece_bytes=world.scenario.piece_bytes,
            ),
            plan,
        )
        store = world.scenario.store
        if store is not None:
            beside = ToyStoreConnector(
                store=world.store,
                trouble=world.new_trouble(store),
                is_async=store.is_async,
                may_wait=store.may_wait,
            )
            connector = MultiConnector.of([connector, beside])
        executor = SimExecutor(
            world,
            spec.name,
            config,
            connector,
            shape=spec.shape,
            engine_id=identity[0],
            incarnation=identity[1],
            max_model_len=MAX_MODEL_LEN,
            wake=self.woken,
            step_s=lambda step: self.speed * world.step_s(step.num_tokens),
        )
        executor.drafter = TOY_DRAFTERS.get(spec.drafter)
        core, info = start_engine(
            executor,
            connector,
            world.clock,
            config=config,
            engine_id=identity[0],
            incarnation=identity[1],
        )
        info = msgspec.structs.replace(info, can_push=info.can_push and world.may_push)
        super().__init__(core, info, executor, world.clock, tick_s=spec.lease_s / 8)
        app = build_app(
            self, TEXT, engine_config=config, server_config=ServerConfig(), clock=world.clock
        )
        app[SERVICE].grammar_checks = ToyChecks()
        self.host = Host(app, world.violation)
        world.net.hosts[spec.address] = self.host

    @property
    def is_over(self) -> bool:
        """Whether this life has ended."""
        return self.dead_reason is not None

    def add(self, request: GenerateRequest) -> None:
        super().add(self.world.carried(request))

    def ended(self, error: Exception) -> None:
        self.world.violation(error)

    def turn(self) -> None:
        super().turn()
        self._num_turns += 1
        if self._num_turns % _CHECK_EVERY == 0:
            check(self.scheduler)

    def die(self, reason: str = "it was killed") -> None:
        """As by SIGKILL: nothing is said to anybody."""
        self.running.clear()
        super().die(reason)
        if self.world.net.hosts.get(self.spec.address) is self.host:
            del self.world.net.hosts[self.spec.address]
        self.host.die()
