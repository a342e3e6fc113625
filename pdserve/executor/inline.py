"""The worker inside the engine core's process: no hop at all."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from pdserve.worker.worker import Worker, WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config.schema import EngineConfig
    from pdserve.wire.ids import EngineId, Incarnation
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
    from pdserve.wire.transfer import ConnectorReport


class InlineExecutor:
    """One rank, called directly. A submitted step runs when it is collected."""

    max_in_flight = 1

    def __init__(
        self,
        config: EngineConfig,
        *,
        engine_id: EngineId,
        incarnation: Incarnation,
        progress: Callable[[str], None],
    ) -> None:
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._submitted: SchedulerOutput | None = None
        self._is_closed = False
        self._worker = Worker(
            config,
            engine_id=engine_id,
            incarnation=incarnation,
            wake=self._wake,
            progress=progress,
        )

    @property
    def wake_fds(self) -> list[int]:
        """See `Executor`."""
        return [self._wake_fd]

    def start(self) -> WorkerInfo:
        """See `Executor`."""
        return self._worker.start()

    def submit(self, step: SchedulerOutput) -> None:
        """See `Executor`."""
        self._submitted = step

    def collect(self) -> ModelRunnerOutput:
        """See `Executor`."""
        step, self._submitted = self._submitted, None
        assert step is not None
        return self._worker.execute(step)

    def poll_report(self) -> ConnectorReport | None:
        """See `Executor`."""
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return None
        return self._worker.poll() or None

    def close(self, timeout_s: float) -> None:
        """See `Executor`."""
        if not self._is_closed:
            self._is_closed = True
            self._worker.close(timeout_s)
            os.close(self._wake_fd)

    def _wake(self) -> None:
        # A transfer thread may still speak while the worker closes.
        with contextlib.suppress(OSError):
            if not self._is_closed:
                os.eventfd_write(self._wake_fd, 1)
