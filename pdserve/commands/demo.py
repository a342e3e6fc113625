"""Sends the first request that a new user sees, and prints its words as they arrive.

Knows HTTP and the shape of OpenAI's stream; knows no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp

from pdserve.commands.asking import error_message
from pdserve.errors import ConfigError
from pdserve.http.plain_client import reason_of
from pdserve.wire.hop import REQUEST_ID_HEADER


class DemoFailedError(Exception):
    """The demo request was not answered; the message is the server's.

    Attributes:
        status: HTTP status of the answer; 200 if it broke off, 0 if there was none.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Question:
    """Text of a demo request, and which of the API's two endpoints it uses."""

    text: str
    max_tokens: int
    is_chat: bool

    @property
    def path(self) -> str:
        """Path of the endpoint."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    @property
    def body(self) -> dict[str, object]:
        """The request, without `stream`."""
        asked: dict[str, object] = (
            {"messages": [{"role": "user", "content": self.text}]}
            if self.is_chat
            else {"prompt": self.text}
        )
        return {**asked, "max_tokens": self.max_tokens, "temperature": 0}


async def wait_ready(
    session: aiohttp.ClientSession, url: str, *, engines: Mapping[str, int] | None = None
) -> None:
    """Return once `url`'s server says that it is ready.

    Args:
        url: URL of a server; one without HTTP (`tcp://`) is ready as soon as it listens.
        engines: Ready engines by role that a proxy must also report. With fewer it is ready too,
            but sends each request to a single engine.

    Raises:
        ConfigError: The server's certificate is not believed.
    """
    if url.startswith("tcp://"):
        await _until_it_listens(url.removeprefix("tcp://"))
        return
    while True:
        try:
            async with session.get(
                f"{url}/readyz", timeout=aiohttp.ClientTimeout(total=2.0)
            ) as response:
                if response.status == 200:
                    known = (await response.json())["engines"] if engines else {}
                    if all(known[role] >= num for role, num in (engines or {}).items()):
                        return
        except aiohttp.ClientConnectorCertificateError as error:
            raise ConfigError(
                f"{url} shows a certificate that is not believed "
                f"({reason_of(error.certificate_error)}): it must name this host, and "
                "--ssl-ca-certs the CA that signed it",
                param="ssl-ca-certs",
            ) from error
        except (aiohttp.ClientError, TimeoutError):
            pass  # not there yet
        await asyncio.sleep(0.05)


async def _until_it_listens(address: str) -> None:
    host, _, port = address.rpartition(":")
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            return
        await asyncio.sleep(0.05)


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    question: Question,
    *,
    request_id: str,
    headers: Mapping[str, str],
    on_text: Callable[[str], None],
) -> None:
    """Stream the answer of the server at `url`.

    Args:
        on_text: Receives each piece of text as it arrives.

    Raises:
        DemoFailedError: The server answered with an error, or ended early.
    """
    status = 0
    try:
        async with session.post(
            url + question.path,
            json={**question.body, "stream": True},
            headers={**headers, REQUEST_ID_HEADER: request_id},
        ) as response:
            status = response.status
            if status != 200:
                message = error_message(await response.read()) or f"HTTP {status}"
                raise DemoFailedError(message, status)
            async for line in response.content:
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                if data:
                    event = json.loads(data)
                    if "error" in event:
                        raise DemoFailedError(event["error"]["message"], status)
                    for choice in event["choices"]:
                        delta = (
                            choice["delta"].get("content") if question.is_chat else choice["text"]
                        )
                        on_text(delta or "")
    except aiohttp.ClientError as error:
        raise DemoFailedError(str(error), status) from error
    raise DemoFailedError("the answer ended too early", status)
