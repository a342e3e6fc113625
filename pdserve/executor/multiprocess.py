"""One rank in its own process, behind shared-memory rings.

The engine core plans the next step while the rank runs this one.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import ConfigError, InternalError
from pdserve.executor.channel import ChannelClosedError, Ring
from pdserve.executor.messages import (
    Close,
    FromRank,
    Launch,
    Loading,
    News,
    RankFailed,
    RunStep,
    Started,
    StepDone,
    ToRank,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config.schema import EngineConfig
    from pdserve.wire.ids import EngineId, Incarnation
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
    from pdserve.wire.transfer import ConnectorReport
    from pdserve.worker.worker import WorkerInfo

_RING_BYTES = 4 << 20
_SPIN_S = 50e-6


class RankDiedError(InternalError):
    """A rank has ended; the message says how."""


class MultiprocessExecutor:
    """Steps through a ring to the rank, results through another back."""

    max_in_flight = 2

    def __init__(
        self,
        config: EngineConfig,
        *,
        engine_id: EngineId,
        incarnation: Incarnation,
        progress: Callable[[str], None],
    ) -> None:
        self._progress = progress
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
        self._done: deque[ModelRunnerOutput] = deque()
        self._reports: deque[ConnectorReport] = deque()
        # With as many ranks as cores, a spinning reader would take one from the compute.
        spin_s = _SPIN_S if len(os.sched_getaffinity(0)) > 2 else 0.0
        self._steps = Ring.create(capacity_bytes=_RING_BYTES, spin_s=spin_s)
        self._replies = Ring.create(capacity_bytes=_RING_BYTES, spin_s=spin_s)
        fds = {
            "steps_memory_fd": self._steps.memory_fd,
            "steps_doorbell_fd": self._steps.doorbell_fd,
            "replies_memory_fd": self._replies.memory_fd,
            "replies_doorbell_fd": self._replies.doorbell_fd,
        }
        launch = Launch(
            parent_pid=os.getpid(),
            log_level=logging.getLogger("pdserve").getEffectiveLevel(),
            config=config,
            engine_id=engine_id,
            incarnation=incarnation,
            spin_s=spin_s,
            **fds,
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdserve.executor.rank"],
            stdin=subprocess.PIPE,
            pass_fds=list(fds.values()),
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self._encoder.encode(launch))
        self._process.stdin.close()
        self._pid_fd = os.pidfd_open(self._process.pid)
        for ring in (self._steps, self._replies):
            ring.watch_peer(self._pid_fd)
        self._is_closed = False

    @property
    def pid(self) -> int:
        """The rank's process id."""
        return self._process.pid

    @property
    def wake_fds(self) -> list[int]:
        """See `Executor`."""
        return [self._replies.doorbell_fd, self._pid_fd]

    def start(self) -> WorkerInfo:
        """See `Executor`."""
        while True:
            message = self._recv()
            match message:
                case Loading(text):
                    self._progress(text)
                case Started(info):
                    return info
                case _:
                    raise InternalError(f"a rank that starts sent {message!r}")

    def submit(self, step: SchedulerOutput) -> None:
        """See `Executor`."""
        self._send(RunStep(step))

    def collect(self) -> ModelRunnerOutput:
        """See `Executor`."""
        while not self._done:
            self._take(self._recv())
        return self._done.popleft()

    def poll_report(self) -> ConnectorReport | None:
        """See `Executor`."""
        self._replies.drain_doorbell()
        self._take_replies()
        if not self._reports and self._process.poll() is not None:
            raise self._death()
        return self._reports.popleft() if self._reports else None

    def close(self, timeout_s: float) -> None:
        """See `Executor`."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._process.poll() is None:
            try:
                self._send(Close(timeout_s))
                self._process.wait(timeout_s + 1.0)
            except (subprocess.TimeoutExpired, InternalError, ConfigError):
                self._process.kill()
        self._process.wait()
        os.close(self._pid_fd)
        self._steps.close()
        self._replies.close()

    def _take_replies(self) -> None:
        while self._replies.has_frame():
            self._take(self._recv())

    def _take(self, message: FromRank) -> None:
        match message:
            case StepDone(output):
                self._done.append(output)
            case News(report):
                self._reports.append(report)
            case _:
                raise InternalError(f"a rank that runs steps sent {message!r}")

    def _send(self, message: ToRank) -> None:
        try:
            self._steps.send(self._encoder.encode(message), on_full=self._take_replies)
        except ChannelClosedError as error:
            raise self._death() from error

    def _recv(self) -> FromRank:
        try:
            frame = self._replies.recv(None)
        except ChannelClosedError as error:
            raise self._death() from error
        assert frame is not None  # without a timeout
        message = self._decoder.decode(frame)
        if isinstance(message, RankFailed):
            raise (
                ConfigError(message.reason) if message.is_config else RankDiedError(message.reason)
            )
        return message

    def _death(self) -> RankDiedError:
        return RankDiedError(f"the rank ended with code {self._process.wait()}")
