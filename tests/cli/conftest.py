"""What tests of commands share."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def hears_hang_ups() -> Iterator[None]:
    """Commands started here hear SIGHUP even where these tests run under nohup."""
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, former)
