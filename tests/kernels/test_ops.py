"""Every implementation of every operation gives what its reference gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdserve.kernels.cases import Case
from pdserve.kernels.cpu.native import NativeKernels
from pdserve.kernels.ops import OPS, Op
from tests.kernels.builds import NEEDS, kernels_for

# The first test of each build waits for a compiler.
pytestmark = pytest.mark.timeout(300)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [
    pytest.param(op, case, dtype, id=f"{op.name}-{case.name}-{str(dtype).split('.')[1]}")
    for op in OPS.values()
    for case in op.cases()
    for dtype in DTYPES
]


@pytest.fixture(scope="session", params=NEEDS)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    """The kernels built for this CPU, and those without its best instructions."""
    return kernels_for(request.param)


@pytest.mark.parametrize(("op", "case", "dtype"), ROWS)
def test_native_agrees_with_reference(
    kernels: NativeKernels, op: Op[..., Any], case: Case, dtype: torch.dtype
) -> None:
    expected_args, args = case.make(dtype, CPU), case.make(dtype, CPU)
    expected, result = op.reference(*expected_args), op.cpu(kernels, *args)
    _assert_close(op, dtype, result, expected)
    for position in op.mutates:
        _assert_close(op, dtype, args[position], expected_args[position])


def _assert_close(op: Op[..., Any], dtype: torch.dtype, result: Any, expected: Any) -> None:
    tolerance = op.tolerance[dtype]
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
