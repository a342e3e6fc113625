"""What all executors of several ranks have in common.

Steps go to all ranks at once, results come from the output rank alone, in order. Posts go to
all ranks beside the steps, and the reports of the ranks' connectors come back that way; each is
passed on once all ranks have made it. A rank that fails or ends also ends the engine: the others
are killed, and the error says what happened.

It has two interfaces below it: a `Hub` carries frames (`pdserve.executor.base`), `Ranks` starts
and ends the ranks behind it, and notices when one has ended.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from typing import TYPE_CHECKING, NoReturn, Protocol

import msgspec

from pdserve.connectors.quorum import Quorum
from pdserve.errors import ConfigError, InternalError
from pdserve.executor.base import RankDiedError
from pdserve.executor.channel import Waiter, make_eventfd
from pdserve.executor.messages import (
    Close,
    FromRank,
    Listening,
    Loading,
    News,
    Post,
    RankFailed,
    RunStep,
    Started,
    StepDone,
    Tell,
)
from pdserve.observe.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.executor.base import Hub
    from pdserve.observe.clock import Clock
    from pdserve.parallel.place import RankPlace
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
    from pdserve.wire.transfer import ConnectorMetadata, ConnectorReport
    from pdserve.worker.info import WorkerInfo

_log = logging.getLogger(__name__)

_TICK_S = 0.5
_QUIET_S = 2.0
# A rank's error often only follows from another's end, which is noticed a moment later.
_ECHO_S = 0.2
_EXIT_S = 1.0
_CLOSE_POLL_S = 0.002


class Ranks(Protocol):
    """The ranks as processes or actors, numbered from 0 within their engine."""

    def start(self) -> None:
        """Start all of them; does not wait until they are ready."""
        ...

    def wake_on(self, waiter: Waiter) -> None:
        """Make `waiter` watch descriptors that stay readable once a rank has ended."""
        ...

    def ended(self) -> dict[int, str]:
        """Return ended ranks with causes ("pid 12 was killed by SIGKILL"). Never blocks."""
        ...

    def look(self) -> dict[int, str]:
        """Look once; return ranks to give up, with reasons ("pid 12 was stopped for 5 s")."""
        ...

    def kill(self) -> None:
        """Kill the ranks that have not ended. May be called at any time. Never blocks for long."""
        ...

    def close(self) -> None:
        """Wait until all have ended, and release everything; called once, behind `kill`."""
        ...


class RankedExecutor:
    """See `Executor`. Owns `hub`, `posts` and `ranks`, and closes them.

    Args:
        hub: For steps and answers.
        posts: For posts and news.
        places: Places of the ranks, in their order.
        max_in_flight: See `Executor`.
        look_s: Seconds between two looks at the ranks.
        progress: Called with messages about the progress of the start.
    """

    def __init__(
        self,
        hub: Hub,
        posts: Hub,
        ranks: Ranks,
        *,
        places: Sequence[RankPlace],
        max_in_flight: int,
        look_s: float,
        progress: Callable[[str], None],
    ) -> None:
        self.max_in_flight = max_in_flight
        self._hub, self._posts, self._ranks = hub, posts, ranks
        self._num_ranks = num_ranks = len(places)
        self._output_rank = next(place.engine_rank for place in places if place.is_output)
        self._clock = SystemClock()
        self._progress = StartProgress(num_ranks, clock=self._clock, tell=progress)
        self._look_s = look_s
        self._next_look_s = self._clock.monotonic_s() + look_s
        self._given_up: dict[int, str] = {}
        self._quorum = Quorum(num_ranks)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromRank).decode
        self._waiter = Waiter(spin_s=0.0)
        hub.wake_on(self._waiter)
        posts.wake_on(self._waiter)
        self._again_fd = make_eventfd()
        self._waiter.hear(self._again_fd)
        self._infos: dict[int, WorkerInfo] = {}
        self._listening: set[int] = set()
        self._num_posts = 0
        self._in_flight: deque[int] = deque()
        self._last_step: int | None = None
        self._done: deque[ModelRunnerOutput] = deque()
        self._reports: deque[ConnectorReport] = deque()
        self._failed: dict[int, RankFailed] = {}
        self._error: ConfigError | RankDiedError | None = None
        self._is_started = False
        self._is_closed = False

    @property
    def wake_fds(self) -> list[int]:
        """See `Executor`."""
        return [self._waiter.fileno()]

    def start(self) -> list[WorkerInfo]:
        """See `Executor`."""
        self._is_started = True
        try:
            self._ranks.start()
            self._ranks.wake_on(self._waiter)
            while min(len(self._infos), len(self._listening)) < self._num_ranks:
                self._receive(_TICK_S)
                self._check()
                self._progress.tick()
        except BaseException:
            self._ranks.kill()
            raise
        return [self._infos[rank] for rank in range(self._num_ranks)]

    def submit(self, step: SchedulerOutput) -> None:
        """See `Executor`."""
        self._refuse_if_broken()
        self._in_flight.append(step.step_id)
        frame = self._encode(RunStep(step, self._num_posts))
        self._hub.broadcast(frame, on_full=self._on_full)

    def post(self, metadata: ConnectorMetadata) -> None:
        """See `Executor`."""
        self._refuse_if_broken()
        self._num_posts += 1
        self._posts.broadcast(self._encode(Post(metadata)), on_full=self._on_full)

    def ask_for_slices(self) -> bool:
        """See `Executor`."""
        self._refuse_if_broken()
        self._posts.broadcast(self._encode(Tell()), on_full=self._on_full)
        return True

    def poll_result(self) -> ModelRunnerOutput | None:
        """See `Executor`."""
        self._refuse_if_broken()
        if not self._done:
            self._look()
            if self._reports:
                # Taken just now, or while a frame waited for room: the caller may ask for results
                # and then sleep without asking for reports, whose wake-up has been consumed.
                os.eventfd_write(self._again_fd, 1)
        return self._done.popleft() if self._done else None

    def poll_report(self) -> ConnectorReport | None:
        """See `Executor`."""
        self._refuse_if_broken()
        self._look()
        return self._reports.popleft() if self._reports else None

    def close(self, timeout_s: float) -> None:
        """See `Executor`."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_started and self._error is None:
            self._ask_to_close(timeout_s)
        self._ranks.kill()
        self._ranks.close()
        self._waiter.close()
        os.close(self._again_fd)
        self._hub.close()
        self._posts.close()

    def _ask_to_close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s + _EXIT_S

        def drain() -> None:
            # A rank's remaining frames are useless, but it may be waiting for room to send them.
            while self._next() is not None:
                pass
            if time.monotonic() > deadline:
                raise TimeoutError

        try:
            self._hub.broadcast(self._encode(Close(timeout_s)), on_full=drain)
            while len(self._ranks.ended()) < self._num_ranks:
                drain()
                time.sleep(_CLOSE_POLL_S)
        except TimeoutError:
            ended = self._ranks.ended()
            stuck = [rank for rank in range(self._num_ranks) if rank not in ended]
            _log.warning("ranks %s did not end within %.1f s: killed", stuck, timeout_s + _EXIT_S)

    def _next(self) -> tuple[int, bytes] | None:
        """Return the next frame of any rank, over either hub. Never blocks."""
        return self._hub.receive() or self._posts.receive()

    def _receive(self, timeout_s: float) -> None:
        """Wait for a frame and take it, or until a rank may have ended."""
        found = self._waiter.wait(self._next, timeout_s)
        if found is not None:
            self._take(*found)

    def _look(self) -> None:
        """Take all frames received, and raise if a rank has ended. Never blocks."""
        may_have_ended = self._waiter.poll()
        self._drain()
        if may_have_ended or self._is_look_due():
            self._check()

    def _drain(self) -> None:
        while (found := self._next()) is not None:
            self._take(*found)

    def _on_full(self) -> None:
        self._drain()
        self._check()

    def _take(self, rank: int, frame: bytes) -> None:
        message = self._decode(frame)
        match message:
            case StepDone(output) if rank == self._output_rank:
                self._retire(output)
            case News(report):
                self._note(rank, report)
            case Loading(text):
                self._progress.note(rank, text)
            case Started(info):
                self._infos[rank] = info
            case Listening():
                self._listening.add(rank)
            case RankFailed():
                self._failed[rank] = message
                self._end()
            case _:
                raise InternalError(f"rank {rank} sent {message!r}")

    def _retire(self, output: ModelRunnerOutput) -> None:
        expected = self._in_flight.popleft() if self._in_flight else None
        if output.step_id != expected:
            raise InternalError(f"step {output.step_id} came back, step {expected} was next")
        self._last_step = output.step_id
        self._done.append(output)

    def _note(self, rank: int, report: ConnectorReport) -> None:
        complete = self._quorum.add(rank, report)
        if complete or complete.slices:
            self._reports.append(complete)

    def _check(self) -> None:
        """Raise if a rank has failed or ended, is out of reach or must be given up."""
        if self._is_look_due():
            self._next_look_s = self._clock.monotonic_s() + self._look_s
            self._given_up = self._ranks.look()
        if self._failed or self._ranks.ended() or self._lost() or self._given_up:
            self._end()

    def _is_look_due(self) -> bool:
        return self._clock.monotonic_s() >= self._next_look_s

    def _lost(self) -> dict[int, str]:
        return {**self._posts.lost(), **self._hub.lost()}

    def _end(self) -> NoReturn:
        """Find out why the engine cannot continue, kill every rank, and raise the error.

        `close` waits for their end: who waits for this reason has a limit of its own.
        """
        deadline = time.monotonic() + _ECHO_S
        while True:
            ended = self._ranks.ended()
            heard_out = [
                rank
                for rank in ended
                if self._hub.has_heard_out(rank) and self._posts.has_heard_out(rank)
            ]
            while (found := self._next()) is not None:
                self._note_last_words(*found)
            is_known = (
                bool(self._given_up)
                or any(rank not in self._failed for rank in heard_out)
                or any(failed.is_config for failed in self._failed.values())
                or len(self._failed) == self._num_ranks
            )
            if is_known or time.monotonic() > deadline:
                break
            time.sleep(_CLOSE_POLL_S)
        lost = self._lost()
        self._ranks.kill()
        self._error = self._explain(ended, lost)
        raise self._error

    def _note_last_words(self, rank: int, frame: bytes) -> None:
        message = self._decode(frame)
        if isinstance(message, RankFailed):
            self._failed[rank] = message
        elif isinstance(message, Loading):
            self._progress.note(rank, message.text)

    def _explain(self, ended: dict[int, str], lost: dict[int, str]) -> ConfigError | RankDiedError:
        for failed in self._failed.values():
            if failed.is_config:
                return ConfigError(failed.reason)
        causes = [
            f"rank {rank} ({how}) ended without a word"
            for rank, how in ended.items()
            if rank not in self._failed
        ]
        causes += [
            f"rank {rank} {how}"
            for rank, how in lost.items()
            if rank not in ended and rank not in self._failed
        ]
        causes += [f"rank {rank} ({how})" for rank, how in self._given_up.items()]
        ranks_of: dict[str, list[int]] = {}
        for rank, failed in self._failed.items():
            reason = failed.reason.strip()
            # Beside a silent end, a traceback only follows from it: its last line is enough.
            ranks_of.setdefault(reason.splitlines()[-1] if causes else reason, []).append(rank)
        words = [
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))} failed: {reason}"
            for reason, ranks in ranks_of.items()
        ]
        return RankDiedError(f"{'; '.join(causes + words)} ({self._situation()})")

    def _situation(self) -> str:
        if len(self._infos) < self._num_ranks:
            missing = [rank for rank in range(self._num_ranks) if rank not in self._infos]
            said = [f"rank {rank}: {self._progress.last(rank) or 'nothing'}" for rank in missing]
            return f"while the engine started; last heard: {', '.join(said)}"
        if self._in_flight:
            return f"with steps {list(self._in_flight)} in flight"
        return f"with no step in flight; the last one was {self._last_step}"

    def _refuse_if_broken(self) -> None:
        if self._error is not None:
            raise self._error


class StartProgress:
    """Merges the messages of ranks as they start.

    Passes a line on when every rank has sent it, or when nothing was passed on for a while. So
    ranks that load at the same speed read as one, and one that lags behind is visible.

    Args:
        tell: Called with each line; those of a single rank begin with "rank 1: ".
    """

    def __init__(self, num_ranks: int, *, clock: Clock, tell: Callable[[str], None]) -> None:
        self._num_ranks = num_ranks
        self._clock = clock
        self._tell = tell
        self._ranks_of: dict[str, set[int]] = {}
        self._held: dict[int, str] = {}
        self._told_at_s = clock.monotonic_s()
        self._last: dict[int, str] = {}

    def note(self, rank: int, text: str) -> None:
        """Take a message of a rank."""
        self._last[rank] = text
        if self._num_ranks == 1:
            self._tell(text)
            return
        ranks = self._ranks_of.setdefault(text, set())
        ranks.add(rank)
        if len(ranks) < self._num_ranks:
            self._held[rank] = text
            self.tick()
            return
        self._held = {other: held for other, held in self._held.items() if held != text}
        self._held.pop(rank, None)
        self._pass_on(f"all {self._num_ranks} ranks: {text}")

    def tick(self) -> None:
        """Pass on lines that have waited too long."""
        if self._held and self._clock.monotonic_s() - self._told_at_s >= _QUIET_S:
            for rank in sorted(self._held):
                self._pass_on(f"rank {rank}: {self._held[rank]}")
            self._held.clear()

    def last(self, rank: int) -> str | None:
        """Return a rank's last message."""
        return self._last.get(rank)

    def _pass_on(self, line: str) -> None:
        self._told_at_s = self._clock.monotonic_s()
        self._tell(line)
