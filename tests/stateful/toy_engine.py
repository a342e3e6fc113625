"""A whole engine in memory: the real scheduler, the real memory connector, toy workers.

It is an asynchronous device: a step computes when it is collected, while transfers happen
when it is submitted, before the steps in flight have computed.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING

from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.memory import MemoryFactory
from pdserve.connectors.quorum import Quorum
from pdserve.scheduler.scheduler import Scheduler
from pdserve.wire.ids import EngineId, Incarnation
from pdserve.wire.transfer import EngineRef
from tests.stateful.toy import VOCAB, ToyWorker, toy_layout, toy_shape

if TYPE_CHECKING:
    from pdserve.connectors.memory.exchange import Exchange
    from pdserve.observe.clock import ManualClock
    from pdserve.wire.request import EngineOutput
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
    from pdserve.wire.transfer import ConnectorReport

_lives = itertools.count()

# A load is on the wire for three, and one that fails may be tried once more.
_QUIET_POLLS = 8


class ToyEngine:
    """One engine of a P/D pair.

    Args:
        exchange: Shared by the engines that can reach one another.
        depth: Steps that may be in flight.
        num_stages: Pipeline stages that its scheduler and workers believe in.
        num_ranks: Each has a worker and a connector half, and all must give the same tokens.

    Attributes:
        late: Ranks whose connector halves neither move nor report anything meanwhile.
        ref: How tickets name this engine.
        reports: What came of the ranks' reports, in order.
    """

    def __init__(
        self,
        engine_id: str,
        exchange: Exchange,
        clock: ManualClock,
        *,
        num_blocks: int = 16,
        block_size: int = 8,
        max_model_len: int = 48,
        max_num_batched_tokens: int = 16,
        depth: int = 2,
        num_stages: int = 1,
        num_ranks: int = 1,
    ) -> None:
        self.depth = depth
        self.config = EngineConfig(
            model=ModelConfig(model="toy"),
            engine_id=engine_id,
            cache=CacheConfig(block_size=block_size),
            scheduler=SchedulerConfig(
                max_num_seqs=4, max_num_batched_tokens=max_num_batched_tokens
            ),
        )
        layout = toy_layout(num_blocks, block_size)
        life = next(_lives)
        contexts = [
            ConnectorContext(
                config=self.config,
                engine_id=EngineId(engine_id),
                incarnation=Incarnation(f"life-{life}"),
                layout=layout,
                layout_digest="toy",
                layout_fields={"schema": "1"},
                shape=toy_shape(num_blocks, block_size, num_ranks),
                rank=rank,
                num_ranks=num_ranks,
            )
            for rank in range(num_ranks)
        ]
        nonces = itertools.count()
        factory = MemoryFactory(
            exchange, clock=clock, new_nonce=lambda: f"{engine_id}-{life}-{next(nonces)}"
        )
        self.connectors = [factory.worker(context, lambda: None) for context in contexts]
        self.workers = [
            ToyWorker(num_blocks, block_size, connector, rank=rank, num_stages=num_stages)
            for rank, connector in enumerate(self.connectors)
        ]
        endpoints = [half.endpoint for half in self.connectors if half.endpoint is not None]
        self.ref = EngineRef(
            engine_id=contexts[0].engine_id,
            incarnation=contexts[0].incarnation,
            endpoints=tuple(endpoints),
            shape=contexts[0].shape,
        )
        self.quorum = Quorum(num_ranks)
        self.late: set[int] = set()
        self.reports: list[ConnectorReport] = []
        self.scheduler = Scheduler(
            self.config.scheduler,
            self.config.cache,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            connector=factory.scheduler(contexts[0], endpoints),
            clock=clock,
            num_stages=num_stages,
        )
        self.in_flight: deque[tuple[SchedulerOutput, list[ConnectorReport]]] = deque()

    def submit(self) -> bool:
        """Plan one step and move its KV; False if there was nothing to do."""
        step = self.scheduler.schedule()
        if step is None:
            return False
        self.in_flight.append((step, self._move_kv()))
        return True

    def collect(self) -> None:
        """Compute the oldest step and take its result, or take the connector's news."""
        if not self.in_flight:
            reports = self._move_kv()
        else:
            step, reports = self.in_flight.popleft()
            output, *others = [self._execute(rank, step) for rank in range(len(self.workers))]
            assert all(other == output for other in others), "ranks differ"
            self.scheduler.update(output)
        for report in reports:
            self.scheduler.apply_report(report)

    def _execute(self, rank: int, step: SchedulerOutput) -> ModelRunnerOutput:
        connector = self.connectors[rank]
        if step.connector_metadata is not None:
            connector.start_load_kv(step.connector_metadata)
        output = self.workers[rank].execute(step)
        if step.num_scheduled_tokens:
            connector.wait_for_save()
        return output

    def _move_kv(self) -> list[ConnectorReport]:
        """Let KV move, at once: transfers wait for no step. Return what all ranks have seen."""
        instructions = self.scheduler.take_instructions()
        if instructions is not None:
            for connector in self.connectors:
                connector.post(instructions)
        reports = [
            self.quorum.add(rank, connector.get_finished())
            for rank, connector in enumerate(self.connectors)
            if rank not in self.late
        ]
        self.reports += filter(None, reports)
        return reports

    def step(self) -> list[EngineOutput]:
        """Advance by one step, whatever there is."""
        if len(self.in_flight) < self.depth:
            self.submit()
        self.collect()
        return self.scheduler.drain_outputs()

    def settle(self) -> list[EngineOutput]:
        """Step until nothing moves any more, loads on the wire included."""
        outputs: list[EngineOutput] = []
        num_quiet = 0
        while num_quiet < _QUIET_POLLS:
            moved = self.submit() if len(self.in_flight) < self.depth else False
            moved = moved or bool(self.in_flight)
            self.collect()
            new = self.scheduler.drain_outputs()
            outputs += new
            num_quiet = 0 if moved or new else num_quiet + 1
        return outputs

    def close(self) -> None:
        """Leave the exchange."""
        for connector in self.connectors:
            connector.close(0.0)
