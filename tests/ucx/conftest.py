"""Tests of the UCX connector, which are collected only if pytest is given nothing else.

NIXL brings a copy of UCX of its own, and both may not be in one process: `pytest tests/ucx`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HAS_UCX = importlib.util.find_spec("ucxx") is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave these out beside others, and without ucxx."""
    given = [(config.invocation_params.dir / each.partition("::")[0]) for each in config.args]
    is_alone = all(HERE in (path.resolve(), *path.resolve().parents) for path in given)
    return None if is_alone and HAS_UCX else True
