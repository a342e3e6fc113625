"""Streams of token ids, and what `kill -9` of an engine amid twenty of them does to them."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx

from tests.e2e.test_equality import complete_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future

    from tests.e2e.deployment import Deployment

PROMPTS = [[3 + (29 * i + 7 * n) % 311 for i in range(20 + 17 * n)] for n in range(20)]
NUM_TOKENS = 200


def stream_tokens(
    url: str,
    prompt: list[int],
    start_after_s: float,
    num_tokens: int = NUM_TOKENS,
    begun: threading.Event | None = None,
) -> tuple[list[int], str]:
    """Token ids of a stream, and how it ended: finished, or an error's code.

    Args:
        begun: Set when the first event has come.
    """
    time.sleep(start_after_s)
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    tokens: list[int] = []
    end = "cut off without [DONE]"
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, timeout=60, verify=False
    ) as answer:
        if answer.status_code != 200:
            error = json.loads(answer.read())["error"]
            assert error["message"]
            return tokens, str(error["code"])
        # Not iter_lines: it also splits at characters such as U+0085, which JSON may hold.
        for line in lines_of(answer.iter_bytes()):
            if line == "data: [DONE]":
                return tokens, end
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            if begun is not None:
                begun.set()
            if "error" in event:
                end = str(event["error"]["code"])
                continue
            for choice in event["choices"]:
                tokens += choice["token_ids"] or []
                if choice["finish_reason"] is not None:
                    end = "finished"
    return tokens, end


def lines_of(chunks: Iterable[bytes]) -> Iterator[str]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode() for line in lines)


def begin_streams(
    pool: ThreadPoolExecutor, url: str, prompts: list[list[int]], num_tokens: int = NUM_TOKENS
) -> list[Future[tuple[list[int], str]]]:
    """Streams that begin one after the other; returns when the middle one has."""
    begun = [threading.Event() for _ in prompts]
    streams = [
        pool.submit(stream_tokens, url, prompt, 0.03 * index, num_tokens, begun[index])
        for index, prompt in enumerate(prompts)
    ]
    assert begun[len(prompts) // 2].wait(60)
    return streams


def kill_amid_requests(
    deployment: Deployment, victim: str, prompts: list[list[int]]
) -> dict[str, int]:
    """Kill `victim` while 20 requests run; no wrong token may come out. Returns the ends."""
    # The kernels' answers do not depend on the batch, so this is what P/D must say too.
    expected = complete_all(deployment.url("serve"), prompts, max_tokens=NUM_TOKENS)
    url = deployment.url("proxy")
    with ThreadPoolExecutor(len(prompts)) as pool:
        futures = begin_streams(pool, url, prompts)
        deployment.processes[victim].kill()
        results = [future.result(timeout=90) for future in futures]
    ends: dict[str, int] = {}
    for (tokens, end), right in zip(results, expected, strict=True):
        ends[end] = ends.get(end, 0) + 1
        assert tokens == right[: len(tokens)], "a wrong token behind a 200"
        assert end != "finished" or tokens == right
        assert not end.startswith("cut off")
    return ends
