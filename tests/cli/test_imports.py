"""The import graph of the product, with what is imported for types alone."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

PACKAGES = ("pdserve", "pdserve.connectors", "pdserve.proxy", "pdserve.kernels")


def _cycle(imports: dict[str, set[str]]) -> list[str]:
    """Modules each of which imports the one before it, the first being the last; [] = none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_imports_for_types_alone_are_in_the_graph(imports: dict[str, set[str]]) -> None:
    assert "pdserve.observe.clock" in imports["pdserve.scheduler.scheduler"]
    assert "pdserve.connectors.base" in imports["pdserve.engine.core"]


def test_a_cycle_is_found() -> None:
    assert _cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) in (["b", "c", "b"], ["c", "b", "c"])


def test_no_modules_import_one_another_not_even_for_types(imports: dict[str, set[str]]) -> None:
    cycle = _cycle(imports)
    assert not cycle, " <- ".join(cycle)
