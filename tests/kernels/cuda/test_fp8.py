"""Weights that stay in FP8 on a device, in the interpreter, which has no bf16: widened bits."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.backend import KernelBackend
from pdserve.kernels.cuda.experts import CudaExperts
from pdserve.kernels.cuda.linear import CudaLinear
from pdserve.kernels.fp8 import WHOLE_ROW, Fp8Weight, NotANumberError
from tests.kernels.fp8_weights import CPU, experts, linears, routed, scaled

KERNELS = KernelBackend(name="cuda", description="", linear=CudaLinear, experts=CudaExperts)


# Tiles of kept and of widened weights differ in depth, which only the interpreter's own sums show.
@pytest.mark.usefixtures("hopper_products")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("run", [128, WHOLE_ROW])
@pytest.mark.parametrize("num_rows", [3, 70])
def test_a_layer_has_the_bits_of_a_widened_weight(
    num_rows: int, run: int, dtype: torch.dtype
) -> None:
    kept, widened = linears(KERNELS, scaled(72, 200, run), dtype)
    x = torch.randn(num_rows, 200).to(dtype)
    assert torch.equal(kept(x), widened(x))


@pytest.mark.slow
def test_gated_in_one_launch_it_has_them_too() -> None:
    kept, widened = linears(KERNELS, scaled(64, 128, 128), torch.float16)
    assert isinstance(kept, CudaLinear)
    assert isinstance(widened, CudaLinear)
    x = torch.randn(5, 128).half()
    assert torch.equal(kept.call_gated(x), widened.call_gated(x))


@pytest.mark.slow
@pytest.mark.parametrize("run", [128, WHOLE_ROW])
def test_experts_have_the_bits_of_widened_weights_and_move_with_their_scales(run: int) -> None:
    kept, widened = experts(KERNELS, (3, 160, 144), run, torch.float16)
    x, ids, weights = routed(9, 3, 160)
    expected = widened(x.half(), ids, weights)
    assert torch.equal(kept(x.half(), ids, weights), expected)
    moved = kept.read(0).clone()
    kept.write(0, kept.read(2))
    kept.write(2, moved)
    assert torch.equal(kept(x.half(), 2 - ids, weights), expected)


def test_a_run_that_tiles_do_not_divide_is_widened() -> None:
    kept, widened = linears(KERNELS, scaled(16, 96, 32), torch.float16)
    assert torch.equal(kept.unpack(), widened.unpack())


def test_nan_is_refused() -> None:
    weight = scaled(16, 64)
    weight.numbers.view(torch.uint8)[3, 5] = 0xFF
    layer = CudaLinear(16, 64, dtype=torch.float16, device=CPU)
    with pytest.raises(NotANumberError):
        layer.write(0, Fp8Weight(weight.numbers, weight.scales, WHOLE_ROW))
