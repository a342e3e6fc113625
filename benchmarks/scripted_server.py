"""An OpenAI-compatible server without a model: answers as its requests say, at exact times.

For measuring what measures: `python -m benchmarks.scripted_server` prints its URL, and a request's
prompt is the script of its answer, as JSON; any other prompt gets the server's own script
(`--first-ms`, `--gap-ms`) and as many tokens as it asks for. `GET /times` tells when requests came
and tokens were written (`time.monotonic`, as all processes of a machine have it).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from typing import Any

import msgspec

from benchmarks.played_http import PlayedConnection, PlayedRequest
from pdserve.bench.precise_loop import new_precise_loop
from pdserve.bench.priority import raise_priority


class Script(msgspec.Struct, kw_only=True):
    """How one request is answered.

    Attributes:
        first_s: From its arrival to the first token.
        gaps_s: Between tokens.
        tokens: Of each chunk; empty means one each.
        texts: Of each chunk; empty means a word each.
        role_first_s: A chunk with the role alone comes then, and no token with it (chat).
        cut: Events are written in pieces of so many bytes; 0 writes them whole.
        line_end: Of the event stream.
        end: done, no_done (no `[DONE]`), break (the connection ends after the tokens),
            error_event, bare_finish (the finish reason comes in a chunk of its own),
            bare_token (likewise, and it counts as a token).
        status: Instead of 200.
        usage: Whether the count comes at the end; `each` with every chunk.
        ids: Tell token ids.
        length: The body's length is told before it, which keeps the whole answer back.
        prompt_tokens: What the usage says.
    """

    first_s: float = 0.05
    gaps_s: list[float] = []
    tokens: list[int] = []
    texts: list[str] = []
    role_first_s: float | None = None
    cut: int = 0
    line_end: str = "\n"
    end: str = "done"
    status: int = 200
    usage: str = "end"
    ids: bool = False
    length: bool = False
    prompt_tokens: int = 7


class Server:
    """What the connections share."""

    def __init__(self, script: Script, gap_s: float, key: str) -> None:
        self.script = script
        self.gap_s = gap_s
        self.key = key
        self.times: dict[str, dict[str, Any]] = {}
        self.bodies: dict[str, Any] = {}
        self.num_open = 0
        self.max_open = 0


class Connection(PlayedConnection):
    """One connection; a request has arrived when its last bytes have."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server
        self._arrived_s = 0.0

    def data_received(self, data: bytes) -> None:
        """See `PlayedConnection`."""
        self._arrived_s = time.monotonic()
        super().data_received(data)

    def take(self, request: PlayedRequest) -> None:
        """See `PlayedConnection`."""
        if request.method != "POST":
            self._get(request.path)
        elif not request.path.endswith("completions"):
            self._say(404, {"error": {"message": "no"}})
        else:
            answer = self._answer(request, self._arrived_s)
            self.task = asyncio.get_running_loop().create_task(answer)

    def _get(self, path: str) -> None:
        pages: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "scripted"}]},
            "/times": {"times": self._server.times, "max_open": self._server.max_open},
            "/bodies": self._server.bodies,
        }
        page = pages.get(path)
        self._say(200 if page is not None else 404, page or {"error": {"message": "no"}})

    def _say(self, status: int, content: Any) -> None:
        self.reply(status, json.dumps(content).encode())

    async def _answer(self, came: PlayedRequest, arrived_s: float) -> None:
        server = self._server
        request = json.loads(came.body)
        is_chat = came.path.endswith("/chat/completions")
        if server.key and came.headers.get("authorization") != f"Bearer {server.key}":
            self._say(401, {"error": {"message": "bad key"}})
            return
        script = self._script(request, is_chat)
        request_id = came.headers.get("x-request-id", "")
        times: dict[str, Any] = {"arrived_s": arrived_s, "token_s": [], "is_whole": False}
        server.times[request_id] = times
        server.bodies[request_id] = request
        if script.status != 200:
            self._say(script.status, {"error": {"message": "as the script says"}})
            return
        server.num_open += 1
        server.max_open = max(server.max_open, server.num_open)
        try:
            await self._stream(script, is_chat, arrived_s, times)
        finally:
            server.num_open -= 1

    def _script(self, request: dict[str, Any], is_chat: bool) -> Script:
        prompt = request["messages"][-1]["content"] if is_chat else request["prompt"]
        if isinstance(prompt, str) and prompt.startswith("{"):
            with contextlib.suppress(msgspec.DecodeError):  # a text that only looks like one
                return msgspec.json.decode(prompt, type=Script)
        number = request.get("max_completion_tokens" if is_chat else "max_tokens", 16)
        own = self._server.script
        num_in = own.prompt_tokens if isinstance(prompt, str) else len(prompt)
        gaps_s = [self._server.gap_s] * (number - 1)
        ids = bool(request.get("return_token_ids"))
        return msgspec.structs.replace(own, gaps_s=gaps_s, prompt_tokens=num_in, ids=ids)

    async def _stream(
        self, script: Script, is_chat: bool, arrived_s: float, times: dict[str, Any]
    ) -> None:
        due_s = [arrived_s + script.first_s]
        for gap_s in script.gaps_s:
            due_s.append(due_s[-1] + gap_s)
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
        is_chunked = not script.length and script.end != "break"
        if script.length:
            await _until(due_s[-1])
        held: list[bytes] = []
        total = 0
        if script.role_first_s is not None:
            await _until(arrived_s + script.role_first_s)
            held.append(_event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
        for place, at_s in enumerate(due_s):
            is_last = place == len(due_s) - 1
            if not script.length:
                await _until(at_s)
            number = script.tokens[place] if script.tokens else 1
            total += number
            text = script.texts[place] if script.texts else f" w{place}"
            choice: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
            choice |= {"index": 0, "finish_reason": None}
            if script.ids:
                choice["token_ids"] = list(range(100 + total - number, 100 + total))
            if is_last and script.end in ("done", "no_done"):
                choice["finish_reason"] = "length"
            chunk: dict[str, Any] = {"choices": [choice]}
            if script.usage == "each":
                chunk["usage"] = {"prompt_tokens": 7, "completion_tokens": total}
            held.append(_event(chunk))
            if is_last:
                held += self._ends(script, is_chat, total)
            if script.length:
                continue
            # All that is written in this moment counts from when the token is.
            times["token_s"].append(time.monotonic())
            if place == 0:
                kind = "Transfer-Encoding: chunked" if is_chunked else "Connection: close"
                self.transport.write(f"{head}{kind}\r\n\r\n".encode())
            await self._write(b"".join(held), script, is_chunked)
            held.clear()
        if script.length:
            content = b"".join(held).replace(b"\n", script.line_end.encode())
            self.transport.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        elif is_chunked:
            self.transport.write(b"0\r\n\r\n")
        if script.end == "break":
            self.transport.abort()
        times["is_whole"] = True

    @staticmethod
    def _ends(script: Script, is_chat: bool, total: int) -> list[bytes]:
        ends = []
        if script.end in ("bare_finish", "bare_token"):
            total += script.end == "bare_token"
            choice = {"delta": {}} if is_chat else {"text": ""}
            ends.append(_event({"choices": [{**choice, "finish_reason": "stop"}]}))
        if script.end == "error_event":
            ends.append(_event({"error": {"message": "as the script says", "code": "500"}}))
        elif script.end != "break" and script.usage == "end":
            usage = {"prompt_tokens": script.prompt_tokens, "completion_tokens": total}
            ends.append(_event({"choices": [], "usage": usage}))
        if script.end not in ("no_done", "break"):
            ends.append(b"data: [DONE]\n\n")
        return ends

    async def _write(self, content: bytes, script: Script, is_chunked: bool) -> None:
        content = content.replace(b"\n", script.line_end.encode())
        size = script.cut or len(content)
        for begin in range(0, len(content), size):
            piece = content[begin : begin + size]
            frame = b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece
            self.transport.write(frame)
            if script.cut:
                await asyncio.sleep(0)


async def _until(at_s: float) -> None:
    loop = asyncio.get_running_loop()
    left_s = at_s - time.monotonic()
    if left_s > 0:
        woken = asyncio.Event()
        timer = loop.call_at(loop.time() + left_s, woken.set)
        try:
            await woken.wait()
        finally:
            timer.cancel()


def _event(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def _serve(args: argparse.Namespace) -> None:
    script = Script(first_s=args.first_ms / 1e3, ids=False)
    state = Server(script, args.gap_ms / 1e3, args.api_key)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(state), "127.0.0.1", 0, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first-ms", type=float, default=50.0)
    parser.add_argument("--gap-ms", type=float, default=5.0)
    parser.add_argument("--api-key", default="")
    args = parser.parse_args()
    raise_priority()
    with asyncio.Runner(loop_factory=new_precise_loop) as runner:
        runner.run(_serve(args))


if __name__ == "__main__":
    main()
