"""HTTP without sockets: aiohttp's own requests, responses and applications, in one process.

A `Host` is an application at an address. A `Session` is what stands in for
`aiohttp.ClientSession`: bytes travel with a little latency, a host that is down refuses, one
that dies breaks what it had open, a client that hangs up cancels its handler, as the real ones
do. Knows nothing of what is said.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from aiohttp.http import HttpVersion10
from aiohttp.http_parser import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from pdserve.proxy.connections import SharedReader, on_connected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Mapping

LATENCY_S = 0.0002
_URLS: dict[str, URL] = {}


class Connection:
    """One exchange: the server writes, the client reads.

    Attributes:
        task: The server's handler.
        is_whole: The server has said all.
        is_cut: The server's end is gone before that.
        reader: Told when there is something to read.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.task: asyncio.Task[None] | None = None
        self.is_whole = self.is_cut = self.is_left = False
        self.data = bytearray()
        self.length: int | None = None
        self.output_size = 0
        self.reader = SharedReader(asyncio.Protocol())
        self._changed = asyncio.Event()

    def _change(self) -> None:
        self._changed.set()
        if self.reader.on_read is not None:
            asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        if self.reader.on_read is not None:
            self.reader.on_read()

    # --- the server's end (aiohttp's AbstractStreamWriter)

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        self.status = int(status_line.split(" ", 2)[1])
        self.headers = headers
        self._change()

    def send_headers(self) -> None:
        pass

    def enable_chunking(self) -> None:
        pass

    async def write(self, data: bytes) -> None:
        if self.is_left or self.is_cut:
            raise ConnectionResetError("the other end has closed the connection")
        self.put(data)

    def put(self, data: bytes) -> None:
        self.data += data
        self.output_size += len(data)
        self._change()

    async def write_eof(self, data: bytes = b"") -> None:
        if data:
            await self.write(data)
        self.is_whole = True
        self._change()

    async def drain(self) -> None:
        pass

    def cut(self) -> None:
        """The server's end breaks."""
        if not self.is_whole:
            self.is_cut = True
            self._change()

    # --- the client's end

    def leave(self) -> None:
        """The client hangs up; the server notices a little later."""
        if self.is_left:
            return
        self.is_left = True
        if self.task is not None and not self.task.done():
            asyncio.get_running_loop().call_later(LATENCY_S, self.task.cancel)

    async def begun(self) -> None:
        """Wait for the answer's beginning."""
        while not self.status:
            if self.is_cut:
                raise aiohttp.ServerDisconnectedError
            self._changed.clear()
            await self._changed.wait()
        await asyncio.sleep(LATENCY_S)

    async def take(self) -> bytes:
        """Return what has come; nothing at the end."""
        while not (data := self.taken()) and not self.is_whole:
            self._changed.clear()
            await self._changed.wait()
        return data

    def taken(self) -> bytes:
        """Return what has come by now."""
        if not self.data and not self.is_whole and (self.is_cut or self.is_left):
            raise aiohttp.ClientPayloadError("Response payload is not completed")
        data = bytes(self.data)
        self.data.clear()
        return data


class _Transport:
    """As much of an asyncio transport, and of what stands around it, as hanging up by halves needs.

    It is its connection and its protocol as well; that is None once the answer is complete.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.transport = self

    @property
    def protocol(self) -> _Transport | None:
        return None if self._connection.is_whole else self

    def get_protocol(self) -> SharedReader:
        return self._connection.reader

    def force_close(self) -> None:
        pass

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self._connection.is_cut

    def write_eof(self) -> None:
        task = self._connection.task
        if task is not None and not task.done():
            asyncio.get_running_loop().call_later(LATENCY_S, task.cancel)


class _ServerTransport:
    """As much of the server's transport as writing at once needs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def is_closing(self) -> bool:
        return self._connection.is_left or self._connection.is_cut

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        self._connection.put(data)

    def abort(self) -> None:
        self._connection.cut()


class _Content:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def readany(self) -> bytes:
        return await self._connection.take()

    def read_nowait(self) -> bytes:
        return self._connection.taken()

    def at_eof(self) -> bool:
        return self._connection.is_whole and not self._connection.data


class Response:
    """As much of `aiohttp.ClientResponse` as is used."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers
        self.content = _Content(connection)
        kind = connection.headers.get("Content-Type", "application/octet-stream")
        self.content_type = kind.partition(";")[0]

    @property
    def connection(self) -> _Transport | None:
        whole = self.content.at_eof()
        return None if whole or self._connection.is_left else _Transport(self._connection)

    async def read(self) -> bytes:
        parts = []
        while part := await self._connection.take():
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        self._connection.leave()


class _Call:
    """What `session.post` returns: to be awaited, or entered."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self._response: Response | None = None

    def __await__(self) -> Generator[Any, None, Response]:
        return self._answer.__await__()  # type: ignore[no-any-return]

    async def __aenter__(self) -> Response:
        self._response = await self._answer
        return self._response

    async def __aexit__(self, *_: object) -> None:
        assert self._response is not None
        self._response.close()


class Net:
    """Hosts by address."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}

    def session(self) -> Session:
        return Session(self)


class Session:
    """Stands in for `aiohttp.ClientSession`."""

    def __init__(self, net: Net) -> None:
        self._net = net

    def post(self, url: str, *, data: bytes, headers: Mapping[str, str], **_: Any) -> _Call:
        return _Call(self._ask("POST", url, data, headers))

    def request(
        self, method: str, url: str, *, data: bytes | None, headers: Mapping[str, str]
    ) -> _Call:
        return _Call(self._ask(method, url, data or b"", headers))

    async def close(self) -> None:
        pass

    async def _ask(
        self, method: str, url: str, body: bytes, headers: Mapping[str, str]
    ) -> Response:
        parts = urlsplit(url)
        connection = Connection()
        await asyncio.sleep(LATENCY_S)
        host = self._net.hosts.get(parts.netloc)
        if host is None:
            key: Any = SimpleNamespace(host=parts.netloc, port=None, ssl=False, is_ssl=False)
            raise aiohttp.ClientConnectorError(key, ConnectionRefusedError(111, "refused"))
        if (tell := on_connected.get()) is not None:
            tell(_Transport(connection))  # type: ignore[arg-type]
        host.serve(connection, method, parts.path, body, headers)
        try:
            await connection.begun()
        except asyncio.CancelledError:
            connection.leave()
            raise
        return Response(connection)


class Host:
    """An application at an address.

    Args:
        on_error: Told what a handler raised that it should have answered.
    """

    def __init__(self, app: web.Application, on_error: Callable[[BaseException], None]) -> None:
        app.pre_freeze()
        app.freeze()
        self._app = app
        self._on_error = on_error
        self._open: dict[Connection, None] = {}

    @property
    def num_open(self) -> int:
        """Exchanges under way."""
        return len(self._open)

    def serve(
        self,
        connection: Connection,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
    ) -> None:
        """Answer one request in a task of its own."""
        self._open[connection] = None
        connection.task = asyncio.create_task(self._serve(connection, method, path, body, headers))

    def die(self) -> None:
        """Break everything that is open, without a word."""
        for connection in list(self._open):
            connection.cut()
            if connection.task is not None:
                connection.task.cancel()

    async def _serve(
        self,
        connection: Connection,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
    ) -> None:
        url = _URLS.get(path)
        if url is None:
            url = _URLS[path] = URL(path)
        message = RawRequestMessage(
            method,
            path,
            HttpVersion10,  # or what is written would be framed
            CIMultiDictProxy(CIMultiDict(headers)),
            (),
            False,
            None,
            False,
            False,
            url,
        )
        loop = asyncio.get_running_loop()
        nothing: Any = None
        protocol: Any = SimpleNamespace(
            ssl_context=None,
            peername=None,
            sockname=None,
            transport=_ServerTransport(connection),
        )
        request = web.Request(
            message,
            _Body(body),  # type: ignore[arg-type]
            protocol,
            connection,  # type: ignore[arg-type]
            nothing,
            loop,
        )
        try:
            response = await self._app._handle(request)
            await response.prepare(request)
            await response.write_eof()
        except (ConnectionResetError, asyncio.CancelledError):
            pass
        except Exception as error:
            self._on_error(error)
        finally:
            self._open.pop(connection, None)
            connection.cut()


class _Body:
    """A request's body, which is there at once."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def readany(self) -> bytes:
        """Return all of it, then nothing."""
        data, self._data = self._data, b""
        return data


async def chunks_of(response: Response) -> AsyncIterator[bytes]:
    """Yield an answer as it comes."""
    while chunk := await response.content.readany():
        yield chunk
