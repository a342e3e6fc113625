"""What a hand-over costs: the NIXL connector beside bare NIXL and memcpy, in one run.

    python benchmarks/transfer.py [--tokens 4096] [--repeat 5] [--small 200]

P is a child process, D is this one; both run the real connector halves over a pool of the
shape of an 8B Llama's KV (32 layers, 8 KV heads of 128, bf16: 128 KiB per token). Prints
one JSON object. Rates are GB/s of the best repetition, as memcpy's is; latencies are in ms.
`hand_over` is from the instruction to load until the report says received; `small` is one
block (`small_wire` is bare NIXL moving it); `scattered` loads neighbours into random blocks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import threading
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, TransferConfig
from pdserve.connectors.base import ConnectorContext, KVLayout
from pdserve.connectors.nixl.agent import NixlAgent, TransferState
from pdserve.connectors.nixl.protocol import Region
from pdserve.connectors.registry import find
from pdserve.wire.ids import BlockId, Incarnation, RequestId
from pdserve.wire.step import KnownRequests, SchedulerOutput
from pdserve.wire.transfer import KVHandoff, Received

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    import numpy.typing as npt

STEP = SchedulerOutput(
    step_id=0,
    new_requests=[],
    known_requests=KnownRequests(),
    num_scheduled_tokens={},
    gone_request_ids=[],
)


@dataclass
class Request:
    request_id: RequestId
    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=lambda: [1])
    first_logprobs: None = None
    cache_salt: str = ""
    remote_decode: bool = False
    handoff: KVHandoff | None = None


class Engine:
    """Both connector halves and a pool; no model."""

    def __init__(self, engine_id: str, block_size: int, num_tokens: int) -> None:
        self.layout = KVLayout(
            num_blocks=num_tokens // block_size,
            num_layers=32,
            num_kv_heads=8,
            block_size=block_size,
            head_dim=128,
            dtype="bfloat16",
            dtype_bytes=2,
        )
        context = ConnectorContext(
            config=EngineConfig(
                model=ModelConfig(model="8B-like"),
                cache=CacheConfig(block_size=block_size),
                transfer=TransferConfig(kv_connector="nixl"),
            ),
            engine_id=engine_id,
            incarnation=Incarnation(os.urandom(8).hex()),
            layout=self.layout,
            layout_digest=f"block {block_size}",
            layout_fields={},
        )
        self.news = threading.Event()
        self.kv = torch.zeros(
            (self.layout.num_blocks, 32, 2, 8, block_size, 128), dtype=torch.bfloat16
        )
        factory = find("nixl")
        self.worker = factory.worker(context, self.news.set)
        self.worker.register_kv_caches(self.kv, self.layout)
        self.scheduler = factory.scheduler(context, [self.worker.endpoint])

    def step(self) -> list[Received]:
        metadata = self.scheduler.build_connector_meta(STEP)
        if metadata is not None:
            self.worker.start_load_kv(metadata)
        report = self.worker.get_finished()
        self.scheduler.update_connector_output(report)
        if report.failed:
            raise SystemExit(f"a load failed: {report.failed}")
        return report.received

    def prefill(self, name: str, block_ids: Sequence[int]) -> KVHandoff:
        prompt = list(range(len(block_ids) * self.layout.block_size))
        request = Request(RequestId(name), prompt, remote_decode=True)
        handoff = self.scheduler.request_finished(request, [BlockId(b) for b in block_ids])
        assert handoff is not None
        self.step()
        return handoff

    def region(self) -> Region:
        return Region(
            self.kv.data_ptr(), self.layout.block_bytes, self.layout.num_blocks, "DRAM", 0
        )


def prefill_process(pipe: Connection, block_size: int, num_tokens: int) -> None:
    """P: does what it is asked, and drives its bare agent between questions."""
    torch.set_num_threads(1)
    engine = Engine("P", block_size, num_tokens)
    bare = NixlAgent("bare-P-" + os.urandom(8).hex(), ["UCX"])
    bare.register(engine.region())
    pipe.send((bare.metadata(), engine.region()))
    wiring = False
    while True:
        if wiring:
            bare.progress()
        if not pipe.poll(0.0005 if wiring else 0.02):
            engine.step()
            continue
        match pipe.recv():
            case ("prefill", name, block_ids):
                pipe.send(engine.prefill(name, block_ids))
            case ("wiring", value):
                wiring = value
            case "close":
                break
    engine.worker.close(5.0)
    bare.close()


def hand_over(
    p: Connection,
    d: Engine,
    theirs: Sequence[int],
    mine: Sequence[int],
    busy: Callable[[], object] | None = None,
) -> tuple[float, Received]:
    """Seconds from the instruction to load until the engine can know that KV is here."""
    name = os.urandom(8).hex()
    p.send(("prefill", name, list(theirs)))
    handoff: KVHandoff = p.recv()
    num_tokens = len(mine) * d.layout.block_size
    request = Request(RequestId(name), list(range(num_tokens)), [], handoff=handoff)
    d.scheduler.request_queued(request)
    d.step()
    time.sleep(0.002)
    d.scheduler.update_state_after_alloc(request, [BlockId(b) for b in mine], num_tokens)
    d.news.clear()
    started = time.perf_counter()
    received = d.step()
    while not received:
        if busy is None:
            d.news.wait(30.0)
        else:
            while not d.news.is_set():
                busy()
        d.news.clear()
        received = d.step()
    return time.perf_counter() - started, received[0]


def percentiles(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {
        "p50": round(statistics.median(ordered) * 1e3, 3),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))] * 1e3, 3),
    }


def measure(block_size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(
        target=prefill_process, args=(theirs, block_size, arguments.tokens), daemon=True
    )
    child.start()
    d = Engine("D", block_size, arguments.tokens)
    metadata, remote_region = pipe.recv()
    num_bytes = d.layout.num_blocks * d.layout.block_bytes
    everything = list(range(d.layout.num_blocks))
    shuffled = random.Random(0).sample(everything, len(everything))

    bare = NixlAgent("bare-D-" + os.urandom(8).hex(), ["UCX"])
    bare.register(d.region())
    local = bare.prepare_local(d.region())
    name = bare.add_peer(metadata)
    remote = bare.prepare_remote(name, remote_region)
    units = np.array(everything, dtype=np.int32)

    def bare_read(units: npt.NDArray[np.int32]) -> float:
        started = time.perf_counter()
        transfer, state = bare.read(local, units, remote, units)
        while state is TransferState.IN_PROGRESS:
            time.sleep(0.0003)
            state = bare.poll(transfer)
        bare.release(transfer)
        return time.perf_counter() - started

    pipe.send(("wiring", True))
    bare_read(units)
    pipe.send(("wiring", False))
    hand_over(pipe, d, everything, everything)  # the handshake and the first touch

    source = torch.ones_like(d.kv)

    def copy() -> float:
        started = time.perf_counter()
        d.kv.copy_(source)
        return time.perf_counter() - started

    # Interleaved, so that a noisy neighbour disturbs all alike.
    rounds = [
        (
            copy(),
            bare_read(units),
            hand_over(pipe, d, everything, everything),
            hand_over(pipe, d, everything, shuffled),
        )
        for _ in range(arguments.repeat)
    ]
    memcpy = num_bytes / min(r[0] for r in rounds) / 1e9
    raw = num_bytes / min(r[1] for r in rounds) / 1e9
    whole = num_bytes / min(r[2][0] for r in rounds) / 1e9
    scattered = num_bytes / min(r[3][0] for r in rounds) / 1e9

    a, b = torch.randn(64, 512), torch.randn(512, 512)
    wire, idle, busy = [], [], []
    for i in range(arguments.small):
        block = [i % 4]
        wire.append(bare_read(np.array(block, dtype=np.int32)))
        idle.append(hand_over(pipe, d, block, block)[0])
        busy.append(hand_over(pipe, d, block, block, lambda: a @ b)[0])

    pipe.send("close")
    d.worker.close(5.0)
    bare.unprepare(remote)
    bare.remove_peer(name)
    bare.close()
    child.join(20)
    return {
        "block_size": block_size,
        "block_bytes": d.layout.block_bytes,
        "tokens": arguments.tokens,
        "mib": num_bytes >> 20,
        "memcpy_gb_s": round(memcpy, 2),
        "nixl_gb_s": round(raw, 2),
        "hand_over_gb_s": round(whole, 2),
        "hand_over_scattered_gb_s": round(scattered, 2),
        "hand_over_of_memcpy": round(whole / memcpy, 3),
        "hand_over_of_nixl": round(whole / raw, 3),
        "descriptors_per_gb": round(rounds[0][2][1].num_descriptors / num_bytes * 1e9, 1),
        "descriptors_per_gb_scattered": round(rounds[0][3][1].num_descriptors / num_bytes * 1e9, 1),
        "small_wire_ms": percentiles(wire),
        "small_ms": percentiles(idle),
        "small_ms_while_main_thread_computes": percentiles(busy),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=4096, help="128 KiB each, in each process")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--small", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        json.dumps(
            {
                "benchmark": "transfer",
                "environment": {
                    "machine": platform.machine(),
                    "kernel": platform.release(),
                    "cpus": len(os.sched_getaffinity(0)),
                    "load_1m": os.getloadavg()[0],
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "nixl": version("nixl"),
                    "ucx_tls": os.environ.get("UCX_TLS", "default"),
                },
                "results": [measure(block_size, arguments) for block_size in (16, 64)],
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
