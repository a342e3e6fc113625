"""An engine made of a script: real sockets, no model.

Its "tokens" are a pure function of (seed, position), as a real engine's are, so that a
replay on another engine can be checked against the whole text.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from pdserve.http.control import Verifier
from pdserve.wire.events import EventEndpoint
from pdserve.wire.hop import LAYOUT_HEADER
from pdserve.wire.ids import EngineId, Incarnation, RequestId
from pdserve.wire.seal import PROTOCOL
from pdserve.wire.transfer import HANDOFFS, TICKETS, Endpoint, KVHandoff, KVShape, PushTicket
from tests.web_runner import cleaned_up

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
PROMPT_TOKENS = 7
PREFILLED = {"prefill_s": 0.0002, "prompt_tokens": PROMPT_TOKENS}
Hook = Callable[["Call", web.Request], Awaitable[web.StreamResponse | None]]


def num_before(call: Call) -> int:
    """Tokens that the client has of a stream before one that goes on with it."""
    ours = call.params["pdserve"]
    first = [0] if call.leg == "receive" else HANDOFFS.peek(ours["handoffs"][0]).first_token_ids
    return len(first) if ours["first_delivered"] else 0


def word(seed: int, position: int) -> str:
    return f" {WORDS[(seed * 7 + position * 3) % len(WORDS)]}{position}"


def text_of(seed: int, num_tokens: int) -> str:
    return "".join(word(seed, position) for position in range(num_tokens))


@dataclasses.dataclass
class Call:
    """One generation request as the engine got it."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]

    @property
    def params(self) -> dict[str, Any] | None:
        return self.body.get("kv_transfer_params")

    @property
    def leg(self) -> str:
        params = self.params or {}
        if params.get("do_remote_decode"):
            return "prefill"
        if not params.get("do_remote_prefill"):
            return "local"
        return "decode" if self.ticket is None else "receive"

    @property
    def ticket(self) -> PushTicket | None:
        text = ((self.params or {}).get("pdserve") or {}).get("ticket")
        return None if text is None else TICKETS.peek(text)


class ScriptedEngine:
    """Speaks the engine hop.

    Attributes:
        hook: Called first for every generation; may answer by itself, hang, or fall through.
        kv_headers: What a stream from another engine's KV begins with.
        gate: While cleared, a stream stops before its second token of its own.
        leased: Nonces handed out, not yet read or released.
        released: Nonces given back, in order.
        read: Nonces whose KV a decode engine has read, in order.
        peers, release_peers: Connections that generation requests and releases came over.
        ahead_s: By how much its host's wall clock is ahead.
        kv_host: Where it says that KV is exchanged.
        num_held: KV blocks that it says it holds, of 100.
        reaches: Such addresses of others that it can connect to; None of a release that is not
            asked for them.
        gives_away: It ends streams with a handoff when it is asked to.
        kv_events: Where it says that it tells of its KV.
        eager: As the receiver of a push it does not wait for the prefill engine.
    """

    def __init__(
        self,
        role: str = "both",
        *,
        engine_id: str = "",
        digest: str = "d1",
        can_push: bool = False,
    ) -> None:
        self.role = role
        self.can_push = can_push
        self.eager = False
        self.block_size = 16
        self.engine_id = engine_id or f"{role}-{id(self):x}"
        self.incarnation = "life-1"
        self.digest = digest
        self.weights = "w1"
        self.model = "tiny"
        self.protocol = PROTOCOL
        self.text_digest = ""
        self.max_model_len = 2048
        self.ready = True
        self.hook: Hook | None = None
        self.kv_headers: dict[str, str] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.secret = ""
        self.failing_releases = 0
        self.calls: list[Call] = []
        self.ended: Counter[str] = Counter()
        self.leased: set[str] = set()
        self.released: list[str] = []
        self.read: list[str] = []
        self.peers: set[object] = set()
        self.release_peers: set[object] = set()
        self.requests: Counter[str] = Counter()
        self.load = {"num_running": 0, "num_waiting": 0, "num_receiving": 0}
        self.num_held = 10
        self.gives_away = True
        self.given_away: set[str] = set()
        self.token_delay_s = 0.0
        self.kv_events: list[EventEndpoint] = []
        self.resets: list[web.Request] = []
        self.reset_status = 200
        self.finish_at_prefill = False
        self.stages: dict[str, Any] = {}
        self.seed_offset = 0
        self.ahead_s = 0.0
        self.kv_host = "127.0.0.1"
        self.reaches: set[str] | None = {"127.0.0.1"}
        self.asked_to_reach: list[str] = []
        self.hang_health: asyncio.Event | None = None
        self.metrics_page: str | None = None
        self.hang_metrics: asyncio.Event | None = None
        self.models: Any = [
            {"id": "tiny", "object": "model", "root": "/m/tiny", "max_model_len": 2048}
        ]
        self.url = ""
        self._nonces = itertools.count()
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> ScriptedEngine:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.post("/v1/completions", self._generate),
                web.post("/v1/chat/completions", self._generate),
                web.post("/pdserve/release", self._release),
                web.post("/pdserve/migrate", self._migrate),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.get("/pdserve/info", self._info),
                web.post("/pdserve/reach", self._reach),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
            ]
        )
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            for server in list(runner.server.connections if runner.server else []):
                if server.transport is not None:
                    server.transport.abort()
            await cleaned_up(runner)

    @property
    def layout_digest(self) -> str:
        return f"{self.digest} {self.weights}"

    def info(self) -> dict[str, Any]:
        return {
            "engine_id": self.engine_id,
            "incarnation": self.incarnation,
            "role": self.role,
            "model": self.model,
            "dtype": "float32",
            "max_model_len": self.max_model_len,
            "block_size": self.block_size,
            "num_blocks": 100,
            "max_num_seqs": 8,
            "endpoints": [{"host": self.kv_host, "port": 1}],
            "layout_digest": self.layout_digest,
            "layout": {"dtype": self.digest, "weights": self.weights},
            "can_push": self.can_push,
            "kv_shape": msgspec.to_builtins(self.shape()),
            "protocol": self.protocol,
            "text_digest": self.text_digest,
            "kv_events": msgspec.to_builtins(self.kv_events),
        }

    def shape(self) -> KVShape:
        return KVShape(
            num_blocks=8,
            num_layers=1,
            num_planes=2,
            num_kv_heads=1,
            head_dim=1,
            dtype_bytes=8,
            block_size=self.block_size,
            stages=((0, 1),),
        )

    # --- questions

    async def _info(self, request: web.Request) -> web.Response:
        self.requests["info"] += 1
        if self.hang_health is not None:
            await self.hang_health.wait()
        blocks = {"free": 90 - self.num_held, "cached": 10, "held": self.num_held}
        stats = {**self.load, "num_blocks": 100, "blocks": blocks}
        wall_s = time.time() + self.ahead_s
        said = {"ready": self.ready, "engine": self.info(), "stats": stats, "wall_s": wall_s}
        return web.json_response(said)

    async def _reach(self, request: web.Request) -> web.Response:
        body = await request.read()
        if self.secret:
            Verifier(self.secret, accept_former=False).check(request, body)
        if self.reaches is None:
            raise web.HTTPNotFound
        asked = [each["host"] for each in msgspec.json.decode(body)["endpoints"]]
        self.asked_to_reach += asked
        reasons = [None if host in self.reaches else "Connection refused" for host in asked]
        answer = web.json_response({"reasons": reasons})
        answer.force_close()  # or a request might find this connection and not the one it is to
        return answer

    async def _readyz(self, request: web.Request) -> web.Response:
        self.requests["/readyz"] += 1
        if self.hang_health is not None:
            await self.hang_health.wait()
        return web.Response(status=200 if self.ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        self.requests["/metrics"] += 1
        if self.hang_metrics is not None:
            await self.hang_metrics.wait()
        if self.metrics_page is None:
            raise web.HTTPNotFound
        return web.Response(text=self.metrics_page)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": [1, 2], "count": 2, "by": self.engine_id})

    async def _detokenize(self, request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise web.HTTPNotFound

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        self.resets.append(request)
        return web.Response(status=self.reset_status)

    async def _release(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.release_peers.add(request.transport.get_extra_info("peername"))
        if self.secret:
            Verifier(self.secret, accept_former=False).check(request, body)
        if self.failing_releases:
            self.failing_releases -= 1
            return web.Response(status=500)
        nonce = msgspec.json.decode(body)["nonce"]
        self.released.append(nonce)
        self.leased.discard(nonce)
        return web.json_response({})

    async def _migrate(self, request: web.Request) -> web.Response:
        body = await request.read()
        if self.secret:
            Verifier(self.secret, accept_former=False).check(request, body)
        if self.gives_away:
            self.given_away.add(msgspec.json.decode(body)["request_id"])
        return web.Response()

    # --- generation

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        call = Call(request.path, await request.json(), request.headers.copy())
        self.calls.append(call)
        self.peers.add(request.transport.get_extra_info("peername"))
        try:
            if self.hook is not None:
                answer = await self.hook(call, request)
                if answer is not None:
                    return answer
            return await self.answer(call, request)
        except asyncio.CancelledError:
            self.ended["cancelled"] += 1
            raise

    async def answer(self, call: Call, request: web.Request) -> web.StreamResponse:
        if call.body.get("stream"):
            return await self._stream(call, request)
        return await self._whole(call)

    def _ours(self, call: Call) -> tuple[int, int]:
        ours = (call.params or {}).get("pdserve", {})
        seed = call.body.get("seed")
        seed = ours.get("seed", 0) if seed is None else seed
        return seed + self.seed_offset, ours.get("created", 0)

    def handoff(self, call: Call, num_tokens: int = 1) -> dict[str, Any]:
        is_pushed = call.ticket and call.leg == "prefill"
        nonce = call.ticket.nonce if is_pushed else f"{self.engine_id}-{next(self._nonces)}"
        self.leased.add(nonce)
        LEASES[nonce] = self
        pushed(nonce).set()
        lease = KVHandoff(
            engine_id=EngineId(self.engine_id),
            incarnation=Incarnation(self.incarnation),
            nonce=nonce,
            request_id=RequestId(call.headers["X-Request-Id"]),
            endpoints=[Endpoint(host="127.0.0.1", port=1)],
            block_ids=[],
            num_tokens=PROMPT_TOKENS + num_tokens - 1,
            first_token_ids=list(range(num_tokens)),
            shape=self.shape(),
            layout_digest=self.layout_digest,
            lease_s=30.0,
            prompt_digest="p",
        )
        ours = call.params["pdserve"] if call.params else {}
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "pdserve": {
                "handoffs": [HANDOFFS.seal(lease, "s3cret")],
                "created": ours.get("created"),
                "seed": ours.get("seed"),
            },
        }

    def chunk(
        self, call: Call, text: str, finish: str | None = None, *, first: bool = False
    ) -> bytes:
        _, created = self._ours(call)
        if "chat" in call.path:
            delta: dict[str, Any] = {"content": text}
            if first:
                delta = {"role": "assistant", **delta}
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
        else:
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        body = {"id": call.headers["X-Request-Id"], "created": created, "choices": [choice]}
        return sse(body)

    async def _stream(self, call: Call, request: web.Request) -> web.StreamResponse:
        seed, _ = self._ours(call)
        num_tokens = call.body.get("max_tokens", 4)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                LAYOUT_HEADER: self.layout_digest,
            }
        )
        if call.leg == "prefill" and not self.finish_at_prefill and num_tokens > 1:
            await self.gate.wait()
            await response.prepare(request)
            params = self.handoff(call)
            await response.write(
                self.chunk(call, word(seed, 0), first=True)
                + sse({"pdserve_handoff": params})
                + sse({"pdserve_stages": {**PREFILLED, "queue_s": 0.0001, **self.stages}})
                + b"data: [DONE]\n\n"
            )
            return response
        start = 0
        if call.leg in ("decode", "receive"):
            response.headers.update(self.kv_headers)
            start = num_before(call)
            await self.read_lease(call)
        last = 0 if call.leg == "prefill" and self.finish_at_prefill else num_tokens - 1
        for position in range(start, last + 1):
            if position > start:
                await self.gate.wait()
            if self.token_delay_s:
                await asyncio.sleep(self.token_delay_s)
            if not response.prepared:
                await response.prepare(request)
            finish = "length" if position == last else None
            await response.write(
                self.chunk(call, word(seed, position), finish, first=position == 0)
            )
            if call.headers["X-Request-Id"] in self.given_away and finish is None:
                self.given_away.discard(call.headers["X-Request-Id"])
                params = self.handoff(call, position + 1)
                await response.write(
                    sse({"pdserve_handoff": params})
                    + sse({"pdserve_stages": {"first_step_s": 0.0001, **self.stages}})
                    + b"data: [DONE]\n\n"
                )
                self.ended["moved"] += 1
                return response
        if (call.body.get("stream_options") or {}).get("include_usage"):
            await response.write(sse({"choices": [], "usage": usage(last + 1)}))
        await response.write(sse({"pdserve_stages": {"first_step_s": 0.0001, **self.stages}}))
        await response.write(b"data: [DONE]\n\n")
        self.ended["done"] += 1
        return response

    async def _whole(self, call: Call) -> web.Response:
        seed, created = self._ours(call)
        num_tokens = call.body.get("max_tokens", 4)
        body: dict[str, Any] = {"id": call.headers["X-Request-Id"], "created": created}
        if call.leg == "prefill" and not self.finish_at_prefill:
            choice = {"index": 0, "text": word(seed, 0), "finish_reason": None}
            body |= {"choices": [choice], "kv_transfer_params": self.handoff(call)}
            body["usage"] = usage(1)
        else:
            if call.leg in ("decode", "receive"):
                await self.read_lease(call)
            num_tokens = 1 if call.leg == "prefill" else num_tokens
            text = text_of(seed, num_tokens)
            choice = {"index": 0, "text": text, "finish_reason": "length"}
            body |= {"choices": [choice], "usage": usage(num_tokens)}
        body["pdserve_stages"] = {**PREFILLED, "prefill_s": 0.001}
        return web.json_response(body)

    async def read_lease(self, call: Call) -> None:
        """Stands for the transfer: whoever holds the lease sees it read."""
        if call.ticket is not None:
            nonce = call.ticket.nonce
            if not self.eager:
                await pushed(nonce).wait()
                LEASES[nonce].leased.discard(nonce)
                LEASES[nonce].read.append(nonce)
            return
        for text in call.params["pdserve"]["handoffs"]:
            if text is not None:
                lease = HANDOFFS.peek(text)
                LEASES[lease.nonce].leased.discard(lease.nonce)
                LEASES[lease.nonce].read.append(lease.nonce)


LEASES: dict[str, ScriptedEngine] = {}
"""Every lease handed out, and who holds it: the wire between the engines."""


_PUSHED: dict[str, asyncio.Event] = {}


def pushed(nonce: str) -> asyncio.Event:
    """Set once the prefill engine has handed over what it was to push."""
    return _PUSHED.setdefault(nonce, asyncio.Event())


def usage(num_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": num_tokens,
        "total_tokens": PROMPT_TOKENS + num_tokens,
    }


def sse(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def events_of(stream: bytes) -> list[Any]:
    """The parsed events of a client's stream; the end mark must be there and is left out."""
    parts = stream.split(b"\n\n")
    assert parts[-1] == b"", f"the stream ends inside an event: {parts[-1]!r}"
    datas = [part.removeprefix(b"data: ") for part in parts[:-1]]
    assert datas[-1] == b"[DONE]", datas
    assert b"[DONE]" not in datas[:-1]
    return [msgspec.json.decode(data) for data in datas[:-1]]


def text_in(stream: bytes) -> str:
    """The text a client has got from a stream."""
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for event in events_of(stream)
        for choice in event.get("choices", [])
    )
