"""The only place that launches Triton kernels.

Triton's interpreter runs the same launches on a CPU if ``TRITON_INTERPRET=1`` was set before the
first kernel was defined.

A number that differs from step to step, such as a count of tokens, is named in
``@triton.jit(do_not_specialize=[...])`` by the kernel with this argument, because Triton compiles a
kernel again for a 1 and for a multiple of 16.

A kernel may *overlap* with the one before it on its stream (CUDA's programmatic dependent launch):
its programs start on the device while the last ones of the other still run, and wait there. Such a
kernel takes ``OVERLAPS: tl.constexpr`` and begins, in every program and before it reads or writes
anything, with ``wait_for_previous(OVERLAPS)``: a program that ended without waiting could let the
next kernel start before the previous one has ended. Its `Tuning` says whether it overlaps, which
may differ from tile to tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from pdserve.kernels.cuda.target import Architecture, target

_INT32 = 1 << 31


@dataclass(frozen=True, slots=True)
class Tuning:
    """How to compile one program of a kernel; this never changes the bits of a result.

    Attributes:
        warps: Warps of a program.
        stages: Depth to which loads of a loop are prefetched.
        overlaps: Whether the kernel itself waits for the previous one.
        registers: Registers that a thread starts with; None: as many as it needs.
    """

    warps: int
    stages: int = 1
    overlaps: bool = False
    registers: int | None = None


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, tuning: Tuning, **constants: Any
) -> None:
    """Launch ``kernel`` on the current stream; an empty grid launches nothing.

    Products and sums are never implicitly contracted to fused multiply-adds, because the default,
    and so the bits, differ between Triton's versions.

    Args:
        kernel: A ``triton.jit`` or ``gluon.jit`` function.
        grid: Programs per axis.
        args: The kernel's arguments, tensors and numbers, in order.
        constants: Its ``tl.constexpr`` arguments, by name.
    """
    if 0 in grid:
        return
    if tuning.overlaps or "OVERLAPS" in kernel.arg_names:
        overlaps = tuning.overlaps and _overlapping and _can_overlap(target().architecture)
        constants |= {"OVERLAPS": overlaps, "launch_pdl": overlaps}
    key = kernel.fn, tuning, *constants.items(), *map(_kind, args)
    known = _compiled.get(key)
    if known is not None:
        compiled, rest = known
        compiled[(*grid, 1, 1)[:3]](*args, *rest)
        return
    compiled = kernel[grid](
        *args,
        **constants,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        maxnreg=tuning.registers,
        enable_fp_fusion=False,
    )
    if compiled is not None:  # not interpreted
        _compiled[key] = compiled, [constants[name] for name in kernel.arg_names[len(args) :]]


_compiled: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}
"""The compiled kernel of a launch, and its constants in the kernel's form. Triton would find both
itself, but take several times as long."""


def _kind(arg: Any) -> object:
    """Return everything in an argument for which Triton may compile another kernel."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, int):
        return arg == 1, arg % 16 == 0, -_INT32 <= arg < _INT32
    if isinstance(arg, float) or arg is None:
        return type(arg)
    return arg.base.dtype, *arg.block_shape  # by descriptor


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr) -> None:
    """Let the next kernel's programs start, and wait until the previous kernel has ended."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


_overlapping = True


@contextmanager
def without_overlap() -> Iterator[None]:
    """Make kernels launched inside the block start when the previous one has ended."""
    global _overlapping  # noqa: PLW0603
    before, _overlapping = _overlapping, False
    try:
        yield
    finally:
        _overlapping = before


@cache
def _can_overlap(architecture: Architecture) -> bool:
    return architecture.is_hopper_like and not is_interpreted()


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU."""
    return bool(knobs.runtime.interpret)
