"""A whole engine in memory: the real scheduler, the real memory connector, the toy worker.

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
from pdserve.scheduler.scheduler import Scheduler
from pdserve.wire.ids import EngineId, Incarnation
from tests.stateful.toy import VOCAB, ToyWorker, toy_layout

if TYPE_CHECKING:
    from pdserve.connectors.memory.exchange import Exchange
    from pdserve.observe.clock import ManualClock
    from pdserve.wire.request import EngineOutput
    from pdserve.wire.step import SchedulerOutput
    from pdserve.wire.transfer import ConnectorReport

_lives = itertools.count()


class ToyEngine:
    """One engine of a P/D pair.

    Args:
        exchange: Shared by the engines that can reach one another.
        depth: Steps that may be in flight.
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
        context = ConnectorContext(
            config=self.config,
            engine_id=EngineId(engine_id),
            incarnation=Incarnation(f"life-{life}"),
            layout=layout,
            layout_digest="toy",
            layout_fields={"schema": "1"},
        )
        nonces = itertools.count()
        factory = MemoryFactory(
            exchange, clock=clock, new_nonce=lambda: f"{engine_id}-{life}-{next(nonces)}"
        )
        self.connector = factory.worker(context, lambda: None)
        self.worker = ToyWorker(num_blocks, block_size, self.connector)
        self.scheduler = Scheduler(
            self.config.scheduler,
            self.config.cache,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            connector=factory.scheduler(context, self.connector.endpoint),
            clock=clock,
        )
        self.in_flight: deque[tuple[SchedulerOutput, ConnectorReport | None]] = deque()

    def submit(self) -> bool:
        """Plan one step and move its KV; False if there was nothing to do."""
        step = self.scheduler.schedule()
        if step is None:
            return False
        self.in_flight.append((step, self.worker.move_kv(step)))
        return True

    def collect(self) -> None:
        """Compute the oldest step and take its result, or take the connector's news."""
        if self.in_flight:
            self.scheduler.update(self.worker.execute(*self.in_flight.popleft()))
        else:
            self.scheduler.apply_report(self.connector.get_finished())

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
        while num_quiet < 5:
            moved = self.submit() if len(self.in_flight) < self.depth else False
            moved = moved or bool(self.in_flight)
            self.collect()
            new = self.scheduler.drain_outputs()
            outputs += new
            num_quiet = 0 if moved or new else num_quiet + 1
        return outputs
