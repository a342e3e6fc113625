"""An engine core over toy ranks, whose steps come to their end when the test says so."""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.config.kv_events import KVEventsConfig
from pdserve.config.schema import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pdserve.config.speculative import SpeculativeConfig
from pdserve.connectors.base import NullConnector
from pdserve.connectors.memory import MemoryConnector
from pdserve.engine.core import EngineCore
from pdserve.engine.loading import start_engine
from pdserve.observe.clock import ManualClock
from pdserve.wire.ids import EngineId, Incarnation
from pdserve.wire.sampling import SamplingParams
from pdserve.wire.transfer import ConnectorReport, EngineRef, Failed
from tests.scheduler.invariants import check
from tests.toy_executor import TOY_EOS, ToyExecutor, toy_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.connectors.base import KVConnectorBase, KVConnectorScheduler, KVConnectorWorker
    from pdserve.connectors.memory.exchange import Exchange
    from pdserve.wire.request import EngineOutput
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
    from pdserve.wire.transfer import KVShape

_lives = itertools.count()

# A load is on the wire for three, and one that fails may be tried once more.
_QUIET_TURNS = 8


def sampling(max_tokens: int, *, seed: int = 0, ignore_eos: bool = False) -> SamplingParams:
    """Toy sampling parameters."""
    return SamplingParams(
        max_tokens=max_tokens, seed=seed, eos_token_ids=(TOY_EOS,), ignore_eos=ignore_eos
    )


def toy_config(
    *,
    engine_id: str = "",
    block_size: int = 8,
    num_stages: int = 1,
    enable_prefix_caching: bool = True,
    tells: bool = False,
    max_drafted: int = 0,
    **scheduler: Any,
) -> EngineConfig:
    """The settings of a toy engine; `scheduler` are fields of `SchedulerConfig`."""
    return EngineConfig(
        model=ModelConfig(model="toy"),
        engine_id=engine_id,
        cache=CacheConfig(
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            events=KVEventsConfig(enable_kv_cache_events=tells),
        ),
        scheduler=SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, **scheduler}),
        parallel=ParallelConfig(pipeline_parallel_size=num_stages),
        speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=max_drafted)
        if max_drafted
        else SpeculativeConfig(),
    )


class HeldExecutor(ToyExecutor):
    """Brings a step to its end when the test says so.

    Attributes:
        late: Ranks whose connector halves neither move nor report anything meanwhile.
        played: What the ranks are made to report beside what they report.
        reports: What came of the ranks' own reports, in order.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.late: set[int] = set()
        self.played: deque[ConnectorReport] = deque()
        self.reports: list[ConnectorReport] = []
        self._ends: deque[dict[str, Any]] = deque()
        self._failing: list[Failed] = []

    def finish(self, **changes: Any) -> None:
        """Let the oldest step come back, with these changes to its result."""
        self._ends.append(changes)

    def poll_result(self) -> ModelRunnerOutput | None:
        if not self._ends:
            return None
        changes = self._ends.popleft()
        self._failing = changes.pop("failed_loads", [])
        result = super().poll_result()
        assert result is not None, "no step is in flight"
        return msgspec.structs.replace(result, **changes)

    def poll_report(self) -> ConnectorReport | None:
        if self.played:
            return self.played.popleft()
        report = super().poll_report()
        if report is not None:
            self.reports.append(report)
        return report

    def _finish_kv(self, layers: Sequence[tuple[KVConnectorWorker, int]]) -> list[Failed]:
        return [*super()._finish_kv(layers), *self._failing]

    def _said(self, rank: int) -> ConnectorReport:
        return ConnectorReport() if rank in self.late else super()._said(rank)


class HeldEngine:
    """A core over such an executor.

    Args:
        half: Takes the place of the scheduler half that `connector` makes.
        depth: Steps that `step` and `settle` keep in flight.

    Attributes:
        ref: How tickets name this engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        shape: KVShape,
        *,
        connector: KVConnectorBase | None = None,
        half: KVConnectorScheduler | None = None,
        clock: ManualClock | None = None,
        max_model_len: int = 48,
        depth: int = 1,
    ) -> None:
        self.clock = clock or ManualClock()
        self.depth = depth
        connector = connector or NullConnector()
        identity = EngineId(config.engine_id or "toy"), Incarnation(f"life-{next(_lives)}")
        self.executor = HeldExecutor(
            config,
            connector,
            shape=shape,
            engine_id=identity[0],
            incarnation=identity[1],
            max_model_len=max_model_len,
        )
        if half is not None:
            workers = self.executor.start()
            self.core = EngineCore(self.executor, half, self.clock, config=config, workers=workers)
        else:
            self.core, info = start_engine(
                self.executor,
                connector,
                self.clock,
                config=config,
                engine_id=identity[0],
                incarnation=identity[1],
            )
            self.ref = EngineRef(
                engine_id=info.engine_id,
                incarnation=info.incarnation,
                endpoints=tuple(info.endpoints),
                shape=shape,
            )
        self.scheduler = self.core.scheduler
        self._outputs: list[EngineOutput] = []

    @property
    def in_flight(self) -> deque[SchedulerOutput]:
        """Steps that have not come back, the oldest first."""
        return self.executor.in_flight

    def blocks(self, state: str) -> int:
        """Number of blocks in a state."""
        return self.scheduler.stats().blocks[state]

    def submit(self) -> SchedulerOutput | None:
        """Plan a step; it is in flight until it is collected. None: there is nothing to do."""
        num_before = len(self.in_flight)
        self._turn(num_before + 1)
        return self.in_flight[-1] if len(self.in_flight) > num_before else None

    def submit_empty(self) -> SchedulerOutput:
        """Submit a step without tokens, as for a wave of other engines."""
        step = self.scheduler.empty_step()
        self.executor.submit(step)
        return step

    def collect(self, **changes: Any) -> list[EngineOutput]:
        """Bring the oldest step, if there is one, to its end, and take the connector's news.

        Args:
            changes: To the step's result.
        """
        num_left = len(self.in_flight)
        if num_left:
            self.executor.finish(**changes)
            num_left -= 1
        self._turn(num_left)
        return self.take()

    def submit_all(self) -> None:
        """Plan steps until there are as many in flight as may be, or nothing is left to do."""
        self._turn(self.depth)

    def step(self) -> list[EngineOutput]:
        """Advance by one step, whatever there is."""
        self.submit_all()
        return self.collect()

    def run(self) -> list[EngineOutput]:
        """Steps until nothing can be scheduled."""
        outputs = self.take()
        while self.submit() is not None:
            outputs += self.collect()
        return outputs + self.take()

    def settle(self) -> list[EngineOutput]:
        """Step until nothing moves any more, loads on the wire included."""
        outputs: list[EngineOutput] = []
        num_quiet = 0
        while num_quiet < _QUIET_TURNS:
            self.submit_all()
            moved = bool(self.in_flight)
            told = self.collect()
            outputs += told
            num_quiet = 0 if moved or told else num_quiet + 1
        return outputs

    def report(self, **facts: Any) -> list[EngineOutput]:
        """All ranks' connector halves have seen this."""
        self.executor.played.append(ConnectorReport(**facts))
        self._turn(len(self.in_flight))
        return self.take()

    def take(self) -> list[EngineOutput]:
        """Outputs since the last call."""
        outputs, self._outputs = self._outputs + self.scheduler.drain_outputs(), []
        return outputs

    def close(self) -> None:
        """Leave the exchange."""
        self.core.close(0.0)

    def _turn(self, max_in_flight: int) -> None:
        self.executor.max_in_flight = max_in_flight
        self.core.step(self._outputs.extend)
        check(self.scheduler)


class ToyEngine(HeldEngine):
    """One engine of a P/D pair, over the memory connector.

    Args:
        exchange: Shared by the engines that can reach one another.
        num_ranks: Each has its own KV memory and connector half.
    """

    def __init__(
        self,
        engine_id: str,
        exchange: Exchange,
        clock: ManualClock,
        *,
        num_blocks: int = 16,
        num_ranks: int = 1,
        num_stages: int = 1,
        **fields: Any,
    ) -> None:
        life, nonces = next(_lives), itertools.count()
        max_model_len = fields.pop("max_model_len", 48)
        super().__init__(
            toy_config(engine_id=engine_id, num_stages=num_stages, **fields),
            toy_shape(num_blocks, 8, pp=num_ranks),
            connector=MemoryConnector(
                exchange=exchange,
                clock=clock,
                new_nonce=lambda: f"{engine_id}-{life}-{next(nonces)}",
            ),
            clock=clock,
            max_model_len=max_model_len,
            depth=2,
        )
