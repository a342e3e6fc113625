"""Every implementation of every operation gives what its reference gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdserve.kernels.backend import KernelBackend
from pdserve.kernels.cases.case import Case
from pdserve.kernels.cases.table import OPERATIONS, OperationSpec
from tests.kernels.builds import CPU, TARGETS, kernels_for

# The first test of each build waits for a compiler.
pytestmark = pytest.mark.timeout(300)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# float16 goes the ways of bfloat16, with another conversion.
MARKS = {torch.float16: pytest.mark.slow}
ROWS = [
    pytest.param(
        *(op, case, dtype),
        id=f"{op.name}-{case.name}-{str(dtype).split('.')[1]}",
        marks=MARKS.get(dtype, ()),
    )
    for op in OPERATIONS.values()
    for case in op.cases()
    for dtype in DTYPES
]


@pytest.fixture(scope="session", params=TARGETS)
def kernels(request: pytest.FixtureRequest) -> KernelBackend:
    """The kernels built for this CPU, and those without its best instructions."""
    return kernels_for(request.param)


@pytest.mark.parametrize(("op", "case", "dtype"), ROWS)
def test_native_agrees_with_reference(
    kernels: KernelBackend, op: OperationSpec, case: Case, dtype: torch.dtype
) -> None:
    expected_args, args = case.make(dtype, CPU), case.make(dtype, CPU)
    expected, result = op.reference(*expected_args), op.of(kernels)(*args)
    _assert_close(op, dtype, result, expected)
    for position in op.mutates:
        _assert_close(op, dtype, args[position], expected_args[position])


def _assert_close(op: OperationSpec, dtype: torch.dtype, result: Any, expected: Any) -> None:
    tolerance = op.tolerance[dtype]
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
