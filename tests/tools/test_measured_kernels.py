"""Figures know the kernels that they were measured of."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from benchmarks.gpu.kernel_parts import KERNELS, PARTS, modules_of, part_hashes
from tools.measured_kernels import table


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """A copy of the kernels, to change."""
    return Path(shutil.copytree(KERNELS, tmp_path / "cuda"))


def _changed(kernels: Path, name: str, was: str, becomes: str) -> set[str]:
    """Change one text of a module; return the parts whose hash changes with it."""
    before, path = part_hashes(kernels), kernels / name
    assert was in path.read_text()
    path.write_text(path.read_text().replace(was, becomes, 1))
    return {part for part, found in part_hashes(kernels).items() if found != before[part]}


def test_a_tables_number_changes_the_parts_that_take_tiles_from_it(kernels):
    assert _changed(
        kernels, "tiles.py", "_tile(16, 32, 256, 4, 4)", "_tile(16, 32, 256, 4, 3)"
    ) == {
        "linear layers",
        "experts",
    }


@pytest.mark.slow
def test_what_attention_loads_is_part_of_latent_attention_too(kernels):
    assert _changed(kernels, "paged.py", "other=0.0", "other=1.0") == {
        "attention",
        "latent attention",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ('"""Paged attention', '"""Attention'),
        ("_MAX_GROUP = 64", "_MAX_GROUP = 64  # rows"),
        ("_MAX_GROUP = 64", "_MAX_GROUP = (\n    64\n)"),
    ],
    ids=["docstring", "comment", "layout"],
)
def test_what_is_no_code_changes_no_hash(kernels, was, becomes):
    assert _changed(kernels, "attention.py", was, becomes) == set()


def test_every_kernel_is_part_of_something():
    trees = {path.stem: ast.parse(path.read_text()) for path in KERNELS.glob("*.py")}
    hashed = {name for part in PARTS for name in modules_of(part, trees)}
    assert trees.keys() - hashed == {"__init__", "backend"}, "add it to PARTS, and its figures"


def _report(date: str, kernels: str, **figures: object) -> dict[str, object]:
    environment = {
        "date": date, "device": "H", "triton": "3", "kernels": {"digests": kernels}
    }  # fmt: skip
    return {"environment": environment, "parts": {"rows": {"results": figures}}}


@pytest.mark.parametrize(
    ("reports", "told"),
    [
        ([], "**unmeasured**"),
        ([_report("d1", "a", **{"kv_digests, 16": {"skipped": "time is over"}})], "**unmeasured**"),
        (
            [_report("d1", "b", **{"kv_digests, 16": {"us": 1}})],
            "**unmeasured**: changed since d1",
        ),
        (
            [
                _report("d1", "a", **{"kv_digests, 16": {"us": 1}}),
                _report("d2", "b", **{"kv_digests, 16": {"us": 1}}),
            ],
            "measured d1, H, Triton 3",
        ),
    ],
    ids=["no report", "time was over", "changed", "as it was once"],
)
def test_a_part_is_measured_if_figures_are_of_its_hash(reports, told):
    assert table({"digests": "a"}, reports).endswith(f"| digests | {told} |\n")
