"""How client processes end, and what is noticed of it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Any

import pytest

from pdserve.bench.runner import Options, run_plan
from pdserve.bench.target import Target
from tests.bench.scripted import request, script, scripted_server

pytestmark = pytest.mark.slow


async def test_nobody_but_asyncio_takes_a_clients_exit_status(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One client ends long before the other; asyncio's watcher hears of it late, as when busy."""
    taken = os.waitpid

    def late(pid: int, options: int) -> Any:
        if not options & os.WNOHANG:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            time.sleep(1.0)  # asyncio's watcher comes last
        return taken(pid, options)

    monkeypatch.setattr(os, "waitpid", late)
    with scripted_server() as server, caplog.at_level(logging.WARNING, "asyncio"):
        plan = [request(0, script(first_s=0.01)), request(1, script(first_s=0.8))]
        found = await run_plan(plan, Target(base_url=server.url), Options(num_processes=2))
    assert all(each.is_good for each in found.outcomes)
    assert not [record.message for record in caplog.records]


async def test_clients_end_with_a_run_that_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def noted(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        started.append(await start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    with scripted_server() as server:
        plan = [request(n, script(first_s=60.0)) for n in range(2)]
        run = asyncio.create_task(
            run_plan(plan, Target(base_url=server.url, model="m"), Options(num_processes=2))
        )
        while server.max_open() < 2:
            await asyncio.sleep(0.05)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert [each.returncode for each in started] == [-9, -9]
