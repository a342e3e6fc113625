"""When the client's connections are made, kept and replaced, as a server on a socket sees it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from pdserve.bench import client as client_module
from pdserve.bench import http
from pdserve.bench.bodies import Asking
from pdserve.bench.client import Client, Sending
from pdserve.bench.http import Address, Connections, HttpError, Reply
from pdserve.bench.records import Outcome, Planned
from pdserve.bench.target import Target
from tests.bench.scripted import request
from tests.cli.process import free_ports

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Behave = Callable[[int, asyncio.StreamWriter], Awaitable[None]]
"""What to do with a connection's request, by how many it has had before."""


class Server:
    def __init__(self, behave: Behave) -> None:
        self._behave = behave
        self.num_connections = 0
        self.num_requests = 0
        self.accepted = asyncio.Event()
        self.url = ""
        self._serving: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}

    async def end(self) -> None:
        for writer in self._serving.values():
            writer.transport.abort()
        await asyncio.gather(*(task for task in self._serving if task), return_exceptions=True)

    async def on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.num_connections += 1
        self._serving[asyncio.current_task()] = writer
        self.accepted.set()
        before = 0
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])
                await reader.readexactly(length)
                self.num_requests += 1
                await self._behave(before, writer)
                before += 1
        writer.close()


@contextlib.asynccontextmanager
async def serving(behave: Behave) -> AsyncIterator[Server]:
    state = Server(behave)
    server = await asyncio.start_server(state.on_connection, "127.0.0.1", 0)
    state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        try:
            yield state
        finally:
            await state.end()


async def answer(before: int, writer: asyncio.StreamWriter) -> None:
    writer.write(OK)


async def exchange(connections: Connections) -> int:
    def make_reply() -> Reply:
        return Reply(asyncio.get_running_loop().create_future())

    return (await connections.exchange(connections.encode(b"{}", "id"), make_reply)).status


def client_of(server: Server, *, max_concurrency: int | None = None) -> Client:
    def ignore(outcome: Outcome) -> None:
        pass

    return Client(
        Asking(target=Target(base_url=server.url, model="m")),
        Sending(max_concurrency=max_concurrency),
        on_outcome=ignore,
    )


def test_any_letters_of_a_path_and_a_header_go_out_as_aiohttp_writes_them() -> None:
    connections = Connections(Address("http://h/v1/ż b/%41?q=ä"), {"X-Team": "Łódź"})
    line, *lines = connections.encode(b"{}", "id").decode().split("\r\n")
    assert line == "POST /v1/%C5%BC%20b/%41?q=%C3%A4 HTTP/1.1"
    assert "X-Team: Łódź" in lines


async def test_however_many_turns_follow_one_that_failed_the_run_ends() -> None:
    ended: dict[int, Outcome] = {}
    (port,) = free_ports(1)
    client = Client(
        Asking(target=Target(base_url=f"http://127.0.0.1:{port}", model="m")),
        Sending(),
        on_outcome=lambda outcome: ended.update({outcome.index: outcome}),
    )
    turns = [request(index, [1], after=index - 1) for index in range(1, 3000)]
    async with asyncio.timeout(30.0):
        await client.run([*plan_of(0.0), *turns], time.monotonic())
    assert len(ended) == 3000
    assert ended[2999].error == "request 2998, which this turn follows, was not answered"


def plan_of(*at_s: float) -> list[Planned]:
    return [request(index, [1], at_s=each) for index, each in enumerate(at_s)]


async def test_a_connection_that_is_there_is_used() -> None:
    async with serving(answer) as server:
        connections = Connections(Address(server.url), {})
        connections.want(1)
        await connections.settle(10.0)
        assert await exchange(connections) == 200
        assert await exchange(connections) == 200
        assert (server.num_connections, server.num_requests) == (1, 2)
        connections.close()


@pytest.mark.parametrize(("places", "number"), [(None, 3), (2, 2)])
async def test_a_client_connects_before_it_begins_as_often_as_it_will_need_at_once(
    places: int | None, number: int
) -> None:
    async with serving(answer) as server:
        client = client_of(server, max_concurrency=places)
        await client.connect(plan_of(0.0, 0.0, 0.1, 50.0))
        while server.num_connections < number:
            await asyncio.sleep(0.01)
        assert (server.num_connections, server.num_requests) == (number, 0)
        client.close()


async def test_a_connection_is_made_before_its_request_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "_AHEAD_S", 49.9)
    async with serving(answer) as server:
        client = client_of(server)
        run = asyncio.create_task(client.run(plan_of(50.0), asyncio.get_running_loop().time()))
        await server.accepted.wait()
        assert server.num_requests == 0
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        client.close()


async def test_a_kept_connection_that_the_server_closed_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "_STALE_S", 60.0)

    async def close_at_the_second(before: int, writer: asyncio.StreamWriter) -> None:
        if before:
            writer.close()
        else:
            await answer(before, writer)

    async with serving(close_at_the_second) as server:
        connections = Connections(Address(server.url), {})
        assert await exchange(connections) == 200
        assert await exchange(connections) == 200
        assert server.num_connections == 2
        connections.close()


async def test_a_request_that_the_server_had_taken_is_not_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "_STALE_S", 0.05)

    async def die_at_the_second(before: int, writer: asyncio.StreamWriter) -> None:
        if before:
            await asyncio.sleep(0.2)
            writer.close()
        else:
            await answer(before, writer)

    async with serving(die_at_the_second) as server:
        connections = Connections(Address(server.url), {})
        assert await exchange(connections) == 200
        with pytest.raises(HttpError, match="before it answered"):
            await exchange(connections)
        assert server.num_requests == 2
        connections.close()


async def test_a_connection_that_cannot_be_made_ahead_is_an_error_of_its_request_alone() -> None:
    async with serving(answer) as server:
        url = server.url
    connections = Connections(Address(url), {})
    connections.want(1)
    await connections.settle(10.0)
    with pytest.raises(HttpError, match="cannot connect"):
        await exchange(connections)
