"""What tools do with a page that they write: write it, or check that it is up to date."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_or_check(page: Path, text: str) -> int:
    """Write a page; with ``--check`` on the command line, return 1 if it has another text."""
    if "--check" in sys.argv[1:]:
        return int(page.read_text() != text)
    page.write_text(text)
    return 0
