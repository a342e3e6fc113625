from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator

import psutil
import pytest

from pdserve.commands.children import Child, ChildFailedError, ChildSpec
from tests.cli.process import ROOT, environment, free_ports

pytestmark = pytest.mark.slow


class Watched:
    """A child that is a proxy (the lightest of our processes), and what was heard of it."""

    def __init__(self, *arguments: str, heartbeat_timeout_s: float = 5.0) -> None:
        (self.port,) = free_ports(1)
        self.lines: list[str] = []
        self.said: list[str] = []
        command = ["proxy", "--port", str(self.port), "--drain-delay", "0", *arguments]
        spec = ChildSpec("proxy", command, environment())
        self.child = Child(
            spec,
            on_line=self.lines.append,
            say=self.said.append,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[asyncio.Task[None], None]:
        life = asyncio.create_task(self.child.run())
        try:
            yield life
        finally:
            await self.child.stop(30)
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)

    async def listening(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return
            await asyncio.sleep(0.02)


async def test_a_child_that_is_killed_is_started_again() -> None:
    watched = Watched()
    async with watched.running():
        await watched.listening()
        first = watched.child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        while watched.child.pid in (None, first):
            await asyncio.sleep(0.02)
        await watched.listening()
    assert watched.said == ["proxy ended with exit code -9; restarting it in 0.5 s"]


async def test_a_child_that_stands_still_is_killed_and_started_again() -> None:
    watched = Watched(heartbeat_timeout_s=1.0)
    async with watched.running():
        await watched.listening()
        first = watched.child.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        while watched.child.pid in (None, first):
            await asyncio.sleep(0.02)
        await watched.listening()
    assert watched.said == [
        "proxy was stopped for longer than --heartbeat-timeout; killing it",
        "proxy ended with exit code -9; restarting it in 0.5 s",
    ]


async def test_a_child_whose_settings_cannot_be_used_is_not_started_again() -> None:
    watched = Watched("--queue-size", "-1")
    async with watched.running() as life:
        with pytest.raises(ChildFailedError, match="exit code 3") as caught:
            await life
    assert caught.value.code == 3
    assert any("--queue-size is -1" in line for line in watched.lines)


async def test_a_stopped_child_is_gone_and_stays_gone() -> None:
    watched = Watched()
    async with watched.running() as life:
        await watched.listening()
        pid = watched.child.pid
        assert pid is not None
        await watched.child.stop(30)
        await asyncio.wait_for(life, 30)
    assert not psutil.pid_exists(pid)
    assert watched.child.pid is None


async def test_a_child_that_is_stopped_while_it_starts_is_gone() -> None:
    watched = Watched()
    life = asyncio.create_task(watched.child.run())
    await asyncio.sleep(0)  # it is being started, and has no process yet
    await watched.child.stop(30)
    try:
        await asyncio.wait_for(asyncio.shield(life), 10)
    finally:
        watched.child.kill()
    assert watched.child.pid is None


async def test_a_child_that_does_not_end_is_killed() -> None:
    watched = Watched()
    async with watched.running():
        await watched.listening()
        pid = watched.child.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await watched.child.stop(0.2)
    assert not psutil.pid_exists(pid)
    assert watched.said == ["proxy did not end within 0.2 s; killing it"]


def test_children_end_with_a_supervisor_that_is_killed() -> None:
    (port,) = free_ports(1)
    script = (
        "import asyncio, os, sys\n"
        "from pdserve.commands.children import Child, ChildSpec\n"
        f"command = ['proxy', '--port', '{port}', '--drain-delay', '0']\n"
        "spec = ChildSpec('proxy', command, dict(os.environ))\n"
        "child = Child(spec, on_line=print, say=print)\n"
        "asyncio.run(child.run())\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment())
    try:
        family = psutil.Process(supervisor.pid)
        deadline_s = time.monotonic() + 120
        while not any(c.laddr.port == port for p in family.children() for c in p.net_connections()):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        children = family.children(recursive=True)
    finally:
        supervisor.kill()
        supervisor.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
