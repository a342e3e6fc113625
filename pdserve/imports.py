"""Imports large packages, above all torch, with garbage collection paused.

Knows neither what is imported nor for whom.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


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
