from __future__ import annotations

import re
from fnmatch import fnmatch

from tests.chaos.failures import document
from tests.cli.process import ROOT

TREES = ("pdserve", "connectors", "proxy", "kernels")
LINKS = {ROOT / "pdserve" / name for name in TREES[1:]}


def test_every_module_has_its_line_in_the_structure() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    listed = re.findall(r"^\| `([\w/]+(?:/\*)?\.py)` \|", text, re.MULTILINE)
    modules = [
        str(file.relative_to(ROOT))
        for tree in TREES
        for file in (ROOT / tree).rglob("*.py")
        if not LINKS.intersection(file.parents)
        and (file.name != "__init__.py" or file.parent == ROOT / "pdserve")
    ]
    folders = [path for path in listed if path.endswith("*.py")]
    modules = [path for path in modules if not any(fnmatch(path, each) for each in folders)]
    assert sorted(path for path in listed if path not in folders) == sorted(modules)


def test_the_failure_table_is_what_its_source_says_but_for_what_was_measured() -> None:
    text = (ROOT / "docs" / "failures.md").read_text()
    told, _, _ = document([], "").partition("## Measured")
    assert text.startswith(told), "change tests/chaos/failures.py, which writes docs/failures.md"
