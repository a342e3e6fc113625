"""What KV in an LMCache server costs and saves: beside memcpy, computing, and no store, in one run.

    python -m benchmarks.tiers [copy] [ttft] [saves] [dead] [--rounds N] [--tokens N] [--threads N]
                               [--apart]

A real server with a tier on disk, and engine cores in this process. Prints one JSON object. What is
compared is interleaved; ratios are the median of those of the rounds.

- `copy`: 4k tokens of KV as of an 8B model (32 layers, 8 KV heads of 128, bf16), from the server's
  memory into blocks, layer by layer and checked, from the first message to the last layer; and out
  of them, to the last answer. The first save finds memory that nobody has touched. memcpy is
  torch's, one thread, of as many bytes. Beside it LMCache's own worker does the same, with as many
  threads, unchecked.
- `ttft`: of a prompt of which all is in the server's memory (`l1`), or on its disk alone (`l2`; the
  page cache is as warm as it is), over computing it. SmolLM2-135M's shape.
- `layerwise`: the same, of a prompt whose first half is in memory, over the longer of loading that
  half, and computing the other one behind a local first half.
- `saves`: tokens per second of a full engine that saves prompts and answers, over one without; and
  the CPU time of a round, of whom, as engine and store share the cores here; not with `--apart`.
- `dead`: milliseconds that a prompt takes longer than in an engine without a store: one that is not
  in the store, the first one after the server was killed, and later ones. Two layers of the shape.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import select
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch

from benchmarks.engine import environment
from benchmarks.shapes import SMOLLM2_135M, write_model
from benchmarks.tiers_lmcache import LMCacheWorker
from pdserve.config.schema import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    TransferConfig,
)
from pdserve.connectors.conformance import Engine, make_shape
from pdserve.connectors.lmcache import LMCacheConnector
from pdserve.connectors.lmcache.settings import LMCacheSettings
from pdserve.connectors.views import ScheduledRequest, StepView
from pdserve.engine.loading import load_engine
from pdserve.observe.clock import SystemClock
from pdserve.parallel.place import CorePlace
from pdserve.wire.ids import BlockId, RequestId
from pdserve.wire.request import FinishReason, GenerateRequest
from pdserve.wire.sampling import SamplingParams
from tests.lmcache_server import LMCacheServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.wire.request import EngineOutput

CHUNK = 256
COPIED_TOKENS = 4096
DEAD_ROUNDS = 40
BLOCK_SIZE = 16
_LOOK_S = 0.1
GOALS = {
    "copy_over_memcpy": 0.6,
    "ttft_l1_over_computing": 0.15,
    "ttft_l2_over_computing": 0.4,
    "layerwise_over_longer": 1.1,
    "throughput_with_saves": 0.97,
    "dead_s": {"first": 1.0, "later": 0.0005},
}


class Core:
    """An engine core in this process, turned until what was asked for has come."""

    def __init__(
        self, model: Path, server: LMCacheServer | None, args: argparse.Namespace, **told: Any
    ) -> None:
        prefix_caching = told.pop("prefix_caching", False)
        transfer = TransferConfig()
        if server is not None:
            settings = {"url": server.url, "save": "prompt", **told}
            transfer = TransferConfig(
                kv_connector="lmcache",
                settings={f"lmcache.{name}": value for name, value in settings.items()},
            )
        config = EngineConfig(
            model=ModelConfig(model=str(model), load_format="dummy"),
            device="cpu",
            cache=CacheConfig(
                block_size=BLOCK_SIZE,
                enable_prefix_caching=prefix_caching,
                kv_cache_memory_bytes=1 << 30,
            ),
            scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=args.tokens),
            parallel=ParallelConfig(num_threads=args.threads),
            transfer=transfer,
        )
        self.core, _ = load_engine(
            config, place=CorePlace(), clock=SystemClock(), progress=lambda _: None
        )
        self._outputs: list[EngineOutput] = []
        self._until(lambda: server is None or self.stats.is_up)

    def ttft(self, prompt: list[int]) -> float:
        """Seconds to the first token; the rest of the request is over when this returns."""
        began_s = time.perf_counter()
        self._add(prompt, 1)
        self._until(lambda: self._outputs)
        taken_s = time.perf_counter() - began_s
        self._finish()
        return taken_s

    def throughput(self, prompts: Sequence[list[int]], num_tokens: int) -> float:
        """Tokens per second of all prompts at once, prompts included."""
        began_s = time.perf_counter()
        for prompt in prompts:
            self._add(prompt, num_tokens)
        self._finish()
        num_prompt = sum(map(len, prompts))
        return (num_prompt + num_tokens * len(prompts)) / (time.perf_counter() - began_s)

    @property
    def stats(self) -> Any:
        return self.core.scheduler.stats().kv_store

    def close(self) -> None:
        self.core.close(5.0)

    def _add(self, prompt: list[int], num_tokens: int) -> None:
        self.core.scheduler.add(
            GenerateRequest(
                request_id=RequestId(secrets.token_hex(6)),
                prompt_token_ids=prompt,
                sampling=SamplingParams(
                    temperature=0.0, seed=0, max_tokens=num_tokens, ignore_eos=True
                ),
                arrival_s=0.0,
            )
        )

    def _finish(self) -> None:
        scheduler = self.core.scheduler
        self._until(lambda: scheduler.is_idle and not scheduler.num_in_flight)
        self._outputs.clear()

    def _until(self, holds: Callable[[], object]) -> None:
        """Turn as an engine's process does: when there is news, and else now and then."""
        while not holds():
            self.core.step(self._outputs.extend)
            select.select(self.core.executor.wake_fds, [], [], _LOOK_S)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="of what is measured; all if none is named")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8000, help="of the prompts of `ttft`")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--apart", action="store_true", help="engine on one core, store on others")
    args = parser.parse_args()
    parts = {"copy": copy, "ttft": first_tokens, "saves": saves, "dead": dead}
    chosen = args.parts or list(parts)
    if unknown := set(chosen) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    first, *others = sorted(os.sched_getaffinity(0))
    result: dict[str, Any] = {"apart": args.apart}
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
        directory = Path(folder)
        model = write_model(directory / "m", SMOLLM2_135M)
        for name in chosen:  # each with a store of its own: what one has saved is no other's load
            if args.apart:
                os.sched_setaffinity(0, others)
            with LMCacheServer(
                directory / f"{name}.log",
                chunk_tokens=CHUNK,
                cpu_bytes=4 << 30,
                disk=None if name == "copy" else directory / name,
            ) as server:
                if args.apart:
                    os.sched_setaffinity(0, {first})
                result |= parts[name](model, server, args)
    print(
        json.dumps(
            {
                "benchmark": "tiers",
                "environment": environment(args.threads),
                "goals": GOALS,
                **result,
            },
            indent=1,
        )
    )


def copy(model: Path, server: LMCacheServer, args: argparse.Namespace) -> dict[str, Any]:
    """Rates in GB/s; not of the model."""
    shape = make_shape(
        num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", num_blocks=2 * 256
    )
    num_blocks = COPIED_TOKENS // BLOCK_SIZE
    peer = LMCacheWorker(
        server.url,
        num_layers=32,
        num_blocks=2 * num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=8,
        head_dim=128,
        chunk=CHUNK,
    )
    rows = []
    settings = LMCacheSettings(url=server.url, max_pending_chunks=1 << 20)
    engine = Engine(LMCacheConnector(settings=settings), "P", shape=shape, dtype="bfloat16")
    engine.until(lambda: engine.scheduler.store_stats.is_up)
    kv = engine.ranks[0].kv
    kv.view(torch.int16).random_(0, 1 << 14)
    here, there = (range(i * num_blocks, (i + 1) * num_blocks) for i in range(2))
    num_bytes = kv[: len(here)].numel() * kv.element_size()
    for round_id in range(args.rounds + 1):
        prompt = list(range(round_id, round_id + COPIED_TOKENS + 1))
        saved_s = _save(engine, prompt, [BlockId(b) for b in here])
        loaded_s = _load(engine, prompt, [BlockId(b) for b in there])
        assert torch.equal(kv[list(here)], kv[list(there)])
        kv[there.start : there.stop].zero_()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        began_s = time.perf_counter()
        kv[there.start : there.stop].copy_(kv[here.start : here.stop])
        copied_s = time.perf_counter() - began_s
        torch.set_num_threads(args.threads)
        theirs_s = peer.copy(prompt[:-1], here, there)
        torch.set_num_threads(threads)
        times_s = (loaded_s, saved_s, copied_s, *theirs_s)
        rows.append([num_bytes / each / 1e9 for each in times_s])
        _clear(server)
    engine.close()
    peer.close()
    first, *others = rows
    loads, saves, copies, their_loads, their_saves = zip(*others, strict=True)
    return {
        "copy": {
            "mib": num_bytes >> 20,
            "load_gb_s": _median(loads),
            "save_gb_s": _median(saves),
            "first_save_gb_s": round(first[1], 2),
            "memcpy_gb_s": _median(copies),
            "load_over_memcpy": _ratio(loads, copies),
            "save_over_memcpy": _ratio(saves, copies),
            "lmcache_load_over_memcpy": _ratio(their_loads, copies),
            "lmcache_save_over_memcpy": _ratio(their_saves, copies),
        }
    }


def _save(engine: Engine, prompt: list[int], blocks: list[BlockId]) -> float:
    request = engine.new_request(prompt)
    engine.arrive(request)
    scheduler = engine.scheduler
    engine.until(lambda: scheduler.get_num_new_matched_tokens(request, 0) is not None)
    scheduler.update_state_after_alloc(request, blocks, 0)
    request.output_token_ids.append(1)
    request.finish_reason = FinishReason.LENGTH
    began_s = time.perf_counter()
    hold = scheduler.request_finished(request, blocks, [1] * len(blocks))
    assert hold is not None
    engine.until(lambda: hold.hold_id in [each.nonce for each in engine.settled])
    return time.perf_counter() - began_s


def _load(engine: Engine, prompt: list[int], blocks: list[BlockId]) -> float:
    request = engine.new_request(prompt)
    engine.arrive(request)
    scheduler, worker = engine.scheduler, engine.ranks[0].worker
    engine.until(lambda: scheduler.get_num_new_matched_tokens(request, 0) is not None)
    match = scheduler.get_num_new_matched_tokens(request, 0)
    assert match is not None
    assert match.num_tokens == COPIED_TOKENS, match
    scheduler.update_state_after_alloc(request, blocks, match.num_tokens)
    end = len(prompt)
    scheduled = ScheduledRequest(request, blocks, [1] * len(blocks), end - 1, end)
    metadata = scheduler.build_connector_meta(
        StepView({request.request_id: 1}, lambda _: scheduled)
    )
    assert metadata is not None
    began_s = time.perf_counter()
    worker.start_load_kv(metadata)
    for layer in range(engine.context.layout.num_layers):
        worker.wait_for_layer_load(layer)
    taken_s = time.perf_counter() - began_s
    assert not worker.wait_for_save()
    engine.step()
    request.finish_reason = FinishReason.ABORT
    scheduler.request_finished(request, blocks, [1] * len(blocks))
    engine.step()
    return taken_s


def first_tokens(model: Path, server: LMCacheServer, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to the first token, and their ratios."""
    rng = random.Random(5)
    half = args.tokens // 2 // CHUNK * CHUNK
    core = Core(model, server, args)
    # In a namespace of its own: it finds nothing that the other has saved.
    local = Core(model, server, args, save="off", namespace="local", prefix_caching=True)
    core.ttft(_prompt(rng, 512))
    rows: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        prompt = _prompt(rng, args.tokens)
        row = {"computed": core.ttft(prompt), "l1": core.ttft(prompt)}
        _wait_for_disk(server)
        _clear(server)
        row["l2"] = core.ttft(prompt)
        prompt = _prompt(rng, 2 * half)
        core.ttft(prompt[:half])
        row["loads_half"] = core.ttft(prompt[:half])
        row["loads_and_computes"] = core.ttft(prompt)
        local.ttft(prompt[:half])  # into its prefix cache
        row["computes_half"] = local.ttft(prompt)
        for name, seconds in row.items():
            rows.setdefault(name, []).append(seconds)
    for each in (core, local):
        each.close()
    longer = [max(pair) for pair in zip(rows["loads_half"], rows["computes_half"], strict=True)]
    return {
        "ttft": {
            "tokens": args.tokens,
            **{f"{name}_ms": _median(s * 1e3 for s in rows[name]) for name in rows},
            "l1_over_computing": _ratio(rows["l1"], rows["computed"]),
            "l2_over_computing": _ratio(rows["l2"], rows["computed"]),
        },
        "layerwise": {
            "tokens": 2 * half,
            "over_longer": _ratio(rows["loads_and_computes"], longer),
        },
    }


def saves(model: Path, server: LMCacheServer, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second with and without, and the CPU time of a round."""
    rng = random.Random(6)
    cores = {save: Core(model, server, args, save=save) for save in ("all", "off")}
    rows: dict[str, list[float]] = {save: [] for save in cores}
    spent: dict[str, list[Spent]] = {save: [] for save in cores}
    for round_id in range(args.rounds + 1):
        for save in sorted(cores, reverse=bool(round_id % 2)):
            before = spent_so_far(server)
            found = cores[save].throughput([_prompt(rng, 500) for _ in range(16)], 64)
            if round_id:  # the first one warms up
                rows[save].append(found)
                after = spent_so_far(server)
                spent[save].append(Spent(*(b - a for a, b in zip(before, after, strict=True))))
    stats = cores["all"].stats
    for core in cores.values():
        core.close()
    return {
        "saves": {
            "tok_per_s": {save: _median(found) for save, found in rows.items()},
            "with_over_without": _ratio(rows["all"], rows["off"]),
            "cpu_s": {
                save: {each: _median(getattr(s, each) for s in found) for each in Spent._fields}
                for save, found in spent.items()
            },
            "saved_mib": stats.saved_bytes >> 20,
            "saved_units": stats.num_saved_chunks,
            "dropped_chunks": stats.num_dropped_chunks,
        }
    }


class Spent(NamedTuple):
    """CPU time in seconds.

    Attributes:
        steps: Of the threads that run steps.
        steps_wait: That these could run and had no core.
        engine: Of this process.
        store: Of the store's server.
    """

    steps: float
    steps_wait: float
    engine: float
    store: float


def spent_so_far(server: LMCacheServer) -> Spent:
    """Since each of them began."""
    threads = [each.native_id for each in threading.enumerate() if each.name == "steps"]
    told = [Path(f"/proc/self/task/{each}/schedstat").read_text().split() for each in threads]
    steps, steps_wait = (sum(int(each[i]) for each in told) / 1e9 for i in (0, 1))
    store = psutil.Process(server.pid).cpu_times()
    return Spent(steps, steps_wait, time.process_time(), store.user + store.system)


def dead(model: Path, server: LMCacheServer, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds on top of those of an engine without a store, in turns."""
    rng = random.Random(7)
    small = write_model(model.parent / "small", SMOLLM2_135M | {"num_hidden_layers": 2})
    stored, bare = Core(small, server, args, save="off"), Core(small, None, args)
    usual: list[float] = []

    def more() -> float:
        with_store = stored.ttft(_prompt(rng, 512))
        usual.append(bare.ttft(_prompt(rng, 512)))
        return with_store - usual[-1]

    before = [more() for _ in range(DEAD_ROUNDS)]
    server.kill()
    first = more()
    later = [more() for _ in range(DEAD_ROUNDS)]
    stored.close()
    bare.close()
    more_s = {
        "before": statistics.median(before),
        "first": first,
        "later": statistics.median(later),
    }
    return {
        "dead": {
            "ttft_ms": round(statistics.median(usual) * 1e3, 2),
            **{f"{name}_ms_more": round(each * 1e3, 2) for name, each in more_s.items()},
        }
    }


def _prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(300, 40000) for _ in range(num_tokens)]


def _wait_for_disk(server: LMCacheServer) -> None:
    """What is in memory is written to the disk beside; nothing says when it is all there."""
    time.sleep(3.0)
    server.until(lambda status: not status["read_locked_count"])


def _clear(server: LMCacheServer) -> None:
    request = urllib.request.Request(f"{server.http_url}/cache/clear", method="POST")
    urllib.request.urlopen(request, timeout=10).close()


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return _median(a / b for a, b in zip(above, below, strict=True))


def _median(values: Any) -> float:
    return round(statistics.median(values), 3)


if __name__ == "__main__":
    main()
