"""The only place that launches Triton kernels.

Triton's interpreter runs the same launches on a CPU, where ``TRITON_INTERPRET=1`` was set before
the first kernel was defined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton import knobs


@dataclass(frozen=True, slots=True)
class Tuning:
    """How one program of a kernel is compiled; its numbers never change the bits of a result.

    Attributes:
        warps: Warps of a program.
        stages: Depth to which loads of a loop are prefetched.
    """

    warps: int
    stages: int = 1


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, tuning: Tuning, **constants: Any
) -> None:
    """Launch ``kernel`` on the current stream; an empty grid launches nothing.

    Products and sums are never contracted to fused multiply-adds behind the kernel's back: the
    default of Triton's versions differs, and with it the bits.

    Args:
        kernel: A ``triton.jit`` function.
        grid: Programs per axis.
        args: The kernel's arguments, tensors and numbers, in order.
        constants: Its ``tl.constexpr`` arguments, by name.
    """
    if 0 in grid:
        return
    kernel[grid](
        *args,
        **constants,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        enable_fp_fusion=False,
    )


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU."""
    return bool(knobs.runtime.interpret)
