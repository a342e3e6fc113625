"""What `launch` promises, and what a kernel that overlaps must do."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import pdserve.kernels.cuda
from pdserve.kernels.cuda.launch import Tuning, launch, wait_for_previous
from tests.interpreted_triton import interpreting

SOURCES = sorted(Path(pdserve.kernels.cuda.__path__[0]).glob("*.py"))


with interpreting():

    @triton.jit
    def _count(x, OVERLAPS: tl.constexpr):  # noqa: N803
        wait_for_previous(OVERLAPS)
        tl.store(x, tl.load(x) + 1)


def test_a_launch_of_no_programs_does_nothing() -> None:
    x = torch.zeros(1)
    launch(_count, (3, 0), x, tuning=Tuning(1, overlaps=True))
    assert x == 0
    launch(_count, (3, 1), x, tuning=Tuning(1, overlaps=True))
    assert x == 3


def _jitted(path: Path) -> list[ast.FunctionDef]:
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any(".jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_kernel_that_overlaps_waits_before_it_does_anything(path: Path) -> None:
    for function in _jitted(path):
        names = [argument.arg for argument in function.args.args]
        if "OVERLAPS" in names and function.name != wait_for_previous.__name__:
            begins = 1 if ast.get_docstring(function) else 0
            assert ast.unparse(function.body[begins]) == "wait_for_previous(OVERLAPS)", (
                function.name
            )


def test_kernels_of_a_step_overlap() -> None:
    overlapping = {
        function.name
        for path in SOURCES
        for function in _jitted(path)
        if "OVERLAPS" in ast.unparse(function.args)
    }
    assert overlapping >= {"norm_row", "gate_row", "rope_heads", "rope_latent", "attend_apart"}
