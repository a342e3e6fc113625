"""What an executor and its ranks say to one another."""

from __future__ import annotations

import msgspec

from pdserve.config.schema import EngineConfig
from pdserve.executor.rings import RingEnds
from pdserve.executor.zmq_links import ZmqEnds
from pdserve.parallel.seat import Seat
from pdserve.wire.ids import EngineId, Incarnation
from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
from pdserve.wire.transfer import ConnectorReport
from pdserve.worker.info import WorkerInfo

WORKER = "pdserve.worker.worker:Worker"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """All a rank is told before it starts.

    Attributes:
        log_level: As in `logging`; the rank logs to standard error.
        ends: How it reaches the engine core.
        parent_pid: The process that it ends with; None for a rank that something else ends.
        worker: What runs its steps, as "module:name" of something called as `Worker` is.
    """

    log_level: int
    config: EngineConfig
    seat: Seat
    engine_id: EngineId
    incarnation: Incarnation
    ends: RingEnds | ZmqEnds
    parent_pid: int | None = None
    worker: str = WORKER


class RunStep(msgspec.Struct, frozen=True, tag="step"):
    """Run one step."""

    step: SchedulerOutput


class Close(msgspec.Struct, frozen=True, tag="close"):
    """End within `timeout_s`."""

    timeout_s: float


ToRank = RunStep | Close


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The rank is ready for steps."""

    info: WorkerInfo


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Where its start-up stands."""

    text: str


class StepDone(msgspec.Struct, frozen=True, tag="done"):
    """A step's results, from the output rank alone."""

    output: ModelRunnerOutput


class News(msgspec.Struct, frozen=True, tag="news"):
    """What the rank's connector saw: without a step, or on a rank that does not answer it."""

    report: ConnectorReport


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank ends; `is_config` tells a wrong setting from our own mistake."""

    reason: str
    is_config: bool


FromRank = Started | Loading | StepDone | News | RankFailed
