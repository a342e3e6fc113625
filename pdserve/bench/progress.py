"""Shows the progress of a run: one line that is rewritten, or a line now and then.

A terminal gets the former, a file or a pipe the latter.
"""

from __future__ import annotations

import math
import shutil
from typing import Final, TextIO

from pdserve.bench.runner import RunProgress

_LINE_EVERY_S: Final = 5.0
_CLEAR: Final = "\r\x1b[2K"


class ProgressLine:
    """Draws progress on `out`, usually stderr, as wide as the terminal is."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._width = shutil.get_terminal_size((100, 24)).columns
        self._is_tty = out.isatty()
        self._next_s = 0.0
        self._is_drawn = False

    def __call__(self, progress: RunProgress) -> None:
        """Draw the progress of a run."""
        self.draw(shown(progress), progress.elapsed_s)

    def draw(self, text: str, elapsed_s: float) -> None:
        """Draw some words, or write them as a line if one is due."""
        if self._is_tty:
            self._out.write(_CLEAR + text[: self._width - 1])
            self._is_drawn = True
        elif elapsed_s >= self._next_s:
            self._next_s = elapsed_s + _LINE_EVERY_S
            self._out.write(text + "\n")
        else:
            return
        self._out.flush()

    def close(self) -> None:
        """Clear the line, so that the next output begins on an empty one."""
        if self._is_drawn:
            self._out.write(_CLEAR)
            self._out.flush()
            self._is_drawn = False


def shown(progress: RunProgress) -> str:
    """Return progress in words."""
    parts = [f"{progress.done}/{progress.total} done"]
    parts.append(f"{progress.in_flight} in flight")
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    if progress.elapsed_s > 0:
        parts.append(f"{progress.done / progress.elapsed_s:.1f} req/s")
        parts.append(f"{progress.num_output_tokens / progress.elapsed_s:.0f} tok/s")
    if progress.ttft_p50_s is not None:
        parts.append(f"TTFT p50 {progress.ttft_p50_s * 1e3:.1f} ms")
    if progress.itl_p99_s is not None:
        parts.append(f"ITL p99 {progress.itl_p99_s * 1e3:.1f} ms")
    left_s = _left_s(progress)
    if left_s is not None:
        parts.append(f"{left_s // 60:.0f}:{left_s % 60:02.0f} left")
    return " | ".join(parts)


def _left_s(progress: RunProgress) -> int | None:
    """Seconds to the end: by the schedule, or after its end by the progress so far."""
    if progress.done == progress.total:
        return None
    by_schedule_s = progress.last_due_s - progress.elapsed_s
    if not progress.done:
        return math.ceil(by_schedule_s) if by_schedule_s > 0 else None
    by_pace_s = progress.elapsed_s / progress.done * (progress.total - progress.done)
    return math.ceil(max(by_schedule_s, by_pace_s))
