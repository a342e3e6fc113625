"""HTTP as the servers read it that benchmarks play; what they answer is their own."""

from __future__ import annotations

import asyncio
from typing import NamedTuple


class PlayedRequest(NamedTuple):
    """What came; names of headers are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class PlayedConnection(asyncio.Protocol):
    """One connection; requests come one after the other.

    Attributes:
        transport: For answers in pieces.
        task: What answers in pieces; it is cancelled when the connection ends.
    """

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        method, path, _ = first.split(" ")
        self.take(PlayedRequest(method, path, headers, rest[:length]))

    def take(self, request: PlayedRequest) -> None:
        """Answer a request, or begin to."""
        raise NotImplementedError

    def reply(self, status: int, body: bytes) -> None:
        """Answer with JSON, at once and whole."""
        self.transport.write(
            b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (status, len(body), body)
        )
