"""A proxy over two engines' servers over engines without a model, in a thread of their own.

For clients that wait for an answer where they are, such as schemathesis.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pdserve.config.http import ProxyConfig
from pdserve.config.schema import ModelConfig
from pdserve.proxy.app import Proxy
from pdserve.text.load import load_text
from tests.server.conftest import make_engine, serving
from tests.server.engine import MemoryNetwork
from tests.text.tiny import write_model_files

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Self

    from tests.server.conftest import Server

T = TypeVar("T")

MAX_MODEL_LEN = 64


class Served:
    """Starts on entry; everything of it is over on exit.

    Attributes:
        urls: Of the `proxy`, and of an `engine` that the proxy sends decode legs to.
        apps: Their applications.
    """

    def __init__(self) -> None:
        self.urls: dict[str, str] = {}
        self.engines: list[Server] = []
        self._cleanup = contextlib.AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.do(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.do(self._cleanup.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine where the servers run; return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> None:
        folder = self._cleanup.enter_context(tempfile.TemporaryDirectory())
        text = load_text(
            ModelConfig(
                model=str(write_model_files(Path(folder))),
                tool_call_parser="hermes",
                reasoning_parser="qwen3",
            )
        )
        network = MemoryNetwork()
        for role in ("prefill", "decode"):
            engine = make_engine(
                text, network=network, role=role, engine_id=role, max_model_len=MAX_MODEL_LEN
            )
            self.engines.append(await self._cleanup.enter_async_context(serving(text, engine)))
        self.proxy = Proxy(
            ProxyConfig(
                port=0,
                prefill=(self.engines[0].url,),
                decode=(self.engines[1].url,),
                shutdown_timeout_s=1.0,
            )
        )
        self._cleanup.push_async_callback(self.proxy.stop)
        self.apps = {"proxy": self.proxy.build_app(), "engine": self.engines[1].app}
        self.urls = {"proxy": await self.proxy.start(), "engine": self.engines[1].url}

    @property
    def num_held(self) -> int:
        """Requests, leases and bytes of bodies that are still there."""
        held = self.proxy.bodies.num_held_bytes + self.proxy.admission.num_running
        for server in self.engines:
            held += server.service.bodies.num_held_bytes
            held += len(server.engine.running)
        # The other engine is asked for leases by whoever likes.
        return held + len(self.engines[0].engine.leases)

    def settle(self) -> int:
        """Wait until nothing is held; return what is after 10 s.

        What the engines without a model have noted of requests is forgotten.
        """
        self.do(self._until_nothing_is_held())
        for server in self.engines:
            server.engine.requests.clear()
        return self.num_held

    async def _until_nothing_is_held(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10.0):
                while self.num_held:
                    await asyncio.sleep(0.002)
