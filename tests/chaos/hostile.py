"""Clients that mean no good, or know no better: each kind keeps a pace and counts its answers.

What they do is bounded: a few connections each, loopback only, and all of it ends with `run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BIG_BODY_BYTES = 60_000_000
PIECE_BYTES = 1 << 18
NUM_HALF_OPEN = 20
"""Connections that are held at once, a third each without a header's end, without a body's, and
without a byte."""
HALF_OPEN_S = 5.0
"""How long each is held, within which other clients must not feel it."""
ANSWER_S = 30.0
"""No answer within this is counted as none."""
PERIODS_S = {
    "refused": 0.1,
    "big body": 5.0,
    "big chunked body": 5.0,
    "n = 1024": 5.0,
    "logit_bias": 1.0,
    "bad_words": 1.0,
    "half open": 0.1,
}


@dataclass
class HostileClients:
    """One client of each kind against a proxy.

    Args:
        url: Base URL of the proxy.
        vocab_size: `logit_bias` names every token of it.

    Attributes:
        answers: How often each kind got which answer: "KIND: STATUS", "closed" where the
            connection was closed before an answer, "none" where nothing came in `ANSWER_S`.
    """

    url: str
    vocab_size: int
    answers: Counter[str] = field(default_factory=Counter)

    async def run(self, is_on: Callable[[], bool], is_over: Callable[[], bool]) -> None:
        """Be a nuisance while `is_on()`, until `is_over()`."""
        kinds: dict[str, Callable[[], Awaitable[str]]] = {
            "refused": self._refused,
            "big body": self._big_body,
            "big chunked body": self._big_chunked_body,
            "n = 1024": self._many_choices,
            "logit_bias": self._whole_bias,
            "bad_words": self._many_bad_words,
            "half open": self._half_open,
        }
        async with asyncio.TaskGroup() as group:
            for kind, act in kinds.items():
                # Each half-open connection is held: they overlap.
                for _ in range(NUM_HALF_OPEN if kind == "half open" else 1):
                    group.create_task(self._repeat(kind, act, is_on, is_over))

    async def _repeat(
        self,
        kind: str,
        act: Callable[[], Awaitable[str]],
        is_on: Callable[[], bool],
        is_over: Callable[[], bool],
    ) -> None:
        while not is_over():
            if is_on():
                try:
                    async with asyncio.timeout(ANSWER_S):
                        end = await act()
                except TimeoutError:
                    end = "none"
                except OSError:
                    end = "closed"
                self.answers[f"{kind}: {end}"] += 1
            await asyncio.sleep(PERIODS_S[kind])

    async def _refused(self) -> str:
        return await self._post({"prompt": "x", "temperature": -1})

    async def _many_choices(self) -> str:
        rng = random.Random(0)
        prompt = [3 + rng.randrange(300) for _ in range(700)]
        return await self._post({"prompt": prompt, "n": 1024, "max_tokens": 4, "temperature": 1.0})

    async def _whole_bias(self) -> str:
        bias = {str(token): 1.0 for token in range(self.vocab_size)}
        return await self._post({"prompt": [5, 6, 7], "max_tokens": 16, "logit_bias": bias})

    async def _many_bad_words(self) -> str:
        words = [f"w{index}" for index in range(2048)]
        return await self._post({"prompt": [5, 6, 7], "max_tokens": 16, "bad_words": words})

    async def _big_body(self) -> str:
        return await self._send(
            f"Content-Length: {BIG_BODY_BYTES}",
            [b"x" * PIECE_BYTES] * (BIG_BODY_BYTES // PIECE_BYTES),
        )

    async def _big_chunked_body(self) -> str:
        piece = b"%x\r\n%s\r\n" % (PIECE_BYTES, b"x" * PIECE_BYTES)
        return await self._send(
            "Transfer-Encoding: chunked", [piece] * (BIG_BODY_BYTES // PIECE_BYTES)
        )

    async def _post(self, body: dict[str, object]) -> str:
        data = json.dumps(body).encode()
        return await self._send(f"Content-Length: {len(data)}", [data])

    async def _send(self, framing: str, pieces: list[bytes]) -> str:
        """Send a body in pieces, and stop as soon as there is an answer."""
        where = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        answer = asyncio.ensure_future(reader.readline())
        try:
            writer.write(self._head(framing))
            # The server may answer and close before it has read everything.
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    if answer.done():
                        break
                    writer.write(piece)
                    await writer.drain()
            words = (await answer).split()
            if len(words) < 2:
                return "closed"
            # To its end, so that the proxy's work on it is done and not merely abandoned.
            await reader.read()
            return words[1].decode()
        finally:
            answer.cancel()
            writer.close()

    async def _half_open(self) -> str:
        """Begin a request, never end it, and leave by a reset."""
        where = urlsplit(self.url)
        _, writer = await asyncio.open_connection(where.hostname, where.port)
        try:
            head = self._head("Content-Length: 1000")
            writer.write(random.choice([b"", head[:40], head + b'{"prompt": "']))
            await asyncio.sleep(HALF_OPEN_S)
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        finally:
            writer.transport.abort()
        return "left"

    def _head(self, framing: str) -> bytes:
        lines = (
            "POST /v1/completions HTTP/1.1",
            f"Host: {urlsplit(self.url).netloc}",
            "Content-Type: application/json",
            "Connection: close",
            framing,
        )
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode()
