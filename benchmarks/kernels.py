"""Times every operation of `pdserve.kernels` on this CPU against torch, in one run.

Prints one JSON object. Times are the best of many short calls, which on a shared machine is the
one that nobody disturbed. Weights rotate through more memory than the last-level cache holds, so
that they are read from memory, as in serving. `of_memory_rate` is the share of the rate at which
torch sums large tensors with as many threads.

    python benchmarks/kernels.py [--seconds-each 0.3] [--threads 1 2] [--dtypes bfloat16 float32]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.cases.attention import attention_inputs, rope_table
from pdserve.kernels.digest import place_keys, word_constants
from pdserve.kernels.registry import kernels_on

CPU = torch.device("cpu")
KERNELS = kernels_on(CPU)
ROWS = (1, 4, 16, 32, 128, 512)
CONTEXT = 512

# A layer of SmolLM-135M.
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 576, 1536, 9, 3, 64
MATRICES = (
    ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    (HIDDEN, HEADS * HEAD_DIM),
    (2 * INTERMEDIATE, HIDDEN),
    (HIDDEN, INTERMEDIATE),
)
NUM_LAYERS = 16
CHUNK, BLOCK_SIZE = 256, 16


@dataclass(frozen=True)
class Measured:
    """One operation at one size.

    Attributes:
        op: Its name.
        rows: Tokens of the call.
        ours: Our call, on the i-th set of weights.
        torch: torch's, likewise.
        num_bytes: Read or written by a call, at least.
        num_flops: Arithmetic of a call.
    """

    op: str
    rows: int
    ours: Callable[[int], object]
    torch: Callable[[int], object]
    num_bytes: int
    num_flops: int


def best_s(call: Callable[[int], object], budget_s: float) -> float:
    """Return the shortest time of a call, among those that fit the budget (five at least)."""
    call(0)
    best, count, end = float("inf"), 0, time.perf_counter() + budget_s
    while count < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call(count)
        best = min(best, time.perf_counter() - start)
        count += 1
    return best


def linears(dtype: torch.dtype, all_rows: tuple[int, ...] = ROWS) -> Iterator[Measured]:
    """All matrices of a layer in turn."""
    weights = [
        [torch.randn(n, k).to(dtype) / k**0.5 for n, k in MATRICES] for _ in range(NUM_LAYERS)
    ]
    packed = [[KERNELS.linear_of(weight) for weight in layer] for layer in weights]
    elements = sum(n * k for n, k in MATRICES)
    for rows in all_rows:
        inputs = {k: torch.randn(rows, k).to(dtype) for _, k in MATRICES}

        def ours(i: int, inputs: dict[int, Tensor] = inputs) -> None:
            for layer in packed[i % NUM_LAYERS]:
                layer(inputs[layer.in_features])

        def theirs(i: int, inputs: dict[int, Tensor] = inputs) -> None:
            for weight in weights[i % NUM_LAYERS]:
                functional.linear(inputs[weight.shape[1]], weight)

        num_bytes = elements * dtype.itemsize
        yield Measured("linear_layer", rows, ours, theirs, num_bytes, 2 * rows * elements)


def row_ops(dtype: torch.dtype) -> Iterator[Measured]:
    """Norm, activation and rotation, on rows that fit the cache."""
    for rows in ROWS:
        yield norms(rows, dtype)
        yield activations(rows, dtype)
        yield rotations(rows, dtype)


def norms(rows: int, dtype: torch.dtype) -> Measured:
    """Sum and norm."""
    weight = torch.randn(HIDDEN).to(dtype)
    x, residual = torch.randn(2, rows, HIDDEN).to(dtype)

    def theirs(_: int) -> Tensor:
        residual.add_(x)
        return functional.rms_norm(residual, (HIDDEN,), weight, 1e-5)

    return Measured(
        "add_rms_norm",
        rows,
        lambda _: KERNELS.add_rms_norm(x, residual, weight, 1e-5),
        theirs,
        4 * x.nbytes,
        6 * x.numel(),
    )


def activations(rows: int, dtype: torch.dtype) -> Measured:
    """Gated activation."""
    gate_up = torch.randn(rows, 2 * INTERMEDIATE).to(dtype)

    def theirs(_: int) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    return Measured(
        "silu_and_mul",
        rows,
        lambda _: KERNELS.silu_and_mul(gate_up),
        theirs,
        gate_up.nbytes * 3 // 2,
        5 * gate_up.numel() // 2,
    )


def rotations(rows: int, dtype: torch.dtype) -> Measured:
    """Rotation and cache write."""
    table = rope_table(rows, HEAD_DIM, CPU)
    qkv = torch.randn(rows, MATRICES[0][0]).to(dtype)
    at = torch.arange(rows)
    cache = torch.zeros(rows // 16 + 1, 2, KV_HEADS, 16, HEAD_DIM, dtype=dtype)
    cos, sin = (half.repeat(1, 2).unsqueeze(1) for half in table.to(dtype).chunk(2, dim=-1))

    def theirs(_: int) -> Tensor:
        heads = qkv.view(rows, -1, HEAD_DIM)
        turning, v = heads[:, : HEADS + KV_HEADS], heads[:, HEADS + KV_HEADS :]
        low, high = turning.chunk(2, dim=-1)
        turned: Tensor = turning * cos + torch.cat((-high, low), dim=-1) * sin
        block, offset = at // 16, at % 16
        cache[block, 0, :, offset] = turned[:, HEADS:]
        cache[block, 1, :, offset] = v
        return turned[:, :HEADS]

    return Measured(
        "rope_and_cache",
        rows,
        lambda _: KERNELS.rope_and_cache(qkv, at, table, cache, at, None, None, 1e-5),
        theirs,
        2 * qkv.nbytes,
        3 * qkv.numel(),
    )


def attentions(dtype: torch.dtype) -> Iterator[Measured]:
    """Prefill of one prompt, and decode of a batch."""
    for rows in ROWS:
        if rows > 1:
            yield attention("attention_prefill", [rows], [rows], dtype)
        if rows < ROWS[-1]:
            decodes = [1] * rows, [CONTEXT] * rows
            yield attention(f"attention_decode_{CONTEXT}", *decodes, dtype)


def attention(op: str, queries: list[int], contexts: list[int], dtype: torch.dtype) -> Measured:
    """Attention of requests of equal length; torch reads a cache without blocks."""
    inputs: Any = attention_inputs(
        queries, contexts, (HEADS, KV_HEADS), HEAD_DIM, dtype=dtype, device=CPU
    )
    batch, context = len(queries), contexts[0]
    q = torch.randn(batch, HEADS, queries[0], HEAD_DIM).to(dtype)
    kv = torch.randn(2, batch, KV_HEADS, context, HEAD_DIM).to(dtype)
    seen = sum(n * c - n * (n - 1) // 2 for n, c in zip(queries, contexts, strict=True))
    return Measured(
        op,
        sum(queries),
        lambda _: KERNELS.paged_attention(*inputs),
        lambda _: functional.scaled_dot_product_attention(
            q, kv[0], kv[1], is_causal=queries[0] > 1, enable_gqa=True
        ),
        kv.nbytes + 2 * q.nbytes,
        4 * seen * HEADS * HEAD_DIM,
    )


def copies(dtype: torch.dtype) -> Iterator[Measured]:
    """A chunk of a store, out of blocks and into them; torch copies as many bytes."""
    each = CHUNK // BLOCK_SIZE
    shape = (NUM_LAYERS * each, NUM_LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    kv = torch.randn(shape).to(dtype)
    memory = kv.view(torch.uint8)
    blocks = torch.randperm(len(kv)).view(NUM_LAYERS, 1, each)
    flat = memory.view(NUM_LAYERS, -1)
    pool = torch.zeros_like(flat)
    starts = torch.arange(KV_HEADS).view(1, KV_HEADS) * (flat.shape[1] // KV_HEADS)
    constants = word_constants(CHUNK, memory.shape[5] // 4)
    keys = place_keys(range(NUM_LAYERS), 2, range(KV_HEADS))
    for op in ("gather_chunks", "scatter_chunks"):

        def ours(i: int, op: str = op) -> None:
            which = i % NUM_LAYERS
            getattr(KERNELS, op)(memory, blocks[which], pool[which], starts, constants, keys)

        def theirs(i: int, out: bool = op == "gather_chunks") -> None:
            pair = flat[i % NUM_LAYERS], pool[i % NUM_LAYERS]
            pair[out].copy_(pair[not out])

        yield Measured(op, CHUNK, ours, theirs, 2 * flat[0].nbytes, 0)


def memory_gb_per_s(budget_s: float) -> float:
    """Return the rate of torch's sum over tensors that no cache holds together."""
    tensors = [torch.ones(2 << 20) for _ in range(16)]
    return tensors[0].nbytes / best_s(lambda i: tensors[i % 16].sum(), budget_s) / 1e9


def run(seconds_each: float, thread_counts: list[int], dtypes: list[str]) -> dict[str, Any]:
    """Measure everything and return what is to be printed."""
    results = []
    rates = {}
    for threads in thread_counts:
        torch.set_num_threads(threads)
        rates[threads] = memory_gb_per_s(seconds_each)
        for name in dtypes:
            dtype = getattr(torch, name)
            for ops in (linears, row_ops, attentions, copies):
                for m in ops(dtype):
                    ours = best_s(m.ours, seconds_each)
                    theirs = best_s(m.torch, seconds_each)
                    gb_per_s = m.num_bytes / ours / 1e9
                    results.append(
                        {
                            "op": m.op,
                            "dtype": name,
                            "threads": threads,
                            "rows": m.rows,
                            "us": round(ours * 1e6, 2),
                            "torch_us": round(theirs * 1e6, 2),
                            "speedup": round(theirs / ours, 2),
                            "gb_per_s": round(gb_per_s, 2),
                            "of_memory_rate": round(gb_per_s / rates[threads], 2),
                            "gflop_per_s": round(m.num_flops / ours / 1e9, 1),
                        }
                    )
    return {
        "environment": {
            "machine": platform.machine(),
            "cores": torch.get_num_threads(),
            "torch": torch.__version__,
            "kernels": KERNELS.name,
            "bf16_on_amx_tiles": "AMX" in KERNELS.description,
        },
        "memory_gb_per_s": {threads: round(rate, 1) for threads, rate in rates.items()},
        "results": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seconds-each", type=float, default=0.3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    options = parser.parse_args()
    print(json.dumps(run(options.seconds_each, options.threads, options.dtypes), indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
