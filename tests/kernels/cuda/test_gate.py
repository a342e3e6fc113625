"""The compile gate reads what a launch becomes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from pdserve.kernels.cuda.launch import Tuning, launch
from tests.kernels.cuda import gate


@triton.jit
def _multiply(x, y, out, scale, count, size: tl.constexpr):
    at = tl.arange(0, size)
    cell = at[:, None] * size + at[None, :]
    product = tl.dot(tl.load(x + cell, mask=cell < count), tl.load(y + cell)) * scale
    tl.store(out + cell, product)


def calls() -> gate.Calls:
    x = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    out = torch.empty(64, 64, device="meta")

    def multiply() -> None:
        launch(_multiply, (1,), x, x, out, 0.5, 4096, tuning=Tuning(4), size=64)

    return {"product": multiply}


def no_calls() -> gate.Calls:
    return {"nothing": lambda: None}


@pytest.mark.matrix
def test_the_gate_finds_registers_shared_memory_and_tensor_cores() -> None:
    (product,) = gate.compiled(f"{__name__}:calls")["product"]
    assert product.kernel == "_multiply"
    assert 16 < product.registers < 128
    assert product.spilled == 0
    assert product.shared >= 64 * 64 * 2
    assert product.count("HGMMA.64x64x16.F32.BF16") == 4
    assert product.count("HMMA") == 0
    assert product.programs_per_sm() >= 4


@pytest.mark.matrix
def test_a_call_that_launches_nothing_does_not_pass() -> None:
    with pytest.raises(AssertionError, match="proves nothing"):
        gate.compiled(f"{__name__}:no_calls")


def test_what_compiles_is_where_make_gate_finds_it() -> None:
    tests = Path(__file__).parent.glob("test_*.py")
    compiling = {path.name for path in tests if "gate.compiled(" in path.read_text()}
    assert {name for name in compiling if not name.endswith("_compiled.py")} == {"test_gate.py"}
