"""A rank: receive a step, run it, answer.

`serve` is the loop, over any link. As a process, started as `python -m pdserve.executor.rank`
with a `Launch` on standard input, a rank ends with the process that started it.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Protocol, assert_never

import msgspec

from pdserve.errors import ConfigError, PeerLostError
from pdserve.executor.channel import ChannelClosedError
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
from pdserve.executor.rings import RingEnds, RingLink
from pdserve.executor.zmq_links import ZmqEnds, ZmqLink
from pdserve.lifeline import end_with_parent
from pdserve.observe.log import configure_logging

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.executor.transport import Link
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
    from pdserve.wire.transfer import ConnectorReport
    from pdserve.worker.info import WorkerInfo


class StepRunner(Protocol):
    """What `serve` asks of a worker (`pdserve.worker.worker.Worker`)."""

    def start(self) -> WorkerInfo:
        """Get ready for steps."""
        ...

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        ...

    def finish_step(self) -> None:
        """The step is answered: do what the answer need not wait for."""
        ...

    def poll(self) -> ConnectorReport:
        """News without a step."""
        ...

    def close(self, timeout_s: float) -> None:
        """Let go of everything."""
        ...


def run(launch: Launch) -> int:
    """Be the rank that `launch` describes, until told to close.

    Returns:
        What a process exits with: 0 after `Close`, 3 for a wrong setting, else 1. The core
        has been told why.
    """
    try:
        link = open_link(launch.ends)
    except ChannelClosedError as error:
        print(f"rank {launch.seat.engine_rank}: {error}", file=sys.stderr)
        return 1
    try:
        return serve(link, launch)
    finally:
        link.close()


def open_link(ends: RingEnds | ZmqEnds) -> Link:
    """The rank's end of a link.

    Raises:
        ChannelClosedError: The core cannot be reached.
    """
    match ends:
        case RingEnds():
            return RingLink(ends)
        case ZmqEnds():
            return ZmqLink(ends)
        case _:
            assert_never(ends)


def serve(link: Link, launch: Launch) -> int:
    """Start the worker and run steps until told to close. Returns as `run` does."""
    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder(ToRank).decode
    is_output = launch.seat.is_output

    def reply(message: FromRank) -> None:
        link.send(encode(message))

    def tell(report: ConnectorReport | None) -> None:
        if report:
            reply(News(report))

    try:
        worker = _make_worker(launch, link.interrupt, lambda text: reply(Loading(text)))
        reply(Started(worker.start()))
        while True:
            frame = link.recv()
            if frame is None:
                tell(worker.poll())
                continue
            message: ToRank = decode(frame)
            match message:
                case RunStep(step):
                    output = worker.execute(step)
                    if is_output:
                        reply(StepDone(output))
                    else:
                        tell(output.connector_report)
                    worker.finish_step()
                case Close(timeout_s):
                    worker.close(timeout_s)
                    return 0
                case _:
                    assert_never(message)
    except ChannelClosedError:
        return 1  # nobody is left to be told
    except ConfigError as error:
        reply(RankFailed(error.message, is_config=True))
        return 3
    except PeerLostError as error:  # the echo of another rank's end
        reply(RankFailed(str(error), is_config=False))
        return 1
    except Exception:  # noqa: BLE001 - the top of a rank: the engine must learn why
        reply(RankFailed(traceback.format_exc(), is_config=False))
        return 1


def _make_worker(
    launch: Launch, wake: Callable[[], None], progress: Callable[[str], None]
) -> StepRunner:
    module, _, name = launch.worker.partition(":")
    make = getattr(importlib.import_module(module), name)
    worker: StepRunner = make(
        launch.config,
        seat=launch.seat,
        engine_id=launch.engine_id,
        incarnation=launch.incarnation,
        wake=wake,
        progress=progress,
    )
    return worker


def main() -> None:
    """Entry point of the rank's process."""
    # Signals reach the whole process group; the engine decides how its ranks end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Launch)
    if launch.parent_pid is not None:
        end_with_parent(launch.parent_pid)
    configure_logging(sys.stderr, level=launch.log_level)
    code = run(launch)
    # Threads of native libraries must not keep a finished rank alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
