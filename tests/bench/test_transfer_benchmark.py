"""The benchmark of the hand-over measures the hand-over, and not its own process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cli.process import ROOT, environment
from tests.python import run_python

if TYPE_CHECKING:
    from pathlib import Path

_PROGRAM = """
import gc
from benchmarks.kv_engines import pair
if __name__ == "__main__":
    with pair(16, 64):
        print(len(gc.get_objects()))
"""


@pytest.mark.matrix
def test_a_full_garbage_collection_amid_hand_overs_does_not_look_at_torch(tmp_path: Path) -> None:
    program = tmp_path / "program.py"  # a child that is spawned imports it
    program.write_text(_PROGRAM)
    answer = run_python(str(program), env=environment(PYTHONPATH=str(ROOT)))
    assert int(answer.stdout) < 50_000
