from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Callable, Iterator

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


def imported(text: str, is_known: Callable[[str], bool]) -> set[str]:
    """Top-level packages that a module imports, neither ours nor Python's nor known."""
    found = {
        top
        for top in _IMPORT.findall(text)
        if top not in OURS and top not in sys.stdlib_module_names and not is_known(top)
    }
    # It may be a line of a text.
    return found and found.intersection(_imports(ast.parse(text)))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        yield from (name.partition(".")[0] for name in names)


_IMPORT = re.compile(r"^\s*(?:import|from)\s+(\w+)", re.MULTILINE)
_packages_distributions = functools.cache(importlib.metadata.packages_distributions)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(("paths", "extras"), [(CODE, False), (TOOLS, True)])
def test_every_package_that_is_imported_is_declared(paths: tuple[str, ...], extras: bool) -> None:
    owners = _packages_distributions()
    known = declared(extras=extras) | ALONGSIDE

    def is_known(top: str) -> bool:
        return not known.isdisjoint({top} | {_canonical(owner) for owner in owners.get(top, [])})

    missing = {
        f"{top} in {name}"
        for path in paths
        for file in (ROOT / path).rglob("*.py")
        if "node_modules" not in file.parts
        for name in [str(file.relative_to(ROOT))]
        for top in imported(file.read_text(), is_known)
        if OPTIONAL.get(top) != name
    }
    assert missing == set()
