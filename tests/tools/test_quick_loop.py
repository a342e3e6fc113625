"""Which cases the quick loop runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.process import ROOT

_TESTS = """
import pytest

@pytest.fixture(params=["proxy", "engine"])
def served(request):
    return request.param

@pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 2), (2, 1)])
def test_rows(a, b):
    pass

@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_crossed(served, size):
    pass
"""


@pytest.mark.slow
def test_each_row_of_each_parametrize_is_there_and_no_more(tmp_path):
    (tmp_path / "test_cases.py").write_text(_TESTS)
    args = ["-q", "--collect-only", "-m", "not slow", "-p", "tests.conftest", str(tmp_path)]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-c",
        ROOT / "pyproject.toml",
    ]
    ran = subprocess.run([*command, *args], cwd=ROOT, capture_output=True, text=True, check=True)
    cases = [line.partition("::")[2] for line in ran.stdout.splitlines() if "::" in line]
    crossed = [case for case in cases if "crossed" in case]
    assert [case for case in cases if case not in crossed] == [
        "test_rows[1-1]",
        "test_rows[1-2]",
        "test_rows[2-1]",
    ]
    assert sorted(case[-2] for case in crossed) == ["1", "2"]
    assert sorted(case.partition("[")[2][:5] for case in crossed) == ["engin", "proxy"]
