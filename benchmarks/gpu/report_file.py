"""Reports as files, whole at any moment: whoever writes one may be ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(path: Path | None, report: dict[str, Any]) -> None:
    """Write a report so far, whole or not at all; without a path not at all."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(report, indent=1, default=str) + "\n")
    beside.replace(path)
