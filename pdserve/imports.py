"""Imports large packages, above all torch, with garbage collection paused.

Knows not for whom.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

SHORT_SPIN: Final = {"GOMP_SPINCOUNT": "4000"}
"""Environment in which torch is imported, unless it is set. Torch's threads (OpenMP's) wait for
their next work by spinning: with this for 0.1 ms, else for 8 ms, during which they take the cores
from the threads of our kernels."""


@contextlib.contextmanager
def large_imports() -> Iterator[None]:
    """Import torch, and what is built on it, in here.

    The collector would look at all of it again and again: a sixth of the second that it takes.
    Modules live as long as their process, so they are frozen: while an engine serves, a full
    collection takes the time of what requests have made. Where torch is there already, nothing
    large is to come, and nothing is done.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
