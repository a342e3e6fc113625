from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from blockbuster import blockbuster_ctx

from pdserve.config.http import HttpLimits, ProxyConfig
from pdserve.proxy.app import Proxy
from tests.proxy.scripted import ScriptedEngine
from tests.server.conftest import make_engine, model_dir, serving, text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping

    from pdserve.text.load import Text

    Serve = Callable[..., Awaitable[str]]

__all__ = ["model_dir", "text"]


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    with blockbuster_ctx("pdserve.proxy"), blockbuster_ctx("pdserve.server"):
        yield


@pytest.fixture(params=["proxy", "engine"])
async def serve(request: pytest.FixtureRequest, text: Text) -> AsyncIterator[Serve]:
    """Start a proxy, or an engine's server: `url = await serve(settings, **limits)`."""
    async with contextlib.AsyncExitStack() as cleanup:

        async def start(settings: Mapping[str, Any] | None = None, **limits: float) -> str:
            common = {"limits": HttpLimits(**limits), **(settings or {})}
            if request.param == "engine":
                server = serving(text, make_engine(text), **common)
                return (await cleanup.enter_async_context(server)).url
            engine = await ScriptedEngine("decode").start()
            cleanup.push_async_callback(engine.stop)
            proxy = Proxy(
                ProxyConfig(port=0, decode=(engine.url,), shutdown_timeout_s=1.0, **common)
            )
            cleanup.push_async_callback(proxy.stop)
            return await proxy.start()

        yield start


class Wire:
    """A connection of bytes: what a client may send that no library would."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next answer that comes: its status, its headers in lower case, its body."""
        async with asyncio.timeout(30.0):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.rstrip().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(first.split()[1]), headers, body

    async def refusal(self) -> tuple[int, dict[str, str | None]]:
        """The next answer, which is an error in OpenAI's shape: its status and the object."""
        status, headers, body = await self.answer()
        assert headers["content-type"].startswith("application/json"), (status, headers, body)
        error = msgspec.json.decode(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["code"], str)
        return status, error

    async def is_closed(self) -> bool:
        """Whether the server hangs up, within 30 s, and says nothing before."""
        async with asyncio.timeout(30.0):
            return await self.reader.read() == b""


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Wire]:
    """Connect to a server."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
