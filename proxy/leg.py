"""One HTTP exchange with one engine, which can be abandoned at any await.

What the engine has already sent is still read then, so that a lease granted at the moment the
client left can be given back. Knows aiohttp; decides nothing.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from pdserve.errors import DeadlineError
from pdserve.http.answers import SSE
from pdserve.proxy.connections import FAILURES, SharedReader, failure_of, on_connected
from pdserve.proxy.errors import RefusedError, WorkerError, failure_in
from pdserve.proxy.relay import MAX_EVENT_BYTES, SseParser
from pdserve.wire.hop import (
    KV_MODE_HEADER,
    LAYOUT_HEADER,
    LOAD_FAILURES_HEADER,
    REQUEST_ID_HEADER,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    import aiohttp
    from aiohttp.connector import Connection

    from pdserve.proxy.background import BackgroundTasks
    from pdserve.proxy.relay import Event

ABANDON_TIMEOUT_S = 1.0
"""How long an engine may take to notice that its leg was abandoned."""
HANG_UP_TIMEOUT_S = 0.5
"""The same where a lease waits for it, which is to be free within a second."""
DRAIN_TIMEOUT_S = 2.0


class Leg:
    """One exchange with one engine.

    Attributes:
        url: The engine's path this leg was sent to.
        connection: Its connection, as long as that has a protocol; None until connected.
        layout: Digest of the answering engine's layout; None until the answer has begun, and
            if the engine does not say.
        has_kv: Whether the answer's start says that KV came from another engine.
        load_failures: Labels of earlier failed KV loads, as given at the answer's start.
        request_id: ID of the request it is part of.
        may_move: Whether the engine was asked to end its stream with a handoff.
        moved: Data of the event with that handoff, once it has come.
        ended: Set when the engine has ended its side, or is not waited for any more.
        num_reads: Number of reads that returned data.
    """

    def __init__(
        self,
        background: BackgroundTasks,
        session: aiohttp.ClientSession,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
    ) -> None:
        self.url = url
        self._background = background
        self._parser: SseParser | None = None
        self._response: aiohttp.ClientResponse | None = None
        self._lost: WorkerError | None = None
        self._body = bytearray()
        self._read: Callable[[], None] | None = None
        self.connection: Connection | None = None
        self.layout: str | None = None
        self.request_id = headers.get(REQUEST_ID_HEADER, "")
        self.may_move = False
        self.moved: bytes | None = None
        self.has_kv = False
        self.load_failures: tuple[str, ...] = ()
        self.ended = asyncio.Event()
        self.num_reads = 0
        # A task of its own, because cancelling the post itself would close the connection
        # on whatever the engine has already sent.
        self._post = asyncio.create_task(self._send(session, url, body, headers))

    async def _send(
        self, session: aiohttp.ClientSession, url: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        on_connected.set(self._connected)
        return await session.post(url, data=body, headers=headers, allow_redirects=False)

    def _connected(self, connection: Connection) -> None:
        self.connection = connection

    async def open(self) -> str:
        """Wait for the answer to begin; return its content type, lower case, bare.

        Raises:
            WorkerError: The engine could not be reached, hung up, or answered 5xx; or it has
                no KV to continue from.
            RefusedError: It answered 4xx.
            DeadlineError: It reports that the request's deadline has passed.
        """
        try:
            response = self._response = await asyncio.shield(self._post)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._lost is not None and task is not None and not task.cancelling():
                raise self._lost from None
            raise
        except FAILURES as error:
            raise self._lost or failure_of(self.url, error) from error
        if response.status == 200:
            headers = response.headers
            self.layout, self.has_kv = headers.get(LAYOUT_HEADER), KV_MODE_HEADER in headers
            failures = headers.get(LOAD_FAILURES_HEADER, "")
            self.load_failures = tuple(filter(None, failures.split(",")))
            return response.content_type
        raise failure_in(
            self.url,
            response.status,
            await self.read(),
            retry_after=response.headers.get("Retry-After"),
            load_failures=response.headers.get(LOAD_FAILURES_HEADER),
        )

    async def read(self) -> bytes:
        """Return the whole answer; may be called again after it was cancelled.

        Raises:
            WorkerError: The connection was lost, or the answer is too long.
        """
        async for chunk in self.chunks():
            self._body += chunk
            if len(self._body) > MAX_EVENT_BYTES:
                raise WorkerError(f"{self.url} sent an answer that does not end", reason="garbled")
        self.ended.set()
        return bytes(self._body)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the answer's bytes as they arrive, until it ends.

        Raises:
            WorkerError: The connection was lost.
        """
        assert self._response is not None
        content = self._response.content
        try:
            while chunk := await content.readany():
                self.num_reads += 1
                yield chunk
        except FAILURES as error:
            raise self._lost or failure_of(self.url, error) from error

    async def read_to(self, take: Callable[[bytes], bool]) -> bool:
        """Pass bytes to `take` as they arrive, until it returns False or the answer ends.

        It is called where the connection is read, so that no task is woken for each read. Returns
        whether `take` has stopped it: then more may follow.

        Raises:
            WorkerError: The connection was lost.
            Exception: `take` raised it.
        """
        assert self._response is not None
        content = self._response.content
        stopped: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        failure: Exception | None = None

        def read() -> None:
            nonlocal failure
            try:
                while not stopped.done() and (data := content.read_nowait()):
                    self.num_reads += 1
                    if not take(data):
                        stopped.set_result(True)
                if content.at_eof() and not stopped.done():
                    stopped.set_result(False)
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                failure = error
                stopped.set_result(False)

        reader = SharedReader.of(self._response.connection)
        self._read = read
        if reader is not None:
            reader.on_read = read
        try:
            read()
            if reader is None and not stopped.done():
                raise ConnectionResetError("closed")
            is_stopped = await stopped
            if failure is not None:
                raise failure
        except FAILURES as error:
            raise self._lost or failure_of(self.url, error) from error
        finally:
            self._read = None
            if reader is not None:
                reader.on_read = None
        return is_stopped

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Yield the answer's events as they arrive, those of one read together.

        Raises:
            WorkerError: The connection was lost.
        """
        parser = self._parser = self._parser or SseParser()
        async for chunk in self.chunks():
            if events := parser.feed(chunk):
                yield events

    def close(self) -> None:
        """Hang up. Harmless when the answer has ended."""
        self.ended.set()
        self._post.cancel()
        if self._response is not None:
            self._response.close()
            if self._read is not None:  # or it would hear of it once the transport has closed
                self._read()
        else:
            self._post.add_done_callback(_close_late)

    def lose(self, why: WorkerError) -> None:
        """Fail the request that waits for this leg, as its engine will send no more."""
        self._lost = why
        self.close()

    def take_away(self, why: WorkerError) -> None:
        """Fail the request that waits for this leg, unless its engine has just handed over.

        Only our direction is closed first, as in `abandon`: the reader gets what is on its way, a
        handoff perhaps, and `why` once the engine has noticed.
        """
        self._lost = why
        if self._close_our_side():
            asyncio.get_running_loop().call_later(HANG_UP_TIMEOUT_S, self.close)
        else:
            self.close()

    def drain(self, on_event: Callable[[Event], None] | None = None) -> None:
        """Read the rest in the background, so that the connection can be used again."""
        if self._response is not None and self._response.content.at_eof():
            self.ended.set()
            return
        self._background.start(self._drain(on_event))

    def abandon(self, is_handoff: Callable[[bytes], bool]) -> None:
        """Hang up in the background, but still read a handoff that is already on its way.

        Only our direction is closed first: the engine sees the end and aborts, or it has
        already handed over, and then the handoff still arrives. Closing both at once
        would lose it, and with it the lease until it expires.

        Args:
            is_handoff: Takes the data of an event, or a whole answer; returns whether that is
                the handoff.
        """
        rest = partial(self._read_until, is_handoff)
        self._background.start(self._leave(rest, ABANDON_TIMEOUT_S))

    def hang_up(self) -> None:
        """Hang up in the background; `ended` is set when the engine has noticed."""
        self._background.start(self._leave(self._discard_all, HANG_UP_TIMEOUT_S))

    async def _drain(self, on_event: Callable[[Event], None] | None) -> None:
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                async for events in self.batches():
                    for event in events:
                        if on_event is not None:
                            on_event(event)
        except (WorkerError, TimeoutError):
            pass  # the request has what it needs from this leg
        finally:
            self.close()

    async def _leave(self, read_rest: Callable[[], Awaitable[None]], timeout_s: float) -> None:
        """Close our direction, read what still arrives, then close the other one."""
        if self._response is None and self._post.done() and not self._post.cancelled():
            self._response = None if self._post.exception() else self._post.result()
        try:
            if self._close_our_side():
                async with asyncio.timeout(timeout_s):
                    if self._response is None:
                        await self.open()
                    await read_rest()
        except (WorkerError, RefusedError, DeadlineError, TimeoutError):
            pass  # whatever is wrong with this leg, nothing waits for it any more
        finally:
            self.close()

    def _close_our_side(self) -> bool:
        """Return whether anything may still arrive, or is unread."""
        if self.connection is None:
            return False
        protocol = self.connection.protocol
        if protocol is None:  # the answer is complete: another request may have the connection
            return True
        transport = protocol.transport
        if transport is None or not transport.can_write_eof():
            return False
        if not transport.is_closing():
            # Whatever the engine still answers, nothing can be sent over this again.
            protocol.force_close()
            transport.write_eof()
        return True

    async def _discard_all(self) -> None:
        async for _ in self.chunks():
            pass

    async def _read_until(self, is_handoff: Callable[[bytes], bool]) -> None:
        assert self._response is not None
        if self._response.content_type != SSE:
            is_handoff(await self.read())
            return
        async for events in self.batches():
            if any(is_handoff(event.data) for event in events):
                return


def _close_late(post: asyncio.Task[aiohttp.ClientResponse]) -> None:
    if not post.cancelled() and post.exception() is None:
        post.result().close()
