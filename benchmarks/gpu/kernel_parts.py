"""The parts of the CUDA kernels, and the hash by which figures know what they were measured of.

A part is what some modules of `kernels/cuda` are and import from there: kernels, their tables and
what launches them with which arguments. What is common to all, `launch.py`, is a part of its own.
Comments, docstrings and layout are not hashed.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "kernels" / "cuda"
_COMMON = "launch"
PARTS: dict[str, tuple[str, ...]] = {
    "attention": ("attention",),
    "latent attention": ("latent",),
    "linear layers": ("linear", "halves", "heads"),
    "experts": ("experts", "router"),
    "norms": ("norm",),
    "activation": ("activation",),
    "activation of Gemma": ("gelu",),
    "rotation and cache write": ("rope",),
    "digests": ("digest",),
    "copies to and from a store": ("chunks",),
    "choice of tokens": ("sampling",),
    "penalties and other rules": ("rules",),
    "masks of grammars": ("masks",),
    "sums over ranks": ("ranks",),
    "launching": (_COMMON,),
}
"""Part -> the modules that it begins with."""


def part_hashes(folder: Path = KERNELS) -> dict[str, str]:
    """Return the hash of each part, as the sources of ``folder`` are."""
    trees = {path.stem: ast.parse(path.read_text()) for path in sorted(folder.glob("*.py"))}
    return {part: _hash(trees, modules_of(part, trees)) for part in PARTS}


def modules_of(part: str, trees: dict[str, ast.Module]) -> list[str]:
    """Return the names of a part's modules, sorted."""
    found: set[str] = set()
    ahead = list(PARTS[part])
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += [other for other in _imported(trees[name]) if other != _COMMON]
    return sorted(found)


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            folder, _, name = node.module.rpartition(".")
            if folder == "pdserve.kernels.cuda":
                yield name


def _hash(trees: dict[str, ast.Module], modules: list[str]) -> str:
    digest = hashlib.sha256()
    for name in modules:
        digest.update(f"{name} {_told(trees[name])}\n".encode())
    return digest.hexdigest()


def _told(node: object) -> str:
    """Return a syntax tree as text that no version of Python writes otherwise."""
    match node:
        case list():
            return f"[{','.join(_told(one) for one in node if not _is_docstring(one))}]"
        case ast.AST():
            fields = [
                f"{name}={_told(value)}"
                for name, value in ast.iter_fields(node)
                if value is not None and value != []
            ]
            return f"{type(node).__name__}({','.join(fields)})"
        case _:
            return repr(node)


def _is_docstring(node: object) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
