"""What the products of linear layers and experts become on Hopper, at real sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from tests.kernels.cuda import gate

META = torch.device("meta")


@dataclass(frozen=True)
class Wanted:
    """Most registers, fewest programs an SM, the instruction that multiplies, and what loads.

    ``waits``: whether it waits for the kernel before by itself, as products of few rows do not.
    """

    registers: int
    programs: int
    opcode: str
    loads: str = "LDGSTS"
    waits: bool = True


TMA = "UTMALDG.2D"
HMMA, HGMMA = "HMMA.16816.F32.BF16", "HGMMA.64x{}x16.F32.BF16"
ROWS = {
    "linear 1x4096": Wanted(80, 3, HMMA, waits=False),
    "linear 16x28672": Wanted(72, 1, HGMMA.format(16), waits=False),
    "linear 1x6144": Wanted(72, 2, HGMMA.format(16), waits=False),
    "linear 1x128256 fp32": Wanted(72, 1, HGMMA.format(16), waits=False),
    "linear 64x4096": Wanted(56, 1, HGMMA.format(32), TMA),
    "linear 64x28672": Wanted(80, 2, HGMMA.format(64), TMA),
    "many 64x64": Wanted(80, 1, HGMMA.format(64), TMA),
    "many 64x96": Wanted(80, 1, HGMMA.format(32), TMA),
    "many 64x128": Wanted(120, 1, HGMMA.format(128), TMA),
    "many 64x160": Wanted(120, 1, HGMMA.format(32), TMA),
    "many 64x256": Wanted(200, 1, HGMMA.format(256), TMA),
    "many 128x128": Wanted(200, 1, HGMMA.format(128), TMA),
    "many 128x160": Wanted(192, 1, HGMMA.format(32), TMA),
    "many 128x192": Wanted(128, 1, HGMMA.format(64), TMA),
    "many 128x256": Wanted(192, 1, HGMMA.format(128), TMA),
    "many 256x128": Wanted(208, 1, HGMMA.format(128), TMA),
    "linear fp32": Wanted(104, 4, "FFMA"),
    "linear of FP8 1": Wanted(72, 4, HMMA, waits=False),
    "linear of FP8 64": Wanted(96, 2, HGMMA.format(32)),
    "linear of FP8 2048": Wanted(248, 1, HGMMA.format(128)),
    "gated of FP8 1": Wanted(104, 3, HMMA, waits=False),
    "gated of FP8 64": Wanted(136, 2, HGMMA.format(64)),
    "gate_up of FP8 1": Wanted(104, 3, HMMA, waits=False),
    "gate_up of FP8 128": Wanted(136, 2, HGMMA.format(64)),
    "gate_up of FP8 2048": Wanted(248, 1, HGMMA.format(128)),
    "down of FP8 1": Wanted(88, 3, HMMA, waits=False),
    "down of FP8 128": Wanted(144, 2, HGMMA.format(64)),
    "down of FP8 2048": Wanted(192, 1, HGMMA.format(128)),
    "gated 1": Wanted(80, 2, HMMA, waits=False),
    "gated 64": Wanted(112, 2, HGMMA.format(64), TMA),
    "gated 2048": Wanted(240, 1, HGMMA.format(128), TMA),
    "heads 5": Wanted(80, 2, HMMA, waits=False),
    "heads 40": Wanted(96, 2, HGMMA.format(64)),
    "heads 2048": Wanted(120, 1, HGMMA.format(128)),
    "gate_up 1": Wanted(96, 2, HMMA, waits=False),
    "gate_up 128": Wanted(160, 1, HGMMA.format(64)),
    "gate_up 2048": Wanted(240, 1, HGMMA.format(128)),
    "gate_up of gpt-oss 1": Wanted(96, 2, HMMA, waits=False),
    "gate_up of gpt-oss 128": Wanted(160, 1, HGMMA.format(64)),
    "down of gpt-oss 1": Wanted(80, 2, HMMA, waits=False),
    "down of gpt-oss 128": Wanted(112, 2, HGMMA.format(64)),
    "down 1": Wanted(80, 2, HMMA, waits=False),
    "down 128": Wanted(112, 2, HGMMA.format(64)),
    "down 2048": Wanted(136, 1, HGMMA.format(128)),
}


COVERING = ("linear 64x4096",)
"""All that `make test` compiles: one through descriptors, on tensor cores."""


def every_call() -> gate.Calls:
    from pdserve.kernels.cuda.experts import CudaExperts
    from pdserve.kernels.cuda.heads import CudaHeads
    from pdserve.kernels.cuda.linear import CudaLinear
    from pdserve.kernels.cuda.router import route
    from pdserve.kernels.cuda.sizes import empty_rows
    from pdserve.kernels.cuda.tiles import linear_tile
    from pdserve.kernels.fp8 import Fp8Weight
    from pdserve.kernels.reference.activation import ClampedGlu
    from pdserve.kernels.reference.moe import PLAIN, ExpertForm, RoutingRule

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    def linear(
        m: int,
        n: int,
        dtype: torch.dtype = torch.bfloat16,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        layer = CudaLinear(n, 4096, dtype=dtype, device=META, out_dtype=out_dtype)
        layer.keep()
        layer(empty_rows(m, 4096, empty(0, dtype=dtype)))

    fp8 = Fp8Weight(empty(1, 4096, dtype=torch.float8_e4m3fn), torch.empty(1, 32), 128)

    def linear_fp8(m: int, n: int) -> None:
        layer = CudaLinear(n, 4096, dtype=torch.bfloat16, device=META)
        layer.keep(fp8)
        layer(empty_rows(m, 4096, empty(0)))

    def gated(m: int, kept: Fp8Weight | None = None) -> None:
        layer = CudaLinear(28672, 4096, dtype=torch.bfloat16, device=META)
        layer.keep(kept)
        layer.call_gated(empty(m, 4096))

    def heads(m: int) -> None:
        CudaHeads(empty(16, 512, 128))(empty(m, 16, 192)[..., :128])

    def experts(
        tokens: int,
        width: int = 4096,
        form: ExpertForm = PLAIN,
        kept: Fp8Weight | None = None,
    ) -> None:
        layer = CudaExperts(8, width, 14336, dtype=torch.bfloat16, device=META, form=form)
        layer.keep(kept)
        ids, weights = empty(tokens, 2, dtype=torch.int64), empty(tokens, 2, dtype=torch.float32)
        layer(empty(tokens, width), ids, weights)

    many = {}
    for m in range(2048, 64, -32):
        for n in (1024, 4096, 6144, 28672):
            tile = linear_tile(m, n, torch.bfloat16)
            call = partial(linear, m, n)
            many[f"many {tile.rows}x{tile.cols + tile.extra_cols}"] = call

    clamped = ExpertForm(has_bias=True, glu=ClampedGlu(1.702, 7.0))
    rule = RoutingRule(8, True, True, 2.5, 8, 4, True)
    return many | {
        "linear 1x4096": lambda: linear(1, 4096),
        "linear 16x28672": lambda: linear(16, 28672),
        "linear 1x128256 fp32": lambda: linear(1, 128256, out_dtype=torch.float32),
        "linear 1x6144": lambda: linear(1, 6144),
        "linear 64x4096": lambda: linear(64, 4096),
        "linear 64x28672": lambda: linear(64, 28672),
        "linear fp32": lambda: linear(3, 4096, torch.float32),
        "gated 1": lambda: gated(1),
        "gated 64": lambda: gated(64),
        "gated 2048": lambda: gated(2048),
        "linear of FP8 1": lambda: linear_fp8(1, 4096),
        "linear of FP8 64": lambda: linear_fp8(64, 4096),
        "linear of FP8 2048": lambda: linear_fp8(2048, 4096),
        "gated of FP8 1": lambda: gated(1, fp8),
        "gated of FP8 64": lambda: gated(64, fp8),
        "experts of FP8 1": lambda: experts(1, kept=fp8),
        "experts of FP8 128": lambda: experts(128, kept=fp8),
        "experts of FP8 2048": lambda: experts(2048, kept=fp8),
        "heads 5": lambda: heads(5),
        "heads 40": lambda: heads(40),
        "heads 2048": lambda: heads(2048),
        "experts 1": lambda: experts(1),
        "experts 128": lambda: experts(128),
        "experts 2048": lambda: experts(2048),
        "experts of gpt-oss 1": lambda: experts(1, 2880, clamped),
        "experts of gpt-oss 128": lambda: experts(128, 2880, clamped),
        "route": lambda: route(
            empty(4, 256, dtype=torch.float32), empty(256, dtype=torch.float32), rule
        ),
    }


def covering_calls() -> gate.Calls:
    return {name: call for name, call in every_call().items() if name in COVERING}


def other_calls() -> gate.Calls:
    return {name: call for name, call in every_call().items() if name not in COVERING}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calls", "num_products"),
    [
        pytest.param(covering_calls, 1, id="one"),
        pytest.param(other_calls, len(ROWS) - 1, id="others", marks=pytest.mark.matrix),
    ],
)
def test_what_a_product_becomes(calls: Callable[[], gate.Calls], num_products: int) -> None:
    found = _by_row(gate.compiled(f"{__name__}:{calls.__name__}"))
    assert len(found.keys() & ROWS.keys()) == num_products
    for name, kernel in found.items():
        if name in ROWS:
            _check_product(name, kernel)
        else:
            _check_what_is_around_it(name, kernel)


def _by_row(found: dict[str, list[gate.Compiled]]) -> dict[str, gate.Compiled]:
    """Return kernels by the names of ROWS; those of a call of experts by kernel."""
    kernels: dict[str, gate.Compiled] = {}
    for name, launched in found.items():
        if name.startswith("experts"):
            for kernel in launched:
                kernels[name.replace("experts", kernel.kernel.removesuffix("_kernel"))] = kernel
        else:
            (kernels[name],) = launched
    return kernels


def _check_product(name: str, kernel: gate.Compiled) -> None:
    """It runs on tensor cores, and copies whole tiles or, but for scales, 16 bytes at once."""
    wanted = ROWS[name]
    assert kernel.spilled == 0, name
    assert kernel.registers <= wanted.registers, name
    assert kernel.programs_per_sm() >= wanted.programs, name
    assert kernel.count(wanted.opcode) > 0, name
    assert kernel.count(wanted.loads) > 0, name
    copies = kernel.count("LDGSTS")
    of_scales = copies / 4 if "FP8" in name else 0
    assert copies - kernel.copies_of_16_bytes() <= of_scales, name
    assert (copies == 0) == (wanted.loads == TMA), name
    assert kernel.count("ACQBULK") == kernel.count("PREEXIT") == wanted.waits, name


def _check_what_is_around_it(name: str, kernel: gate.Compiled) -> None:
    """It stays in registers, and waits for the kernel before by itself."""
    assert kernel.spilled == 0, name
    assert kernel.programs_per_sm() >= 8, name
    assert kernel.count("ACQBULK") == 1, name
