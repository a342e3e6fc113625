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
def ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter multiply as tensor cores do: 16 elements of k at a time, ascending.

    Its own products are those of a BLAS, whose order of summation depends on the number of rows.
    """

    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> TensorHandle:
        found = d.data
        for k in range(0, a.data.shape[1], 16):
            part = a.data[:, k : k + 16].astype("f8") @ b.data[k : k + 16].astype("f8")
            found = (found + part).astype(d.data.dtype)
        return TensorHandle(found, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
