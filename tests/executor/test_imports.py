from __future__ import annotations

from tests.python import run_python

# In a process of its own: here torch has been imported already.
SCRIPT = """
import gc
from pdserve.imports import large_imports
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
with large_imports():
    large = [[] for _ in range(100_000)]
    during = len(collections)
frozen = gc.get_freeze_count()
rest = [[] for _ in range(10_000)]
print(during, frozen > 100_000, len(collections) > 0)
"""


def test_nothing_large_is_searched_for_garbage_while_it_is_imported_nor_afterwards() -> None:
    assert run_python("-c", SCRIPT).stdout.split() == ["0", "True", "True"]
