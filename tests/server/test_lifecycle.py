"""From bind to exit, and what proxies are told on the way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pdserve.config.http import ServerConfig
from pdserve.config.schema import EngineConfig, ModelConfig, TransferConfig
from pdserve.errors import ConfigError, EngineDeadError
from pdserve.http.answers import StaleProofError, error_answer
from pdserve.http.control import Verifier
from pdserve.server import registration
from pdserve.server.app import run_server
from pdserve.server.registration import Registrar, places_of
from tests.server.conftest import events, make_engine, serving, until
from tests.web_runner import cleaned_up

pytestmark = pytest.mark.slow


class Running:
    """`run_server` in a task of its own."""

    def __init__(self, model_dir, engine, *, secret: str = "", **server: Any) -> None:
        self.engine = engine
        self.ready: list[str] = []
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        scheme = "https" if "tls" in server and server["tls"].certfile else "http"
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self.task = asyncio.create_task(
            run_server(
                engine,
                engine_config=EngineConfig(
                    model=ModelConfig(model=str(model_dir)), transfer=TransferConfig(secret=secret)
                ),
                server_config=ServerConfig(**{"port": self.port, "drain_delay_s": 0.0} | server),
                on_ready=self.ready.append,
            )
        )

    async def until_ready(self) -> None:
        await until(lambda: bool(self.ready) or self.task.done())
        assert self.ready == [self.url]


async def get(url: str) -> int | None:
    """The status, or None if nobody listens."""
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status
    except aiohttp.ClientConnectionError:
        return None


async def eventually(url: str, status: int | None) -> None:
    async with asyncio.timeout(30.0):
        while await get(url) != status:
            await asyncio.sleep(0.01)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_it_listens_before_the_engine_is_ready_and_tells_when_it_is(text, model_dir):
    running = Running(model_dir, make_engine(text, ready=False))
    await eventually(running.url + "/livez", 200)
    assert await get(running.url + "/readyz") == 503
    assert running.ready == []
    running.engine.become_ready()
    await running.until_ready()
    assert await get(running.url + "/readyz") == 200
    terminate()
    assert await running.task is signal.SIGTERM
    assert await get(running.url + "/livez") is None
    assert running.engine.dead_reason == "closed"


async def test_a_signal_while_it_starts_ends_it(text, model_dir):
    running = Running(model_dir, make_engine(text, ready=False))
    await eventually(running.url + "/livez", 200)
    os.kill(os.getpid(), signal.SIGINT)
    assert await running.task is signal.SIGINT
    assert running.ready == []


async def stream(url: str, **body: Any) -> bytes:
    async with aiohttp.ClientSession() as session:
        body = {"prompt": "x", "stream": True} | body
        async with session.post(url + "/v1/completions", json=body) as response:
            return await response.read()


async def test_what_runs_at_sigterm_may_finish_and_nothing_more_is_taken(text, model_dir):
    running = Running(model_dir, make_engine(text, step_s=0.1))
    await running.until_ready()
    client = asyncio.create_task(stream(running.url, max_tokens=15))
    await until(lambda: bool(running.engine.running))
    terminate()
    await eventually(running.url + "/readyz", 503)
    late = await stream(running.url)
    assert json.loads(late)["error"]["type"] == "service_unavailable_error"
    assert not running.task.done()
    assert len(events(await client)) == 15
    assert await running.task is signal.SIGTERM


async def test_after_sigterm_requests_are_taken_until_others_have_noticed(text, model_dir):
    running = Running(model_dir, make_engine(text), drain_delay_s=100.0)
    await running.until_ready()
    terminate()
    await eventually(running.url + "/readyz", 503)
    async with aiohttp.ClientSession() as session:
        async with session.post(running.url + "/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 200
            assert response.headers["Connection"] == "close"
    assert await get(running.url + "/health") == 200
    assert not running.task.done()
    terminate()
    assert await running.task is signal.SIGTERM


async def test_nobody_waits_for_others_to_notice_after_ctrl_c_or_a_second_signal(text, model_dir):
    for numbers in ((signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)):
        running = Running(model_dir, make_engine(text), drain_delay_s=100.0)
        await running.until_ready()
        for number in numbers:
            os.kill(os.getpid(), number)
            await until_unready(running)
        async with asyncio.timeout(30.0):
            assert await running.task is numbers[0]


async def until_unready(running: Running) -> None:
    async with asyncio.timeout(30.0):
        while await get(running.url + "/readyz") == 200:
            await asyncio.sleep(0.005)


async def test_what_has_not_finished_in_time_ends_with_an_error_event(text, model_dir):
    running = Running(model_dir, make_engine(text, step_s=0.05), shutdown_timeout_s=0.1)
    await running.until_ready()
    client = asyncio.create_task(stream(running.url, max_tokens=1000))
    await until(lambda: bool(running.engine.running))
    terminate()
    assert await running.task is signal.SIGTERM
    assert "error" in events(await client)[-1]


async def test_a_second_signal_does_not_wait(text, model_dir):
    running = Running(model_dir, make_engine(text, step_s=0.05), shutdown_timeout_s=50.0)
    await running.until_ready()
    client = asyncio.create_task(stream(running.url, max_tokens=1000))
    await until(lambda: bool(running.engine.running))
    terminate()
    await eventually(running.url + "/readyz", 503)
    terminate()
    async with asyncio.timeout(30.0):
        await running.task
    assert "error" in events(await client)[-1]


async def test_the_engine_gets_what_is_left_of_the_time_to_settle_its_leases(text, model_dir):
    engine = make_engine(text)
    close, given = engine.close, []

    async def noted(*, timeout_s: float) -> None:
        given.append(timeout_s)
        await close(timeout_s=timeout_s)

    engine.close = noted
    running = Running(model_dir, engine, shutdown_timeout_s=20.0)
    await running.until_ready()
    terminate()
    await running.task
    assert given == [pytest.approx(20.0, abs=10.0)]


async def test_an_engine_that_dies_ends_the_server_with_its_reason(text, model_dir):
    running = Running(model_dir, make_engine(text))
    await running.until_ready()
    running.engine.die("out of luck")
    with pytest.raises(EngineDeadError, match="out of luck"):
        await running.task


async def test_a_port_in_use_names_the_port_and_the_flag(text, model_dir):
    engine = make_engine(text)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port is {port}, which is in use"):
            await run_server(
                engine,
                engine_config=EngineConfig(model=ModelConfig(model=str(model_dir))),
                server_config=ServerConfig(port=port),
                on_ready=lambda url: None,
            )
    assert engine.dead_reason == "closed"


async def test_a_model_without_tokenizer_ends_the_start(text, tmp_path):
    running = Running(tmp_path, make_engine(text))
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        await running.task


class Proxy:
    """Takes registrations and keeps them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.verifier: Verifier | None = None
        self.status = 200
        self.answer = ""
        self.body = b""
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def handle(self, request: web.Request) -> web.Response:
        data = await request.read()
        self.calls.append((request.method, json.loads(data)))
        await self.may_answer.wait()
        if self.verifier is not None:
            try:
                self.verifier.check(request, data)
            except StaleProofError as error:
                self.calls.pop()
                return error_answer(error)
        body = self.body or json.dumps({"error": {"message": self.answer}}).encode()
        return web.Response(body=body, status=self.status, content_type="application/json")

    @contextlib.asynccontextmanager
    async def listening(self, port: int = 0):
        app = web.Application()
        app.router.add_route("*", "/pdserve/register", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}"
        await cleaned_up(runner)


async def test_an_engine_registers_renews_and_leaves(text):
    proxy = Proxy()
    proxy.verifier = Verifier("s3cret", accept_former=False, new_nonce=lambda: "nonce")
    engine = make_engine(text)
    async with proxy.listening() as url:
        registered = Registrar(
            [url + "/"], url="http://me", info=engine.info, secret="s3cret", lease_s=0.15
        )
        await registered.start()
        await until(lambda: len(proxy.calls) >= 3)
        await registered.stop(deadline_s=1.0)
    *renewals, (method, left) = proxy.calls
    assert {method for method, _ in renewals} == {"POST"}
    first = renewals[0][1]
    assert (first["url"], first["role"], first["lease_s"]) == ("http://me", "both", 0.15)
    assert first["engine"]["engine_id"] == "toy"
    assert (method, left["url"]) == ("DELETE", "http://me")


@pytest.mark.parametrize("host", ["0.0.0.0", ""])
async def test_proxies_call_a_wildcard_back_at_the_address_that_leads_to_them(
    text, model_dir, host
):
    proxy = Proxy()
    async with proxy.listening() as url:
        running = Running(model_dir, make_engine(text), proxy_urls=(url,), host=host)
        await until(lambda: bool(proxy.calls))
        terminate()
        await running.task
    assert proxy.calls[0][1]["url"] == running.url


async def test_an_engine_leaves_its_proxies_before_it_refuses(text, model_dir):
    proxy = Proxy()
    async with proxy.listening() as url:
        running = Running(model_dir, make_engine(text, step_s=0.2), proxy_urls=(url,))
        await running.until_ready()
        client = asyncio.create_task(stream(running.url, max_tokens=8))
        await until(lambda: bool(running.engine.running))
        terminate()
        await until(lambda: bool(proxy.calls) and proxy.calls[-1][0] == "DELETE")
        assert not client.done()
        assert len(events(await client)) == 8
        await running.task


async def test_an_engine_that_has_told_its_proxies_does_not_wait_for_them(text, model_dir):
    proxy = Proxy()
    async with proxy.listening() as url:
        running = Running(model_dir, make_engine(text), proxy_urls=(url,), drain_delay_s=100.0)
        await running.until_ready()
        terminate()
        async with asyncio.timeout(30.0):
            await running.task


async def test_a_proxy_that_comes_later_learns_of_the_engine(text, model_dir, monkeypatch, caplog):
    monkeypatch.setattr(registration, "_RETRY_S", 0.05)
    caplog.set_level(logging.INFO, logger="pdserve.server.registration")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    running = Running(
        model_dir,
        make_engine(text),
        proxy_urls=(f"http://127.0.0.1:{port}",),
        advertise_url="http://engine.example:1",
    )
    await running.until_ready()
    await until(lambda: "registration failed" in caplog.text)
    proxy = Proxy()
    async with proxy.listening(port):
        await until(lambda: bool(proxy.calls))
        assert proxy.calls[0][1]["url"] == "http://engine.example:1"
        terminate()
        await running.task
    told = [each.getMessage() for each in caplog.records if each.name == registration.__name__]
    logged = [line.split(" proxy=")[0] for line in told]
    assert logged == ["registration failed", "registered"]


async def test_an_engine_is_not_ready_before_its_proxy_has_answered(text, model_dir):
    proxy = Proxy()
    proxy.may_answer.clear()
    async with proxy.listening() as url:
        running = Running(model_dir, make_engine(text), proxy_urls=(url,))
        await until(lambda: bool(proxy.calls))
        assert await get(running.url + "/readyz") == 503
        proxy.may_answer.set()
        await running.until_ready()
        assert await get(running.url + "/readyz") == 200
        terminate()
        await running.task


async def test_an_engine_that_a_proxy_refuses_is_not_ready_and_says_why(
    text, model_dir, monkeypatch
):
    monkeypatch.setattr(registration, "_RETRY_S", 0.05)
    proxy, other = Proxy(), Proxy()
    proxy.status, proxy.answer = 409, "weights differ"
    async with proxy.listening() as url, other.listening() as other_url:
        running = Running(model_dir, make_engine(text), proxy_urls=(url, other_url))
        await until(lambda: len(proxy.calls) >= 2 and bool(other.calls))
        async with (
            aiohttp.ClientSession() as session,
            session.get(running.url + "/readyz") as response,
        ):
            assert response.status == 503
            told = await response.text()
        assert f"{url} refuses it: weights differ" in told
        assert running.ready == []
        assert await get(running.url + "/livez") == 200
        proxy.status = 200
        await running.until_ready()
        assert await get(running.url + "/readyz") == 200
        terminate()
        await running.task


async def test_an_engine_that_is_refused_later_is_not_ready_any_more(text, monkeypatch):
    proxy = Proxy()
    async with proxy.listening() as url, serving(text, make_engine(text)) as server:
        service = server.service
        service.registration = Registrar(
            [url], url="http://me", info=server.engine.info, secret="", lease_s=0.15
        )
        await service.registration.start()
        await until(lambda: service.registration.is_settled)
        assert (await server.get("/readyz"))[0] == 200
        proxy.status, proxy.answer = 401, "another secret"
        await until(lambda: service.registration.refusal is not None)
        status, told = await server.get("/readyz")
        assert (status, "another secret" in told) == (503, True)
        assert (await server.post("/v1/completions", {"prompt": "The"}))[0] == 200
        await service.registration.stop(deadline_s=1.0)


@pytest.mark.parametrize("status", [None, 500, 503, 429])
async def test_a_proxy_that_gives_no_verdict_keeps_no_engine_from_being_ready(text, status):
    """It may wait for ready engines itself."""
    proxy = Proxy()
    proxy.status = status or 200
    async with contextlib.AsyncExitStack() as cleanup:
        url = "http://127.0.0.1:9"
        if status is not None:
            url = await cleanup.enter_async_context(proxy.listening())
        registered = Registrar([url], url="http://me", info=make_engine(text).info, secret="")
        await registered.start()
        await until(lambda: registered.is_settled)
        assert registered.refusal is None
        await registered.stop(deadline_s=1.0)


@pytest.mark.parametrize("body", [b'{"error": "\xff"}', b"[" * 100_000])
async def test_an_answer_that_cannot_be_read_does_not_end_the_asking(text, monkeypatch, body):
    monkeypatch.setattr(registration, "_RETRY_S", 0.01)
    proxy = Proxy()
    proxy.status, proxy.body = 503, body
    async with proxy.listening() as url:
        registered = Registrar([url], url="http://me", info=make_engine(text).info, secret="")
        await registered.start()
        await until(lambda: len(proxy.calls) > 1)
        await registered.stop(deadline_s=1.0)


async def test_a_refusal_is_logged_again_and_again_but_not_each_time(text, monkeypatch, caplog):
    monkeypatch.setattr(registration, "_RETRY_S", 0.01)
    monkeypatch.setattr(registration, "_REPEAT_S", 0.2)
    proxy = Proxy()
    proxy.status, proxy.answer = 409, "weights differ"
    async with proxy.listening() as url:
        registered = Registrar([url], url="http://me", info=make_engine(text).info, secret="")
        await registered.start()
        await until(lambda: caplog.text.count("weights differ") == 3)
        await registered.stop(deadline_s=1.0)
    lines = [each for each in caplog.records if "weights differ" in each.getMessage()]
    assert {each.levelname for each in lines} == {"WARNING"}
    assert len(proxy.calls) > 2 * len(lines)


async def test_an_engine_registers_with_every_proxy_behind_a_name_as_they_come_and_go(text):
    first, second = Proxy(), Proxy()
    async with first.listening() as here, second.listening() as there:
        behind = {here}

        async def resolve(name: str) -> frozenset[str]:
            assert name == "http://proxies"
            return frozenset(behind)

        registered = Registrar(
            ["http://proxies"],
            url="http://me",
            info=make_engine(text).info,
            secret="",
            lease_s=0.06,
            resolve=resolve,
        )
        await registered.start()
        await until(lambda: registered.is_settled)
        assert (len(first.calls) > 0, len(second.calls)) == (True, 0)
        behind.add(there)
        await until(lambda: len(second.calls) > 2)
        second.status, second.answer = 409, "weights differ"
        await until(lambda: registered.refusal is not None)
        behind.remove(there)
        await until(lambda: registered.refusal is None)
        assert registered._asked == {here}
        behind.clear()  # a name server that fails: they are where they were
        num = len(first.calls)
        await until(lambda: len(first.calls) > num + 2)
        await registered.stop(deadline_s=1.0)
        assert first.calls[-1][0] == "DELETE"


async def test_two_families_of_addresses_are_one_proxy():
    assert await places_of("http://localhost:8000") == {"http://localhost:8000"}
    assert await places_of("http://127.0.0.1:8000/llm") == {"http://127.0.0.1:8000/llm"}
    assert await places_of("http://a..b:1") == frozenset()
