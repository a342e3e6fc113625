"""Messages between an executor and its ranks."""

from __future__ import annotations

import msgspec

from pdserve.config.log import LogConfig
from pdserve.config.schema import EngineConfig
from pdserve.executor.rings import RingEnds
from pdserve.executor.zmq_links import ZmqEnds
from pdserve.parallel.place import RankPlace
from pdserve.wire.ids import EngineId, Incarnation
from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
from pdserve.wire.transfer import ConnectorMetadata, ConnectorReport
from pdserve.worker.info import WorkerInfo

WORKER = "pdserve.worker.worker:Worker"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The start message of a rank.

    Attributes:
        log: Settings of the rank's log, which goes to standard error.
        ends: Link to the engine core for steps and answers.
        post_ends: Link to the engine core for connectors' messages, which wait for no step.
        parent_pid: The process with which it ends; None for a rank that something else ends.
        worker: Factory of its worker as "module:name", called like `Worker`.
    """

    log: LogConfig
    config: EngineConfig
    place: RankPlace
    engine_id: EngineId
    incarnation: Incarnation
    ends: RingEnds | ZmqEnds
    post_ends: RingEnds | ZmqEnds
    parent_pid: int | None = None
    worker: str = WORKER


class RunStep(msgspec.Struct, frozen=True, tag="step"):
    """Run one step.

    Attributes:
        num_posts: Number of posts sent before it; it runs once they have been taken.
    """

    step: SchedulerOutput
    num_posts: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    """End within `timeout_s`."""

    timeout_s: float


ToRank = RunStep | Close


class Post(msgspec.Struct, frozen=True, tag="post"):
    """Instructions for the rank's connector."""

    metadata: ConnectorMetadata


class Tell(msgspec.Struct, frozen=True, tag="tell"):
    """Report recent work now, for a trace."""


ToPostThread = Post | Tell


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The rank is ready for steps."""

    info: WorkerInfo


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress of the start."""

    text: str


class StepDone(msgspec.Struct, frozen=True, tag="done"):
    """A step's results, from the output rank alone."""

    output: ModelRunnerOutput


class News(msgspec.Struct, frozen=True, tag="news"):
    """A report of the rank's connector."""

    report: ConnectorReport


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """The rank takes posts: the first message on their link."""


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank ends; `is_config` distinguishes a wrong setting from an internal error."""

    reason: str
    is_config: bool


FromRank = Started | Loading | StepDone | News | Listening | RankFailed
