"""The meaning of each exit code."""

from __future__ import annotations

from typing import Final

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_CONFIG: Final = 3
EXIT_PEER: Final = 4
EXIT_INTERRUPTED: Final = 130
