"""Child processes of a supervisor: started, watched, restarted, and never left behind.

A child runs in a session of its own, so that Ctrl-C reaches the supervisor alone, which
decides how the children end. What they log appears on our stderr under their name. Knows
nothing of what the children do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pdserve.commands.exit_codes import EXIT_CONFIG, EXIT_USAGE
from pdserve.lifeline import SUPERVISOR_VARIABLE
from pdserve.observe.liveness import NUM_LOOKS, ProcessWatch

T = TypeVar("T")

_BACK_OFF_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
_STEADY_S: Final = 30.0
"""A child that ran for this long restarts with the shortest back-off."""
_MAX_STARTS: Final = 3
"""A child that ends this often without ever being ready is given up."""
_LONGEST_LINE_BYTES: Final = 1 << 20


class ChildFailedError(Exception):
    """A child cannot be started, or may not be started again; its output was shown already.

    Attributes:
        code: Its exit code.
    """

    def __init__(self, name: str, code: int, when: str = "before it was ready") -> None:
        super().__init__(f"{name} ended with exit code {code} {when}")
        self.code = code


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start one child.

    Attributes:
        name: Prefix of its log lines.
        arguments: Arguments of `pdserve`.
        environ: Its whole environment.
        cores: Cores on which it and its children may run; empty changes nothing.
    """

    name: str
    arguments: Sequence[str]
    environ: Mapping[str, str]
    cores: tuple[int, ...] = ()


class Child:
    """One child process and its restarts.

    Args:
        on_line: Receives every log line.
        say: Receives the supervisor's own messages about it.
        may_restart: Whether it is started again when it ends; else `run` raises.
        heartbeat_timeout_s: A child that is stopped (SIGSTOP) for this long is killed.
    """

    def __init__(
        self,
        spec: ChildSpec,
        *,
        on_line: Callable[[str], None],
        say: Callable[[str], None],
        may_restart: bool = True,
        heartbeat_timeout_s: float = 5.0,
    ) -> None:
        self.spec = spec
        self._may_restart = may_restart
        self._look_s = heartbeat_timeout_s / NUM_LOOKS
        self.was_ready = False
        self._on_line = on_line
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Id of the running process, if there is one."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def run(self) -> None:
        """Keep the child alive until `stop`.

        Raises:
            ChildFailedError: Its settings cannot be used, or it never became ready.
        """
        starts = 0
        while not self._stopping.is_set():
            started_s = time.monotonic()
            code = await self._live()
            if self._stopping.is_set():
                return
            if not self._may_restart:
                when = "while it was needed" if self.was_ready else "before it was ready"
                raise ChildFailedError(self.spec.name, code, when)
            starts = 1 if time.monotonic() - started_s > _STEADY_S else starts + 1
            is_usage = code in (EXIT_USAGE, EXIT_CONFIG)
            if not self.was_ready and (is_usage or starts >= _MAX_STARTS):
                raise ChildFailedError(self.spec.name, code)
            delay_s = _BACK_OFF_S[min(starts, len(_BACK_OFF_S)) - 1]
            self._say(
                f"{self.spec.name} ended with exit code {code}; restarting it in {delay_s:g} s"
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _live(self) -> int:
        """Run the process once and return its exit code."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pdserve",
            *self.spec.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=_LONGEST_LINE_BYTES,
            env={**self.spec.environ, SUPERVISOR_VARIABLE: str(os.getpid())},
            start_new_session=True,
            # Set before it can have threads, which would keep the cores they started on.
            preexec_fn=functools.partial(_stay_on, self.spec.cores) if self.spec.cores else None,
        )
        self._process = process
        if self._stopping.is_set():  # `stop` found nothing to end
            self._kill_group(process.pid)
        assert process.stderr is not None
        pump = asyncio.create_task(self._pump(process.stderr))
        watch = asyncio.create_task(self._watch(process.pid))
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            self.kill()
            await process.wait()
            raise
        finally:
            watch.cancel()
            self._kill_group(process.pid)  # its own children
            await pump
        return code

    async def _watch(self, pid: int) -> None:
        """Kill the process if it is stopped for long: it keeps its port and serves nobody."""
        watch = ProcessWatch(pid)
        while watch.num_stopped < NUM_LOOKS:
            await asyncio.sleep(self._look_s)
            watch.look()
        self._say(f"{self.spec.name} was stopped for longer than --heartbeat-timeout; killing it")
        self._kill_group(pid)

    async def _pump(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than any log line; it has been dropped
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if text:
                self._on_line(text)

    async def stop(self, timeout_s: float) -> None:
        """Ask the child to drain and end; kill it after `timeout_s`."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            self._say(f"{self.spec.name} did not end within {timeout_s:g} s; killing it")
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """End the child and all it started, at once."""
        self._stopping.set()
        if self._process is not None:
            self._kill_group(self._process.pid)

    @staticmethod
    def _kill_group(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


async def while_alive(work: Coroutine[Any, Any, T], lives: Sequence[asyncio.Task[None]]) -> T:
    """Do `work`, unless a child ends for good.

    Args:
        lives: Tasks that run `Child.run`.

    Raises:
        ChildFailedError: One did; `work` is cancelled.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task, *lives}, return_when=asyncio.FIRST_COMPLETED)
        for life in lives:
            if life.done():
                life.result()
        return await task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _stay_on(cores: tuple[int, ...]) -> None:
    os.sched_setaffinity(0, cores)
