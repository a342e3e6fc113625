"""What `launch` promises, and what a kernel that overlaps must do."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

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


class _Kernel:
    """Stands for a kernel and what Triton makes of it, which needs a device to run."""

    arg_names = ("x", "size", "SECOND", "FIRST")

    def __init__(self) -> None:
        self.fn = self
        self.made: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def make(*args: Any, **options: Any) -> Any:
            self.made.append(args)
            return _Made(self.launched)

        return make


class _Made:
    def __init__(self, launched: list[tuple[Any, ...]]) -> None:
        self._launched = launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self._launched.append((grid, *args))


def test_triton_is_asked_once_for_each_kind_of_arguments() -> None:
    kernel, x = _Kernel(), torch.zeros(64, dtype=torch.int32)

    def call(x: torch.Tensor, size: int, first: int = 3) -> int:
        launch(kernel, (2,), x, size, tuning=Tuning(1), FIRST=first, SECOND=4)
        return len(kernel.made)

    assert call(x, 5) == 1
    assert not kernel.launched
    assert call(x, 7) == 1
    assert kernel.launched == [((2, 1, 1), x, 7, 4, 3)]
    others = [
        (x, 1),
        (x, 16),
        (x, 1 << 31),
        (x[1:], 5),
        (x.to(torch.int64), 5),
        (x, 5, 2),
    ]
    assert [call(*other) for other in others] == [2, 3, 4, 5, 6, 7]
    assert len(kernel.launched) == 1
