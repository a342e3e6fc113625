"""The server's handle on its coordinator process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio

from pdserve.engine.coordinator import Addresses, CoordinatorLaunch, Counts
from pdserve.engine.local_socket import LocalKeys, connect_local, local_name
from pdserve.observe.liveness import NUM_LOOKS, ProcessWatch, how_it_ended
from pdserve.observe.log import log_config

if TYPE_CHECKING:
    from collections.abc import Callable


class CoordinatorProcess:
    """Starts the coordinator, watches it, and passes on its counts.

    Args:
        look_s: Seconds between two looks at it.
        on_counts: Called with the cores' newest counts.
        on_end: Called with the reason if it ends before `close`.
    """

    def __init__(
        self,
        num_cores: int,
        *,
        look_s: float,
        on_counts: Callable[[list[Counts]], None],
        on_end: Callable[[str], None],
    ) -> None:
        keys = LocalKeys.make()
        self.addresses = Addresses.beginning_with(local_name(), keys.public)
        self._on_counts, self._on_end = on_counts, on_end
        launch = CoordinatorLaunch(
            parent_pid=os.getpid(),
            log=log_config(),
            num_cores=num_cores,
            addresses=self.addresses,
            keys=keys,
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdserve.engine.coordinator"], stdin=subprocess.PIPE
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and that is noticed
            self._process.stdin.write(msgspec.msgpack.encode(launch))
            self._process.stdin.close()
        self._pid_fd = os.pidfd_open(self._process.pid)
        self._exited = asyncio.Event()
        self._is_closing = False
        asyncio.get_running_loop().add_reader(self._pid_fd, self._on_pid_fd)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.linger = 0
        connect_local(self._socket, self.addresses.counts, keys.public)
        self._socket.subscribe(b"")
        self._tasks = [
            asyncio.create_task(self._read(), name="coordinator-counts"),
            asyncio.create_task(self._watch(look_s), name="coordinator-watch"),
        ]

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def close(self) -> None:
        """Kill it; it has nothing to lose. May be called twice."""
        self._is_closing = True
        self._process.kill()
        await self._exited.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(list[Counts])
        while True:
            self._on_counts(decoder.decode(await self._socket.recv()))

    async def _watch(self, look_s: float) -> None:
        """Kill it if it is stopped for long: no wave could begin any more."""
        watch = ProcessWatch(self._process.pid)
        while watch.num_stopped < NUM_LOOKS:
            watch.look()
            await asyncio.sleep(look_s)
        self._on_end("the coordinator was stopped for longer than --heartbeat-timeout")
        self._process.kill()

    def _on_pid_fd(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pid_fd)
        os.close(self._pid_fd)
        code = self._process.wait()
        self._exited.set()
        if not self._is_closing:
            self._on_end(f"the coordinator {how_it_ended(code)}")
