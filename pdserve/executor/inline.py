"""The worker inside the engine core's process: no hop at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import InternalError, PeerLostError
from pdserve.executor.base import RankDiedError
from pdserve.executor.channel import Bell
from pdserve.parallel.seat import seats
from pdserve.worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config.schema import EngineConfig
    from pdserve.parallel.seat import CoreSeat
    from pdserve.wire.ids import EngineId, Incarnation
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
    from pdserve.wire.transfer import ConnectorReport
    from pdserve.worker.info import WorkerInfo


class InlineExecutor:
    """One rank, called directly. A submitted step runs when it is collected.

    Args:
        core: Where this engine core sits. In a world of several cores its rank meets the
            others', so `core.rendezvous` must be given then.
    """

    max_in_flight = 1

    def __init__(
        self,
        config: EngineConfig,
        *,
        core: CoreSeat,
        engine_id: EngineId,
        incarnation: Incarnation,
        progress: Callable[[str], None],
    ) -> None:
        (seat,) = seats(config.parallel, core, core.rendezvous)
        if core.num_cores > 1 and core.rendezvous is None:
            raise InternalError(f"core {core.index} of {core.num_cores} has no rendezvous")
        self._bell = Bell()
        self._submitted: SchedulerOutput | None = None
        self._is_closed = False
        self._worker = Worker(
            config,
            seat=seat,
            engine_id=engine_id,
            incarnation=incarnation,
            wake=self._bell.ring,
            progress=progress,
        )

    @property
    def wake_fds(self) -> list[int]:
        """See `Executor`."""
        return [self._bell.fd]

    def start(self) -> list[WorkerInfo]:
        """See `Executor`."""
        return [self._worker.start()]

    def submit(self, step: SchedulerOutput) -> None:
        """See `Executor`."""
        self._submitted = step

    def collect(self) -> ModelRunnerOutput:
        """See `Executor`."""
        step, self._submitted = self._submitted, None
        assert step is not None
        try:
            return self._worker.execute(step)
        except PeerLostError as error:  # a rank of another core: there is no more to say
            raise RankDiedError(str(error)) from error

    def finish_step(self) -> None:
        """See `Executor`."""
        try:
            self._worker.finish_step()
        except PeerLostError as error:
            raise RankDiedError(str(error)) from error

    def poll_report(self) -> ConnectorReport | None:
        """See `Executor`."""
        return (self._worker.poll() or None) if self._bell.silence() else None

    def close(self, timeout_s: float) -> None:
        """See `Executor`."""
        if not self._is_closed:
            self._is_closed = True
            self._worker.close(timeout_s)
            self._bell.close()
