"""Products on the CPU's matrix unit: the order of their sums, and processes that may not use it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdserve.kernels.backend import KernelBackend
from tests.kernels.builds import KERNELS, TILES, kernels_for, marks_of
from tests.python import run_python

# The first waits for a compiler.
pytestmark = [*marks_of(TILES), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def kernels() -> KernelBackend:
    """This CPU's with its matrix unit, or with one that is emulated."""
    found = kernels_for(TILES)
    assert "AMX" in found.description
    return found


def _product(kernels: KernelBackend, x: Tensor, weight: Tensor) -> Tensor:
    return kernels.linear_of(weight, out_dtype=torch.float32)(x)


def _sum_as_tiles_do(x: Tensor, weight: Tensor) -> Tensor:
    """Sum in the order that Intel's manual gives for TDPBF16PS, in fp32, a rounding per step."""
    total = torch.zeros(len(x), len(weight))
    for first in range(0, x.shape[1], 32):
        halves = torch.zeros(2, len(x), len(weight))
        for k in range(first, first + 32):
            # Products of two bf16 are exact in fp32.
            halves[k % 2] += x[:, k, None].float() * weight[None, :, k].float()
        total += halves[0] + halves[1]
    return total


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 31, 70])
def test_sums_are_in_the_documented_order(kernels: KernelBackend, rows: int) -> None:
    x, weight = torch.randn(rows, 640).bfloat16(), torch.randn(48, 640).bfloat16()

    assert torch.equal(_product(kernels, x, weight), _sum_as_tiles_do(x, weight))


def _bf16_at_the_edges(*shape: int) -> Tensor:
    """Denormals, zeros of both signs, numbers whose products are denormal, and a few large ones."""
    exponent = torch.tensor([0, 1, 20, 50, 60, 63, 64, 65, 70, 75, 127])
    bits = exponent[torch.randint(len(exponent), shape)] << 7 | torch.randint(128, shape)
    bits[torch.rand(shape) < 0.1] = 0
    bits |= torch.randint(2, shape) << 15
    return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("rows", [2, 3, 16, 17, 40])
def test_a_row_at_the_edges_of_fp32_is_the_same_in_any_batch(
    kernels: KernelBackend, rows: int
) -> None:
    x, weight = _bf16_at_the_edges(rows, 128), _bf16_at_the_edges(64, 128)
    weight[:20, 64:] = 0  # so that some sums stay denormal
    x[:, :64] = _bf16_at_the_edges(rows, 64) * 1e-30
    alone = torch.cat([_product(kernels, row, weight) for row in x.split(1)])

    assert torch.equal(_product(kernels, x, weight).view(torch.int32), alone.view(torch.int32))


@pytest.mark.parametrize("rows", [2, 3, 16, 40])
def test_infinities_and_nans_reach_the_same_elements_in_any_batch(
    kernels: KernelBackend, rows: int
) -> None:
    x, weight = torch.randn(rows, 96).bfloat16(), torch.randn(40, 96).bfloat16()
    x[rows // 2, 5] = float("inf")
    weight[7, 5], weight[8, 6], weight[9, 5] = 0, float("nan"), float("-inf")
    alone = torch.cat([_product(kernels, row, weight) for row in x.split(1)])

    torch.testing.assert_close(_product(kernels, x, weight), alone, rtol=0, atol=0, equal_nan=True)


def test_denormals_are_flushed_in_products_alone(kernels: KernelBackend) -> None:
    smallest = torch.tensor([[1e-40]])
    layer = kernels.linear_of(torch.eye(32).bfloat16(), out_dtype=torch.float32)
    layer(torch.ones(1, 32).bfloat16())

    assert smallest.item() > 0
    assert (smallest * 1.0).item() > 0


@pytest.mark.skipif("AMX" not in KERNELS.description, reason="no AMX, or no compiler")
def test_a_process_that_is_refused_tiles_computes_without_and_stays_invariant() -> None:
    # Linux refuses them where a signal stack has no room for their contents.
    code = (
        "import ctypes\n"
        "class Stack(ctypes.Structure):\n"
        "    _fields_ = [('sp', ctypes.c_void_p), ('flags', ctypes.c_int), ('n', ctypes.c_long)]\n"
        "memory = ctypes.create_string_buffer(4096)\n"
        "small = Stack(ctypes.addressof(memory), 0, 4096)\n"
        "assert ctypes.CDLL(None).sigaltstack(ctypes.byref(small), None) == 0\n"
        "import torch\n"
        "from pdserve.kernels.registry import kernels_on\n"
        "kernels = kernels_on(torch.device('cpu'))\n"
        "x, weight = torch.randn(50, 70).bfloat16(), torch.randn(40, 70).bfloat16()\n"
        "layer = kernels.linear_of(weight, out_dtype=torch.float32)\n"
        "torch.testing.assert_close(layer(x), x.float() @ weight.float().T)\n"
        "assert torch.equal(torch.cat([layer(row) for row in x.split(1)]), layer(x))\n"
        "assert torch.equal(layer.unpack(), weight)\n"
        "print('AMX' in kernels.description)\n"
    )
    assert run_python("-c", code).stdout.strip() == "False"
