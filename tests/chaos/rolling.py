"""Two versions of pdserve in one deployment, and load that goes on while it is rolled.

The release is a commit of this repository's history, unpacked into a directory of its own; its
processes are started by the same commands.
"""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Sequence

RELEASE = "d0043bb"
"""0.1, which spoke protocol 1."""

_ROOT = Path(__file__).parents[2]


def release_tree(directory: Path) -> Path | None:
    """Unpack the release; None where the checkout has no history."""
    archive = subprocess.run(
        ["git", "-C", str(_ROOT), "archive", "--format=tar", RELEASE],
        capture_output=True,
        check=False,
    )
    if archive.returncode != 0:
        return None
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(directory, filter="tar")
    return directory


def prompt(index: int) -> list[int]:
    """One of a fixed set, of several lengths."""
    return [3 + (17 * i + 5 * index) % 311 for i in range(15 + 60 * index)]


NUM_PROMPTS = 5


def complete(url: str, index: int, *, stream: bool, num_tokens: int = 24) -> list[int] | str:
    """Token ids of one completion, or what came instead of them."""
    body: dict[str, Any] = {
        "prompt": prompt(index),
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120, verify=False)
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.text}"
    if not stream:
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found
    tokens: list[int] = []
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                return line
            for choice in event["choices"]:
                tokens += choice["token_ids"] or []
    return tokens


class Balancer:
    """A load balancer's part: sends requests to proxies that say that they are ready.

    It sends a request once. A request that fails has failed.
    """

    def __init__(self, urls: Sequence[str], interval_s: float = 0.2) -> None:
        self._urls = list(urls)
        self._interval_s = interval_s
        self._turn = itertools.count()
        self._ready: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def url(self) -> str:
        """Whom the next request goes to."""
        ready = self._ready or self._urls
        return ready[next(self._turn) % len(ready)]

    def end(self) -> None:
        """Look no more."""
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(self._interval_s):
            self._ready = [url for url in self._urls if _is_ready(url)]


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=1.0, verify=False).status_code == 200
    except httpx.HTTPError:
        return False


class SteadyLoad:
    """Requests at a rate, whatever becomes of those before.

    Attributes:
        answers: (prompt's index, tokens or an error), as they came.
    """

    def __init__(self, balancer: Balancer, *, rate: float, num_tokens: int) -> None:
        self.answers: list[tuple[int, list[int] | str]] = []
        self._balancer = balancer
        self._num_tokens = num_tokens
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(64)
        self._thread = threading.Thread(target=self._send, args=(1 / rate,), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let every request have its answer."""
        self._is_over.set()
        self._thread.join()
        self._pool.shutdown()

    def _send(self, gap_s: float) -> None:
        due_s = time.monotonic()
        for turn in itertools.count():
            due_s += gap_s
            if self._is_over.wait(max(0.0, due_s - time.monotonic())):
                return
            self._pool.submit(self._ask, turn)

    def _ask(self, turn: int) -> None:
        index, url = turn % NUM_PROMPTS, self._balancer.url()
        try:
            found = complete(url, index, stream=turn % 3 != 0, num_tokens=self._num_tokens)
        except httpx.HTTPError as error:
            found = f"{url}: {error!r}"
        self.answers.append((index, found))


class Load:
    """Clients that ask one request after the other, until they are told to stop.

    Attributes:
        answers: (prompt's index, tokens or an error), as they came.
    """

    def __init__(self, url: str, *, num_clients: int, num_tokens: int) -> None:
        self.answers: list[tuple[int, list[int] | str]] = []
        self._url = url
        self._num_tokens = num_tokens
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,), daemon=True)
            for number in range(num_clients)
        ]
        for thread in self._threads:
            thread.start()

    def wait_for(self, num_more: int) -> None:
        """Return when so many more answers have come."""
        goal = len(self.answers) + num_more
        while len(self.answers) < goal:
            self._is_over.wait(0.02)

    def end(self) -> None:
        """Let every client have its last answer."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a request hangs"

    def _ask(self, number: int) -> None:
        turn = number
        while not self._is_over.is_set():
            index = turn % NUM_PROMPTS
            found = complete(self._url, index, stream=turn % 3 != 0, num_tokens=self._num_tokens)
            self.answers.append((index, found))
            turn += 1
