"""Two versions of pdserve in one deployment, and load that goes on while it is rolled.

The release is a commit of this repository's history, unpacked into a directory of its own; its
processes are started by the same commands.
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import threading
from pathlib import Path
from typing import Any

import httpx

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
