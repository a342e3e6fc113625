"""Streams of any length, each of which loses its decode engine twice.

    python -m tests.chaos.lengths [--parts long,many] [--report FILE]

`long` is one stream of 20,000 tokens, `many` are 200 streams of 4,000 at once; sampled, at a
temperature of 1, and half of them with token ids. When every stream has a third of its tokens, and
again when every one has a tenth more than it had then, the decode engine that serves them all is
stopped, the proxy learns of another one, and the first is killed: no stream is done by then.
Each stream must have the text that it has where nothing fails. Prints one JSON object with the
proxy's resident memory: with no stream, and what each stream adds when all of them are at a third,
and at most afterwards. The exit code is 0 if nothing speaks against it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import msgspec

from pdserve.http.control import Stamps, proof_headers
from pdserve.wire.hop import NONCE_HEADER
from tests.e2e.deployment import Deployment
from tests.tiny_models import write_tiny_model

PARTS = {"long": (1, 20_000), "many": (200, 4_000)}
"""Streams, and tokens of each."""
NUM_REQUESTS = 8
"""That differ, by prompt and seed."""
MAX_MODEL_LEN = 24_576
MAX_KIB_PER_STREAM = 320
"""Of the proxy's memory at most: two connections, each with up to 128 KiB that were read and not
looked at yet while a stream repeats itself, and what is known of the stream. The chunks of 4,000
tokens are twice as much."""


@dataclass
class Stream:
    """What a client has of one stream.

    Attributes:
        num_tokens: As far as their ids are told.
        digest: Of its text and token ids, in order.
    """

    num_tokens: int = 0
    end: str = ""
    digest: Any = field(default_factory=hashlib.sha256)


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


async def read(
    session: aiohttp.ClientSession, url: str, index: int, num_tokens: int, stream: Stream
) -> None:
    """Ask for a stream and read all of it."""
    body = {
        "prompt": [3 + (17 * index + 5 * position) % 300 for position in range(8 + index)],
        "max_tokens": num_tokens,
        "temperature": 1.0,
        "seed": 100 + index,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": index % 2 == 0,
    }
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            stream.end = (await answer.text())[:300]
            return
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = _decode(line[6:])
            if chunk.error is not None:
                stream.end = str(chunk.error)
            for choice in chunk.choices:
                stream.num_tokens += len(choice.token_ids or ())
                stream.digest.update(choice.text.encode())
                for token_id in choice.token_ids or ():
                    stream.digest.update(token_id.to_bytes(4, "little"))
                stream.end = choice.finish_reason or stream.end


class Lengths:
    """A proxy, a prefill engine, and one decode engine at a time that the proxy knows of."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.deployment = Deployment(directory)
        self._model = model
        self._spares = ["decode2", "decode1", "decode"]
        self._serving = ""
        self._stamps = Stamps("tests.chaos.lengths")

    def start(self) -> None:
        """Start everything and wait until it serves."""
        # Many streams that begin anew keep a small machine busy: nobody is lost for being late.
        checks = ("--health-check-interval-secs", "0.3", "--health-check-timeout-secs", "15")
        self.deployment.start("proxy", "proxy", "--port", "0", *checks)
        for name in ("prefill", *self._spares):
            self.deployment.start(
                name,
                *(name.rstrip("12"), str(self._model), "--dtype", "float32", "--num-threads", "1"),
                *("--port", "0", "--max-num-seqs", "256", "--max-model-len", str(MAX_MODEL_LEN)),
                *("--kv-cache-memory-bytes", "192MiB"),
            )
        self.deployment.wait()
        self._register("prefill")
        self.replace_decode()

    def replace_decode(self) -> None:
        """Let another decode engine serve, and kill the one that served so far.

        That one is stopped first: however long it takes, no stream ends meanwhile.
        """
        former, self._serving = self._serving, self._spares.pop()
        for process in self.deployment.processes[former].family() if former else ():
            process.send_signal(signal.SIGSTOP)
        self._register(self._serving)
        self.deployment.wait_routable(1, 2 if former else 1)
        if former:
            self.deployment.processes.pop(former).kill()

    def _register(self, name: str) -> None:
        """Tell the proxy of an engine, as that would itself."""
        proxy, path = self.deployment.url("proxy"), "/pdserve/register"
        body = {
            "url": self.deployment.url(name),
            "role": name.rstrip("12"),
            "engine": self.deployment.info(name)["engine"],
            "lease_s": 3600.0,
        }
        data = msgspec.json.encode(body)
        for _ in range(2):
            stamp = self._stamps.for_(proxy)
            proof = proof_headers(self.deployment.secret, "POST", path, data, stamp=stamp)
            headers = {"Content-Type": "application/json", **proof}
            answer = httpx.post(f"{proxy}{path}", content=data, headers=headers, verify=False)
            if NONCE_HEADER in answer.headers:
                self._stamps.learn(proxy, answer.headers[NONCE_HEADER])
        assert answer.status_code == 200, answer.text

    def proxy_bytes(self) -> int:
        """Resident memory of the proxy."""
        family = self.deployment.processes["proxy"].family()
        return sum(process.memory_info().rss for process in family)


async def play(lengths: Lengths, num_streams: int, num_tokens: int) -> dict[str, Any]:
    """Have streams lose their engine twice, and compare them with those that lose nothing."""
    url = lengths.deployment.url("proxy")
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def read_all(number: int) -> tuple[list[Stream], asyncio.Future[Any]]:
            streams = [Stream() for _ in range(number)]
            return streams, asyncio.gather(
                *(
                    read(session, url, index % NUM_REQUESTS, num_tokens, stream)
                    for index, stream in enumerate(streams)
                )
            )

        expected, done = await read_all(min(num_streams, NUM_REQUESTS))
        await done
        began_s, idle = time.monotonic(), lengths.proxy_bytes()
        streams, done = await read_all(num_streams)
        settled = most = 0
        told = streams[::2]
        wanted = [num_tokens / 3] * len(told)
        for _ in range(2):
            while not done.done() and any(
                stream.num_tokens < num for stream, num in zip(told, wanted, strict=True)
            ):
                await asyncio.sleep(0.1)
            wanted = [stream.num_tokens + num_tokens / 10 for stream in told]
            settled = settled or lengths.proxy_bytes()
            ends = {stream.end for stream in streams}
            assert not done.done(), f"the streams have ended before their engine was lost: {ends}"
            await asyncio.to_thread(lengths.replace_decode)
        while not done.done():
            most = max(most, lengths.proxy_bytes())
            await asyncio.sleep(0.1)
        await done
    failures = lengths.deployment.metrics("proxy").items()
    right = [stream.digest.digest() for stream in expected]
    return {
        "streams": num_streams,
        "tokens_each": num_tokens,
        "seconds": round(time.monotonic() - began_s, 1),
        "wrong": sum(
            stream.digest.digest() != right[index % NUM_REQUESTS]
            for index, stream in enumerate(streams)
        ),
        "not_finished": sum(stream.end != "length" for stream in expected + streams),
        "ends": sorted({stream.end for stream in expected + streams}),
        "engines_lost": sum(
            n for key, n in failures if key.startswith("pdserve_leg_failures_total")
        ),
        "proxy_idle_mib": round(idle / (1 << 20), 1),
        "proxy_kib_per_stream": {
            "at_a_third": round((settled - idle) / num_streams / 1024, 1),
            "at_most": round((most - idle) / num_streams / 1024, 1),
        },
    }


def objections(result: dict[str, Any]) -> list[str]:
    """What speaks against a part's result; nothing if it is good."""
    found = [
        f"{result[what]} streams {words}"
        for what, words in (("wrong", "with another text"), ("not_finished", "not finished"))
        if result[what]
    ]
    at_most = result["proxy_kib_per_stream"]["at_most"]
    if result["streams"] > 1 and at_most > MAX_KIB_PER_STREAM:  # of one it is mere noise
        found.append(f"the proxy takes {at_most} KiB per stream")
    if result["engines_lost"] < 2 * result["streams"]:
        found.append(f"only {result['engines_lost']} times a stream has lost its engine")
    return found


def run(directory: Path, streams: int, tokens: int) -> dict[str, Any]:
    """Play one part in a deployment of its own."""
    model = write_tiny_model(
        directory / "model",
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_MODEL_LEN,
    )
    logs = directory / "logs"
    logs.mkdir()
    lengths = Lengths(logs, model)
    try:
        lengths.start()
        return asyncio.run(play(lengths, streams, tokens))
    finally:
        lengths.deployment.end()


def main() -> None:
    """Run and print."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    results, against = {}, []
    for part in args.parts.split(","):
        # Left behind where something fails: the logs are in it.
        directory = Path(tempfile.mkdtemp(prefix="pdserve-lengths-"))
        results[part] = run(directory, *PARTS[part])
        shutil.rmtree(directory)
        against += [f"{part}: {each}" for each in objections(results[part])]
    text = json.dumps({"benchmark": "lengths", **results, "objections": against}, indent=1)
    print(text)
    if args.report is not None:
        args.report.write_text(text + "\n")
    print(f"verdict: {'; '.join(against) or 'good'}")
    sys.exit(bool(against))


if __name__ == "__main__":
    main()
