"""What a hand-over costs: the NIXL connector beside bare NIXL and memcpy, in one run.

    python -m benchmarks.transfer [--tokens 4096 32768] [--repeat 7] [--streams 16]
    python -m benchmarks.transfer --device cuda --block-size 64 --only pull streams

D is this process, P a child of it (`benchmarks.kv_engines`). Prints one JSON object. Times are
in ms, rates in GB/s. What is compared is interleaved, and compared round by round: ratios are the
median of those of the rounds, so that a noisy neighbour disturbs both alike.

- `pull`: from the instruction to load until D's report says received, all of it checked. P takes
  digests of each chunk (`chunk` tokens) while it computes the next one, so when the lease begins
  all are known but those of the last chunk: that is `hand_over`. Beside it `nothing_known`, where
  P takes all of them while D reads the same blocks (a prompt of one chunk), `known` where it has
  them all (a shared prefix), and `scattered`, the same with neighbours loaded into random blocks.
  memcpy is torch's, one thread, from one half of D's pool to the other.
- `digest_8k`: what digests of 8k tokens take in one thread, beside the least that their prefill
  takes here: the products of one layer of an 8B, measured over 512 tokens, times all of them.
- `streams`: so many streams of requests, one block each, each with a pause of `think_ms` in the
  mean between two: the hand-over itself, `computing` while D's main thread multiplies matrices;
  `alone` one after another, `wire` bare NIXL moving such a block.
- `push`: what is `left` when P has computed the last layer until D's report says received, all
  of it checked, beside a pull of as many tokens: what the transfer would take after the prefill.
  In the first rounds it is learned how the last chunk is best written; `left_ms` is of the others.
- `ucx` (with pdserve[ucx]): `pull` and `push` over the UCX connector, in their own processes.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import importlib.util
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.engine import environment
from benchmarks.kv_engines import (
    NUM_LAYERS,
    Pair,
    decode_request,
    draw_ticket,
    pair,
    pushed_request,
    queued,
)
from pdserve.connectors.digests import BlockDigests
from pdserve.connectors.nixl.agent import NixlAgent
from pdserve.connectors.slicing import routes
from pdserve.connectors.transfer.seams import Direction
from pdserve.kernels.registry import kernels_on
from pdserve.wire.ids import BlockId
from pdserve.wire.transfer import Received

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from pdserve.connectors.conformance.engines import KitRequest
    from pdserve.wire.transfer import KVHandoff

_BUSY = torch.ones(64, 512), torch.ones(512, 512)
# Of an 8B Llama's layer: qkv, output, gate and up, down.
_LAYER = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
_LAYER_TOKENS = 512


def hand_over(pair: Pair, handoff: KVHandoff, mine: Sequence[int]) -> tuple[float, Received]:
    """Seconds from the instruction to load until the engine can know that KV is here."""
    d = pair.d
    request = queued(d, decode_request(handoff))
    time.sleep(0.002)
    begin(pair, request, mine)
    d.news.clear()
    started_s = time.perf_counter()
    received = d.step().received
    while not received:
        d.news.wait(30.0)
        d.news.clear()
        received = d.step().received
    taken_s = time.perf_counter() - started_s
    d.step()  # the lease is over
    return taken_s, received[0]


def begin(pair: Pair, request: KitRequest, mine: Sequence[int]) -> None:
    """Stage the load of a request."""
    pair.d.scheduler.update_state_after_alloc(
        request, [BlockId(b) for b in mine], len(request.prompt_token_ids)
    )


class BareReader:
    """NIXL without us: one agent, one READ."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._agent = NixlAgent("bare-D-" + os.urandom(8).hex(), ["UCX"])
        self._agent.register(pair.d.region())
        self._local = self._agent.prepare(pair.d.region())
        self._name = self._agent.add_peer(pair.bare_metadata)
        self._remote = self._agent.prepare(pair.bare_region, self._name)
        self.read(np.arange(1, dtype=np.int32))

    def read(self, units: npt.NDArray[np.int32]) -> float:
        """Seconds to read these blocks."""
        self._pair.drive_bare(True)
        started_s = time.perf_counter()
        transfer, is_done = self._agent.post(
            Direction.READ, self._local, units, self._remote, units
        )
        while not is_done:
            time.sleep(0.0003)
            is_done = self._agent.poll(transfer)
        taken_s = time.perf_counter() - started_s
        self._agent.release(transfer)
        self._pair.drive_bare(False)
        return taken_s

    def close(self) -> None:
        """In the order NIXL needs."""
        self._agent.unprepare(self._remote)
        self._agent.remove_peer(self._name)
        self._agent.close()


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes, of the device too."""
    started_s = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started_s


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """Of seconds, in ms; the p99 of less than a hundred is the worst."""
    ordered = sorted(samples)
    return {
        "p50": round(statistics.median(ordered) * 1e3, 3),
        "p99": round(ordered[math.ceil(0.99 * len(ordered)) - 1] * 1e3, 3),
    }


def pull(arguments: argparse.Namespace, num_tokens: int) -> dict[str, Any]:
    """The rate of whole hand-overs; beside bare NIXL, if that moves them."""
    block_size, chunk = arguments.block_size, arguments.chunk
    kv_connector, repeat = arguments.kv_connector, arguments.repeat
    with pair(block_size, num_tokens, kv_connector, arguments.device) as engines:
        d = engines.d
        num_bytes = d.layout.num_blocks * d.layout.block_bytes
        everything = list(range(d.layout.num_blocks))
        shuffled = random.Random(0).sample(everything, len(everything))
        units = np.array(everything, dtype=np.int32)
        bare = BareReader(engines) if kv_connector == "nixl" else None
        half = d.layout.num_blocks // 2

        def leased(
            mine: Sequence[int], *, is_known: bool, chunk: int = 0
        ) -> tuple[float, Received]:
            (handoff,) = engines.prefill([everything], is_known=is_known, chunk=chunk)
            return hand_over(engines, handoff, mine)

        leased(everything, is_known=False)  # the handshake and the first touch
        rounds = [
            (
                2 * timed(lambda: d.kv[:half].copy_(d.kv[half : 2 * half])),
                bare.read(units) if bare is not None else math.nan,
                leased(everything, is_known=False, chunk=chunk),
                leased(everything, is_known=False),
                leased(everything, is_known=True),
                leased(shuffled, is_known=True),
            )
            for _ in range(repeat)
        ]
        if bare is not None:
            bare.close()

    def gb_s(seconds: Sequence[float]) -> float:
        return round(num_bytes / statistics.median(seconds) / 1e9, 2)

    def of(part: Sequence[float], whole: Sequence[float]) -> float:
        ratios = [theirs / ours for ours, theirs in zip(part, whole, strict=True)]
        return round(statistics.median(ratios), 3)

    memcpy, raw = [r[0] for r in rounds], [r[1] for r in rounds]
    ours, nothing = [r[2][0] for r in rounds], [r[3][0] for r in rounds]
    known, scattered = [r[4][0] for r in rounds], [r[5][0] for r in rounds]
    beside_bare = {"nixl_gb_s": gb_s(raw), "hand_over_of_nixl": of(ours, raw)} if bare else {}
    return {
        "block_size": block_size,
        "tokens": num_tokens,
        "chunk": chunk,
        "mib": num_bytes >> 20,
        "memcpy_gb_s": gb_s(memcpy),
        **beside_bare,
        "hand_over_gb_s": gb_s(ours),
        "nothing_known_gb_s": gb_s(nothing),
        "known_gb_s": gb_s(known),
        "scattered_gb_s": gb_s(scattered),
        "hand_over_of_memcpy": of(ours, memcpy),
        "nothing_known_of_memcpy": of(nothing, memcpy),
        "known_of_memcpy": of(known, memcpy),
        "scattered_of_memcpy": of(scattered, memcpy),
        "descriptors_per_gb": round(rounds[0][2][1].num_descriptors / num_bytes * 1e9, 1),
        "scattered_descriptors_per_gb": round(rounds[0][5][1].num_descriptors / num_bytes * 1e9, 1),
        "digest_ms": percentiles([r[2][1].digest_s for r in rounds])["p50"],
    }


def digest(block_size: int) -> dict[str, Any]:
    """What digests of 8k tokens cost, beside their prefill."""
    num_tokens = 8192
    with pair(block_size, num_tokens) as engines:
        d, shape = engines.d, engines.d.ref.shape
        (route,) = routes(shape, shape)
        table = [BlockId(b) for b in range(d.layout.num_blocks)]
        take = functools.partial(
            BlockDigests(d.kv, shape, 0).found, shape, route, table, first_token=0
        )
        seconds = min(timed(lambda: take(first_token=0, num_tokens=num_tokens)) for _ in range(5))
    layer_s = 0.0
    for depth, width in _LAYER:
        weight = torch.ones(width, depth, dtype=torch.bfloat16)
        product = kernels_on(weight.device).linear_of(weight)
        x = torch.ones(_LAYER_TOKENS, depth, dtype=torch.bfloat16)
        layer_s += min(timed(lambda x=x, f=product: f(x)) for _ in range(3))  # type: ignore[misc]
    prefill_s = layer_s * NUM_LAYERS * num_tokens / _LAYER_TOKENS
    return {
        "block_size": block_size,
        "one_side_ms": round(seconds * 1e3, 1),
        "gb_s": round(num_tokens * (128 << 10) / seconds / 1e9, 1),
        "prefill_at_least_ms": round(prefill_s * 1e3),
        "both_sides_of_prefill": round(2 * seconds / prefill_s, 5),
    }


def streams(arguments: argparse.Namespace) -> dict[str, Any]:
    """Hand-overs of one block, of many streams."""
    block_size, num_streams = arguments.block_size, arguments.streams
    num_each, think_s = arguments.each, arguments.think_ms / 1e3
    num_tokens = 4 * num_streams * block_size
    with pair(block_size, num_tokens, device=arguments.device) as engines:
        bare = BareReader(engines)
        wire = [bare.read(np.array([i % 4], dtype=np.int32)) for i in range(200)]
        bare.close()
        (handoff,) = engines.prefill([[0]])
        hand_over(engines, handoff, [0])
        alone = []
        for i in range(num_each):
            (handoff,) = engines.prefill([[i % 4]], is_known=True)
            alone.append(hand_over(engines, handoff, [i % 4])[0])
        stream = functools.partial(_stream, engines, num_streams, num_each, think_s)
        idle = stream(between=engines.d.news.wait)
        busy = stream(between=lambda _: torch.mm(*_BUSY))
    return {
        "block_size": block_size,
        "streams": num_streams,
        "think_ms": think_s * 1e3,
        "wire_ms": percentiles(wire),
        "alone_ms": percentiles(alone),
        "ms": percentiles(idle),
        "computing_ms": percentiles(busy),
    }


def _stream(
    engines: Pair,
    num_streams: int,
    num_each: int,
    think_s: float,
    *,
    between: Callable[[float], object],
) -> list[float]:
    """Seconds of each hand-over.

    Args:
        think_s: Mean time between the end of a stream's hand-over and its next one.
        between: What the main thread does while it waits, for so many seconds at most.
    """
    d, rng = engines.d, random.Random(1)
    tables = [[i % num_streams] for i in range(num_streams * num_each)]
    handoffs = engines.prefill(tables, is_known=True)
    waiting = [queued(d, decode_request(handoff)) for handoff in reversed(handoffs)]
    due = [(rng.expovariate(1 / think_s), stream) for stream in range(num_streams)]
    heapq.heapify(due)
    began: dict[str, tuple[float, int]] = {}
    taken: list[float] = []
    start_s = time.perf_counter()
    while began or (waiting and due):
        d.news.clear()
        while waiting and due and due[0][0] <= time.perf_counter() - start_s:
            _, stream = heapq.heappop(due)
            request = waiting.pop()
            began[request.request_id] = (time.perf_counter(), stream)
            begin(engines, request, [stream])
        received = d.step().received
        now_s = time.perf_counter()
        for each in received:
            began_s, stream = began.pop(each.request_id)
            taken.append(now_s - began_s)
            heapq.heappush(due, (now_s - start_s + rng.expovariate(1 / think_s), stream))
        if not received:
            next_s = due[0][0] + start_s - now_s if due and waiting else 30.0
            between(max(0.0, next_s))
    d.step()
    return taken


def push(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a push leaves to do after the last layer."""
    block_size, num_tokens = arguments.block_size, arguments.push_tokens
    chunk, layer_ms, repeat = arguments.chunk, arguments.layer_ms, 2 * arguments.repeat
    with pair(block_size, num_tokens, arguments.kv_connector, arguments.device) as engines:
        d = engines.d
        everything = list(range(d.layout.num_blocks))
        pulls, left, facts = [], [], []
        for _ in range(repeat):
            (handoff,) = engines.prefill([everything])
            pulls.append(hand_over(engines, handoff, everything)[0])
            ticket = draw_ticket(engines)
            request = queued(d, pushed_request(ticket, num_tokens))
            begin(engines, request, everything)
            d.step()
            engines.begin_push(ticket, num_tokens, chunk=chunk, layer_s=layer_ms / 1e3)
            received: list[Received] = []
            while not received:
                d.news.wait(30.0)
                d.news.clear()
                received = d.step().received
            received_s = time.monotonic()
            d.step()
            left.append(received_s - engines.end_push())
            facts.append(received[0])
    # Layer by layer or whole is learned: what counts is what it does then.
    settled = len(left) // 2
    pull_s = statistics.median(pulls)
    return {
        "block_size": block_size,
        "tokens": num_tokens,
        "chunk": chunk,
        "layer_ms": layer_ms,
        "pull_ms": percentiles(pulls),
        "left_ms": percentiles(left[settled:]),
        "left_by_round_ms": [round(each * 1e3, 1) for each in left],
        "digest_ms": percentiles([each.digest_s for each in facts[settled:]])["p50"],
        "left_of_pull": round(statistics.median(left[settled:]) / pull_s, 3),
    }


def over_ucx(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same over the UCX connector: not in a process that has loaded NIXL."""
    flags = ["--kv-connector", "ucx", "--only", "pull", "push"]
    flags += ["--tokens", *map(str, arguments.tokens), "--repeat", str(arguments.repeat)]
    flags += ["--push-tokens", str(arguments.push_tokens), "--chunk", str(arguments.chunk)]
    flags += ["--layer-ms", str(arguments.layer_ms), "--block-size", str(arguments.block_size)]
    flags += ["--device", arguments.device]
    program = [sys.executable, "-m", "benchmarks.transfer", *flags]
    run = subprocess.run(program, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(run.stdout)
    return {"ucxx": version("ucxx-cu13"), "pull": found["pull"], "push": found["push"]}


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[4096, 32768], help="128 KiB each, at P and at D"
    )
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--each", type=int, default=50, help="hand-overs per stream")
    parser.add_argument("--think-ms", type=float, default=200.0, help="between two of a stream")
    parser.add_argument("--push-tokens", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--layer-ms", type=float, default=2.0, help="of one chunk")
    parser.add_argument(
        "--only", nargs="+", choices=["pull", "digest_8k", "streams", "push", "ucx"], default=None
    )
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--device", default="cpu", help="where both pools lie")
    parser.add_argument("--kv-connector", choices=["nixl", "ucx"], default="nixl")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], Any]] = {
        "pull": lambda: [pull(arguments, num_tokens) for num_tokens in arguments.tokens],
        "digest_8k": lambda: digest(arguments.block_size),
        "streams": lambda: streams(arguments),
        "push": lambda: push(arguments),
    }
    if arguments.kv_connector == "nixl" and importlib.util.find_spec("ucxx") is not None:
        parts["ucx"] = lambda: over_ucx(arguments)
    print(
        json.dumps(
            {
                "benchmark": "transfer",
                "environment": {
                    **environment(1),
                    "kernel": platform.release(),
                    "device": _device_name(arguments.device),
                    "nixl": version("nixl"),
                    "ucx_tls": os.environ.get("UCX_TLS", "default"),
                },
                **{
                    name: part()
                    for name, part in parts.items()
                    if name in (arguments.only or parts)
                },
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
