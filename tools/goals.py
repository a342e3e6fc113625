"""Figures of how the source tree is built, of one tree or of several side by side.

    python -m tools.goals               # this tree
    python -m tools.goals . ../other    # two of them, a column each
    python -m tools.goals --list        # with the names behind each figure

It reads files and imports nothing of the trees, so that any version of them can be measured.
"""

from __future__ import annotations

import argparse
import ast
import os
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PRODUCT: Final = ("pdserve", "connectors", "proxy", "kernels")
MAX_LINES: Final = 450
MAX_PARAMETERS: Final = 7
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A Python file of a tree.

    Attributes:
        path: Relative to the tree, with slashes.
        name: By which others import it.
    """

    path: str
    name: str
    text: str

    @cached_property
    def syntax(self) -> ast.Module:
        """Its parsed text."""
        return ast.parse(self.text)

    @property
    def num_lines(self) -> int:
        """Lines, blank ones included."""
        return self.text.count("\n")


class SourceTree:
    """The Python files of a checkout, each once: links between its folders are not followed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.product = [module for folder in PRODUCT for module in self.modules(folder)]

    def modules(self, folder: str) -> list[Module]:
        """All files below a folder."""
        return [
            self._module(Path(where) / name)
            for where, _, names in sorted(os.walk(self._root / folder))
            for name in sorted(names)
            if name.endswith(".py")
        ]

    def module(self, path: str) -> Module:
        """The product's file at a path."""
        return next(module for module in self.product if module.path == path)

    def class_names(self) -> dict[str, list[str]]:
        """Paths of the product's modules by the public classes that they define."""
        paths = defaultdict(list)
        for module in self.product:
            for node in module.syntax.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    paths[node.name].append(module.path)
        return paths

    def _module(self, file: Path) -> Module:
        path = file.relative_to(self._root)
        parts = path.with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if parts[0] in PRODUCT[1:]:
            parts = ("pdserve", *parts)
        return Module(path.as_posix(), ".".join(parts), file.read_text())


def lines_of(folder: str) -> Callable[[SourceTree], int]:
    """Measure the lines of a folder's Python files."""
    return lambda tree: sum(module.num_lines for module in tree.modules(folder))


def class_names_of_several_modules(tree: SourceTree) -> list[str]:
    """Public classes whose name another module of the product defines as well."""
    paths = sorted(tree.class_names().items())
    return [f"{name}: {', '.join(where)}" for name, where in paths if where[1:]]


def import_cycles(tree: SourceTree, *, typing_only: bool = True) -> list[str]:
    """Groups of modules that can all be reached from one another by imports.

    Args:
        typing_only: Imports under `if TYPE_CHECKING:` count as well.
    """
    names = {module.name for module in tree.product}
    imports = {
        module.name: set(_imports(module.syntax, names, typing_only=typing_only))
        for module in tree.product
    }
    reached = {name: _reached(name, imports) for name in imports}
    cycles = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in imports
        if name in reached[name]
    }
    return sorted(" ".join(sorted(cycle)) for cycle in cycles)


def _imports(node: ast.AST, names: set[str], *, typing_only: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) if not typing_only:
                continue
            case ast.Import():
                yield from (alias.name for alias in child.names if alias.name in names)
            case ast.ImportFrom(module=str(module)):
                wanted = {f"{module}.{alias.name}" for alias in child.names}
                yield from (wanted & names) or ({module} & names)
            case ast.expr():
                continue
            case _:
                yield from _imports(child, names, typing_only=typing_only)


def _reached(start: str, imports: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    open_ = [start]
    while open_:
        further = imports[open_.pop()] - reached
        reached |= further
        open_ += further
    return reached


def long_files(tree: SourceTree) -> list[str]:
    """Files of the product with more than `MAX_LINES` lines."""
    return [
        f"{module.path} ({module.num_lines})"
        for module in tree.product
        if module.num_lines > MAX_LINES
    ]


def functions_with_many_parameters(tree: SourceTree) -> list[str]:
    """Functions of the product with more than `MAX_PARAMETERS`, `self` and `cls` not counted.

    Triton's and Gluon's are left out: a kernel takes every pointer, stride and constant by itself.
    """
    return [
        f"{module.path}:{function.lineno} {function.name} ({count})"
        for module in tree.product
        for function in ast.walk(module.syntax)
        if isinstance(function, Function)
        and not _is_of_triton(function)
        and (count := _num_parameters(function)) > MAX_PARAMETERS
    ]


def _is_of_triton(function: Function) -> bool:
    return any(".jit" in ast.unparse(each) for each in function.decorator_list)


def _num_parameters(function: Function) -> int:
    named = function.args
    parameters = [*named.posonlyargs, *named.args, *named.kwonlyargs]
    return len([each for each in parameters if each.arg not in {"self", "cls"}])


def interface_methods(half: str) -> Callable[[SourceTree], list[str]]:
    """Measure the public methods of one half of the connectors' interface."""

    def methods(tree: SourceTree) -> list[str]:
        (found,) = (
            node
            for node in tree.module("connectors/base.py").syntax.body
            if isinstance(node, ast.ClassDef) and node.name == half
        )
        return [
            node.name
            for node in found.body
            if isinstance(node, Function) and not node.name.startswith("_")
        ]

    return methods


def places_that_give_a_handoff_back(tree: SourceTree) -> list[str]:
    """Calls in the proxy that end a lease: of the HTTP client, or of one method that wraps it."""
    return [
        f"{module.path}:{call.lineno}"
        for module in tree.product
        if module.path.startswith("proxy/")
        for call in _calls(module.syntax)
        if isinstance(call.func, ast.Attribute) and call.func.attr in {"release", "give_back"}
    ]


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function) and child.name == "give_back":
            continue
        if isinstance(child, ast.Call):
            yield child
        yield from _calls(child)


Figure: TypeAlias = "Callable[[SourceTree], int | list[str]]"
FIGURES: Final[dict[str, Figure]] = {
    **{f"Python lines: {each}": lines_of(each) for each in (*PRODUCT, "tests")},
    "public class names defined in two modules": class_names_of_several_modules,
    "import cycles": lambda tree: import_cycles(tree, typing_only=False),
    "import cycles, typing-only imports included": import_cycles,
    f"files over {MAX_LINES} lines": long_files,
    f"functions with more than {MAX_PARAMETERS} parameters": functions_with_many_parameters,
    "connector methods, scheduler half": interface_methods("KVConnectorScheduler"),
    "connector methods, worker half": interface_methods("KVConnectorWorker"),
    "places that give a handoff back": places_that_give_a_handoff_back,
}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="figures of how source trees are built")
    parser.add_argument("trees", type=Path, nargs="*", default=[Path()])
    parser.add_argument("--list", action="store_true", help="the names behind each figure as well")
    arguments = parser.parse_args()
    trees = [SourceTree(path.resolve()) for path in arguments.trees]
    print(f"{'':52}", *(f"{path!s:>12.12}" for path in arguments.trees))
    for label, figure in FIGURES.items():
        found = [figure(tree) for tree in trees]
        counts = [each if isinstance(each, int) else len(each) for each in found]
        print(f"{label:52}", *(f"{count:12,}" for count in counts))
        if arguments.list:
            for path, each in zip(arguments.trees, found, strict=True):
                for name in each if isinstance(each, list) else ():
                    print(f"    {path}  {name}")


if __name__ == "__main__":
    main()
