"""The backend of CPUs: C++ kernels compiled at first use for the CPU that runs them.

The number of threads is ``torch.get_num_threads()``, read at every call.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from pdserve.kernels.backend import KernelBackend, KernelsUnavailableError, hash_of_sources
from pdserve.kernels.cpu import build
from pdserve.kernels.cpu.attention import AttentionOps
from pdserve.kernels.cpu.digest import DigestOps
from pdserve.kernels.cpu.halves import make_attention, make_mlp
from pdserve.kernels.cpu.linear import CpuHeads, CpuLinear
from pdserve.kernels.cpu.marshal import open_library
from pdserve.kernels.cpu.moe import CpuExperts, RouterOps
from pdserve.kernels.cpu.packing import Packing
from pdserve.kernels.cpu.rows import RowOps
from pdserve.kernels.cpu.sampling import ChoiceOps
from pdserve.kernels.ops import SamplingOps

_UNITS = ("by fp32 FMA", "by VDPBF16PS", "on AMX tiles")


def load(device: torch.device, progress: Callable[[str], None]) -> KernelBackend:
    """Load the kernels; build them if no process on this machine has.

    Raises:
        KernelsUnavailableError: There is no compiler, or it failed.
    """
    try:
        if not build.is_built():
            progress("compiling the CPU kernels, once per machine (about 10 s)")
        return from_library(build.library())
    except build.BuildError as error:
        raise KernelsUnavailableError(str(error)) from error
    except OSError as error:
        raise KernelsUnavailableError(
            f"{error}: remove it, or set XDG_CACHE_HOME to a folder that is not mounted noexec"
        ) from error


def from_library(path: Path) -> KernelBackend:
    """Return the backend of a library from `build.library`."""
    library = open_library(path)
    packing = Packing(library)
    rows, attention, digest = RowOps(library), AttentionOps(library), DigestOps(library)
    choice = ChoiceOps(library)
    unit = _UNITS[library.pd_bf16_unit()]
    return KernelBackend(
        name="cpu",
        description=f"C++ kernels for this CPU, bf16 {unit}: {path}",
        arch=f"{platform.machine()}, bf16 {unit}",
        sources=hash_of_sources(build.SOURCE_DIR),
        compiler=library.pd_compiler().decode(),
        rms_norm=rows.rms_norm,
        add_rms_norm=rows.add_rms_norm,
        silu_and_mul=rows.silu_and_mul,
        gelu_and_mul=rows.gelu_and_mul,
        rope_and_cache=attention.rope_and_cache,
        paged_attention=attention.paged_attention,
        route=RouterOps(library).route,
        rope_and_latent=attention.rope_and_latent,
        latent_attention=attention.latent_attention,
        kv_digests=digest.kv_digests,
        gather_chunks=digest.gather_chunks,
        scatter_chunks=digest.scatter_chunks,
        linear=partial(CpuLinear, packing),
        heads=partial(CpuHeads, packing),
        experts=partial(CpuExperts, packing),
        mlp=partial(make_mlp, library),
        attention=partial(make_attention, library),
        sampling=SamplingOps(draw=choice.draw, describe=choice.describe),
    )
