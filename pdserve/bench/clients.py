"""Manages the benchmark's client processes: start, messages and guaranteed end.

Knows neither a plan nor a figure.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

from pdserve.bench.job import (
    LENGTH_BYTES,
    Broken,
    Orders,
    Says,
    decode_says,
    frame,
    length,
)
from pdserve.errors import ConfigError

_END_TIMEOUT_S: Final = 5.0


class ClientProcess:
    """One client process and its two pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._in, self._out = process.stdin, process.stdout

    async def tell(self, message: Orders) -> None:
        """Send a message; if the client has ended, `hear` raises."""
        self._in.write(frame(message))
        with contextlib.suppress(ConnectionError):
            await self._in.drain()

    def stop(self) -> None:
        """Let it end its run early."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # Not the process's own methods, which first look whether it has ended, and so take the
        # exit status that asyncio is waiting for.
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    async def hear(self) -> Says:
        """Wait for a message.

        Raises:
            ConfigError: The client cannot do its job.
            RuntimeError: It has ended.
        """
        try:
            head = await self._out.readexactly(LENGTH_BYTES)
            message: Says = decode_says(await self._out.readexactly(length(head)))
        except asyncio.IncompleteReadError:
            code = await self.process.wait()
            raise RuntimeError(f"a client process ended with exit code {code}") from None
        if isinstance(message, Broken):
            raise ConfigError(message.message, param=message.param)
        return message


@contextlib.asynccontextmanager
async def client_processes(
    number: int, environ: Mapping[str, str] | None
) -> AsyncIterator[list[ClientProcess]]:
    """Client processes; those that have not ended by themselves soon after the block are killed."""
    started: list[ClientProcess] = []
    try:
        for _ in range(number):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pdserve.bench.client_process",
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=dict(environ) if environ is not None else None,
                start_new_session=True,  # Ctrl-C is for the one that started them
            )
            started.append(ClientProcess(process))
        yield started
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT_S):
                await _all_ended(started)
    finally:
        for each in started:
            each.kill()
        await _all_ended(started)


async def _all_ended(clients: Sequence[ClientProcess]) -> None:
    for each in clients:
        await each.process.wait()
