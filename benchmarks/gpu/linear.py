"""Times of the products of Llama-3.1-8B's shapes, and of what stands around them.

*tiles*: each shape alone, beside cuBLAS, with weights that the L2 cache does not hold. *layer*: a
layer's products and norms in turn, as in a decode step. *gated*, *experts*: see `mixtures`.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.layer import LAYER_ROWS, layer_builds, layer_times
from benchmarks.gpu.mixtures import (
    EXPERT_TOKENS,
    GATED_ROWS,
    experts_times,
    gated_builds,
    sweep_gated,
)
from benchmarks.gpu.timing import (
    DEVICE,
    Experiments,
    num_rotated,
    sized,
    time_eager,
    time_in_graph,
)
from benchmarks.gpu.ways import (
    BASE,
    DTYPE,
    SHAPES,
    Build,
    choose_cublas,
    compile_all,
    every_tile,
    inputs,
    least_us,
    named,
    random,
    run_tile,
    run_way,
    swept,
)
from pdserve.kernels.cuda.tiles import linear_tile

SWEPT_ROWS = sized((256, 128, 512, 96, 1, 64, 2048), (1, 5))


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
        "tflop_per_s": sized(square.tflop_per_s(2 * size**3), 1.0),
    }


def sweep(name: str, num_rows: int, peak: dict[str, float]) -> dict[str, Any]:
    """Time the tiles of one shape and one number of rows, fastest first, and cuBLAS.

    Shares are those of the time that copying or multiplying as much takes, whichever is longer.
    """
    cols, depth = SHAPES[name]
    dtype = torch.float32 if name == "head" else DTYPE
    x, weights = inputs(name, num_rows, num_rotated(cols * depth * 2))
    out = torch.empty((num_rows, cols), dtype=dtype, device=DEVICE)
    wanted = run_way(x, weights[0], BASE, dtype)
    calls = len(weights) * sized(2, 1)
    moved = weights[0].nbytes + x.nbytes + out.nbytes
    floor_us = least_us(moved, 2 * num_rows * cols * depth, peak)

    def row(call: Any) -> dict[str, Any]:
        us = time_in_graph(call, calls=calls, budget_s=0.03).us
        return {"us": round(us, 2), "share": round(floor_us / us, 3)}

    found: dict[str, dict[str, Any]] = {}
    for of in swept(num_rows, cols):
        try:
            out.fill_(float("nan"))
            run_tile(of, x, weights[0], out)
            equal = torch.equal(out, wanted)
            found[named(of)] = row(lambda i, of=of: run_tile(of, x, weights[i % len(weights)], out))
            if not equal:
                found[named(of)]["bits"] = "differ"
        except Exception as error:  # noqa: BLE001  # a tile that does not fit leaves the others
            found[named(of)] = {"us": float("inf"), "error": str(error)[:200]}
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


def run(limit_s: float, *, sweeps: bool = True) -> dict[str, Any]:
    """Measure layers and mixtures, then tiles alone for as long as there is time."""
    experiments = Experiments("linear", limit_s)
    builds = [Build(of) for of in (BASE, *every_tile())] + gated_builds() if sweeps else []
    builds += layer_builds()
    experiments.run("compile", lambda: compile_all(builds))
    peak = experiments.run("peaks", peaks) or {"copy_gb_per_s": 3000.0, "tflop_per_s": 740.0}
    for num_rows in LAYER_ROWS:
        experiments.run(f"layer {num_rows}", lambda num_rows=num_rows: layer_times(num_rows, peak))
    for num_tokens in EXPERT_TOKENS:
        experiments.run(
            f"experts {num_tokens}", lambda num_tokens=num_tokens: experts_times(num_tokens, peak)
        )
    if sweeps:
        _sweep(experiments, peak)
    return experiments.results


def _sweep(experiments: Experiments, peak: dict[str, float]) -> None:
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
    best = experiments.results["best"] = best_rows(experiments.results)
    print(*(f"linear: best: {name}: {row}" for name, row in best.items()), sep="\n", flush=True)
