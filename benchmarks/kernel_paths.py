"""Times the CPU's products of bf16 on each instruction path that this CPU has, beside its limit.

A path is a build of the kernels for a lesser CPU, in a process of its own. Its limit on a core is
what a loop of its instruction reaches with all operands in registers, the best of those that run
between the products; `of_peak` is the share of it on all threads. torch multiplies the same
matrices in turns with ours: in bf16 (oneDNN) held to the same instructions, and in fp32 (MKL) with
those that it likes. Times are the best of several calls, which on a shared machine is the one that
nobody disturbed; on one thread they are that thread's CPU time. Prints one JSON object.

    python -m benchmarks.kernel_paths [--paths avx512_bf16,avx512,avx2] [--shapes 135M,1B]
                                      [--rows 16 512] [--threads 1 2] [--seconds-each 0.2]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.engine import environment
from benchmarks.kernels import (
    KERNELS,
    MATRICES,
    activations,
    attention,
    linears,
    norms,
    rotations,
)
from pdserve.kernels.cpu import build


class InstructionPath(NamedTuple):
    """How a path is forced.

    Attributes:
        target: GCC's name of an architecture that has no better one.
        onednn: oneDNN's name of the same.
        feature: Of this CPU, in /proc/cpuinfo, without which the path does not run.
    """

    target: str
    onednn: str
    feature: str


PATHS = {
    "amx": InstructionPath("sapphirerapids", "AVX512_CORE_AMX", "amx_bf16"),
    "avx512_bf16": InstructionPath("cooperlake", "AVX512_CORE_BF16", "avx512_bf16"),
    "avx512": InstructionPath("x86-64-v4", "AVX512_CORE", "avx512vl"),
    "avx2": InstructionPath("x86-64-v3", "AVX2", "avx2"),
}

# All matrices of a layer: of SmolLM2-135M, and of Llama 3.2 1B.
SHAPES = {
    "135M": MATRICES,
    "1B": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
}
# Weights of so many bytes are rotated through: more than a last-level cache holds.
_ROTATED_BYTES = 100 << 20
PROMPT = 1024  # tokens


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--paths", default=",".join(PATHS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 256, 512, 1024, 2048])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds-each", type=float, default=0.2)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        with torch.inference_mode():
            print(json.dumps(_measured(options)))
        return
    info = Path("/proc/cpuinfo").read_text().split()
    paths = {
        name: _in_a_process(PATHS[name])
        for name in options.paths.split(",")
        if PATHS[name].feature in info
    }
    result = {
        "benchmark": "kernel_paths",
        "environment": environment(len(os.sched_getaffinity(0))),
        "paths": paths,
    }
    print(json.dumps(result, indent=1))


def _in_a_process(path: InstructionPath) -> dict[str, Any]:
    forced = {"PD_CPU_TARGET": path.target, "ONEDNN_MAX_CPU_ISA": path.onednn}
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernel_paths", *sys.argv[1:], "--here"],
        env=os.environ | forced,
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of this process's path."""
    library = ctypes.CDLL(str(build.library()))
    library.pd_peak_gflops.restype = ctypes.c_double
    unit = library.pd_bf16_unit()
    peaks = [library.pd_peak_gflops(unit)]
    linear: list[dict[str, Any]] = []
    prefill: list[dict[str, Any]] = []
    for shape in options.shapes.split(","):
        for row in _linear_layers(SHAPES[shape], options):
            linear.append({"shape": shape, **row})
            peaks.append(library.pd_peak_gflops(unit))
    for threads in options.threads:
        torch.set_num_threads(threads)
        prefill.append({"threads": threads, **_prefill(options.seconds_each)})
        peaks.append(library.pd_peak_gflops(unit))
    for row in linear + prefill:
        row["of_peak"] = round(row["gflop_per_s"] / max(peaks) / row["threads"], 3)
    return {
        "kernels": KERNELS.description.partition(":")[0],
        "gflop_per_s_of_a_core": {"peak": round(max(peaks), 1), "lowest": round(min(peaks), 1)},
        "linear_layers": linear,
        f"prefill_of_{PROMPT}_by_layer_of_135M": prefill,
    }


def _linear_layers(
    sizes: tuple[tuple[int, int], ...], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """All matrices of a layer in turn, of ours and of torch's."""
    elements = sum(n * k for n, k in sizes)
    weights = [
        [torch.randn(n, k).bfloat16() / k**0.5 for n, k in sizes]
        for _ in range(max(1, _ROTATED_BYTES // (2 * elements)))
    ]
    wide = [[weight.float() for weight in layer] for layer in weights]
    packed = [[KERNELS.linear_of(weight) for weight in layer] for layer in weights]
    for threads in options.threads:
        torch.set_num_threads(threads)
        for rows in options.rows:
            inputs = {k: torch.randn(rows, k).bfloat16() for _, k in sizes}
            floats = {k: x.float() for k, x in inputs.items()}

            def ours(i: int, inputs: dict[int, Tensor] = inputs) -> None:
                for layer in packed[i % len(packed)]:
                    layer(inputs[layer.in_features])

            def theirs(i: int, inputs: dict[int, Tensor] = inputs) -> None:
                for weight in weights[i % len(weights)]:
                    functional.linear(inputs[weight.shape[1]], weight)

            def in_fp32(i: int, floats: dict[int, Tensor] = floats) -> None:
                for weight in wide[i % len(wide)]:
                    functional.linear(floats[weight.shape[1]], weight)

            times = _best_in_turns((ours, theirs, in_fp32), options.seconds_each)
            rates = [round(2e-9 * rows * elements / each, 1) for each in times]
            yield {
                "threads": threads,
                "rows": rows,
                "us": round(times[0] * 1e6),
                **dict(zip(("gflop_per_s", "torch_bf16", "torch_fp32"), rates, strict=True)),
            }


def _prefill(budget_s: float) -> dict[str, Any]:
    """Each operation of a layer by a prompt, in us, and the rate of their arithmetic together."""
    dtype = torch.bfloat16
    parts = {
        "linear": next(each for each in linears(dtype, (PROMPT,))),
        "attention": attention("attention_prefill", [PROMPT], [PROMPT], dtype),
        "norm": norms(PROMPT, dtype),
        "activation": activations(PROMPT, dtype),
        "rotation": rotations(PROMPT, dtype),
    }
    times = {name: _best_in_turns((part.ours,), budget_s)[0] for name, part in parts.items()}
    times["norm"] *= 2  # one per half of a layer
    flops = parts["linear"].num_flops + parts["attention"].num_flops
    return {
        **{f"{name}_us": round(took * 1e6) for name, took in times.items()},
        "gflop_per_s": round(1e-9 * flops / sum(times.values()), 1),
    }


def _best_in_turns(calls: tuple[Callable[[int], object], ...], budget_s: float) -> list[float]:
    """Return the shortest time of each call, of at least two turns after one to warm up."""
    best = [float("inf")] * len(calls)
    # A thread alone is not charged for the time that others have its core.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for call in calls:
        call(0)
    count, end = 1, time.perf_counter() + len(calls) * budget_s
    while count < 3 or time.perf_counter() < end:
        for i, call in enumerate(calls):
            start = clock()
            call(count)
            best[i] = min(best[i], clock() - start)
        count += 1
    return best


if __name__ == "__main__":
    main()
