"""Paged attention of Llama-3.1-8B's shape: that its bits are fixed, and how fast each tiling is.

*bits*: see `paged_bits`.
*decode* and *prefill*: times of what is shipped, and of each tiling (of prompts those of
`attend_whole`), at contexts that the L2 cache does not hold, beside torch's attention over
contiguous keys and values; *peaks* has what they are shares of. The best tiling of each row is
printed; one for all is picked by hand: tile and segment fix the bits.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.latents import LATENTS
from benchmarks.gpu.paged import BASE, DTYPE, HEAD_DIM, HEADS, Layers
from benchmarks.gpu.paged_bits import BITS, bits
from benchmarks.gpu.timing import (
    IS_DRY,
    Experiments,
    Timing,
    num_rotated,
    sized,
    time_eager,
    time_in_graph,
)
from pdserve.kernels.cuda.attention import (
    AttentionCall,
    AttentionTiles,
    attend,
    paged_attention,
)
from pdserve.kernels.cuda.launch import Tuning

DECODES = sized(
    [(1, 32768), (8, 8192), (64, 2048), (64, 128), (1, 2048), (1, 512), (8, 2048)],
    [(1, 600), (3, 70)],
)
"""Requests, and the context of each."""

PROMPTS = sized([2048, 8192, 16384], [70])

# The second needs a device.
_TORCH = sized(
    (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION), dry=(SDPBackend.FLASH_ATTENTION,)
)

SPLITS = [
    replace(
        BASE,
        segment=segment,
        split=Tuning(warps, stages, overlaps=True),
        programs_per_sm=programs,
    )
    for segment in sized((512, 1024, 256), (512,))
    for warps, stages, programs in sized(
        ((4, 2, 2), (4, 2, 3), (4, 3, 2), (4, 3, 3), (4, 4, 2), (8, 3, 2)), ((4, 2, 2),)
    )
]
WHOLES = [
    replace(
        BASE,
        apart=False,
        tile=tile,
        segment=segment,
        whole_rows=rows,
        whole=Tuning(warps, stages, overlaps=True),
    )
    for segment in sized((512, 1024), (512,))
    for tile, rows, warps, stages in sized(
        ((64, 128, 8, 3), (64, 128, 8, 4), (64, 64, 4, 3), (64, 64, 4, 2), (128, 128, 8, 2)),
        ((64, 128, 8, 3),),
    )
]


def named(tiles: AttentionTiles, *, split: bool) -> str:
    """Name what of a tiling matters to one form."""
    cut = f"tile {tiles.tile}, segment {tiles.segment}"
    if split:
        tuning, more = tiles.split, f"{tiles.programs_per_sm} programs"
        rows = tiles.split_rows
    else:
        tuning, more, rows = tiles.whole, "by attend_whole", tiles.whole_rows
    return f"{cut}, rows {rows}, warps {tuning.warps}, stages {tuning.stages} {more}"


# Compiling, many at once


def compile_tiles(tiles: AttentionTiles, num_requests: int, num_tokens: int) -> None:
    """Run once with few keys: what is compiled is kept on disk."""
    queries = [num_tokens // num_requests] * num_requests
    attend(Layers(num_requests, 128).call(queries, [128] * num_requests), tiles)
    if not IS_DRY:
        torch.cuda.synchronize()


def compare_bits() -> dict[str, Any]:
    """Compare the bits of every case, in processes of their own."""
    if IS_DRY:
        return {name: bits(*of) for name, of in BITS.items()}
    found: dict[str, Any] = {}
    with _processes() as pool:
        compared = [(name, pool.submit(bits, *of)) for name, of in BITS.items()]
        for name, result in compared:
            error = result.exception()
            found[name] = {"error": str(error)[:600]} if error else result.result()
            print(f"attention: bits: {name}: {json.dumps(found[name])}", flush=True)
    return found


def compile_all() -> dict[str, Any]:
    """Compile every tiling that is swept, in processes of their own."""
    if IS_DRY:
        return {}
    wanted: dict[Any, None] = {}
    for tiles in SPLITS:
        for num_requests in sorted({1 if n <= 16 else n for n, _ in DECODES}):
            wanted[replace(tiles, programs_per_sm=1), num_requests, num_requests] = None
    for tiles in WHOLES:
        wanted[tiles, 1, 128] = None
    found: dict[str, Any] = {"failed": {}, "compiled": 0}
    with _processes() as pool:
        compiled = [(of, pool.submit(compile_tiles, *of)) for of in wanted]
        for of, done in compiled:
            if error := done.exception():
                found["failed"][str(of)] = str(error)[:300]
            else:
                found["compiled"] += 1
    return found


def _processes() -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=context)


# Times


class Decode:
    """Single tokens at one context: each tiling, and what it is compared with."""

    def __init__(self, num_requests: int, context: int) -> None:
        self.context = context
        self.num_bytes = num_requests * context * HEADS[1] * HEAD_DIM * 2 * DTYPE.itemsize
        self.num_layers = num_rotated(self.num_bytes, at_most=12)
        self.layers = Layers(num_requests, context, num_layers=self.num_layers)
        ones, contexts = [1] * num_requests, [context] * num_requests
        self.calls = [self.layers.call(ones, contexts, layer=i) for i in range(self.num_layers)]
        self.wanted = self.by_torch(self.layers.contiguous(0))

    def described(self) -> dict[str, Any]:
        return {"kv_bytes": self.num_bytes, "layers": self.num_layers}

    def by_torch(self, keys_and_values: Tensor) -> Tensor:
        q = self.calls[0].q[:, :, None]
        keys, values = keys_and_values
        return scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    def row(self, timing: Timing) -> dict[str, Any]:
        return timing.row(gb_per_s=timing.gb_per_s(self.num_bytes))

    def ours(self, tiles: AttentionTiles, budget_s: float = 0.05) -> dict[str, Any]:
        error = (attend(self.calls[0], tiles) - self.wanted.flatten(1)).abs().max().item()
        assert error < 0.02, f"differs from torch by {error}"
        calls = self.calls
        timing = time_in_graph(
            lambda i: attend(calls[i % self.num_layers], tiles), budget_s=budget_s
        )
        return self.row(timing)

    def theirs(self, backend: SDPBackend) -> dict[str, Any]:
        caches = [self.layers.contiguous(i) for i in range(self.num_layers)]
        with sdpa_kernel([backend]):
            return self.row(time_in_graph(lambda i: self.by_torch(caches[i % self.num_layers])))


class Prefill:
    """One prompt's chunk at the end of a context."""

    def __init__(self, num_tokens: int, context: int) -> None:
        self.num_tokens, self.context = num_tokens, context
        self.layers = Layers(1, context)
        self.call = self.layers.call([num_tokens], [context])
        seen = num_tokens * (context - num_tokens) + num_tokens * (num_tokens + 1) // 2
        self.num_flops = 4 * HEADS[0] * HEAD_DIM * seen
        self.q = self.call.q.transpose(0, 1)[None].contiguous()

    def described(self) -> dict[str, Any]:
        return {"flops": self.num_flops}

    def by_torch(self, keys_and_values: Tensor) -> Tensor:
        keys, values = keys_and_values
        return scaled_dot_product_attention(self.q, keys, values, is_causal=True, enable_gqa=True)

    def row(self, timing: Timing) -> dict[str, Any]:
        return timing.row(tflop_per_s=timing.tflop_per_s(self.num_flops))

    def ours(self, tiles: AttentionTiles, budget_s: float = 0.1) -> dict[str, Any]:
        return self.by(lambda call: attend(call, tiles), budget_s)

    def by(self, way: Callable[[AttentionCall], Tensor], budget_s: float = 0.1) -> dict[str, Any]:
        if self.num_tokens == self.context:
            wanted = self.by_torch(self.layers.contiguous(0))
            apart = way(self.call) - wanted[0].transpose(0, 1).flatten(1)
            error = apart.abs().max().item()
            assert error < 0.06, f"differs from torch by {error}"
        return self.row(time_eager(lambda _: way(self.call), budget_s=budget_s))

    def theirs(self, backend: SDPBackend) -> dict[str, Any]:
        cache = self.layers.contiguous(0)
        with sdpa_kernel([backend]):
            return self.row(time_eager(lambda _: self.by_torch(cache), budget_s=0.1))


def timed(
    experiments: Experiments, name: str, make: Callable[[], Decode | Prefill], *, sweeps: bool
) -> None:
    """Time what is shipped, and torch; or all tilings, and print the best."""
    made: list[Decode | Prefill] = []

    def inputs() -> dict[str, Any]:
        made.append(make())
        return made[0].described()

    experiments.run(f"{name}: inputs" + " of the sweep" * sweeps, inputs)
    if not made:
        return
    (at,) = made
    if not sweeps:
        experiments.run(f"{name}: as shipped", lambda: at.ours(BASE, budget_s=0.2))
        for backend in _TORCH:
            experiments.run(f"{name}: torch {backend.name}", lambda of=backend: at.theirs(of))
        return
    is_split = isinstance(at, Decode)
    found = {}
    for tiles in SPLITS if is_split else WHOLES:
        of = named(tiles, split=is_split)
        result = experiments.run(f"{name}: {of}", lambda tiles=tiles: at.ours(tiles))
        if result is not None:
            found[of] = result
    _best(experiments, name, found)


def _best(experiments: Experiments, name: str, found: dict[str, dict[str, Any]]) -> None:
    ranked = sorted(found.items(), key=lambda pair: float(pair[1]["us"]))[:5]
    experiments.run(f"{name}: best", lambda: dict(ranked))


def chunks() -> dict[str, Any]:
    """Time chunks at the end of a long context, alone and with single tokens beside them."""
    context, num_decodes = sized((8192, 32), (130, 3))
    found: dict[str, Any] = {}
    for size in sized((16, 128, 512, 2048), (20,)):
        found[f"{size} at {context}"] = Prefill(size, context).ours(BASE)
    layers = Layers(num_decodes + 1, context)
    size = sized(512, 20)
    batches = {
        "decodes": [1] * num_decodes,
        f"decodes and a chunk of {size}": [1] * num_decodes + [size],
    }
    for name, queries in batches.items():
        call = layers.call(queries, [context] * len(queries))
        timing = time_eager(lambda _, call=call: attend(call, BASE))
        found[f"{num_decodes} {name} at {context}"] = timing.row()
    return found


def host() -> dict[str, Any]:
    """Time what a call takes of the host."""
    layers = Layers(8, 128)
    found = {}
    for name, queries in {"decode": [1] * 8, "prefill": [64], "mixed": [1] * 7 + [64]}.items():
        call = layers.call(queries, [128] * len(queries))
        paged_attention(*call)
        samples = []
        for _ in range(sized(60, 2)):
            if not IS_DRY:
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(sized(10, 1)):
                paged_attention(*call)
            samples.append((time.perf_counter() - start) * 1e6 / sized(10, 1))
        found[name] = {"us": round(sorted(samples)[len(samples) // 2], 1)}
    return found


def run(limit_s: float, *, sweeps: bool = True) -> dict[str, Any]:
    """Run all experiments: what is shipped first, then sweeps for as long as there is time."""
    experiments = Experiments("attention", limit_s)
    experiments.run("bits", compare_bits)
    experiments.run("host", host)
    _time_all(experiments, sweeps=False)
    experiments.run("chunks", chunks)
    for name, experiment in LATENTS.items():
        experiments.run(f"latents: {name}", experiment)
    if sweeps:
        experiments.run("compiling what is swept", compile_all)
        _time_all(experiments, sweeps=True)
    return experiments.results


def _time_all(experiments: Experiments, *, sweeps: bool) -> None:
    for num_requests, context in DECODES:
        name, make = f"decode {num_requests} x {context}", partial(Decode, num_requests, context)
        timed(experiments, name, make, sweeps=sweeps)
    for length in PROMPTS:
        timed(experiments, f"prefill {length}", partial(Prefill, length, length), sweeps=sweeps)
