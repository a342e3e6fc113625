from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from pdserve.config.http import ProxyConfig
from pdserve.observe.clock import Clock
from pdserve.proxy.app import Proxy
from tests.proxy.scripted import ScriptedEngine


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[BlockBuster]:
    with blockbuster_ctx("pdserve.proxy") as blockbuster:
        yield blockbuster


@dataclasses.dataclass
class Stack:
    """A proxy with scripted engines behind it, and a client before it."""

    proxy: Proxy
    url: str
    client: aiohttp.ClientSession
    engines: list[ScriptedEngine]

    def post(self, body: Any = None, path: str = "/v1/completions", **kwargs: Any) -> Any:
        payload = {"prompt": "hi", "max_tokens": 4, "seed": 3} if body is None else body
        return self.client.post(f"{self.url}{path}", json=payload, **kwargs)

    async def get(self, path: str) -> Any:
        """GET; return the parsed answer."""
        async with self.client.get(self.url + path) as response:
            return await response.json()

    async def refused(self, body: Any = None, **kwargs: Any) -> tuple[int, str | None]:
        """POST what is not served; return the status and the error's code."""
        async with self.post(body, **kwargs) as response:
            return response.status, (await response.json())["error"].get("code")

    async def stream(self, body: Any = None, path: str = "/v1/completions") -> bytes:
        payload = {"prompt": "hi", "max_tokens": 4, "seed": 3, **(body or {}), "stream": True}
        async with self.post(payload, path) as response:
            assert response.status == 200, await response.text()
            return await response.read()

    async def until_stages(self, *stages: str) -> None:
        """Wait until just so many requests run, at these stages."""
        async with asyncio.timeout(30.0):
            while True:
                running = (await self.get("/debug/requests"))["running"]
                if sorted(each["stage"] for each in running) == sorted(stages):
                    return
                await asyncio.sleep(0.005)

    async def metrics(self) -> dict[str, float]:
        async with self.client.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}


MakeStack = Callable[..., Any]


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pdserve logs, whatever became of its handlers."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("pdserve"), "handlers", [handler])
    return lines


@pytest.fixture
async def started() -> AsyncIterator[Callable[..., Any]]:
    """Start engines that no proxy knows yet: `await started(role, **parameters)`."""
    async with contextlib.AsyncExitStack() as cleanup:

        async def start(*args: Any, **parameters: Any) -> ScriptedEngine:
            engine = await ScriptedEngine(*args, **parameters).start()
            cleanup.push_async_callback(engine.stop)
            return engine

        yield start


@pytest.fixture
async def make_stack() -> AsyncIterator[MakeStack]:
    """Start engines and a proxy: `await make_stack([p], [d], clock, **settings)`."""
    async with contextlib.AsyncExitStack() as cleanup:

        async def make(
            prefill: list[ScriptedEngine] | None = None,
            decode: list[ScriptedEngine] | None = None,
            clock: Clock | None = None,
            **settings: Any,
        ) -> Stack:
            engines = []
            for engine in [*(prefill or []), *(decode or [])]:
                if not engine.url:
                    await engine.start()
                    cleanup.push_async_callback(engine.stop)
                engines.append(engine)
            config = ProxyConfig(
                **{
                    "port": 0,
                    "prefill": tuple(engine.url for engine in prefill or []),
                    "decode": tuple(engine.url for engine in decode or []),
                    "health_check_interval_s": 0.05,
                    "health_check_timeout_s": 10.0,
                    "shutdown_timeout_s": 1.0,
                    **settings,
                }
            )
            proxy = Proxy(config, clock=clock, rng=random.Random(1))
            url = await proxy.start()
            cleanup.push_async_callback(proxy.stop)
            client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True)
            )
            await cleanup.enter_async_context(client)
            return Stack(proxy, url, client, engines)

        yield make


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for something that must become true."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
