"""Waits for what must become true."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Poll until `condition()` holds; a time-out is an assertion."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.001)
