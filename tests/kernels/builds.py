"""The kernels as built for this CPU, and for lesser ones that it can stand in for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.kernels.backend import REFERENCE, KernelBackend
from pdserve.kernels.cpu import build
from pdserve.kernels.cpu.backend import from_library
from pdserve.kernels.registry import kernels_on

CPU = torch.device("cpu")
KERNELS = kernels_on(CPU)
"""What models run on here: the reference where there is no compiler."""

needs_native = pytest.mark.skipif(KERNELS is REFERENCE, reason="no compiler")

ZEN_3 = "-march=znver3"
"""AVX2, for which GCC leaves fused products out of some loops unless they are asked for."""

NEEDS = {
    build.NATIVE: "",
    "-march=cooperlake": "avx512_bf16",  # pairs of bf16 in AVX-512, but no tiles
    "-march=x86-64-v4": "avx512vl",  # bf16 as fp32 in AVX-512
    "-march=x86-64-v3": "avx2",
    ZEN_3: "avx2",
}
"""The targets, and the feature in /proc/cpuinfo that tells whether their code runs here."""

TARGETS = [
    pytest.param(target, marks=[] if target == build.NATIVE else pytest.mark.slow)
    for target in NEEDS
    if target != ZEN_3
]
"""Most of them as parameters: the quick loop runs what this CPU runs."""


def kernels_for(target: str) -> KernelBackend:
    """Return the kernels built for `target`, or skip the test where they cannot be built or run."""
    info = Path("/proc/cpuinfo")
    if NEEDS[target] and NEEDS[target] not in (info.read_text() if info.exists() else ""):
        pytest.skip(f"this CPU has no {NEEDS[target]}")
    try:
        return from_library(build.library(target))
    except build.NoCompilerError as error:
        pytest.skip(str(error))
