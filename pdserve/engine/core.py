"""The engine core: a scheduler, an executor and a connector's scheduler half, injected.

`step` does everything: take the connector's news and the results, plan and submit as many steps as
may be in flight, and post the instructions of connectors that need no step. It never waits, so that
it notices at once what happens while a step runs. A core whose ranks share experts with other cores
lets `Waves` plan, which makes all of them step together. It knows no sockets and starts no threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.engine.waves import Phase, Waves
from pdserve.executor.base import RankDiedError
from pdserve.scheduler.scheduler import Scheduler
from pdserve.scheduler.state import Dimensions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.config.schema import EngineConfig
    from pdserve.connectors.base import KVConnectorScheduler
    from pdserve.executor.base import Executor
    from pdserve.observe.clock import Clock
    from pdserve.wire.request import EngineOutput
    from pdserve.worker.info import WorkerInfo


_LONGEST_GAP_S = 2.0
"""Maximum time between two looks at the step in flight: the loop turns ten times a second while a
request is unfinished. Beyond this the process was stopped, which is not the step's time."""


class EngineCore:
    """A loaded engine.

    Args:
        executor: A started executor, which the core closes.
        connector: The scheduler half; the executor has its worker halves.
        workers: Facts that the executor's ranks reported at the start.
        in_waves: Whether the ranks share experts with those of other cores.

    Attributes:
        waves: Waves with other cores; None if no other core shares this one's world.
    """

    def __init__(
        self,
        executor: Executor,
        connector: KVConnectorScheduler,
        clock: Clock,
        *,
        config: EngineConfig,
        workers: Sequence[WorkerInfo],
        in_waves: bool = False,
    ) -> None:
        first = workers[0]
        layout = first.layout
        self.executor = executor
        self.scheduler = Scheduler(
            config.scheduler,
            config.cache,
            Dimensions(
                num_blocks=layout.num_blocks,
                block_size=layout.block_size,
                max_model_len=first.max_model_len,
                vocab_size=first.vocab_size,
                num_stages=config.parallel.pipeline_parallel_size,
                kv_bytes_per_token=sum(w.layout.block_bytes for w in workers) // layout.block_size,
                max_drafted=config.speculative.max_drafted,
                max_in_flight=executor.max_in_flight,
                row_costs=next((w.row_costs for w in workers if w.row_costs), ()),
                draft_cost=max(w.draft_cost for w in workers),
            ),
            connector,
            clock,
        )
        self.waves = Waves(self.scheduler) if in_waves else None
        self._plan = self.scheduler.schedule if self.waves is None else self.waves.schedule
        self._clock = clock
        self._step_timeout_s = config.liveness.step_timeout_s
        self._step_age_s = 0.0
        self._looked_s = clock.monotonic_s()

    def step(self, publish: Callable[[list[EngineOutput]], None]) -> bool:
        """Do all the work there is now; one of the executor's `wake_fds` signals more.

        Must also be called after requests came or went. Never waits.

        Args:
            publish: Called with outputs; tokens alone come once the ranks have the next step.

        Returns:
            Whether there was news of the ranks.

        Raises:
            RankDiedError: A rank ended, or a step has timed out.
        """
        self._look_at_step()
        has_news = self._take_reports()
        self.post()
        self._submit()
        while (result := self.executor.poll_result()) is not None:
            has_news = True
            self._step_age_s = 0.0
            self.scheduler.update(result)
            if self.waves is not None:
                self.waves.collected(result)
            # A handoff's lease is granted before the handoff is published. What ends a request is
            # published at once, tokens when the ranks have the next step. In a wave every step that
            # comes back makes room for exactly one.
            self.post()
            outputs = self.scheduler.drain_outputs()
            if any(each.finish_reason for each in outputs):
                publish(outputs)
                outputs = []
            self._submit()
            if outputs:
                publish(outputs)
        self.post()
        self.scheduler.telemetry.sample(self._clock.monotonic_s())
        self._drain(publish)
        return has_news

    def _look_at_step(self) -> None:
        """Count how long the oldest step in flight has been under way."""
        now_s = self._clock.monotonic_s()
        if self.scheduler.num_in_flight:
            self._step_age_s += min(now_s - self._looked_s, _LONGEST_GAP_S)
        else:
            self._step_age_s = 0.0
        self._looked_s = now_s
        if self._step_age_s > self._step_timeout_s:
            raise RankDiedError(
                f"a step has not finished within {self._step_timeout_s:g} s: raise --step-timeout "
                "if steps may take so long, or lower --max-num-batched-tokens"
            )

    def post(self) -> None:
        """Send the ranks' connectors the scheduler's instructions."""
        instructions = self.scheduler.take_instructions()
        if instructions is not None:
            self.executor.post(instructions)

    def _drain(self, publish: Callable[[list[EngineOutput]], None]) -> None:
        outputs = self.scheduler.drain_outputs()
        if outputs:
            publish(outputs)

    def _take_reports(self) -> bool:
        """Take the connectors' reports; return whether there were any."""
        has_news = False
        while (report := self.executor.poll_report()) is not None:
            self.scheduler.apply_report(report)
            if not report:  # slices alone: nothing has changed
                continue
            if self.waves is not None:
                self.waves.news()
            has_news = True
        return has_news

    def _submit(self) -> None:
        """Plan and submit as many steps as may be in flight."""
        scheduler, executor, waves = self.scheduler, self.executor, self.waves
        has_room = scheduler.num_in_flight < executor.max_in_flight
        if not has_room or (waves is not None and waves.phase is not Phase.INSIDE):
            # Loads need no step, so they start without one.
            scheduler.admit_loads()
        while scheduler.num_in_flight < executor.max_in_flight:
            step = self._plan()
            if step is None:
                break
            executor.submit(step)

    def close(self, timeout_s: float) -> None:
        """End the executor. Idempotent."""
        self.executor.close(timeout_s)
