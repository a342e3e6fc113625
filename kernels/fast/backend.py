"""The CUDA backend with faster members, whose bits depend on the batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from pdserve.kernels.backend import KernelBackend, hash_of_sources
from pdserve.kernels.cuda import backend as exact_backend
from pdserve.kernels.fast.attention import Flash, find_flash, with_flash
from pdserve.kernels.reference.halves import Attention
from pdserve.kernels.registry import completed


def load(device: torch.device, progress: Callable[[str], None]) -> KernelBackend:
    """Load the exact backend and the faster members, and report them.

    Raises:
        KernelsUnavailableError: As for the exact backend.
    """
    return faster(exact_backend.load(device, progress), find_flash(device), progress)


def faster(
    exact: KernelBackend, flash: Flash | str, progress: Callable[[str], None]
) -> KernelBackend:
    """Return the exact backend with cuBLAS for some products, and FA3 for prompts if it is there.

    Args:
        exact: The backend of CUDA devices.
        flash: FA3, or why it is not available.
        progress: See `load`.
    """
    from pdserve.kernels.fast.linear import LEAST_ROWS, MOST_ROWS, FastLinear

    libraries = f"torch {torch.__version__}"
    half, attention = exact.attention, exact.paged_attention
    prompts = f"by Triton kernels ({flash})"
    if isinstance(flash, Flash):
        # Padded steps: a request whose tokens have no context FA3 was never given on a device. So
        # a capture launches the kernels that the run before it has compiled.
        half = partial(Attention, padded=completed(exact))
        attention = with_flash(flash.attend, exact.paged_attention)
        libraries += f", FA3 {flash.version}"
        prompts = f"by FA3 {flash.version}"
    told = (
        f"linear layers of {LEAST_ROWS} to {MOST_ROWS:,} rows by cuBLAS (torch "
        f"{torch.__version__}), attention of prompts {prompts}"
    )
    progress(f"numerics fast: {told}")
    both = exact.sources + hash_of_sources(Path(__file__).resolve().parent)
    return replace(
        exact,
        name=f"{exact.name} fast",
        description=f"{exact.description}; {told}",
        sources=hashlib.sha256(both.encode()).hexdigest(),
        compiler=f"{exact.compiler}, {libraries}",
        linear=FastLinear,
        paged_attention=attention,
        attention=half,
    )
