"""What is asked of an endpoint before anything is measured.

Which model it serves, whether it answers, and to drop its prefix cache, so that a run does not
benefit from an earlier one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import aiohttp
import msgspec

from pdserve.bench.answer import Answer, error_of
from pdserve.bench.bodies import Asking, adapt
from pdserve.bench.records import Planned, Prompt
from pdserve.bench.target import Target
from pdserve.errors import PeerError
from pdserve.http.plain_client import reason_of
from pdserve.wire.seal import UNREADABLE

AnswerT = TypeVar("AnswerT")

_AGAIN_S: Final = 0.2
_TIMEOUT: Final = aiohttp.ClientTimeout(total=30.0)
_FINAL_STATUSES: Final = (400, 401, 403, 404, 405, 413, 422)
"""Statuses that waiting does not change."""


class _NotYetError(Exception):
    """It does not answer yet."""


class ServedModel(msgspec.Struct, frozen=True):
    """A model that an endpoint serves, from `/v1/models`.

    Attributes:
        model: Its name.
        root: Its directory on the server's machine; empty if unknown.
        max_model_len: Maximum tokens of prompt and output together; None if unknown.
    """

    model: str
    root: str = ""
    max_model_len: int | None = None


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def ask_served(target: Target, timeout_s: float = 0.0) -> ServedModel:
    """Return the model for requests to `target`: the one it names, else the first.

    Raises:
        PeerError: The endpoint does not answer within `timeout_s`, or does not serve such a model.
    """
    url = f"{target.base_url.rstrip('/')}/v1/models"

    async def ask() -> ServedModel:
        async with session.get(url, headers=target.headers) as response:
            body = await response.read()
            if response.status == 404 and target.model:  # it has no such page
                return ServedModel(target.model)
            if response.status != 200:
                raise _refusal(response.status, body, url)
        try:
            models = msgspec.json.decode(body, type=_Models).data
        except UNREADABLE:
            models = []
        for each in models:
            if target.model in ("", each.id):
                return ServedModel(each.id, each.root or "", each.max_model_len)
        if target.model:
            known = ", ".join(each.id for each in models) or "none"
            raise PeerError(f"{url} has no model {target.model!r}: use one of its models ({known})")
        raise PeerError(f"{url} names no model: name one with --model")

    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        return await _patiently(ask, url, timeout_s)


async def until_answers(
    session: aiohttp.ClientSession, asking: Asking, plan: Sequence[Planned], timeout_s: float
) -> None:
    """Return once the endpoint has answered a request for one token, not of the plan.

    Raises:
        PeerError: It refuses the request, or does not answer within `timeout_s`.
    """
    target = asking.target
    sample = plan[0].prompt
    prompt: Prompt = "Hello"
    if not isinstance(sample, str) and sample and isinstance(sample[0], int):
        prompt = [sample[0]]
    body = asking.body(adapt(prompt, target.endpoint), 1)
    headers = {**target.headers, "Content-Type": "application/json"}

    async def ask() -> None:
        async with session.post(target.url, data=body, headers=headers) as response:
            content = await response.read()
            if response.status != 200:
                raise _refusal(response.status, content, target.url)
            kind = response.content_type
        if kind != "text/event-stream":
            raise PeerError(
                f"{target.url} does not stream: it answers with Content-Type {kind}, and "
                "text/event-stream is needed"
            )
        answer = Answer()
        answer.feed(content, time.monotonic())
        if answer.error:
            raise PeerError(f"{target.url} answered with an error: {answer.error}")

    await _patiently(ask, target.url, timeout_s)


async def reset_prefix_caches(target: Target) -> str | None:
    """Reset the cache; return None on success, else the reason in words.

    pdserve's engines and its proxy support it, and vLLM with VLLM_SERVER_DEV_MODE=1.
    """
    url = f"{target.base_url.rstrip('/')}/reset_prefix_cache"
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT) as session,
            session.post(url, headers=target.headers) as response,
        ):
            if response.status == 200:
                return None
            if response.status in {404, 405}:
                return f"{url} does not exist: {response.status}"
            return f"{url} answered {response.status}: {(await response.text())[:300].strip()}"
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"{url} did not answer: {error or type(error).__name__}"


async def _patiently(ask: Callable[[], Awaitable[AnswerT]], url: str, timeout_s: float) -> AnswerT:
    """Ask until there is an answer, at least once."""
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            return await ask()
        except (aiohttp.ClientError, TimeoutError, _NotYetError) as error:
            why = reason_of(error) or type(error).__name__
        if time.monotonic() + _AGAIN_S > end_s:
            hint = "" if timeout_s else "; --ready-check-timeout-sec waits for it"
            raise PeerError(f"{url} does not answer: {why}{hint}")
        await asyncio.sleep(_AGAIN_S)


def _refusal(status: int, body: bytes, url: str) -> Exception:
    if status in _FINAL_STATUSES:
        return PeerError(f"{url}: {error_of(status, body)}")
    return _NotYetError(error_of(status, body))
