"""An engine core in a process of its own, as an `EngineClient`.

Messages go through a `CorePipe`, one end of which the core inherits: no port, no file, no address,
nothing left behind when a process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, assert_never

import msgspec

from pdserve.engine.core_pipe import CorePipe
from pdserve.engine.heartbeat import CoreWatch
from pdserve.engine.launch import EngineLaunch
from pdserve.engine.open_requests import OpenRequests, TraceDump
from pdserve.errors import (
    ConfigError,
    EngineDeadError,
    InternalError,
    ShuttingDownError,
    StartingError,
)
from pdserve.imports import SHORT_SPIN
from pdserve.observe.liveness import ProcessWatch, how_it_ended
from pdserve.observe.log import log_config
from pdserve.parallel.place import CorePlace
from pdserve.wire.core_messages import (
    MAJOR,
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
)
from pdserve.wire.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from pdserve.config.schema import EngineConfig
    from pdserve.engine.coordinator import Addresses
    from pdserve.wire.ids import RequestId
    from pdserve.wire.request import EngineInfo, EngineOutput, EngineStats, GenerateRequest, Sibling
    from pdserve.wire.trace import ProcessTrace

_log = logging.getLogger(__name__)

_KILL_AFTER_S = 8.0
_LEAVE_AFTER_S = 10.0
"""Time for a killed process to end: it ends at once unless it is stuck inside the kernel."""


async def launch_engine(
    config: EngineConfig,
    *,
    progress: Callable[[str], None],
    core: CorePlace | None = None,
    coordinator: Addresses | None = None,
    on_dead: Callable[[], None] = lambda: None,
) -> CoreClient:
    """Start an engine core; it loads in the background (`wait_ready`).

    Args:
        core: Its place, if it is one of several; the listening socket of its rendezvous is
            passed on to it.
        coordinator: Addresses of the cores' coordinator, if there are several cores.
        on_dead: Called when the core has ended unasked.
    """
    core = core or CorePlace()
    ours, theirs = socket.socketpair()
    launch = EngineLaunch(
        parent_pid=os.getpid(),
        log=log_config(),
        config=config,
        pipe_fd=theirs.fileno(),
        core=core,
        coordinator=coordinator,
    )
    inherited = [theirs.fileno()]
    if core.rendezvous is not None and core.rendezvous.listen_fd is not None:
        inherited.append(core.rendezvous.listen_fd)
    process = subprocess.Popen(  # noqa: ASYNC220 - a fork and exec, once, before serving
        [sys.executable, "-m", "pdserve.engine.process"],
        env={**SHORT_SPIN, **os.environ},
        stdin=subprocess.PIPE,
        pass_fds=inherited,
    )
    theirs.close()
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and that is noticed
        process.stdin.write(msgspec.msgpack.encode(launch))
        process.stdin.close()
    return CoreClient(
        config,
        process=process,
        pipe=CorePipe(ours),
        progress=progress,
        on_dead=on_dead,
    )


class CoreClient:
    """See `EngineClient`. Made by `launch_engine`; lives in one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        process: subprocess.Popen[bytes],
        pipe: CorePipe,
        progress: Callable[[str], None],
        on_dead: Callable[[], None] = lambda: None,
    ) -> None:
        self._process = process
        self._pipe = pipe
        self._progress = progress
        self._on_dead = on_dead
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._requests = OpenRequests(config.scheduler)
        self._dump_numbers = itertools.count(1)
        self._dumps: dict[int, TraceDump] = {}
        self._info: EngineInfo | None = None
        self._stats: EngineStats | None = None
        self._dead_reason: str | None = None
        self._is_config_error = False
        self._num_sent = 0
        self._is_closing = False
        self._settled = asyncio.Event()
        self._exited = asyncio.Event()
        self._heartbeat = CoreWatch(ProcessWatch(process.pid), config.liveness)
        self._pid_fd = os.pidfd_open(process.pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pid_fd, self._on_exit)
        self._loop.add_reader(pipe, self._read)
        self._watcher = asyncio.create_task(self._watch(), name="heartbeats")

    @property
    def info(self) -> EngineInfo | None:
        """See `EngineClient`."""
        return self._info

    @property
    def stats(self) -> EngineStats | None:
        """See `EngineClient`."""
        return self._stats

    @property
    def dead_reason(self) -> str | None:
        """See `EngineClient`."""
        return self._dead_reason

    @property
    def stall_reason(self) -> str | None:
        """See `EngineClient`."""
        return self._heartbeat.stall_reason

    @property
    def core_stats(self) -> list[EngineStats | None]:
        """See `EngineClient`."""
        return [self._stats]

    @property
    def pid(self) -> int:
        """The engine core's process id."""
        return self._process.pid

    @property
    def num_answering(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def num_sent(self) -> int:
        """Requests sent to the core since the start."""
        return self._num_sent

    @property
    def exit_code(self) -> int | None:
        """Exit code of the core's process; None before it has ended."""
        return self._process.poll()

    @property
    def is_config_error(self) -> bool:
        """Whether it has ended because of a setting or a file."""
        return self._is_config_error

    def serves(self, request_id: RequestId) -> bool:
        """Whether a request of this id is being answered."""
        return request_id in self._requests

    async def wait_ready(self) -> EngineInfo:
        """Wait until the engine serves.

        Raises:
            ConfigError: Its settings, model or device cannot be used.
            EngineDeadError: It ended for another reason.
        """
        await self.wait_settled()
        if self._info is None:
            reason = self._dead_reason or "the engine ended while it started"
            raise ConfigError(reason) if self._is_config_error else EngineDeadError(reason)
        return self._info

    async def wait_settled(self) -> None:
        """Wait until the engine serves, or has ended."""
        await self._settled.wait()

    async def generate(
        self, request: GenerateRequest, siblings: Sequence[Sibling] = ()
    ) -> AsyncGenerator[EngineOutput, None]:
        """See `EngineClient`."""
        if self._dead_reason is not None:
            raise EngineDeadError(self._dead_reason)
        if self._is_closing:
            raise ShuttingDownError("this engine")
        if self._info is None:
            raise StartingError
        num_tokens = len(request.prompt_token_ids)
        self._requests.refuse_if_full(
            num_tokens * (1 + len(siblings)),
            max_running=self._info.max_num_seqs,
            num_waiting=0 if self._stats is None else self._stats.num_waiting,
        )
        ids = {request.request_id, *(sibling.request_id for sibling in siblings)}
        answers = self._requests.add(ids, num_tokens)
        try:
            self._send(Add(request, list(siblings)))
            self._num_sent += len(ids)
            while (output := await answers.next()) is not None:
                if output.finish_reason is not None:
                    self._requests.end(output.request_id)
                yield output
        finally:
            if answers.num_open and (left := self._requests.close(ids, answers)):
                self._send(AbortRequests(left))

    async def abort(self, request_ids: Sequence[RequestId]) -> None:
        """See `EngineClient`."""
        if known := self._requests.abort(request_ids):
            self._send(AbortRequests(known))

    async def release_lease(self, nonce: str) -> None:
        """See `EngineClient`."""
        self._send(ReleaseLease(nonce))

    async def keep_leases(self, nonces: Sequence[str]) -> None:
        """See `EngineClient`."""
        self._send(KeepLeases(list(nonces)))

    async def hand_over(self, request_ids: Sequence[RequestId]) -> None:
        """See `EngineClient`."""
        self._send(HandOver(list(request_ids)))

    async def reset_prefix_cache(self) -> None:
        """See `EngineClient`."""
        self._send(ResetPrefixCache())

    async def trace(self, seconds: float) -> list[ProcessTrace]:
        """See `EngineClient`."""
        if self._dead_reason is not None or self._info is None:
            raise EngineDeadError(self._dead_reason or "the engine is still loading")
        number = next(self._dump_numbers)
        dump = self._dumps[number] = TraceDump(asyncio.get_running_loop().create_future())
        try:
            self._send(DumpTrace(number, seconds))
            return [await dump.trace]
        finally:
            del self._dumps[number]

    def fail(self, reason: str) -> None:
        """End the engine at once; its requests end with `reason`."""
        self._is_closing = True
        self._die(reason, is_config=False)
        self._process.kill()

    async def close(self, *, timeout_s: float) -> None:
        """See `EngineClient`. What has not ended some seconds after is killed."""
        self._is_closing = True
        if self._info is None:
            self._process.kill()
        elif not self._exited.is_set():
            self._send(Shutdown(timeout_s))
            try:
                await asyncio.wait_for(self._exited.wait(), timeout_s + _KILL_AFTER_S)
            except TimeoutError:
                self._process.send_signal(signal.SIGKILL)
        try:
            await asyncio.wait_for(self._exited.wait(), _LEAVE_AFTER_S)
        except TimeoutError:
            _log.error("engine core %d cannot be killed: left behind", self._process.pid)
        self._watcher.cancel()
        if self._pipe.fileno() >= 0:
            self._loop.remove_reader(self._pipe)
            self._loop.remove_writer(self._pipe)
        self._pipe.close()

    async def _watch(self) -> None:
        """Watch the core until it ends, and give it up if it makes no progress."""
        heartbeat = self._heartbeat
        while not self._is_closing and not self._exited.is_set():
            reason = heartbeat.look()
            if reason is not None:
                self._die(reason, is_config=False)
                self._process.kill()
                return
            if (number := heartbeat.next()) is not None:
                self._send(Ping(number))
            await asyncio.sleep(heartbeat.look_s)

    def _send(self, message: ToEngine) -> None:
        """Send without waiting: the caller may be a cancelled task.

        A core that has gone is noticed separately.
        """
        if self._pipe.fileno() < 0:
            return
        self._pipe.send(self._encoder.encode(message))
        if self._pipe.has_unsent:
            self._loop.add_writer(self._pipe, self._flush)

    def _flush(self) -> None:
        self._pipe.flush()
        if not self._pipe.has_unsent:
            self._loop.remove_writer(self._pipe)

    def _read(self) -> bool:
        """Take the messages received; the event loop calls again while there are more.

        Returns:
            Whether there may be more.
        """
        is_more = self._pipe.receive()
        try:
            while (frame := self._pipe.take()) is not None:
                self._take(self._decoder.decode(frame))
        except Exception as error:  # noqa: BLE001 - the top of a callback: waiters must be told
            self._loop.remove_reader(self._pipe)
            self._die(f"the engine core's messages cannot be read: {error!r}", is_config=False)
            self._process.kill()
            return False
        if self._pipe.has_ended:
            self._loop.remove_reader(self._pipe)
        return is_more

    def _take(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs, stats):
                self._stats = stats
                for output in outputs:
                    is_read = self._requests.deliver(output)
                    if not is_read and output.finish_reason is FinishReason.HANDOFF:
                        # The client left in the same moment, so this lease will not be read.
                        self._send(AbortRequests([output.request_id]))
            case CoreProgress(text):
                self._progress(text)
            case CoreReady(info, major):
                if major != MAJOR:
                    raise InternalError(f"it speaks version {major}, the server {MAJOR}")
                self._info = info
                self._heartbeat.expect()
                self._settled.set()
            case Died(reason, is_config):
                self._die(reason, is_config=is_config)
            case Pong(number):
                self._heartbeat.answered(number)
            case TracePiece(number):
                dump = self._dumps.get(number)  # None: its requester has left
                if dump is not None:
                    dump.take(message)
            case _:
                assert_never(message)

    def _die(self, reason: str, *, is_config: bool) -> None:
        if self._dead_reason is None:
            self._dead_reason = reason
            self._is_config_error = is_config
        self._settled.set()
        self._requests.fail(self._dead_reason)
        for dump in self._dumps.values():
            dump.fail(reason)
        if not self._is_closing:
            self._on_dead()

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pid_fd)
        os.close(self._pid_fd)
        code = self._process.wait()
        while self._pipe.fileno() >= 0 and self._read():  # its last messages are all there
            pass
        self._die(f"the engine core {how_it_ended(code)}", is_config=False)
        self._exited.set()
        if code:
            self._on_dead()
