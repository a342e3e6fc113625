from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.process import ROOT

pytestmark = pytest.mark.slow

OURS = {"pdserve", "tests", "benchmarks", "tools"}
CODE = ("pdserve", "connectors", "proxy", "kernels")
TOOLS = ("tests", "benchmarks", "tools")
# Imported by one module alone, which is imported only where the extra that brings it is asked for,
# or runs in an environment of its own.
OPTIONAL = {
    "dynamo": "benchmarks/dynamo_side.py",
    "flash_attn_interface": "kernels/fast/attention.py",
    "grpc": "proxy/epp/listener.py",
    "instructor": "tests/clients/agents_side.py",
    "langchain_core": "tests/clients/langchain_side.py",
    "langchain_openai": "tests/clients/langchain_side.py",
    "litellm": "tests/clients/agents_side.py",
    "lm_eval": "tests/clients/lm_eval_side.py",
    "lmcache": "connectors/lmcache/client.py",
    "ray": "pdserve/executor/ray.py",
}
# triton comes with torch's CUDA build, yarl with aiohttp, the hub's client with tokenizers; nixl
# is a front for one of two packages.
ALONGSIDE = {"triton", "yarl", "huggingface-hub", "nixl-cu12", "nixl-cu13"}


def declared(*, extras: bool) -> set[str]:
    """Distributions that pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    if extras:
        for extra in project["optional-dependencies"].values():
            wanted += extra
    return {_canonical(re.split(r"[\[<>=!~; ]", line)[0]) for line in wanted}


def imported(path: Path) -> Iterator[tuple[str, Path]]:
    """Top-level packages of others that the files of a folder import."""
    for file in path.rglob("*.py"):
        if "node_modules" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                if top not in OURS and top not in sys.stdlib_module_names:
                    yield top, file


_packages_distributions = functools.cache(importlib.metadata.packages_distributions)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(("paths", "extras"), [(CODE, False), (TOOLS, True)])
def test_every_package_that_is_imported_is_declared(paths: tuple[str, ...], extras: bool) -> None:
    owners = _packages_distributions()
    known = declared(extras=extras) | ALONGSIDE
    missing = {
        f"{top} in {file.relative_to(ROOT)}"
        for path in paths
        for top, file in imported(ROOT / path)
        if OPTIONAL.get(top) != str(file.relative_to(ROOT))
        and known.isdisjoint({top} | {_canonical(owner) for owner in owners.get(top, [])})
    }
    assert missing == set()
