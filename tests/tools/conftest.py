from __future__ import annotations

import gc

import pytest

from tests.cli.process import ROOT
from tools.goals import SourceTree


@pytest.fixture(scope="package")
def this_tree() -> SourceTree:
    """The product's files, parsed once: no garbage, which would be looked through for seconds."""
    tree = SourceTree(ROOT)
    gc.collect()
    gc.disable()
    assert all(module.syntax for module in tree.product)
    gc.freeze()
    gc.enable()
    return tree
