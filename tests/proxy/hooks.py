"""What scripted engines do other than they should, and how they are asked.

A hook is what an engine calls first for every generation (`ScriptedEngine.hook`): it answers,
hangs, cuts the connection, or returns None and lets the script go on.
"""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from tests.proxy.scripted import ScriptedEngine, sse, text_in, word

DONE = b"data: [DONE]\n\n"
REFUSAL = b'{"error": {"message": "max_tokens  is -1", "type": "invalid_request_error"}}'


def prefills(number: int = 1, **more: bool) -> list[ScriptedEngine]:
    return [ScriptedEngine("prefill", engine_id=f"p{i}", **more) for i in range(number)]


def decodes(number: int = 1, **more: bool) -> list[ScriptedEngine]:
    return [ScriptedEngine("decode", engine_id=f"d{i}", **more) for i in range(number)]


async def streaming(request: web.Request) -> web.StreamResponse:
    """Begin a stream of events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


def legs(engines: list[ScriptedEngine]) -> list[str]:
    return [call.leg for engine in engines for call in engine.calls]


def at_first(times: int, leg: str | None):
    """Let a hook have the first `times` calls (of a leg), and the script the others."""

    def limited(hook):
        left = times

        async def counted(call, request):
            nonlocal left
            if left == 0 or (leg is not None and call.leg != leg):
                return None
            left -= 1
            return await hook(call, request)

        return counted

    return limited


def answers(status: int, body: bytes, times: int = 10**9, leg: str | None = None):
    """A hook that answers the first `times` calls (of a leg) by itself."""

    @at_first(times, leg)
    async def hook(call, request):
        return web.Response(status=status, body=body, content_type="application/json")

    return hook


def drops(times: int = 10**9, *, after: bytes = b"", leg: str | None = None):
    """A hook that sends `after` as the start of a stream and then cuts the connection."""

    @at_first(times, leg)
    async def hook(call, request):
        if after:
            response = await streaming(request)
            await response.write(after)
            await asyncio.sleep(0.01)
        request.transport.abort()
        return web.Response()

    return hook


def in_bursts(engine: ScriptedEngine, cuts: list[int], *, burst: int = 200):
    """A hook that streams a script many tokens at a time, as fast as it is read.

    Args:
        cuts: After how many tokens of the whole stream connections are cut, one after the other;
            for several engines to share.
    """

    async def hook(call, request):
        if call.leg == "prefill":
            return None
        cut_at = cuts.pop(0) if cuts else None
        start = int((call.params["pdserve"]).get("first_delivered", 0))
        if call.leg == "decode":
            await engine.read_lease(call)
        num_tokens = call.body["max_tokens"]
        response = await streaming(request)
        end = num_tokens if cut_at is None else cut_at
        for begin in range(start, end, burst):
            await response.write(
                b"".join(
                    engine.chunk(
                        call,
                        word(call.body["seed"], position),
                        "length" if position == num_tokens - 1 else None,
                        first=position == 0,
                    )
                    for position in range(begin, min(begin + burst, end))
                )
            )
        if cut_at is None:
            await response.write(DONE)
            return response
        await asyncio.sleep(0.01)
        request.transport.abort()
        return response

    return hook


def first_chunk(seed: int = 3) -> bytes:
    choice = {"index": 0, "text": word(seed, 0), "logprobs": None, "finish_reason": None}
    return sse({"id": "x", "choices": [choice]})


def error(code: str, message: str = "no") -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": "x", "code": code}})


def kv_failed(times: int = 10**9, leg: str | None = None, reasons: str = ""):
    """A hook that answers as an engine does whose KV did not arrive."""

    @at_first(times, leg)
    async def hook(call, request):
        headers = {"X-Pdserve-Load-Failures": reasons} if reasons else {}
        return web.Response(
            status=503,
            body=error("kv_transfer_failed"),
            content_type="application/json",
            headers=headers,
        )

    return hook


def hangs(leg: str | None = None):
    async def hook(call, request):
        if leg is None or call.leg == leg:
            await asyncio.Event().wait()

    return hook


async def ask(stack, *, stream: bool, **more) -> str:
    async with stack.post({"prompt": "hi", "seed": 3, "stream": stream, **more}) as response:
        body = await response.read()
        assert response.status == 200, body
    return text_in(body) if stream else msgspec.json.decode(body)["choices"][0]["text"]
