"""Operations on CUDA give what they give on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdserve.kernels.cases.case import Case
from pdserve.kernels.cases.table import OPERATIONS, OperationSpec
from pdserve.kernels.registry import kernels_on

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
ROWS = [
    pytest.param(op, case, dtype, id=f"{op.name}-{case.name}-{str(dtype).split('.')[1]}")
    for op in OPERATIONS.values()
    for case in op.cases()
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("op", "case", "dtype"), ROWS)
def test_an_operation_on_cuda_is_that_of_the_cpu(
    cuda: torch.device, op: OperationSpec, case: Case, dtype: torch.dtype
) -> None:
    wanted_args, args = case.make(dtype, CPU), case.make(dtype, cuda)
    wanted, found = op.reference(*wanted_args), op.of(kernels_on(cuda))(*args)
    assert_close(op, dtype, found, wanted)
    for position in op.mutates:
        assert_close(op, dtype, args[position], wanted_args[position])


def assert_close(op: OperationSpec, dtype: torch.dtype, found: Any, wanted: Any) -> None:
    tolerance = op.tolerance[dtype]
    torch.testing.assert_close(
        found, wanted, rtol=tolerance, atol=tolerance, check_device=False, equal_nan=True
    )
