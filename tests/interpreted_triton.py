"""Triton in its interpreter, in a test process of a machine without a CUDA device.

Triton reads ``TRITON_INTERPRET`` when it is imported (its own functions), when a kernel is defined
and when one is launched. `transformers` imports it too, hence the import here, before any test's;
kernels are defined and launched by `tests/kernels/cuda` alone. The environment is left as it was.
With a device nothing is interpreted: the tests of `tests/gpu` run the kernels on it.
"""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def interpreting() -> Iterator[None]:
    """Have kernels that are defined and launched meanwhile be interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield


def has_driver() -> bool:
    """Whether this machine may have a CUDA device; torch, which knows, takes seconds to import."""
    nodes = ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia")
    return shutil.which("nvidia-smi") is not None or any(Path(node).exists() for node in nodes)


def import_interpreter() -> bool:
    """Import Triton as an interpreter.

    Returns:
        Whether kernels can be interpreted in this process.
    """
    if has_driver():
        return False
    with interpreting():
        try:
            from triton.language import sum as of_triton
            from triton.runtime.interpreter import InterpretedFunction
        except ImportError:
            return False
    return isinstance(of_triton, InterpretedFunction)


CAN_INTERPRET = import_interpreter()
