from __future__ import annotations

from pathlib import Path

import pytest

from tools.goals import (
    FIGURES,
    SourceTree,
    class_names_of_several_modules,
    functions_with_many_parameters,
    import_cycles,
    interface_methods,
    lines_of,
    long_files,
    places_that_give_a_handoff_back,
)

FILES = {
    "connectors/base.py": """
class KVConnectorScheduler:
    def request_arrived(self): ...
    def take_instructions(self): ...
    def _private(self): ...
class Twice: ...
class _Private: ...
""",
    "proxy/legs.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from pdserve.proxy.client import Client
class Twice: ...
class _Private: ...
class Legs:
    def give_back(self, handoff): self._http.release(handoff)
    async def leave(self): return [self.give_back(1), self._http.release(2)]
""",
    "proxy/client.py": """
def ask():
    from pdserve.proxy import legs
""",
    "pdserve/a.py": "import pdserve.b\n",
    "pdserve/b.py": "from pdserve.a import x\n",
    "pdserve/long.py": "\n" * 451,
    "pdserve/short.py": "\n" * 450,
    "kernels/wide.py": """
class Wide:
    def seven(self, a, b, /, c, d, *rest, e, f, g): ...
    async def eight(self, a, b, /, c, d, *, e, f, g, h, **more): ...
""",
    "tests/test_a.py": "class Twice: ...\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "pdserve" / "proxy").symlink_to(tmp_path / "proxy")
    return SourceTree(tmp_path)


def test_figures_of_a_tree_whose_figures_are_known(tree):
    assert lines_of("pdserve")(tree) == 903
    assert lines_of("tests")(tree) == 1
    assert class_names_of_several_modules(tree) == ["Twice: connectors/base.py, proxy/legs.py"]
    assert import_cycles(tree, typing_only=False) == ["pdserve.a pdserve.b"]
    assert import_cycles(tree) == ["pdserve.a pdserve.b", "pdserve.proxy.client pdserve.proxy.legs"]
    assert long_files(tree) == ["pdserve/long.py (451)"]
    assert functions_with_many_parameters(tree) == ["kernels/wide.py:4 eight (8)"]
    assert interface_methods("KVConnectorScheduler")(tree) == [
        "request_arrived",
        "take_instructions",
    ]
    assert places_that_give_a_handoff_back(tree) == ["proxy/legs.py:9", "proxy/legs.py:9"]


@pytest.mark.slow
def test_every_figure_can_be_taken_of_this_tree(this_tree):
    for figure in FIGURES.values():
        figure(this_tree)
    assert {module.path for module in this_tree.product} > {"pdserve/cli.py", "proxy/app.py"}
