"""Products of Llama-3.1-8B's shapes, and the tiles to compute them by, of which the best is sought.

Tiles of 16 and of 64 rows, and those for thousands, are settled: the tables of the kernels hold the
best (benchmarks/results/2026-11-23-h100-*.json). Swept are those for 65 to 512 rows.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.timing import DEVICE, IS_DRY, sized
from pdserve.kernels.cuda.launch import Tuning, without_overlap
from pdserve.kernels.cuda.linear import multiply, multiply_gated
from pdserve.kernels.cuda.sizes import FEW_ROWS
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


def tile(rows: int, cols: int, depth: int, warps: int, stages: int, **more: Any) -> ProductTile:
    tuning = Tuning(warps, stages, overlaps=rows > FEW_ROWS)
    return ProductTile(rows=rows, cols=cols, depth=depth, tuning=tuning, **more)


def described(*sizes: int, **more: Any) -> ProductTile:
    """Return a tile that is loaded by descriptors."""
    return tile(*sizes, described=True, **more)


_BEHIND = 256
"""Rows behind those of x: a tile that is not whole would be loaded without descriptors."""

_DRY = [tile(32, 32, 16, 4, 3), tile(16, 64, 16, 4, 3, swapped=True), described(16, 32, 32, 4, 3)]
BASE = sized(tile(128, 256, 64, 8, 3), _DRY[0])
"""Whose bits the others are compared with."""

_TO_128 = [
    described(64, 64, 128, 4, 3),
    described(64, 64, 128, 4, 5),
    described(64, 128, 64, 4, 4),
    described(64, 128, 128, 4, 4),
    described(64, 128, 128, 4, 4, swapped=True),
    described(128, 64, 128, 4, 4),
    described(128, 128, 64, 8, 4),
    described(128, 256, 64, 8, 4, swapped=True),
]
_TO_512 = [
    described(64, 128, 64, 4, 4),
    described(64, 128, 128, 4, 4),
    described(64, 256, 64, 4, 4),
    described(128, 64, 64, 4, 4),
    described(128, 64, 128, 4, 4),
    described(128, 128, 64, 4, 4),
    described(128, 128, 64, 8, 3),
    described(128, 128, 64, 8, 4),
    described(128, 256, 64, 8, 4, swapped=True),
    described(256, 64, 64, 8, 4),
    described(256, 128, 64, 8, 4),
]


def swept(num_rows: int, num_cols: int) -> list[ProductTile]:
    """Return the table's tile for a product, and others worth timing."""
    if IS_DRY:
        return _DRY
    found = [linear_tile(num_rows, num_cols, DTYPE)]
    if 64 < num_rows <= 512:
        found += _TO_128 if num_rows <= 128 else _TO_512
    return list(dict.fromkeys(found))


def every_tile() -> list[ProductTile]:
    """Return what `swept` returns for any shape and number of rows."""
    rows = (1, 64, 128, 512, 2048)
    return list(dict.fromkeys(one for m in rows for n, _ in SHAPES.values() for one in swept(m, n)))


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Return values that a process of its own can draw again."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, device=DEVICE, generator=generator).mul_(scale).to(DTYPE)


def inputs(name: str, num_rows: int, copies: int = 1) -> tuple[Tensor, list[Tensor]]:
    """Return x, with rows behind it that fill any tile, and weights."""
    cols, depth = SHAPES[name]
    weights = [random(cols, depth, seed=2 + i, scale=depth**-0.5) for i in range(copies)]
    return random(num_rows + _BEHIND, depth, seed=1)[:num_rows], weights


def run_tile(of: ProductTile, x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write ``x @ weight.T`` to ``out``, of contiguous matrices."""
    multiply(x[:, None], weight[None], None, out[:, None], of)


def run_way(x: Tensor, weight: Tensor, way: ProductTile, dtype: torch.dtype) -> Tensor:
    out = torch.empty((len(x), len(weight)), dtype=dtype, device=x.device)
    run_tile(way, x, weight, out)
    return out


@dataclass(frozen=True, slots=True)
class Build:
    """A kernel to compile before it is timed.

    Attributes:
        tile: Its tile.
        dtype: Of its result.
        gated: Whether it computes gate, up and their activation.
        overlaps: Whether it overlaps with the kernel before it.
    """

    tile: ProductTile
    dtype: torch.dtype = DTYPE
    gated: bool = False
    overlaps: bool = True

    def run(self) -> None:
        """Compile it into Triton's cache, which processes share."""
        x, weight = random(16 + _BEHIND, 1024, seed=1)[:16], random(1024, 1024, seed=2)
        with nullcontext() if self.overlaps else without_overlap():
            if self.gated:
                out = torch.empty((16, 512), dtype=self.dtype, device=DEVICE)
                multiply_gated(x, weight, None, out, self.tile)
            else:
                run_way(x, weight, self.tile, self.dtype)
        torch.cuda.synchronize()


def compile_all(builds: list[Build]) -> dict[str, Any]:
    """Compile in several processes."""
    if IS_DRY:
        return {"compiled": 0}
    builds = sorted(dict.fromkeys(builds), key=lambda b: b.tile.rows * b.tile.cols, reverse=True)
    context = multiprocessing.get_context("spawn")
    failed = {}
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=context) as pool:
        for build, result in [(build, pool.submit(build.run)) for build in builds]:
            if error := result.exception():
                failed[f"{named(build.tile)} {build.gated}"] = str(error)[:300]
    return {"compiled": len(builds) - len(failed), **failed}


def least_us(num_bytes: int, num_flops: int, peak: dict[str, float]) -> float:
    """Return the time of copying, or of multiplying, as much: whichever is longer."""
    return max(num_bytes / peak["copy_gb_per_s"] / 1e3, num_flops / peak["tflop_per_s"] / 1e6)


def named(of: ProductTile) -> str:
    tuning = of.tuning
    text = "tma " if of.described else ""
    width = of.cols + of.extra_cols
    text += f"{of.rows}x{width}x{of.depth} w{tuning.warps} s{tuning.stages}"
    text += "" if of.group == 8 else f" g{of.group}"
    return text + (" swapped" if of.swapped else "")


def choose_cublas(library: str, *, may_split: bool) -> None:
    """Choose the library, and whether it may split K and add the parts in bf16."""
    if IS_DRY:
        return
    torch.backends.cuda.preferred_blas_library(library)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (may_split, may_split)
