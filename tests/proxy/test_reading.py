"""The shared read buffer, over real sockets."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from pdserve.proxy.connections import SharedReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NUM_BYTES = 1 << 20


class Collector(asyncio.Protocol):
    """Keeps what comes."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.told: list[str] = []
        self.lost = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.received += data

    def eof_received(self) -> None:
        self.told.append("eof")

    def connection_lost(self, exc: Exception | None) -> None:
        self.told.append("lost")
        self.lost.set()


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A server that answers one byte with what only that byte gives, and hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(content(await reader.readexactly(1)))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def content(name: bytes) -> bytes:
    return random.Random(name[0]).randbytes(NUM_BYTES)


async def ask(port: int, name: bytes) -> Collector:
    loop = asyncio.get_running_loop()
    transport, collector = await loop.create_connection(Collector, "127.0.0.1", port)
    SharedReader.put_before(collector, transport)
    SharedReader.put_before(collector, transport)  # as for a connection that is used again
    transport.write(name)
    await collector.lost.wait()
    return collector


async def test_connections_that_share_a_buffer_get_their_own_bytes(port: int) -> None:
    names = [b"a", b"b", b"c"]
    collectors = await asyncio.gather(*(ask(port, name) for name in names))
    assert [bytes(c.received) == content(n) for c, n in zip(collectors, names, strict=True)] == [
        True,
        True,
        True,
    ]


async def test_the_end_of_a_connection_is_told(port: int) -> None:
    collector = await ask(port, b"a")
    assert collector.told == ["eof", "lost"]
