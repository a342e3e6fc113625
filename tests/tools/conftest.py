from __future__ import annotations

import pytest

from tests.cli.process import ROOT
from tools.goals import SourceTree


@pytest.fixture(scope="package")
def this_tree() -> SourceTree:
    """The product's files, parsed once."""
    return SourceTree(ROOT)
