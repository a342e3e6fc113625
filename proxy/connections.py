"""Connections to engines, which are read into one shared buffer.

asyncio allocates 256 KiB for each read and truncates it to the data received. That takes longer
than the read itself, and is a third of the proxy's work for a token. An answer may be taken where
its connection is read, which wakes no task. Says how a request fails with its connection; knows
nothing of the data.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import TYPE_CHECKING

import aiohttp

from pdserve.http.plain_client import reason_of
from pdserve.proxy.errors import WorkerError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

CONNECT_TIMEOUT_S = 3.0
FAILURES = (aiohttp.ClientError, ConnectionError, TimeoutError, UnicodeError)
"""What requests raise if their connection fails; UnicodeError is for a host name such as `a..b`."""
_NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, UnicodeError)
_NUM_BYTES = 64 << 10
_BUFFER = memoryview(bytearray(_NUM_BYTES))
"""An event loop fills it and empties it in one go, so no connection finds another's bytes."""


class SharedReader(asyncio.BufferedProtocol):
    """Stands between a transport and the protocol that receives its bytes.

    Use one event loop per process.

    Attributes:
        on_read: Called whenever the protocol has received bytes, and when the connection is lost.
    """

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol
        self.on_read: Callable[[], None] | None = None

    @staticmethod
    def of(connection: Connection | None) -> SharedReader | None:
        """Return what reads an open connection; None if it is closed or has been given back."""
        transport = None if connection is None else connection.transport
        protocol = None if transport is None else transport.get_protocol()
        return protocol if isinstance(protocol, SharedReader) else None

    @classmethod
    def put_before(cls, protocol: asyncio.Protocol, transport: asyncio.Transport) -> None:
        """Make `protocol`, which owns this transport, read this way from now on."""
        if transport.get_protocol() is protocol:
            transport.set_protocol(cls(protocol))

    def get_buffer(self, sizehint: int) -> memoryview:
        """See the base class."""
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        """See the base class."""
        self._protocol.data_received(bytes(_BUFFER[:nbytes]))
        if self.on_read is not None:
            self.on_read()

    def eof_received(self) -> bool | None:
        """See the base class."""
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        """See the base class."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """See the base class."""
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """See the base class."""
        self._protocol.connection_lost(exc)
        if self.on_read is not None:
            self.on_read()


on_connected: ContextVar[Callable[[Connection], None] | None]
on_connected = ContextVar("on_connected", default=None)
"""Told which connection carries what this task sends, before the answer begins."""


class EngineConnector(aiohttp.TCPConnector):
    """Connects to engines; see the module."""

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        """See the base class."""
        connection = await super().connect(req, traces, timeout)
        protocol, transport = connection.protocol, connection.transport
        if protocol is not None and transport is not None:
            SharedReader.put_before(protocol, transport)
        if (tell := on_connected.get()) is not None:
            tell(connection)
        return connection


def open_session(tls: ssl.SSLContext | bool) -> aiohttp.ClientSession:
    """Return a session with engines; call it inside the event loop."""
    return aiohttp.ClientSession(
        connector=EngineConnector(limit=0, keepalive_timeout=10.0, ssl=tls),
        # A prefill may wait in a queue for as long as its client does: the request's own
        # deadline is the limit. Only connecting has one of its own.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        auto_decompress=True,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


def failure_of(url: str, error: BaseException) -> WorkerError:
    """Return how a request to `url` failed, from one of `FAILURES`."""
    if isinstance(error, _NOT_CONNECTED):
        message = f"cannot connect to {url}: {reason_of(error)}"
        return WorkerError(message, reason="connect", was_taken=False)
    return WorkerError(f"{url} hung up: {error or type(error).__name__}", reason="dropped")
