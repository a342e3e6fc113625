"""What the products of linear layers and experts become on Hopper, at real sizes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.kernels.cuda import gate

META = torch.device("meta")


@dataclass(frozen=True)
class Wanted:
    """Most registers, fewest programs an SM, and the instruction that multiplies."""

    registers: int
    programs: int
    opcode: str


ROWS = {
    "linear 1x4096": Wanted(80, 3, "HMMA.16816.F32.BF16"),
    "linear 16x28672": Wanted(72, 2, "HMMA.16816.F32.BF16"),
    "linear 1x128256 fp32": Wanted(72, 2, "HMMA.16816.F32.BF16"),
    "linear 64x4096": Wanted(104, 2, "HGMMA.64x64x16.F32.BF16"),
    "linear 512x4096": Wanted(128, 1, "HGMMA.64x128x16.F32.BF16"),
    "linear 2048x4096": Wanted(208, 1, "HGMMA.64x256x16.F32.BF16"),
    "linear fp32": Wanted(104, 4, "FFMA"),
    "gated 1": Wanted(80, 2, "HMMA.16816.F32.BF16"),
    "gated 64": Wanted(144, 2, "HGMMA.64x64x16.F32.BF16"),
    "gated 2048": Wanted(240, 1, "HGMMA.64x128x16.F32.BF16"),
    "heads 5": Wanted(80, 2, "HMMA.16816.F32.BF16"),
    "gate_up 1": Wanted(96, 2, "HMMA.16816.F32.BF16"),
    "gate_up 128": Wanted(160, 1, "HGMMA.64x64x16.F32.BF16"),
    "gate_up 2048": Wanted(240, 1, "HGMMA.64x128x16.F32.BF16"),
    "down 1": Wanted(80, 2, "HMMA.16816.F32.BF16"),
    "down 128": Wanted(112, 2, "HGMMA.64x64x16.F32.BF16"),
    "down 2048": Wanted(136, 1, "HGMMA.64x128x16.F32.BF16"),
}


def calls() -> gate.Calls:
    from pdserve.kernels.cuda.linear import CudaHeads, CudaLinear
    from pdserve.kernels.cuda.moe import CudaExperts
    from pdserve.kernels.cuda.router import route
    from pdserve.kernels.reference.moe import RoutingRule

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    def linear(
        m: int,
        n: int,
        dtype: torch.dtype = torch.bfloat16,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        layer = CudaLinear(n, 4096, dtype=dtype, device=META, out_dtype=out_dtype)
        layer(empty(m, 4096, dtype=dtype))

    def gated(m: int) -> None:
        layer = CudaLinear(28672, 4096, dtype=torch.bfloat16, device=META)
        layer.call_gated(empty(m, 4096))

    def experts(tokens: int) -> None:
        layer = CudaExperts(8, 4096, 14336, dtype=torch.bfloat16, device=META)
        ids, weights = empty(tokens, 2, dtype=torch.int64), empty(tokens, 2, dtype=torch.float32)
        layer(empty(tokens, 4096), ids, weights)

    rule = RoutingRule(8, True, True, 2.5, 8, 4, True)
    return {
        "linear 1x4096": lambda: linear(1, 4096),
        "linear 16x28672": lambda: linear(16, 28672),
        "linear 1x128256 fp32": lambda: linear(1, 128256, out_dtype=torch.float32),
        "linear 64x4096": lambda: linear(64, 4096),
        "linear 512x4096": lambda: linear(512, 4096),
        "linear 2048x4096": lambda: linear(2048, 4096),
        "linear fp32": lambda: linear(3, 4096, torch.float32),
        "gated 1": lambda: gated(1),
        "gated 64": lambda: gated(64),
        "gated 2048": lambda: gated(2048),
        "heads 5": lambda: CudaHeads(empty(16, 512, 128))(empty(5, 16, 192)[..., :128]),
        "experts 1": lambda: experts(1),
        "experts 128": lambda: experts(128),
        "experts 2048": lambda: experts(2048),
        "route": lambda: route(
            empty(4, 256, dtype=torch.float32), empty(256, dtype=torch.float32), rule
        ),
    }


@pytest.fixture(scope="module")
def found() -> dict[str, gate.Compiled]:
    """The kernels by the names of ROWS; those of a call of experts by kernel."""
    kernels: dict[str, gate.Compiled] = {}
    for name, launched in gate.compiled(f"{__name__}:calls").items():
        if name.startswith("experts"):
            for kernel in launched:
                kernels[name.replace("experts", kernel.kernel.removesuffix("_kernel"))] = kernel
        else:
            (kernels[name],) = launched
    return kernels


@pytest.mark.parametrize("name", ROWS)
def test_a_product_runs_on_tensor_cores_and_copies_16_bytes_at_once(
    found: dict[str, gate.Compiled], name: str
) -> None:
    kernel, wanted = found[name], ROWS[name]
    assert kernel.spilled == 0
    assert kernel.registers <= wanted.registers
    assert kernel.programs_per_sm() >= wanted.programs
    assert kernel.count(wanted.opcode) > 0
    copies = kernel.count("LDGSTS")
    assert 0 < kernel.copies_of_16_bytes() == copies


@pytest.mark.parametrize("name", ["route", "count 128", "sort 128", "sum 128"])
def test_what_is_around_the_products_stays_in_registers(
    found: dict[str, gate.Compiled], name: str
) -> None:
    assert found[name].spilled == 0
    assert found[name].programs_per_sm() >= 8
