"""The loop of a rank: receive a step, run it, answer; a second thread serves the connector.

`serve` is the loop, over any link. A second link and a second thread (`PostThread`) take posts to
the worker's connector and its news back, so that neither waits for a step. A rank started as
the process `python -m pdserve.executor.rank`, with a `Launch` on standard input, ends with the
process that started it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Protocol, assert_never

import msgspec

from pdserve.errors import ConfigError, PeerLostError, story_of
from pdserve.executor.channel import ChannelClosedError
from pdserve.executor.messages import (
    Close,
    FromRank,
    Launch,
    Listening,
    Loading,
    News,
    Post,
    RankFailed,
    RunStep,
    Started,
    StepDone,
    Tell,
    ToPostThread,
    ToRank,
)
from pdserve.executor.rings import RingEnds, RingLink
from pdserve.executor.zmq_links import ZmqEnds, ZmqLink
from pdserve.imports import large_imports
from pdserve.lifeline import end_with_parent, ignore_stop_signals
from pdserve.observe.heap import share_arenas
from pdserve.observe.log import configure_logging, log_event

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.executor.base import Link
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
    from pdserve.wire.transfer import ConnectorMetadata, ConnectorReport
    from pdserve.worker.info import WorkerInfo

_log = logging.getLogger(__name__)

_JOIN_S = 5.0
_ENCODE = msgspec.msgpack.Encoder().encode
# Made here and not in the threads that use them: when two threads of a process learn the same
# type at once, msgspec 0.22 crashes.
_DECODE = msgspec.msgpack.Decoder(ToRank).decode
_DECODE_POST = msgspec.msgpack.Decoder(ToPostThread).decode


class StepRunner(Protocol):
    """The part of a worker (`pdserve.worker.worker.Worker`) that `serve` needs.

    One thread calls it, except for `post` and `poll`, which another one calls.
    """

    def start(self) -> WorkerInfo:
        """Get ready for steps."""
        ...

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        ...

    def finish_step(self) -> None:
        """Do the work that need not delay the answer to the step."""
        ...

    def post(self, metadata: ConnectorMetadata) -> None:
        """Give its connector instructions, also while a step runs."""
        ...

    def poll(self) -> ConnectorReport:
        """Return its connector's report, and its own work, since the last call.

        May be called while a step runs.
        """
        ...

    def close(self, timeout_s: float) -> None:
        """Release everything."""
        ...


def run(launch: Launch) -> int:
    """Run the rank that `launch` describes until told to close.

    Returns:
        Exit code of the process: 0 after `Close`, 3 for a wrong setting, else 1. The core
        has been told why.
    """
    with contextlib.ExitStack() as stack:
        try:
            link = open_link(launch.ends)
            stack.callback(link.close)
            post_link = open_link(launch.post_ends)
            stack.callback(post_link.close)
        except ChannelClosedError as error:
            log_event(_log, "rank cannot reach its core", level=logging.ERROR, reason=str(error))
            return 1
        return serve(link, post_link, launch)


def open_link(ends: RingEnds | ZmqEnds) -> Link:
    """Open the rank's end of a link.

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


def serve(link: Link, post_link: Link, launch: Launch) -> int:
    """Start the worker and run steps until told to close. Returns as `run` does.

    Args:
        link: For steps and answers.
        post_link: For posts and news.
    """
    is_output = launch.place.is_output
    post_thread: PostThread | None = None

    def reply(message: FromRank) -> None:
        link.send(_ENCODE(message))

    try:
        worker = _make_worker(launch, post_link.interrupt, lambda text: reply(Loading(text)))
        reply(Started(worker.start()))
        post_thread = PostThread(post_link, worker, on_death=link.interrupt)
        while True:
            frame = link.recv()
            if frame is None:
                return 1  # that thread has reported why
            message: ToRank = _DECODE(frame)
            match message:
                case RunStep(step, num_posts):
                    if not post_thread.wait_for(num_posts):
                        return 1
                    output = worker.execute(step)
                    if is_output:
                        reply(StepDone(output))
                    worker.finish_step()
                case Close(timeout_s):
                    post_thread.close()
                    worker.close(timeout_s)
                    return 0
                case _:
                    assert_never(message)
    except ChannelClosedError:
        return 1  # the core is gone and cannot be told
    except ConfigError as error:
        reply(RankFailed(error.message, is_config=True))
        return 3
    except PeerLostError as error:  # the echo of another rank's end
        reply(RankFailed(str(error), is_config=False))
        return 1
    except Exception as error:  # noqa: BLE001 - the top of a rank: the engine must learn why
        reply(RankFailed(story_of(error), is_config=False))
        return 1
    finally:
        if post_thread is not None:
            post_thread.close()


class PostThread:
    """Takes posts to a worker and its news back, on a thread of its own.

    Args:
        link: Used only by that thread until `close` has returned.
        on_death: Called from the thread if it must end before `close`; the core has been told.
    """

    def __init__(self, link: Link, worker: StepRunner, *, on_death: Callable[[], None]) -> None:
        self._link, self._worker, self._on_death = link, worker, on_death
        self._num_taken = 0
        self._is_over = False
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._main, name="posts", daemon=True)
        self._thread.start()

    def wait_for(self, num_posts: int) -> bool:
        """Wait until `num_posts` posts were taken; return False if the thread ends before."""
        if self._num_taken < num_posts:
            with self._changed:
                self._changed.wait_for(lambda: self._num_taken >= num_posts or self._is_over)
        return self._num_taken >= num_posts

    def close(self) -> None:
        """End the thread. May be called twice."""
        self._is_closing = True
        self._link.interrupt()
        self._thread.join(_JOIN_S)

    def _main(self) -> None:
        try:
            self._run()
        except ChannelClosedError:
            self._on_death()
        except Exception as error:  # noqa: BLE001 - the top of a thread: the engine must learn why
            self._link.send(_ENCODE(RankFailed(story_of(error), is_config=False)))
            self._on_death()
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify()

    def _run(self) -> None:
        self._link.send(_ENCODE(Listening()))
        while not self._is_closing:
            frame = self._link.recv()
            message: ToPostThread = Tell() if frame is None else _DECODE_POST(frame)
            match message:
                case Tell():
                    report = self._worker.poll()
                    if report or report.slices:
                        self._link.send(_ENCODE(News(report)))
                case Post(metadata):
                    self._worker.post(metadata)
                    with self._changed:
                        self._num_taken += 1
                        self._changed.notify()
                case _:
                    assert_never(message)


def _make_worker(
    launch: Launch, wake: Callable[[], None], progress: Callable[[str], None]
) -> StepRunner:
    module, _, name = launch.worker.partition(":")
    with large_imports():
        make = getattr(importlib.import_module(module), name)
    worker: StepRunner = make(
        launch.config,
        place=launch.place,
        engine_id=launch.engine_id,
        incarnation=launch.incarnation,
        wake=wake,
        progress=progress,
    )
    return worker


def main() -> None:
    """Entry point of the rank's process."""
    ignore_stop_signals()  # the engine decides how its ranks end
    share_arenas()
    launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Launch)
    if launch.parent_pid is not None:
        end_with_parent(launch.parent_pid)
    configure_logging(sys.stderr, launch.log)
    code = run(launch)
    # Threads of native libraries must not keep a finished rank alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
