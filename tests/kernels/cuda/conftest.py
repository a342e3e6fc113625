"""CUDA kernels in Triton's interpreter: defined here, for the whole process, and launched so.

No other test but those of `tests/gpu`, which need a device, imports `pdserve.kernels.cuda`; and
where there is a device this folder is not collected.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

import pytest

import pdserve.kernels.cuda
from tests.interpreted_triton import CAN_INTERPRET, interpreting
from tests.kernels.cuda.mma_model import multiply_add, multiply_add_one_by_one

if TYPE_CHECKING:
    from collections.abc import Iterator

if CAN_INTERPRET:
    with interpreting():
        for module in pkgutil.iter_modules(pdserve.kernels.cuda.__path__, "pdserve.kernels.cuda."):
            importlib.import_module(module.name)
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with interpreting():
        yield


@pytest.fixture
def hopper_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter multiply as a Hopper GPU does, bit for bit.

    Its own products are those of a BLAS, whose order of summation depends on the number of rows.
    """

    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(_: Any, a: Any, b: Any, c: Any, *__: Any) -> TensorHandle:
        is_half = a.dtype.scalar.primitive_bitwidth == 16
        product = multiply_add if is_half else multiply_add_one_by_one
        return TensorHandle(product(a.data, b.data, c.data), c.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
