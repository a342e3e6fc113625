"""The scripted server as a process of its own, and plans whose prompts are its scripts."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec

from benchmarks.scripted_server import Script
from pdserve.bench.records import Planned, Prompt
from tests.cli.process import ROOT, environment


class ScriptedServer:
    def __init__(self, url: str) -> None:
        self.url = url

    def times(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/times", verify=False).json()["times"]

    def max_open(self) -> int:
        return httpx.get(f"{self.url}/times", verify=False).json()["max_open"]

    def bodies(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/bodies", verify=False).json()


@contextlib.contextmanager
def scripted_server(*arguments: str) -> Iterator[ScriptedServer]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.scripted_server", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    try:
        assert process.stdout is not None
        yield ScriptedServer(process.stdout.readline().strip())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def script(**fields: Any) -> str:
    return msgspec.json.encode(Script(**fields)).decode()


def request(index: int, prompt: Prompt, **fields: Any) -> Planned:
    return Planned(**{"index": index, "prompt": prompt, "max_tokens": 4, "at_s": 0.0, **fields})
