"""What an executor and a rank process say to one another, over the rings."""

from __future__ import annotations

import msgspec

from pdserve.config.schema import EngineConfig
from pdserve.wire.ids import EngineId, Incarnation
from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
from pdserve.wire.transfer import ConnectorReport
from pdserve.worker.worker import WorkerInfo


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """All a rank process is told when it starts, on its standard input.

    Attributes:
        log_level: As in `logging`; the rank logs to standard error.
    """

    parent_pid: int
    log_level: int
    config: EngineConfig
    engine_id: EngineId
    incarnation: Incarnation
    steps_memory_fd: int
    steps_doorbell_fd: int
    replies_memory_fd: int
    replies_doorbell_fd: int
    spin_s: float


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
    """A step's results."""

    output: ModelRunnerOutput


class News(msgspec.Struct, frozen=True, tag="news"):
    """Connector news that came without a step."""

    report: ConnectorReport


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank ends; `is_config` tells a wrong setting from our own mistake."""

    reason: str
    is_config: bool


FromRank = Started | Loading | StepDone | News | RankFailed
