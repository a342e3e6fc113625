"""Products of Llama-3.1-8B's shapes: which kernels give equal bits, and how fast each tile is.

*bits*: every tile of ours against one of them, in fp32 before the last rounding, and cuBLAS against
the same, with and without what lets it split K; a workspace is chosen by the environment, hence in
processes of their own. *tiles*: times, beside cuBLAS, with weights that the L2 cache does not hold.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.mixtures import EXPERT_TOKENS, GATED_ROWS, experts_times, sweep_gated
from benchmarks.gpu.timing import (
    DEVICE,
    IS_DRY,
    Experiments,
    num_rotated,
    sized,
    time_eager,
    time_in_graph,
)
from benchmarks.gpu.ways import BASE, FEW, MANY, SOME, named, run_tile, swept
from pdserve.kernels.cuda.tiles import ProductTile, linear_tile

DTYPE = sized(torch.bfloat16, torch.float16)
SHAPES = sized(
    {
        "qkv": (6144, 4096),
        "out": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "head": (128256, 4096),
    },
    {"qkv": (96, 64), "head": (160, 32)},
)
"""Name -> N and K."""

ROWS = sized((1, 2, 16, 64, 128, 2048), (1, 2, 5))
SWEPT_ROWS = sized((1, 64, 16, 2048, 256), (1, 5))

# Library, and whether it may split K: only cuBLASLt can be told not to.
_CUBLAS = (("cublas", True), ("cublaslt", True), ("cublaslt", False))
_WORKSPACES: dict[str, dict[str, str]] = {
    "default workspace": {},
    "small workspace": {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"},
}


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Return values that a process of its own can draw again."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, device=DEVICE, generator=generator).mul_(scale).to(DTYPE)


def inputs(name: str, copies: int = 1) -> tuple[Tensor, list[Tensor]]:
    """Return x of the most rows, and weights."""
    cols, depth = SHAPES[name]
    weights = [random(cols, depth, seed=2 + i, scale=depth**-0.5) for i in range(copies)]
    return random(max(ROWS), depth, seed=1), weights


def run_way(x: Tensor, weight: Tensor, way: ProductTile, dtype: torch.dtype) -> Tensor:
    out = torch.empty((len(x), len(weight)), dtype=dtype, device=x.device)
    run_tile(way, x, weight, out)
    return out


def compile_way(way: ProductTile) -> None:
    """Compile both outputs' kernels into Triton's cache, which processes share."""
    x, weight = random(16, 1024, seed=1), random(512, 1024, seed=2)
    for dtype in (DTYPE, torch.float32):
        run_way(x, weight, way, dtype)
    torch.cuda.synchronize()


def compile_all() -> dict[str, int]:
    """Compile every tile, in several processes."""
    if IS_DRY:
        return {"compiled": 0}
    all_ways = list(dict.fromkeys([*FEW, *SOME, *MANY]))
    all_ways.sort(key=lambda way: way.tile.rows * way.tile.cols, reverse=True)
    context = multiprocessing.get_context("spawn")
    failed = {}
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=context) as pool:
        for way, result in [(way, pool.submit(compile_way, way)) for way in all_ways]:
            if error := result.exception():
                failed[named(way)] = str(error)[:300]
    return {"compiled": len(all_ways) - len(failed), **failed}


# Bits


def row_digests(result: Tensor) -> Tensor:
    """Return one 64-bit number for each row's bits."""
    bits = result.view(torch.int32 if result.dtype == torch.float32 else torch.int16)
    generator = torch.Generator().manual_seed(7)
    factors = torch.randint(-(2**62), 2**62, (bits.shape[1],), generator=generator) | 1
    factors = factors.to(bits.device)
    return torch.cat([(part.long() * factors).sum(1) for part in bits.split(128)]).cpu()


def compared(found: Tensor, base: Tensor) -> bool | float:
    """Return True, or the share of rows whose bits are those of ``base``'s first ones."""
    share = (found == base[: len(found)]).double().mean().item()
    return True if share == 1 else round(share, 4)


def tiles_against_base(name: str) -> dict[str, Any]:
    """Compare every tile of ours, for every number of rows, in fp32 before the last rounding."""
    x, (weight,) = inputs(name)
    base = run_way(x, weight, BASE, torch.float32)
    exact = (x[:16].double() @ weight.double().T).float()
    equal, differing = [], {}
    for way in dict.fromkeys([*FEW, *SOME, *MANY]):
        rows: dict[int, float | str] = {}
        for m in ROWS:
            try:
                found = run_way(x[:m].contiguous(), weight, way, torch.float32)
            except Exception as error:  # noqa: BLE001  # one that does not run leaves the others
                rows[m] = str(error)[:200]
                break
            if not torch.equal(found, base[:m]):
                rows[m] = round((found == base[:m]).all(1).double().mean().item(), 4)
        if rows:
            differing[named(way)] = rows
        else:
            equal.append(named(way))
    return {
        "equal": equal,
        "equal_rows_of_others": differing,
        "largest_error": (base[: len(exact)] - exact).abs().max().item(),
    }


def base_digests() -> dict[str, Tensor]:
    """Return the digests of our rows, per shape and dtype of the result."""
    digests = {}
    for name in SHAPES:
        x, (weight,) = inputs(name)
        for dtype in (DTYPE, torch.float32):
            result = run_way(x, weight, BASE, dtype)
            digests[f"{name} {dtype}"] = row_digests(result)
    return digests


def cublas_digests() -> dict[str, dict[str, dict[int, Tensor]]]:
    """Return cuBLAS's digests: way -> shape and dtype -> rows -> digests."""
    found: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name in SHAPES:
        x, (weight,) = inputs(name)
        for library, may_split in _CUBLAS:
            choose_cublas(library, may_split=may_split)
            way = found.setdefault(f"{library}{'' if may_split else ' without split'}", {})
            for dtype in (DTYPE, torch.float32):
                try:
                    way[f"{name} {dtype}"] = {
                        m: row_digests(by_cublas(x[:m], weight, dtype)) for m in ROWS
                    }
                except RuntimeError as error:  # a way that cannot give this dtype
                    print(f"{library} {name} {dtype}: {error}", flush=True)
    return found


def choose_cublas(library: str, *, may_split: bool) -> None:
    """Choose the library, and whether it may split K and add the parts in bf16."""
    if IS_DRY:
        return
    torch.backends.cuda.preferred_blas_library(library)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (may_split, may_split)


def by_cublas(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == x.dtype:
        return torch.mm(x, weight.T)
    if IS_DRY:
        return torch.mm(x.float(), weight.T.float())
    return torch.mm(x, weight.T, out_dtype=dtype)


def cublas_against_base(workspace: str, base: dict[str, Tensor]) -> dict[str, Any]:
    """Compare cuBLAS in a process of its own, of a given workspace."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "digests.pt"
        subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu.linear", str(file)],
            env=dict(os.environ) | _WORKSPACES[workspace],
            timeout=150,
            check=True,
        )
        ways = torch.load(file)
    found: dict[str, Any] = {}
    for way, by_shape in ways.items():
        for shape, by_rows in by_shape.items():
            equal = {m: compared(digests, base[shape]) for m, digests in by_rows.items()}
            bad = {m: share for m, share in equal.items() if share is not True}
            found.setdefault(way, {})[shape] = bad or "equal"
    return found


# Times


def peaks() -> dict[str, float]:
    """Measure what shares are of: the rate of a copy, and that of a large product."""
    source = random(sized(1 << 29, 1 << 10), seed=1)
    target = torch.empty_like(source)
    copy = time_eager(lambda _: target.copy_(source), budget_s=0.2)
    size = sized(8192, 32)
    a, b = random(size, size, seed=1), random(size, size, seed=2)
    out = torch.empty_like(a)
    square = time_eager(lambda _: torch.mm(a, b.T, out=out), budget_s=0.3)
    return {
        "copy_gb_per_s": copy.gb_per_s(2 * source.nbytes),
        "tflop_per_s": square.tflop_per_s(2 * size**3),
    }


def sweep(name: str, num_rows: int, peak: dict[str, float]) -> dict[str, Any]:
    """Time the tiles of one shape and one number of rows, fastest first, and cuBLAS."""
    cols, depth = SHAPES[name]
    dtype = torch.float32 if name == "head" else DTYPE
    x, weights = inputs(name, num_rotated(cols * depth * 2))
    x = x[:num_rows].contiguous()
    out = torch.empty((num_rows, cols), dtype=dtype, device=DEVICE)
    wanted = run_way(x, weights[0], BASE, dtype)
    calls = len(weights) * sized(2, 1)

    def row(call: Any) -> dict[str, Any]:
        timing = time_in_graph(call, calls=calls, budget_s=0.04)
        moved = timing.gb_per_s(weights[0].nbytes + x.nbytes + out.nbytes)
        rate = timing.tflop_per_s(2 * num_rows * cols * depth)
        share = moved / peak["copy_gb_per_s"] if num_rows <= 64 else rate / peak["tflop_per_s"]
        return {"us": round(timing.us, 2), "share": round(share, 3)}

    found: dict[str, dict[str, Any]] = {}
    for way in swept(num_rows):
        try:
            out.fill_(float("nan"))
            run_tile(way, x, weights[0], out)
            equal = torch.equal(out, wanted)
            found[named(way)] = row(
                lambda i, way=way: run_tile(way, x, weights[i % len(weights)], out)
            )
            if not equal:
                found[named(way)]["bits"] = "differ"
        except Exception as error:  # noqa: BLE001  # a tile that does not fit leaves the others
            found[named(way)] = {"us": float("inf"), "error": str(error)[:200]}
    found = dict(sorted(found.items(), key=lambda item: item[1]["us"]))
    best = next(iter(found))
    choose_cublas("cublas", may_split=True)
    rounded = torch.empty((num_rows, cols), dtype=DTYPE, device=DEVICE)
    cublas = row(lambda i: torch.mm(x, weights[i % len(weights)].T, out=rounded))
    choose_cublas("cublaslt", may_split=False)
    whole = row(lambda i: torch.mm(x, weights[i % len(weights)].T, out=rounded))
    chosen = named(linear_tile(num_rows, cols, DTYPE))
    return {
        "best": {best: found[best]},
        "table": {chosen: found.get(chosen)},
        "cublas": cublas,
        "cublas_without_split": whole,
        "all": found,
    }


def best_rows(results: dict[str, Any]) -> dict[str, str]:
    """Return the fastest tile of each shape and number of rows, in a line each."""
    lines = {}
    for name, one in results.items():
        if not name.startswith("tiles ") or "best" not in one:
            continue
        beside = "cublas" if "cublas" in one else "in_turn"
        ((of, row),) = one["best"].items()
        lines[name] = (
            f"{of} {row['us']} us {row.get('share', 0):.1%}; "
            f"{beside} {one[beside]['us']} us {one[beside]['share']:.1%}"
        )
    return lines


def run(limit_s: float) -> dict[str, Any]:
    """Measure bits, then times."""
    experiments = Experiments("linear", limit_s)
    experiments.run("compile", compile_all)
    for name in SHAPES:
        experiments.run(f"bits {name}", lambda name=name: tiles_against_base(name))
    digests: dict[str, Tensor] = {}
    experiments.run("digests", lambda: digests.update(base_digests()))
    for workspace in _WORKSPACES:
        experiments.run(
            f"cublas {workspace}",
            lambda workspace=workspace: cublas_against_base(workspace, digests),
        )
    peak = experiments.run("peaks", peaks) or {"copy_gb_per_s": 3000.0, "tflop_per_s": 780.0}
    for num_rows in SWEPT_ROWS:
        for name in SHAPES:
            if name == "head" and num_rows > 64:
                continue  # no step asks for so many rows of logits
            experiments.run(
                f"tiles {name} {num_rows}",
                lambda name=name, num_rows=num_rows: sweep(name, num_rows, peak),
            )
    for num_rows in GATED_ROWS:
        experiments.run(
            f"tiles gated {num_rows}", lambda num_rows=num_rows: sweep_gated(num_rows, peak)
        )
    for num_tokens in EXPERT_TOKENS:
        experiments.run(
            f"experts {num_tokens}", lambda num_tokens=num_tokens: experts_times(num_tokens, peak)
        )
    best = experiments.results["best"] = best_rows(experiments.results)
    print(*(f"linear: best: {name}: {row}" for name, row in best.items()), sep="\n", flush=True)
    return experiments.results


if __name__ == "__main__":
    torch.save(cublas_digests(), sys.argv[1])
