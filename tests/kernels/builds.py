"""The kernels as built for this CPU, and for others: run as they are, or emulated."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path
from typing import NamedTuple

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

TILES = "-march=sapphirerapids"
ZEN_3 = "-march=znver3"
"""AVX2, for which GCC leaves fused products out of some loops unless they are asked for."""


class Build(NamedTuple):
    """What a library is built for.

    Attributes:
        feature: The word in /proc/cpuinfo that tells whether its code runs here.
        emulated: Flags that build the same code for AVX2, with what `emulated.h` has instead.
    """

    feature: str = ""
    emulated: tuple[str, ...] | None = None


BUILDS = {
    build.NATIVE: Build(),
    TILES: Build("amx_bf16", ("-DEMULATED_BF16", "-DEMULATED_AMX")),
    "-march=cooperlake": Build("avx512_bf16", ("-DEMULATED_BF16",)),  # pairs of bf16, no tiles
    "-march=x86-64-v4": Build("avx512vl", ()),  # bf16 as fp32 in AVX-512
    "-march=x86-64-v3": Build("avx2"),
    ZEN_3: Build("avx2"),
}

INSTEAD = Path(__file__).with_name("emulated.h")


def marks_of(target: str) -> list[pytest.MarkDecorator]:
    """The quick loop runs what this CPU is best at; the night, that once more and emulations."""
    if target == build.NATIVE:
        return []
    feature = BUILDS[target].feature
    is_again = feature == "avx2" and not _has("avx512vl")
    return [pytest.mark.slow if _has(feature) and not is_again else pytest.mark.matrix]


def kernels_for(target: str) -> KernelBackend:
    """Return the kernels built for `target`, or skip the test where they cannot be built or run."""
    built = BUILDS[target]
    if not _has(built.feature):
        if built.emulated is None or not _has("avx2"):
            pytest.skip(f"this CPU has no {built.feature}")
        version = hashlib.sha256(INSTEAD.read_bytes()).hexdigest()[:8]
        # Else GCC tells that vectors of 64 bytes are passed in memory.
        flags = ["-march=x86-64-v3", "-O1", "-Wno-psabi", f"-DEMULATED={version}", *built.emulated]
        target = shlex.join([*flags, "-include", str(INSTEAD)])
    try:
        return from_library(build.library(target))
    except build.NoCompilerError as error:
        pytest.skip(str(error))


def _has(feature: str) -> bool:
    info = Path("/proc/cpuinfo")
    return feature in (info.read_text() if info.exists() else "")


TARGETS = [pytest.param(target, marks=marks_of(target)) for target in BUILDS if target != ZEN_3]
"""Most of them as parameters."""
