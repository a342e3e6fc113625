"""This folder's kernels are interpreted, and nothing else notices."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
from pathlib import Path

import pdserve.kernels.cuda
from pdserve.kernels.cuda.launch import is_interpreted
from tests.interpreted_triton import interpreting

TESTS = Path(__file__).parents[2]
HERE = {TESTS / "gpu", TESTS / "kernels" / "cuda"}


def test_kernels_are_launched_in_the_interpreter() -> None:
    assert is_interpreted()


def test_no_kernel_was_defined_before_the_interpreter_was_chosen() -> None:
    from triton.runtime import JITFunction

    modules = pkgutil.iter_modules(pdserve.kernels.cuda.__path__, "pdserve.kernels.cuda.")
    compiled = [
        f"{module.name}.{name}"
        for module in modules
        for name, value in vars(importlib.import_module(module.name)).items()
        if isinstance(value, JITFunction) and not value.is_gluon()
    ]
    assert not compiled


def test_the_environment_is_as_it_was_outside_of_the_interpreter() -> None:
    inside = dict(os.environ)
    with interpreting():
        assert dict(os.environ) == inside | {"TRITON_INTERPRET": "1"}
    assert dict(os.environ) == inside


def test_no_other_test_defines_kernels_in_this_process() -> None:
    importing = re.compile(r"pdserve\.kernels\.cuda|pdserve\.kernels import .*\bcuda\b")
    others = [
        path
        for path in TESTS.rglob("*.py")
        if not HERE & set(path.parents) and importing.search(path.read_text())
    ]
    assert not others
