"""CUDA kernels in Triton's interpreter: defined here, for the whole process, and launched so.

No other test but those of `tests/gpu`, which need a device, imports `pdserve.kernels.cuda`; and
where there is a device this folder is not collected.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

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
