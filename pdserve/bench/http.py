"""HTTP/1.1 for measurements: reports when bytes arrived, which a general client does not.

Every read is timestamped before parsing, and passed on in the same call: no task has to wake up in
between, and a chunk costs a fraction of a general client's time. On a machine shared with the
servers, that time would be taken from them.

Connections are made before they are needed and kept for further requests: setting one up takes
longer than everything else a client does, and is not part of the server's answer. Only answers of
OpenAI-compatible servers are supported: content length, chunks, or until the end of the connection
(RFC 9112, section 6.3); no redirects, no compression. Knows no events and no JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import quote, urlsplit

from pdserve.errors import ConfigError

_MAX_HEAD_BYTES: Final = 64 << 10
_IN_PATHS: Final = "/?:@!$&'()*+,;=%"
"""Signs that a path and its query have as they are (RFC 3986, section 3.4)."""
_STALE_S: Final = 0.5
"""A request on an idle connection that was being closed fails within a round trip; a server that
hangs up later than this had accepted the request."""


class HttpError(Exception):
    """The exchange broke: no connection, not HTTP, or an end before the end."""


class Address:
    """The server of a client's requests.

    Raises:
        ConfigError: The URL is neither http nor https.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(
                f"--base-url is {url!r}: write a URL such as http://127.0.0.1:8000",
                param="base-url",
            )
        self.host = parts.hostname
        self.port = port or (443 if parts.scheme == "https" else 80)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self.path = quote(path, safe=_IN_PATHS)
        self.host_header = parts.netloc.rpartition("@")[2]
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None


class _Part(enum.Enum):
    IDLE = enum.auto()
    HEAD = enum.auto()
    LENGTH = enum.auto()
    UNTIL_CLOSE = enum.auto()
    CHUNK_SIZE = enum.auto()
    CHUNK = enum.auto()
    CHUNK_END = enum.auto()
    TRAILER = enum.auto()


class Reply:
    """One answer while it arrives.

    Attributes:
        status: 0 until its head has arrived.
        headers: By lower-case name.
        done: Set at its end, or to the `HttpError` that ended it.
    """

    def __init__(self, done: asyncio.Future[None]) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = done

    def on_head(self) -> None:
        """Called when its status and headers are known."""

    def on_body(self, data: bytes, at_s: float) -> None:
        """Called with bytes of its body that arrived by `at_s` (`time.monotonic`)."""


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self, on_lost: Callable[[_Connection], None]) -> None:
        self.is_usable = True
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._part = _Part.IDLE
        self._buffer = bytearray()
        self._left = 0
        self._reply: Reply | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, request: bytes, reply: Reply) -> None:
        """Write a request; `reply` receives its answer."""
        assert self._transport is not None
        assert self._part is _Part.IDLE
        self._reply, self._part = reply, _Part.HEAD
        self._transport.write(request)

    def close(self) -> None:
        """Hang up at once."""
        self.is_usable = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        at_s = time.monotonic()
        if self._part is _Part.IDLE:  # nobody asked
            self.close()
            return
        try:
            self._take(data, at_s)
        except HttpError as error:
            self._fail(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_usable = False
        self._on_lost(self)
        if self._part is _Part.UNTIL_CLOSE and exc is None:
            self._finish()
        elif self._part is _Part.HEAD:
            self._fail("the server closed the connection before it answered")
        elif self._part is not _Part.IDLE:
            self._fail("the connection broke off within the answer")

    def _fail(self, message: str) -> None:
        reply, self._reply, self._part = self._reply, None, _Part.IDLE
        self.close()
        if reply is not None and not reply.done.done():
            reply.done.set_exception(HttpError(message))

    def _finish(self) -> None:
        reply, self._reply, self._part = self._reply, None, _Part.IDLE
        if self._buffer:  # more than was announced
            self.close()
        if reply is not None and not reply.done.done():
            reply.done.set_result(None)

    def _take(self, data: bytes, at_s: float) -> None:
        self._buffer += data
        while self._reply is not None:
            match self._part:
                case _Part.HEAD:
                    if not self._take_head(self._reply):
                        return
                case _Part.UNTIL_CLOSE:
                    self._give(len(self._buffer), at_s)
                    return
                case _Part.LENGTH | _Part.CHUNK:
                    size = min(self._left, len(self._buffer))
                    if size:
                        self._left -= size
                        self._give(size, at_s)
                    if self._left:
                        return
                    if self._part is _Part.LENGTH:
                        self._finish()
                    else:
                        self._part = _Part.CHUNK_END
                case _Part.CHUNK_SIZE:
                    line = self._line()
                    if line is None:
                        return
                    try:
                        self._left = int(line.partition(b";")[0], 16)
                    except ValueError:
                        raise HttpError(
                            f"a chunk starts with {bytes(line[:40])!r}, which is not a length"
                        ) from None
                    self._part = _Part.CHUNK if self._left else _Part.TRAILER
                case _Part.CHUNK_END:
                    line = self._line()
                    if line is None:
                        return
                    if line:
                        raise HttpError("a chunk is longer than its length says")
                    self._part = _Part.CHUNK_SIZE
                case _Part.TRAILER:
                    line = self._line()
                    if line is None:
                        return
                    if not line:
                        self._finish()
                case _Part.IDLE:
                    return

    def _give(self, size: int, at_s: float) -> None:
        assert self._reply is not None
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        if data:
            self._reply.on_body(data, at_s)

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise HttpError("a line of the answer has no end")
            return None
        line = bytes(self._buffer[:end]).removesuffix(b"\r")
        del self._buffer[: end + 1]
        return line

    def _take_head(self, reply: Reply) -> bool:
        """Read the head if it is complete; returns whether it was."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise HttpError("the head of the answer has no end")
            return False
        status_line, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        version, _, rest = status_line.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise HttpError(f"the answer is not HTTP/1.1: {status_line[:80]!r}")
        status = int(rest[:3])
        if 100 <= status < 200:  # an interim answer; the true one follows
            return True
        reply.status = status
        for line in lines:
            name, _, value = line.partition(":")
            reply.headers[name.strip().lower()] = value.strip()
        connection = reply.headers.get("connection", "").lower()
        if connection == "close" or (version == "HTTP/1.0" and connection != "keep-alive"):
            self.is_usable = False
        if reply.headers.get("content-encoding", "identity").lower() != "identity":
            raise HttpError("the answer is compressed, although no compression was asked for")
        if reply.headers.get("transfer-encoding", "").lower().endswith("chunked"):
            self._part = _Part.CHUNK_SIZE
        elif (length := reply.headers.get("content-length")) is not None:
            if not length.isdecimal():
                raise HttpError(f"the answer's Content-Length is {length!r}")
            self._part, self._left = _Part.LENGTH, int(length)
        elif status in (204, 304):
            self._part, self._left = _Part.LENGTH, 0
        else:
            self._part, self.is_usable = _Part.UNTIL_CLOSE, False
        reply.on_head()
        return True


class Connections:
    """The connections of one client to one server."""

    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        self._address = address
        fixed = {
            "Host": address.host_header,
            "Accept": "text/event-stream, application/json",
            "Accept-Encoding": "identity",
            "User-Agent": "pdserve-bench",
            **headers,
        }
        for name, value in fixed.items():
            if any(sign in name + value for sign in "\r\n"):
                raise ConfigError(
                    f"--header {name} contains a line break: remove it", param="header"
                )
        self._fixed = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())
        self._idle: dict[_Connection, None] = {}  # the one used last is the last
        self._coming: set[asyncio.Task[None]] = set()

    def encode(self, body: bytes, request_id: str) -> bytes:
        """Return the bytes of a POST."""
        head = (
            f"POST {self._address.path} HTTP/1.1\r\n{self._fixed}X-Request-Id: {request_id}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def want(self, number: int) -> None:
        """Start making connections until there are `number` idle ones.

        A failed connection is not an error here, because the request that needs it tries again.
        """
        for _ in range(number - len(self._idle) - len(self._coming)):
            task = asyncio.get_running_loop().create_task(self._make_idle())
            self._coming.add(task)
            task.add_done_callback(self._coming.discard)

    async def settle(self, timeout_s: float) -> None:
        """Wait until all wanted connections are there or have failed, at most `timeout_s`."""
        if self._coming:
            await asyncio.wait(self._coming, timeout=timeout_s)

    async def exchange(self, request: bytes, make_reply: Callable[[], Reply]) -> Reply:
        """Send a request and wait for the end of its answer.

        An idle connection that turns out to be closed is replaced. Cancelling hangs up.

        Raises:
            HttpError: No connection, no HTTP, or the answer broke off.
        """
        while True:
            idle = self._take_idle()
            connection = idle or await self._connect()
            reply = make_reply()
            sent_s = time.monotonic()
            try:
                connection.send(request, reply)
                await reply.done
            except HttpError:
                connection.close()
                was_closed = not reply.status and time.monotonic() - sent_s < _STALE_S
                if idle is not None and was_closed:
                    continue
                raise
            except BaseException:
                connection.close()
                raise
            if connection.is_usable:
                self._idle[connection] = None
            else:
                connection.close()
            return reply

    def close(self) -> None:
        """Close all connections that are idle or still being made."""
        for task in self._coming:
            task.cancel()
        for connection in list(self._idle):
            connection.close()
        self._idle.clear()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.is_usable:
                return connection
        return None

    def _forget(self, connection: _Connection) -> None:
        self._idle.pop(connection, None)

    async def _make_idle(self) -> None:
        with contextlib.suppress(HttpError):
            self._idle[await self._connect()] = None

    async def _connect(self) -> _Connection:
        address = self._address
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(self._forget), address.host, address.port, ssl=address.tls
            )
        except OSError as error:
            raise HttpError(f"cannot connect to {address.host}:{address.port}: {error}") from error
        return connection
