"""A rank in its own process: receive a step, run it, reply.

Started as `python -m pdserve.executor.rank` with a `Launch` on standard input and the
rings' file descriptors inherited. It ends with the process that started it.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import assert_never

import msgspec

from pdserve.errors import ConfigError
from pdserve.executor.channel import Ring
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
from pdserve.lifeline import end_with_parent
from pdserve.observe.log import configure_logging
from pdserve.worker.worker import Worker


def run(launch: Launch) -> None:
    """Serve steps until told to close."""
    steps = Ring(launch.steps_memory_fd, launch.steps_doorbell_fd, spin_s=launch.spin_s)
    replies = Ring(launch.replies_memory_fd, launch.replies_doorbell_fd, spin_s=0.0)
    encoder = msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(ToRank)
    news_fd = os.eventfd(0, os.EFD_NONBLOCK)

    def reply(message: FromRank) -> None:
        replies.send(encoder.encode(message))

    worker = Worker(
        launch.config,
        engine_id=launch.engine_id,
        incarnation=launch.incarnation,
        wake=lambda: os.eventfd_write(news_fd, 1),
        progress=lambda text: reply(Loading(text)),
    )
    try:
        reply(Started(worker.start()))
        while True:
            frame = steps.recv(None, watch=[news_fd])
            if frame is None:
                os.eventfd_read(news_fd)
                report = worker.poll()
                if report:
                    reply(News(report))
                continue
            message: ToRank = decoder.decode(frame)
            match message:
                case RunStep(step):
                    reply(StepDone(worker.execute(step)))
                case Close(timeout_s):
                    worker.close(timeout_s)
                    return
                case _:
                    assert_never(message)
    except ConfigError as error:
        reply(RankFailed(error.message, is_config=True))
    except Exception:  # noqa: BLE001 - the top of a process: the engine must learn why
        reply(RankFailed(traceback.format_exc(), is_config=False))


def main() -> None:
    """Entry point of the rank's process."""
    launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Launch)
    end_with_parent(launch.parent_pid)
    configure_logging(sys.stderr, level=launch.log_level)
    run(launch)
    # Threads of native libraries must not keep a finished rank alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
