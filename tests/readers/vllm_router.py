"""vllm-router, whose index is seen in where it sends prompts: to our engine, or to a control.

The control's events say that it has the first so many blocks of every prompt. A prompt goes to who
has more of it, so with each number of blocks in turn one learns how many the router believes ours
to have.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from aiohttp import web

from pdserve.config.kv_events import KVEventsConfig
from pdserve.config.schema import TransferConfig
from pdserve.engine.kv_events import KVEventPublisher
from pdserve.kvcache.manager import KVCacheManager
from pdserve.wire.ids import Incarnation
from tests.readers.lossy_engine import BLOCK_SIZE, PROMPTS, free_port, tokens_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.readers.lossy_engine import LossyEngine

MODEL = "model"
MAX_DEPTH = 4
START_S = 30.0


class Workers:
    """Two HTTP servers that answer any prompt with nothing, and note who was asked.

    Attributes:
        ports: Of ours, and of the control.
        asked: Which of them got the last prompt.
    """

    def __init__(self) -> None:
        self.ports = (free_port(), free_port())
        self.asked: int | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        for number in range(2):
            asyncio.run_coroutine_threadsafe(self._serve(number), self._loop).result(10.0)

    async def _serve(self, number: int) -> None:
        async def complete(request: web.Request) -> web.Response:
            self.asked = number
            choice = {"index": 0, "text": "", "finish_reason": "length"}
            return web.json_response({"id": "x", "object": "text_completion", "choices": [choice]})

        async def other(request: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": MODEL}], "object": "list"})

        app = web.Application()
        app.router.add_post("/v1/completions", complete)
        app.router.add_route("*", "/{path:.*}", other)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.ports[number]).start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


class Control:
    """An engine of which nothing is there but events.

    Attributes:
        endpoint: Where they are published.
    """

    def __init__(self) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self._publisher = KVEventPublisher(
            KVEventsConfig(enable_kv_cache_events=True, endpoint=self.endpoint),
            TransferConfig(),
            incarnation=Incarnation("1"),
            rank=0,
        )
        self._kv = KVCacheManager(
            num_blocks=1000, block_size=BLOCK_SIZE, enable_prefix_caching=True, log_events=True
        )

    def hold(self, depth: int) -> None:
        """Have the first `depth` blocks of every prompt, and no more."""
        self._kv.pool.forget_all()
        for prompt in PROMPTS if depth else ():
            tokens = tokens_of(prompt[:depth])
            chain = self._kv.chain(tokens, "")
            hit = self._kv.match(chain, max_tokens=len(tokens))
            holding = self._kv.open(hit, len(tokens))
            self._kv.publish(holding, chain, num_computed_tokens=len(tokens))
            holding.end()
        self._publisher.publish(self._kv.events.drain())

    def close(self) -> None:
        self._publisher.close(5.0)


class VllmRouter:
    """The released router, in a process of its own."""

    replay_topic = True

    def __init__(self, python: Path) -> None:
        self._program = python.parent / "vllm-router"
        self._workers = Workers()
        self._control = Control()
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, engine: LossyEngine) -> None:
        ours, control = (f"http://127.0.0.1:{port}" for port in self._workers.ports)
        self._process = subprocess.Popen(
            [
                self._program,
                *("--worker-urls", ours, control, "--policy", "kv_aware"),
                *("--host", "127.0.0.1", "--port", str(self._port)),
                *("--prometheus-port", str(free_port()), "--log-level", "error"),
                *("--kv-event-source", f"{ours}={engine.network.endpoint}"),
                *("--kv-event-source", f"{control}={self._control.endpoint}"),
                *("--kv-event-replay-source", f"{ours}={engine.replay_endpoint}"),
                *("--kv-event-block-size", str(BLOCK_SIZE), "--kv-event-model", MODEL),
            ]
        )
        end_s = time.monotonic() + START_S
        while self._post("abcd"[:1]) is None:
            assert time.monotonic() < end_s, "the router does not answer"
            time.sleep(0.2)

    def restarted(self, engine: LossyEngine) -> None:
        """Nothing is to be done: it sees that numbers begin again."""

    def _post(self, prompt: str) -> int | None:
        """Send a prompt, and a token more: the last one is never looked up. Return who got it."""
        body = {"model": MODEL, "prompt": [*tokens_of(prompt), 1], "max_tokens": 1}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        self._workers.asked = None
        try:
            with urllib.request.urlopen(request, timeout=5.0) as response:
                response.read()
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read()) from error
        except OSError:
            return None
        return self._workers.asked

    def depths(self, prompts: Sequence[str], expected: Sequence[int]) -> list[int]:
        """How deep each prompt is found: as expected, or -1. Who has as much may be asked, too."""
        asked_ours: list[set[int]] = [set() for _ in prompts]
        for depth in range(MAX_DEPTH + 1):
            self._control.hold(depth)
            time.sleep(0.1)
            for index, prompt in enumerate(prompts):
                if self._post(prompt) == 0:
                    asked_ours[index].add(depth)
        return [
            depth if asked - {depth} == set(range(depth)) else -1
            for depth, asked in zip(expected, asked_ours, strict=True)
        ]

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10.0)
        self._control.close()
        self._workers.close()
