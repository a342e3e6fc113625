"""A real proxy before 10, 100 and 1,000 engines of a script, over HTTP: what its fleet costs it.

One process plays all engines, half of them for prompts, half for tokens, on ports of their own:
they register, renew their leases, answer checks, tell of their KV, hand over and stream as engines
do, without a model.
For each size, by a proxy that chooses pairs (`predicted`), one after the other on the same cores:

`ready_s`: until all are registered and ready. `idle_cores`: what the proxy uses without a request.
`choice_ms`: of one request at a time, what lies between its arrival at the proxy and its first leg
(parsing, reading the prompt, letting it in, choosing), as the request's line has it. `ttft_ms`: the
same requests at the client. `route_us`: the joint decision alone, on average. `requests_per_s`, and
the proxy's CPU time for each, with so many users at once. Prints one JSON object.

    python -m benchmarks.proxy_fleet [--engines 10 100 1000] [--requests 400] [--users 16]
                                     [--no-events]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
import numpy as np
import psutil
import zmq

from benchmarks.deployments import Asker, processes, told
from benchmarks.engine import environment
from benchmarks.played_http import PlayedConnection, PlayedRequest
from pdserve.bench.records import Planned
from pdserve.lifeline import end_with_parent
from pdserve.server.registration import Registrar
from pdserve.wire.event_stream import GrainStream
from pdserve.wire.events import (
    DEVICE,
    HEARTBEAT_S,
    Ask,
    EventEndpoint,
    GrainsStored,
    curve_secret,
    first_epoch,
)
from pdserve.wire.hop import HANDOFF, LAYOUT_HEADER, PARAMS, STAGES, EngineReport
from pdserve.wire.ids import EngineId, Incarnation, RequestId, grain_hashes
from pdserve.wire.request import EngineInfo, EngineStats
from pdserve.wire.seal import PROTOCOL
from pdserve.wire.transfer import HANDOFFS, Endpoint, KVHandoff, KVShape

if TYPE_CHECKING:
    from collections.abc import Sequence

SECRET: Final = "benchmark"
PLAY: Final = "--play"
NUM_IN, NUM_OUT = 1024, 8
_PREFILL_S, _GAP_S = 0.002, 0.001
_TAUGHT: Final = 60
_IDLE_S: Final = 8.0
_REGISTERED_AT_ONCE: Final = 32
_BEATING_APART: Final = 25
"""Groups of engines whose heartbeats come at the same time."""
_MODEL: Final = "scripted"
_SHAPE: Final = KVShape(
    num_blocks=8,
    num_layers=1,
    num_planes=2,
    num_kv_heads=1,
    head_dim=1,
    dtype_bytes=8,
    block_size=16,
    stages=((0, 1),),
)


# --- the engines


class FleetEvents:
    """The sockets on which one engine tells of its KV."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], incarnation: Incarnation) -> None:
        self.stream = GrainStream(first_epoch(incarnation))
        self._encode = msgspec.msgpack.Encoder().encode
        self._pub, self._asks = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        ports = []
        for each in (self._pub, self._asks):
            each.curve_server = True
            each.curve_secretkey = curve_secret(SECRET)
            ports.append(each.bind_to_random_port("tcp://127.0.0.1"))
        self.endpoint = EventEndpoint(host="127.0.0.1", port=ports[0], snapshot_port=ports[1])

    def beat(self) -> None:
        """Tell what has changed, if anything, and answer who lacks some of it."""
        self._pub.send(self._encode(self.stream.batch()))
        with contextlib.suppress(zmq.Again):
            while True:
                peer, *frames = self._asks.recv_multipart(zmq.NOBLOCK)
                for answer in self.stream.answer(msgspec.msgpack.decode(frames[-1], type=Ask)):
                    self._asks.send_multipart((peer, self._encode(answer)))


class FleetEngine:
    """One engine of the script: what it says of itself, and how it answers.

    Args:
        context: Of the sockets of its events; None: it tells of none.
    """

    def __init__(self, number: int, context: zmq.Context[zmq.Socket[bytes]] | None) -> None:
        incarnation = Incarnation(f"{number + 1:016x}")
        self.events = None if context is None else FleetEvents(context, incarnation)
        self.info = EngineInfo(
            engine_id=EngineId(f"engine-{number}"),
            incarnation=incarnation,
            role="decode" if number % 2 else "prefill",
            model=_MODEL,
            dtype="float32",
            max_model_len=32_768,
            block_size=16,
            num_blocks=8192,
            max_num_seqs=256,
            endpoints=[Endpoint(host="127.0.0.1", port=1)],
            layout_digest="scripted",
            layout={"dtype": "float32"},
            kv_shape=_SHAPE,
            protocol=PROTOCOL,
            kv_events=[] if self.events is None else [self.events.endpoint],
        )
        blocks = {"free": 8192}
        stats = EngineStats(num_blocks=8192, blocks=blocks)
        report = EngineReport(ready=True, models=(_MODEL,), engine=self.info, stats=stats)
        models = {"object": "list", "data": [{"id": _MODEL, "max_model_len": 32_768}]}
        self.pages = {
            "/readyz": b"ok\n",
            "/pdserve/info": msgspec.json.encode(report),
            "/v1/models": msgspec.json.encode(models),
        }
        self._nonces = itertools.count()

    def handoff(self, request_id: str, ours: dict[str, Any]) -> dict[str, Any]:
        """What a decode engine goes on from."""
        lease = KVHandoff(
            engine_id=self.info.engine_id,
            incarnation=self.info.incarnation,
            nonce=f"{self.info.engine_id}-{next(self._nonces)}",
            request_id=RequestId(request_id),
            endpoints=self.info.endpoints,
            block_ids=[],
            num_tokens=NUM_IN,
            first_token_ids=[0],
            shape=_SHAPE,
            layout_digest=self.info.layout_digest,
            lease_s=30.0,
            prompt_digest="p",
        )
        sealed = {"handoffs": [HANDOFFS.seal(lease, SECRET)]}
        sealed |= {name: ours.get(name) for name in ("created", "seed")}
        return {"do_remote_prefill": True, "remote_engine_id": lease.engine_id, "pdserve": sealed}


class EngineConnection(PlayedConnection):
    """One connection to an engine."""

    def __init__(self, engine: FleetEngine) -> None:
        super().__init__()
        self._engine = engine

    def take(self, request: PlayedRequest) -> None:
        """See `PlayedConnection`."""
        if request.method == "GET":
            page = self._engine.pages.get(request.path)
            self.reply(404 if page is None else 200, page or b"{}")
        elif request.path.endswith("completions"):
            stream = self._stream(request.headers["x-request-id"], request.body)
            self.task = asyncio.get_running_loop().create_task(stream)
        elif request.path == "/pdserve/reach":
            num = len(msgspec.json.decode(request.body)["endpoints"])
            self.reply(200, msgspec.json.encode({"reasons": [None] * num}))
        else:
            self.reply(200, b"{}")

    async def _stream(self, request_id: str, body: bytes) -> None:
        request = msgspec.json.decode(body)
        params = request.get(PARAMS) or {}
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"%b: scripted\r\nTransfer-Encoding: chunked\r\n\r\n" % LAYOUT_HEADER.encode()
        )
        stages: dict[str, Any] = {"prompt_tokens": len(request["prompt"]), "num_choices": 1}
        first, last = 0, request["max_tokens"]
        if params.get("do_remote_decode"):
            last = 1
        elif params.get("do_remote_prefill"):
            first = 1
        if first == 0:
            await asyncio.sleep(_PREFILL_S)
            stages["prefill_s"] = _PREFILL_S
            if self._engine.events is not None:
                stored = GrainsStored(grain_hashes(request["prompt"], ""), DEVICE)
                self._engine.events.stream.add([stored])
        for position in range(first, last):
            if position:
                await asyncio.sleep(_GAP_S)
            is_end = position == request["max_tokens"] - 1
            choice = {"index": 0, "text": f" {position}", "finish_reason": None}
            choice["finish_reason"] = "length" if is_end else None
            self._event({"id": request_id, "created": 1, "choices": [choice]})
        if last == 1:
            self._event({HANDOFF: self._engine.handoff(request_id, params.get("pdserve") or {})})
        else:
            usage = {"prompt_tokens": len(request["prompt"]), "completion_tokens": last}
            usage["total_tokens"] = sum(usage.values())
            self._event({"choices": [], "usage": usage})
        self._event({STAGES: stages})
        self._write(b"data: [DONE]\n\n")
        self.transport.write(b"0\r\n\r\n")

    def _event(self, content: Any) -> None:
        self._write(b"data: " + msgspec.json.encode(content) + b"\n\n")

    def _write(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def _play(num: int, proxy: str, *, with_events: bool) -> None:
    """Be the engines, until killed."""
    loop = asyncio.get_running_loop()
    context: zmq.Context[zmq.Socket[bytes]] | None = None
    if with_events:
        context = zmq.Context()
        context.max_sockets = 4 * num + 16
    engines = [FleetEngine(number, context) for number in range(num)]
    places = asyncio.Semaphore(_REGISTERED_AT_ONCE)

    async def one(engine: FleetEngine) -> Registrar:
        server = await loop.create_server(
            functools.partial(EngineConnection, engine), "127.0.0.1", 0, backlog=256
        )
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with places:
            registrar = Registrar([proxy], url=url, info=engine.info, secret=SECRET)
            await registrar.start()
            while not registrar.is_settled:
                await asyncio.sleep(0.01)
        return registrar

    async def beat_on(some: Sequence[FleetEngine]) -> None:
        while True:
            begun_s = loop.time()
            for each in some:
                if each.events is not None:
                    each.events.beat()
            await asyncio.sleep(max(0.0, begun_s + HEARTBEAT_S - loop.time()))

    async with asyncio.TaskGroup() as group:
        for first in range(_BEATING_APART):
            group.create_task(beat_on(engines[first::_BEATING_APART]))
            await asyncio.sleep(HEARTBEAT_S / _BEATING_APART)
        kept = await asyncio.gather(*map(one, engines))
        assert kept


# --- the proxy before them


async def _measure(num: int, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    async with processes(directory) as started:
        flags = ["--policy", "prefix_sticky", "--split-policy", "predicted"]
        url, log = await started.start(
            f"proxy-{num}", "proxy", "--port", "0", *flags, "--no-early-rejection"
        )
        begun_s = time.monotonic()
        words = [PLAY, str(num), url, str(os.getpid()), *([] if args.events else ["--no-events"])]
        fleet = subprocess.Popen([sys.executable, "-m", __spec__.name, *words])
        try:
            await _until_ready(url, num)
            ready_s = time.monotonic() - begun_s
            proxy = psutil.Process(started.pids[0])
            await asyncio.sleep(2.0)
            idle = await _idle(proxy)
            await _ask(url, "taught", _TAUGHT, users=4)
            since = log.stat().st_size
            alone = await _ask(url, "alone", args.requests, users=1)
            choices = [
                line.first["admission"] + line.first["proxy"]
                for name, line in told(log.read_text()[since:]).items()
                if name.startswith("alone-")
            ]
            before_s, begun_s = _cpu_s(proxy), time.monotonic()
            await _ask(url, "many", 2 * args.requests, users=args.users)
            took_s = time.monotonic() - begun_s
            return {
                "engines": num,
                "ready_s": round(ready_s, 1),
                "idle_cores": round(idle, 3),
                "choice_ms": _spread(choices),
                "ttft_ms": _spread([each * 1e3 for each in alone]),
                "route_us": round(1e6 * await _route_s(url), 1),
                "requests_per_s": round(2 * args.requests / took_s, 1),
                "proxy_ms_per_request": round(
                    1e3 * (_cpu_s(proxy) - before_s) / (2 * args.requests), 2
                ),
                "proxy_rss_mib": round(proxy.memory_info().rss / 2**20, 1),
            }
        finally:
            fleet.kill()
            fleet.wait()


async def _until_ready(url: str, num: int) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/readyz") as response:
                is_ready = response.status == 200
                if is_ready and sum((await response.json())["engines"].values()) == num:
                    return
            await asyncio.sleep(0.1)


async def _idle(proxy: psutil.Process) -> float:
    before_s = _cpu_s(proxy)
    await asyncio.sleep(_IDLE_S)
    return (_cpu_s(proxy) - before_s) / _IDLE_S


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _ask(url: str, name: str, num: int, *, users: int) -> list[float]:
    """Seconds to the first token of prompts of which a quarter begins as another one did."""
    rng = random.Random(name)
    known = [[rng.randrange(1000) for _ in range(NUM_IN)] for _ in range(-(-num * 3 // 4))]
    asker = Asker(url, f"{name}-", max_concurrency=users, may_merge=True)
    plan = [
        Planned(index=index, prompt=rng.choice(known), max_tokens=NUM_OUT, at_s=0.0)
        for index in range(num)
    ]
    try:
        return [outcome.ttft_s for outcome in await asker.ask(plan)]
    finally:
        asker.close()


async def _route_s(url: str) -> float:
    """Seconds of a joint decision, on average."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    found = {
        name: float(value)
        for name, _, value in (line.partition(" ") for line in lines)
        if name.startswith("pdserve_route_seconds_")
    }
    return found["pdserve_route_seconds_sum"] / found["pdserve_route_seconds_count"]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": round(float(np.percentile(values, percent)), 2) for percent in (50, 99)}


def main() -> None:
    """Run and print, or play engines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--events", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(PLAY, nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play:
        num, proxy, parent = args.play
        end_with_parent(int(parent))
        asyncio.run(_play(int(num), proxy, with_events=args.events))
        return
    result: dict[str, Any] = {"benchmark": "proxy_fleet", "events": args.events}
    result["environment"] = environment(1)
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        result["fleets"] = [
            asyncio.run(_measure(num, args, Path(directory))) for num in args.engines
        ]
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
