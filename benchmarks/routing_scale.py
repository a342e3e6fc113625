"""What a choice, and the index behind it, cost in fleets of 10 to 1,000 engines.

The real router, backends, prefix index and joint decision, in one process, without HTTP: for each
size the time of a plan of a prompt of 12,288 tokens of which one engine has 10,240, with a system
prompt that all have (median, 99th percentile); for the largest the index's memory and its updates
per second, decoding included.

    python -m benchmarks.routing_scale [--engines 10 100 1000] [--plans 2000] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.config.http import ProxyConfig
from pdserve.config.policies import PREDICTED
from pdserve.observe.clock import SystemClock
from pdserve.proxy.backend import Health
from pdserve.proxy.backends import Backends
from pdserve.proxy.brain.index import Holder, PrefixIndex
from pdserve.proxy.brain.pairing import Pairing
from pdserve.proxy.brain.prefixes import make_prefixes
from pdserve.proxy.brain.prompt import RoutePrompt
from pdserve.proxy.brain.work import PromptWork
from pdserve.proxy.breakers import Breakers
from pdserve.proxy.metrics import Metrics
from pdserve.proxy.routing import Router
from pdserve.wire.event_reader import ReaderState
from pdserve.wire.events import DEVICE, GrainsRemoved, GrainsStored
from pdserve.wire.ids import GRAIN_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PROMPT_GRAINS, _SHARED_GRAINS, _WARM_GRAINS = 48, 4, 40
_EACH_GRAINS = 1000
_BATCH = 24


class Fleet:
    """Ready engines, half of either role, whose events are in step; and the router before them."""

    def __init__(self, num_engines: int) -> None:
        urls = [f"http://10.0.{n >> 8}.{n & 255}:8000" for n in range(num_engines)]
        config = ProxyConfig(
            prefill=tuple(urls[::2]), decode=tuple(urls[1::2]), split_policy=PREDICTED
        )
        clock, metrics = SystemClock(), Metrics()
        self.backends = Backends(config, clock, Breakers(config, clock, metrics))
        prefixes = make_prefixes(
            config, self.backends, clock, metrics.prefixes, make_feed=self._listen
        )
        pairing = Pairing(config, clock, metrics.route)
        self.holders: dict[str, Holder] = {}
        for backend in self.backends:
            backend.health, backend.load_s = Health.READY, clock.monotonic_s()
            self.holders[backend.url] = Holder(self.index, backend.url)
        _teach(pairing)
        self.router = Router(config, self.backends, prefixes, pairing)

    def _listen(self, index: PrefixIndex) -> Fleet:
        self.index = index
        return self

    def start(self) -> None:
        """See `Feed`."""

    async def stop(self) -> None:
        """See `Feed`."""

    def exact(self, url: str) -> Sequence[int]:
        """See `Feed`."""
        return (self.holders[url].bit,)

    def states(self) -> Sequence[ReaderState]:
        """See `Feed`."""
        return ()

    def lags_s(self) -> Mapping[str, float]:
        """See `Feed`."""
        return {}

    def resyncs(self) -> Mapping[str, int]:
        """See `Feed`."""
        return {}

    @property
    def num_resyncs(self) -> int:
        """See `Feed`."""
        return 0


def _teach(pairing: Pairing) -> None:
    """Give the joint decision enough to decide by."""
    rng = random.Random(0)
    for _ in range(100):
        num, cached = rng.randrange(200, 8000), rng.randrange(0, 4000)
        work = PromptWork(1, num, num * (cached + num / 2))
        seconds = 4e-3 + 45e-6 * num + 2.5e-9 * work.pairs
        pairing.model.learn_prompts(work, seconds)
        streams, kv_tokens = rng.randrange(1, 40), rng.randrange(1000, 200_000)
        pairing.model.learn_step(streams, kv_tokens, 7e-3 + 60e-6 * streams + 6e-8 * kv_tokens)
        pairing.model.learn_wire(num, 1e-3 + 8e-6 * num)
        pairing.model.learn_output(200)


def plans(num_engines: int, num_plans: int) -> dict[str, Any]:
    """Time plans of warm prompts in a fleet of one size."""
    fleet, rng = Fleet(num_engines), random.Random(1)
    shared = [rng.getrandbits(64) for _ in range(_SHARED_GRAINS)]
    for holder in fleet.holders.values():
        holder.apply(GrainsStored(shared, DEVICE))
    holders = list(fleet.holders.values())
    prompts = []
    for number in range(64):
        grains = [*shared, *(rng.getrandbits(64) for _ in range(_PROMPT_GRAINS - _SHARED_GRAINS))]
        warm = holders[rng.randrange(len(holders))]
        warm.apply(GrainsStored(grains[:_WARM_GRAINS], DEVICE))
        num_tokens = _PROMPT_GRAINS * GRAIN_TOKENS
        prompts.append(
            RoutePrompt(4 * num_tokens, num_tokens, tuple(grains), request_id=f"{number}")
        )
    took = []
    gc.collect()
    gc.freeze()
    for number in range(num_plans):
        prompt = prompts[number % len(prompts)]
        start_s = time.perf_counter()
        plan = fleet.router.plan(prompt)
        took.append(time.perf_counter() - start_s)
        assert plan.decision is not None
    took.sort()
    return {
        "engines": num_engines,
        "plan_p50_us": round(1e6 * took[len(took) // 2], 1),
        "plan_p99_us": round(1e6 * took[int(0.99 * (len(took) - 1))], 1),
    }


def index_cost(num_engines: int) -> dict[str, Any]:
    """Measure the index with so many engines, each with a thousand grains of its own or shared."""
    rng = random.Random(2)
    pool = [rng.getrandbits(64) for _ in range(num_engines * _EACH_GRAINS // 2)]
    tracemalloc.start()
    index = PrefixIndex()
    holders = [Holder(index, f"http://engine-{n}") for n in range(num_engines)]
    before = tracemalloc.get_traced_memory()[0]
    for holder in holders:
        holder.apply(GrainsStored(rng.sample(pool, _EACH_GRAINS), DEVICE))
    per_entry = (tracemalloc.get_traced_memory()[0] - before) / len(index)
    tracemalloc.stop()
    batches = []
    for _ in range(4000):
        stored = [rng.getrandbits(64) for _ in range(_BATCH)]
        events = [GrainsStored(stored, DEVICE), GrainsRemoved(stored, DEVICE)]
        batches.append(msgspec.msgpack.encode(events))
    decoder = msgspec.msgpack.Decoder(list[GrainsStored | GrainsRemoved])
    start_s = time.perf_counter()
    for number, batch in enumerate(batches):
        for event in decoder.decode(batch):
            holders[number % num_engines].apply(event)
    took_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    for _ in range(1000):
        holders[0].retire()
    retire_s = (time.perf_counter() - start_s) / 1000
    return {
        "entries": len(index),
        "bytes_per_entry": round(per_entry, 1),
        "updates_per_s": round(2 * _BATCH * len(batches) / took_s),
        "retire_us": round(1e6 * retire_s, 2),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--plans", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [plans(num, args.plans) for num in args.engines]
    index = index_cost(max(args.engines))
    if args.json:
        json.dump(
            {"benchmark": "routing_scale", "plans": rows, "index": index}, sys.stdout, indent=1
        )
        return
    for row in [*rows, index]:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
