"""The worker inside the engine core's process, with a thread of its own for steps.

The core's thread continues while a step runs: the kernels release the interpreter's lock. It calls
the worker's connector itself; all the worker's other work, from its start to its end, happens on
the step thread.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from pdserve.connectors.quorum import Quorum
from pdserve.errors import InternalError, PeerLostError
from pdserve.executor.base import RankDiedError
from pdserve.executor.channel import WakeEvent
from pdserve.parallel.place import rank_places
from pdserve.worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config.schema import EngineConfig
    from pdserve.parallel.place import CorePlace
    from pdserve.wire.ids import EngineId, Incarnation
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
    from pdserve.wire.transfer import ConnectorMetadata, ConnectorReport
    from pdserve.worker.info import WorkerInfo
    from pdserve.worker.step import LaunchedStep

_log = logging.getLogger(__name__)

_EXIT_S = 1.0
_LOOK_S = 0.0001
"""Time between two looks at the device while the core plans the step after the current one."""


class InlineExecutor:
    """One rank, called directly.

    Where the host computes, one step at a time: requests that become ready while a step runs join
    the next one. A second step in the queue would hide the planning (under a millisecond), but make
    them wait for another whole step. Where a device computes, one more decode step is planned and
    launched while the device is busy with another, so that it does not wait.

    Args:
        core: Place of this engine core. In a world of several cores its rank meets the
            others', so `core.rendezvous` must be given then.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        core: CorePlace,
        engine_id: EngineId,
        incarnation: Incarnation,
        progress: Callable[[str], None],
    ) -> None:
        (place,) = rank_places(config.parallel, core, core.rendezvous)
        if core.num_cores > 1 and core.rendezvous is None:
            raise InternalError(f"core {core.index} of {core.num_cores} has no rendezvous")
        self._news, self._answered = WakeEvent(), WakeEvent()
        self._quorum = Quorum(1)
        self._worker = Worker(
            config,
            place=place,
            engine_id=engine_id,
            incarnation=incarnation,
            wake=self._news.set,
            progress=progress,
        )
        self._submitted: queue.SimpleQueue[SchedulerOutput | None] = queue.SimpleQueue()
        self._done: deque[ModelRunnerOutput] = deque()
        self._runs_ahead = False
        self._is_decode = True
        self._info: WorkerInfo | None = None
        self._error: Exception | None = None
        self._has_started = threading.Event()
        self._close_by_s = 0.0
        self._is_closed = False
        self._thread = threading.Thread(target=self._main, name="steps", daemon=True)

    @property
    def max_in_flight(self) -> int:
        """See `Executor`.

        No step is planned behind a prompt, since new requests would have to wait for it; nor behind
        drafts, since the number accepted decides what a request computes next.
        """
        return 2 if self._runs_ahead and self._is_decode else 1

    @property
    def wake_fds(self) -> list[int]:
        """See `Executor`."""
        return [self._news.fd, self._answered.fd]

    def start(self) -> list[WorkerInfo]:
        """See `Executor`."""
        self._thread.start()
        self._has_started.wait()
        self._refuse_if_broken()
        assert self._info is not None
        return [self._info]

    def submit(self, step: SchedulerOutput) -> None:
        """See `Executor`."""
        self._refuse_if_broken()
        is_single = step.num_tokens == len(step.num_scheduled_tokens)
        self._is_decode = is_single and not step.num_draft_rows
        self._submitted.put(step)

    def post(self, metadata: ConnectorMetadata) -> None:
        """See `Executor`."""
        self._refuse_if_broken()
        self._worker.post(metadata)

    def ask_for_slices(self) -> bool:
        """See `Executor`: what its rank does are the core's own steps."""
        return False

    def poll_result(self) -> ModelRunnerOutput | None:
        """See `Executor`."""
        self._answered.clear()
        if self._done:
            return self._done.popleft()
        self._refuse_if_broken()
        return None

    def poll_report(self) -> ConnectorReport | None:
        """See `Executor`."""
        self._refuse_if_broken()
        if not self._news.clear():
            return None
        # Also for a single rank: a repeated report counts once.
        return self._quorum.add(0, self._worker.poll()) or None

    def close(self, timeout_s: float) -> None:
        """See `Executor`. A step that never ends is left behind, and its thread with it."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread.ident is not None:
            self._close_by_s = time.monotonic() + timeout_s
            self._submitted.put(None)
            self._thread.join(timeout_s + _EXIT_S)
            if self._thread.is_alive():
                _log.error("a step did not end within %.1f s: left behind", timeout_s + _EXIT_S)
        self._news.close()
        self._answered.close()

    def _refuse_if_broken(self) -> None:
        if isinstance(self._error, PeerLostError):  # a rank of another core: no more to say
            raise RankDiedError(str(self._error)) from self._error
        if self._error is not None:
            raise self._error

    # ---- the step thread -------------------------------------------------------------------

    def _main(self) -> None:
        """Start the worker, run steps until told to close or one has failed, end the worker."""
        try:
            self._info = self._worker.start()
            self._runs_ahead = self._worker.runs_ahead
        except Exception as error:  # noqa: BLE001 - raised by `start`
            self._error = error
        finally:
            self._has_started.set()
        self._run_steps()
        try:
            self._worker.close(max(0.0, self._close_by_s - time.monotonic()))
        except Exception:  # noqa: BLE001 - the top of a thread: its owner is closing
            _log.exception("the worker did not close")

    def _run_steps(self) -> None:
        """Run steps until told to close."""
        launched: LaunchedStep | None = None
        while True:
            step = self._submitted.get() if launched is None else self._next_behind(launched)
            if step is None and launched is None:
                return
            if self._error is not None:
                launched = None
                continue
            try:
                launched = self._turn(step, launched)
            except Exception as error:  # noqa: BLE001 - the top of a thread: the core raises it
                self._error, launched = error, None
                self._answered.set()

    def _next_behind(self, launched: LaunchedStep) -> SchedulerOutput | None:
        """Return the next step if one comes before the device has finished the last one."""
        while not launched.is_over:
            with contextlib.suppress(queue.Empty):
                step = self._submitted.get(timeout=_LOOK_S)
                if step is None:
                    self._submitted.put(None)  # close after the launched steps
                return step
        return None

    def _turn(
        self, step: SchedulerOutput | None, before: LaunchedStep | None
    ) -> LaunchedStep | None:
        """Launch a step and answer the one before it, in whichever order they allow."""
        launched: LaunchedStep | None = None
        if step is not None and (before is None or self._worker.may_follow(step)):
            launched, step = self._worker.launch(step), None
        if before is not None:
            self._done.append(self._worker.collect(before))
            self._answered.set()
            if launched is not None:
                self._worker.complete()
        if launched is None:
            self._worker.finish_step()
        return launched if step is None else self._worker.launch(step)
