"""The engine core's process: wait for news, drain messages, step, publish, until stopped.

It waits in one place for everything: messages of the server, orders of the coordinator, results
and reports of the ranks.

The API server starts it as `python -m pdserve.engine.process` with an `EngineLaunch` on standard
input; it ends with the server. One of several cores also reports its load to the coordinator; if
they share a world, it asks for waves, and ends together with the others.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, assert_never

import msgspec
import zmq

from pdserve.engine.arrivals import Arrivals
from pdserve.engine.coordinator import CoordinatorLink, EndCores, StartWave
from pdserve.engine.core_pipe import CorePipe
from pdserve.engine.kv_events import KVEventPublisher
from pdserve.engine.launch import EngineLaunch
from pdserve.engine.loading import load_engine
from pdserve.errors import ConfigError, story_of
from pdserve.executor.base import RankDiedError
from pdserve.lifeline import end_with_parent, ignore_stop_signals
from pdserve.observe.clock import SystemClock
from pdserve.observe.heap import BurstTrim, share_arenas
from pdserve.observe.log import configure_logging
from pdserve.wire.core_messages import (
    AbortRequests,
    Add,
    CoreProgress,
    CoreReady,
    Died,
    DumpTrace,
    FromEngine,
    HandOver,
    KeepLeases,
    Outputs,
    Ping,
    Pong,
    ReleaseLease,
    ResetPrefixCache,
    Shutdown,
    ToEngine,
    TracePiece,
    ids_in_unreadable,
)
from pdserve.wire.seal import UNREADABLE
from pdserve.wire.trace import Part

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.wire.request import EngineOutput

_log = logging.getLogger(__name__)

_MAX_MESSAGES_PER_TURN = 64
_UNFINISHED_POLL_MS = 100
_CLOSE_TIMEOUT_S = 5.0
_LINGER_S = 1.0
_SLICES_S = 0.03
"""Time for ranks to report their slices when a trace is requested."""
_ASKED_POLL_MS = 5
_STATS_MS = 10
"""How long a snapshot may wait for outputs to go with. One that goes alone wakes the server, and
keeps the interpreter from the step that was just submitted."""


class EngineProcess:
    """Sockets on one side, an `EngineCore` on the other."""

    def __init__(self, launch: EngineLaunch) -> None:
        self._context = zmq.Context()
        self._pipe = CorePipe(socket.socket(fileno=launch.pipe_fd))
        self._pipe_events: int = zmq.POLLIN
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._clock = SystemClock()
        self._role = launch.config.role.value
        self._asked: list[tuple[float, DumpTrace]] = []
        self._pieces: list[Iterator[TracePiece]] = []
        self._shutdown_at_s: float | None = None
        self._num_taken = 0
        self._stats_due_s: float | None = None
        self._has_drained = False
        self._may_end = launch.core.num_cores == 1
        self._link: CoordinatorLink | None = None
        if launch.coordinator is not None:
            index = launch.core.local_index or 0
            self._link = CoordinatorLink(self._context, launch.coordinator, index)
        try:
            self.core, self._info = load_engine(
                launch.config,
                place=launch.core,
                clock=self._clock,
                progress=lambda text: self._publish(CoreProgress(text)),
            )
            self._events = self._publisher_of(launch)
        except ConfigError as error:
            self._publish(Died(error.message, is_config=True))
            self._close_sockets()
            raise
        except Exception as error:
            self._publish(Died(_story(error)))
            self._close_sockets()
            raise _ReportedError from error
        self._arrivals = Arrivals(self.core.scheduler)
        self._heap = BurstTrim()
        self._poller = zmq.Poller()
        self._poller.register(self._pipe, self._pipe_events)
        for fd in self.core.executor.wake_fds:
            self._poller.register(fd, zmq.POLLIN)
        if self._link is not None:
            self._poller.register(self._link.socket, zmq.POLLIN)
        self._publish(CoreReady(self._info))
        self._publish_outputs([])
        if self._link is not None:
            self._tell(self._link)

    def _publisher_of(self, launch: EngineLaunch) -> KVEventPublisher | None:
        """Begin to publish KV events, and announce it, if the settings ask for it."""
        config = launch.config
        if not config.cache.events.enable_kv_cache_events:
            return None
        try:
            publisher = KVEventPublisher(
                config.cache.events,
                config.transfer,
                incarnation=self._info.incarnation,
                rank=launch.core.local_index or 0,
            )
        except ConfigError:
            self.core.close(_CLOSE_TIMEOUT_S)
            raise
        self._info = msgspec.structs.replace(self._info, kv_events=[publisher.endpoint])
        return publisher

    def run(self) -> None:
        """Serve until shut down. A failure is published before the process ends."""
        try:
            while not self._is_over():
                self._watch_pipe()
                is_waiting = self.core.scheduler.num_unfinished or self._shutdown_at_s is not None
                patience_ms = _UNFINISHED_POLL_MS if is_waiting else None
                if self._stats_due_s is not None:
                    patience_ms = _STATS_MS
                if self._asked:
                    patience_ms = _ASKED_POLL_MS
                has_more = bool(self._pieces or self._arrivals or self._pipe.has_frame)
                has_event = self._poller.poll(0 if has_more else patience_ms) or has_more
                is_time_up = not (has_event or self._asked or self._stats_due_s is not None)
                has_input = self._drain_inputs()
                if self._link is not None:
                    self._hear(self._link)
                if self.core.waves is not None and (has_input or is_time_up):
                    self.core.waves.news()
                has_news = self.core.step(self._publish_outputs)
                num_requests = len(self._arrivals) + self.core.scheduler.num_requests
                self._heap.note(num_requests, self._clock.monotonic_s())
                if self._events is not None:
                    self._events.publish(self.core.scheduler.take_events())
                self._publish_late_stats(has_changed=has_input or has_news)
                if self._link is not None:
                    self._ask(self._link)
                    self._tell(self._link)
                self._begin_dumps()
                if self._pieces:
                    self._publish_piece()
            self._publish(Died("shut down"))
        except Exception as error:  # the top of the engine's loop: nothing may end it silently
            self._publish(Died(_story(error)))
            raise _ReportedError from error
        finally:
            try:
                if self._events is not None:
                    self._events.close(_CLOSE_TIMEOUT_S)
                self.core.close(_CLOSE_TIMEOUT_S)
            finally:
                self._close_sockets()

    def _is_over(self) -> bool:
        """Return whether to end: no work is left, or time is up, and no core needs this one."""
        if self._shutdown_at_s is None:
            return False
        scheduler, waves = self.core.scheduler, self.core.waves
        if not self._has_drained:
            has_work = bool(self._arrivals) or not scheduler.is_idle
            if time.monotonic() < self._shutdown_at_s and has_work:
                return False
            self._has_drained = True
            self._num_taken += self._arrivals.hand_on(may_take_all=True)
            scheduler.abort_all("the engine is shutting down")
            self.core.post()
            self._publish_outputs(scheduler.drain_outputs())
            if self._link is not None:
                self._tell(self._link)
            if not self._may_end and self._link is not None:
                self._link.drained()
        return self._may_end and (waves is None or waves.is_at_rest)

    def _hear(self, link: CoordinatorLink) -> None:
        """Take the coordinator's orders."""
        for order in link.orders():
            match order:
                case StartWave(started):
                    if self.core.waves is not None:
                        self.core.waves.start(started)
                case EndCores():
                    self._may_end = True
                case _:
                    assert_never(order)

    def _tell(self, link: CoordinatorLink) -> None:
        """Report this core's load after planning, when no request waits needlessly."""
        link.tell(self.core.scheduler.stats(), self._num_taken)

    def _ask(self, link: CoordinatorLink) -> None:
        """Ask for a wave where one is needed."""
        waves = self.core.waves
        wave = None if waves is None else waves.wish()
        if wave is not None:
            link.wish(wave)

    def _drain_inputs(self) -> bool:
        """Take some of the messages received; return whether one concerned the scheduler.

        The others stay queued, in order, until the next turn.
        """
        has_input = False
        self._pipe.receive()
        for _ in range(_MAX_MESSAGES_PER_TURN):
            frame = self._pipe.take()
            if frame is None:
                break
            try:
                message = self._decoder.decode(frame)
            except UNREADABLE as error:
                self._refuse(frame, error)
                has_input = True
            else:
                self._take(message)
                has_input |= not isinstance(message, Ping)
        num_handed_on = self._arrivals.hand_on()
        self._num_taken += num_handed_on
        return has_input or num_handed_on > 0

    def _take(self, message: ToEngine) -> None:
        scheduler = self.core.scheduler
        match message:
            case Add():
                self._num_taken += self._arrivals.put(message)
            case AbortRequests(request_ids):
                self._num_taken += self._arrivals.forget(request_ids)
                scheduler.abort(request_ids)
            case ReleaseLease(nonce):
                scheduler.release_lease(nonce)
            case KeepLeases(nonces):
                scheduler.keep_leases(nonces)
            case HandOver(request_ids):
                scheduler.hand_over(request_ids)
            case ResetPrefixCache():
                scheduler.kv.pool.forget_all()
            case DumpTrace():
                wait_s = _SLICES_S if self.core.executor.ask_for_slices() else 0.0
                self._asked.append((self._clock.monotonic_s() + wait_s, message))
            case Ping(number):
                self._publish(Pong(number))
            case Shutdown(timeout_s):
                self._shutdown_at_s = time.monotonic() + timeout_s
            case _:
                assert_never(message)

    def _begin_dumps(self) -> None:
        """Begin the requested dumps, once the ranks have had time to report."""
        while self._asked and self._asked[0][0] <= self._clock.monotonic_s():
            _, asked = self._asked.pop(0)
            self._pieces.append(self._dump(asked.dump, asked.seconds))

    def _dump(self, number: int, seconds: float) -> Iterator[TracePiece]:
        """Return the last seconds, to be sent piece by piece; their contents are fixed now."""
        scheduler = self.core.scheduler
        dump = scheduler.recorder.dump(
            seconds,
            clock=self._clock,
            part=Part.CORE,
            role=self._role,
            engine_id=self._info.engine_id,
            running=scheduler.telemetry.requests(self._clock.monotonic_s()),
        )
        pieces = (TracePiece(number, events) for events in dump.pieces)
        return itertools.chain(pieces, [TracePiece(number, b"", dump.process)])

    def _publish_piece(self) -> None:
        """Send the next piece of the oldest requested dump."""
        piece = next(self._pieces[0])
        if piece.process is not None:
            del self._pieces[0]
        self._publish(piece)

    def _refuse(self, frame: bytes, error: Exception) -> None:
        """Refuse a message that cannot be read, which must not end other requests."""
        request_ids = ids_in_unreadable(frame)
        if not request_ids:
            _log.error("a message of the server cannot be read: %s", error)
        for request_id in request_ids:
            self._num_taken += 1
            self.core.scheduler.refuse(request_id, f"the request cannot be read: {error}")

    def _publish_outputs(self, outputs: list[EngineOutput]) -> None:
        self._stats_due_s = None
        stats = self.core.scheduler.stats()
        if self._events is not None:
            self._events.load = stats.in_brief()
            now_s = self._clock.monotonic_s()
            self._events.learned = self.core.scheduler.telemetry.learned(now_s)
            stats = msgspec.structs.replace(stats, kv_events=self._events.counts())
        self._publish(Outputs(outputs, stats))

    def _publish_late_stats(self, *, has_changed: bool) -> None:
        """Send a snapshot alone if there was no output to send it with."""
        now_s = time.monotonic()
        if self._stats_due_s is not None and now_s >= self._stats_due_s:
            self._publish_outputs([])
        elif self._stats_due_s is None and has_changed:
            self._stats_due_s = now_s + _STATS_MS / 1e3

    def _publish(self, message: FromEngine) -> None:
        self._pipe.send(self._encoder.encode(message))

    def _watch_pipe(self) -> None:
        """Send what was kept, and have the poller wake this loop for what it can do next."""
        self._pipe.flush()
        if self._pipe.has_ended and self._shutdown_at_s is None:
            self._shutdown_at_s = time.monotonic()  # nobody is left to serve
        events: int = 0 if self._pipe.has_ended else zmq.POLLIN
        events |= zmq.POLLOUT if self._pipe.has_unsent else 0
        if events != self._pipe_events:
            self._pipe_events = events
            self._poller.register(self._pipe, events)

    def _close_sockets(self) -> None:
        self._pipe.close(linger_s=_LINGER_S)
        if self._link is not None:
            self._link.close()
        self._context.term()


class _ReportedError(Exception):
    """The core ends, and has told the server why."""


def _story(error: Exception) -> str:
    """Return why the core ends; a dead rank's error already has the whole story."""
    return str(error) if isinstance(error, RankDiedError) else story_of(error)


def main() -> None:
    """Entry point of the engine core's process."""
    ignore_stop_signals()  # the server decides how its engine ends
    share_arenas()
    launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineLaunch)
    end_with_parent(launch.parent_pid)
    configure_logging(sys.stderr, launch.log)
    code = 0
    try:
        EngineProcess(launch).run()
    except ConfigError:
        code = 3
    except _ReportedError:
        code = 1
    except Exception:  # noqa: BLE001 - the top of a process
        _log.exception("the engine core has failed")
        code = 1
    # Threads of native libraries must not keep a finished engine alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
