from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web
from blockbuster import blockbuster_ctx

from pdserve.config.http import ServerConfig
from pdserve.config.schema import (
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SchedulingPolicy,
    TransferConfig,
)
from pdserve.http.connection import HttpListener
from pdserve.observe.clock import ManualClock, SystemClock
from pdserve.server.app import build_app
from pdserve.server.service import SERVICE
from pdserve.text.load import load_text
from tests.server.engine import ServedEngine
from tests.text.tiny import SPECIAL, write_model_files
from tests.web_runner import cleaned_up

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from pdserve.observe.clock import Clock
    from pdserve.text.load import Text
    from tests.server.engine import NextToken

EOS = SPECIAL.index("</s>")


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """A blocking call on the event loop is an error."""
    with blockbuster_ctx("pdserve.server"):
        yield


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_files(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def text(model_dir: Path) -> Text:
    return load_text(ModelConfig(model=str(model_dir)))


class Server:
    """An API server in this process, over an engine core in this process."""

    def __init__(
        self,
        url: str,
        engine: ServedEngine,
        session: aiohttp.ClientSession,
        app: web.Application,
    ) -> None:
        self.url = url
        self.app = app
        self.service = app[SERVICE]
        self.engine = engine
        self.session = session

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """POST JSON; return the status and the parsed answer."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(self.url + path, json=body, headers=names) as response:
            return response.status, await response.json()

    async def ok(self, path: str, body: Any, **headers: str) -> Any:
        """POST JSON; return the answer, which must be a 200."""
        status, answer = await self.post(path, body, **headers)
        assert status == 200, answer
        return answer

    async def refused(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        """POST JSON; return the status and the error object."""
        status, answer = await self.post(path, body, **headers)
        assert set(answer) == {"error"}
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert isinstance(answer["error"]["code"], str)
        return status, answer["error"]

    async def stream(self, path: str, body: Any, **headers: str) -> bytes:
        """POST JSON; return the whole event stream."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        body = {"stream": True} | body
        async with self.session.post(self.url + path, json=body, headers=names) as response:
            data = await response.read()
            assert response.status == 200, data
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            return data

    async def get(self, path: str) -> tuple[int, str]:
        """GET; return the status and the text."""
        async with self.session.get(self.url + path) as response:
            return response.status, await response.text()


@contextlib.asynccontextmanager
async def serving(
    text: Text | None,
    engine: ServedEngine,
    *,
    clock: Clock | None = None,
    secret: str = "",
    model: str = "tiny",
    served_model_name: tuple[str, ...] = (),
    policy: SchedulingPolicy = SchedulingPolicy.FCFS,
    **server: Any,
) -> AsyncIterator[Server]:
    """Serve an engine on a free port."""
    app = build_app(
        engine,
        text,
        engine_config=EngineConfig(
            model=ModelConfig(model=model, served_model_name=served_model_name),
            scheduler=SchedulerConfig(policy=policy),
            transfer=TransferConfig(secret=secret),
        ),
        server_config=ServerConfig(**{"port": 0} | server),
        clock=clock or SystemClock(),
    )
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await HttpListener(runner, app[SERVICE].server_config).start()
    host, port = runner.addresses[0]
    try:
        async with aiohttp.ClientSession() as session:
            yield Server(f"http://{host}:{port}", engine, session, app)
    finally:
        await cleaned_up(runner)
        engine.die("closed")


def make_engine(text: Text, **parameters: Any) -> ServedEngine:
    """An engine whose tokens are no special ones; their bytes need not be UTF-8."""
    return ServedEngine(
        **{"vocab_size": text.tokenizer.vocab_size, "first_token_id": len(SPECIAL)} | parameters
    )


@pytest.fixture
async def server(text: Text) -> AsyncIterator[Server]:
    async with serving(text, make_engine(text)) as running:
        yield running


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1700000000.0)


def script(text: Text, answer: str) -> NextToken:
    """What a model does that answers every prompt with `answer` and the end of sequence."""
    token_ids = [*text.tokenizer.encode(answer, add_special_tokens=False), EOS]
    return lambda request, output: token_ids[len(output)]


def scripted(text: Text, answer: str, **parameters: Any) -> ServedEngine:
    """An engine of such a model."""
    return make_engine(text, **{"next_token": script(text, answer), "step_s": 0.0} | parameters)


def events(stream: bytes) -> list[Any]:
    """The events of a whole stream, which must end in `[DONE]`; that one is left out."""
    parts = stream.decode().split("\n\n")
    assert parts.pop() == ""
    assert parts.pop() == "data: [DONE]"
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that must come true."""
    async with asyncio.timeout(30.0):
        while not condition():
            await asyncio.sleep(0.005)
