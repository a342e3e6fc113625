"""Writes docs/modules.md: every module of the product, and the first sentence of its docstring.

python -m tools.module_list           # writes it
python -m tools.module_list --check   # exit code 1 if it is not what would be written
"""

from __future__ import annotations

import ast
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tools.goals import PRODUCT, SourceTree
from tools.written import write_or_check

if TYPE_CHECKING:
    from tools.goals import Module

ROOT: Final = Path(__file__).parents[1]
DOCUMENT: Final = ROOT / "docs" / "modules.md"
_HEAD: Final = """\
# Modules

The first sentence of each module, written by `python -m tools.module_list`; how they fit together
is in [structure.md](structure.md).
"""


def document(tree: SourceTree) -> str:
    """Make the page.

    Raises:
        ValueError: A module has no docstring.
    """
    parts = [_HEAD]
    for folder, modules in groupby(sorted(tree.product, key=_order), key=_folder):
        rows = [
            f"| `{Path(module.path).name}` | {sentence} |\n"
            for module in modules
            if (sentence := _first_sentence(module))
        ]
        if rows:
            parts.append(f"\n## {folder}\n| module | |\n|---|---|\n{''.join(rows)}")
    return "".join(parts)


def _folder(module: Module) -> str:
    return str(Path(module.path).parent)


def _order(module: Module) -> tuple[int, str, str]:
    return PRODUCT.index(module.path.partition("/")[0]), _folder(module), module.path


def _first_sentence(module: Module) -> str:
    text = ast.get_docstring(module.syntax)
    if text is None and module.path.endswith("/__init__.py"):
        return ""
    if text is None:
        raise ValueError(f"{module.path} has no docstring")
    return " ".join(text.split("\n\n")[0].split())


if __name__ == "__main__":
    sys.exit(write_or_check(DOCUMENT, document(SourceTree(ROOT))))
