"""Products of Llama-3.1-8B's shapes: which tiles give equal bits, and whether cuBLAS does.

Every tile of ours against one of them, in fp32 before the last rounding, and cuBLAS against the
same, with and without what lets it split K; a workspace is chosen by the environment, hence in
processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.timing import IS_DRY, Experiments, sized
from benchmarks.gpu.ways import (
    BASE,
    DTYPE,
    SHAPES,
    Build,
    choose_cublas,
    compile_all,
    every_tile,
    inputs,
    named,
    run_way,
)

ROWS = sized((1, 2, 16, 64, 128, 2048), (1, 2, 5))

# Library, and whether it may split K: only cuBLASLt can be told not to.
_CUBLAS = (("cublas", True), ("cublaslt", True), ("cublaslt", False))
_WORKSPACES: dict[str, dict[str, str]] = {
    "default workspace": {},
    "small workspace": {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"},
}


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
    x, (weight,) = inputs(name, max(ROWS))
    base = run_way(x, weight, BASE, torch.float32)
    exact = (x[:16].double() @ weight.double().T).float()
    equal, differing = [], {}
    for way in every_tile():
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
        x, (weight,) = inputs(name, max(ROWS))
        for dtype in (DTYPE, torch.float32):
            result = run_way(x, weight, BASE, dtype)
            digests[f"{name} {dtype}"] = row_digests(result)
    return digests


def cublas_digests() -> dict[str, dict[str, dict[int, Tensor]]]:
    """Return cuBLAS's digests: way -> shape and dtype -> rows -> digests."""
    found: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name in SHAPES:
        x, (weight,) = inputs(name, max(ROWS))
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
            [sys.executable, "-m", "benchmarks.gpu.bits", str(file)],
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


def run(limit_s: float) -> dict[str, Any]:
    """Compare tiles, then cuBLAS."""
    experiments = Experiments("bits", limit_s)
    builds = [Build(of, dtype) for of in (BASE, *every_tile()) for dtype in (DTYPE, torch.float32)]
    experiments.run("compile", lambda: compile_all(builds))
    for name in SHAPES:
        experiments.run(f"bits {name}", lambda name=name: tiles_against_base(name))
    digests: dict[str, Tensor] = {}
    experiments.run("digests", lambda: digests.update(base_digests()))
    for workspace in _WORKSPACES:
        experiments.run(
            f"cublas {workspace}",
            lambda workspace=workspace: cublas_against_base(workspace, digests),
        )
    return experiments.results


if __name__ == "__main__":
    torch.save(cublas_digests(), sys.argv[1])
