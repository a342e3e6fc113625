"""Copies rows of KV memory into a message and back.

Messages end in their tag, so a truncated or empty one is not mistaken for a complete one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

TRAILER_BYTES: Final = 8
# Runs of at least this many units on average are copied run by run, shorter ones by index.
_LONG_RUN = 4


class Staging:
    """Copies between one rank's KV memory and messages, on the memory's device."""

    def __init__(self, kv: torch.Tensor) -> None:
        self._bytes = kv.view(-1).view(torch.uint8)

    def gather(self, units: npt.NDArray[np.int32], unit_bytes: int, payload: torch.Tensor) -> None:
        """Fill a payload (uint8) with units, in the given order."""
        memory, rows = self._rows(unit_bytes), _as_rows(payload, unit_bytes)
        with torch.inference_mode():
            runs = _runs(units)
            if runs is None:
                torch.index_select(memory, 0, self._indices(units), out=rows)
            else:
                for first, last, unit in runs:
                    rows[first:last].copy_(memory[unit : unit + last - first])
        self._settle()

    def scatter(self, payload: torch.Tensor, units: npt.NDArray[np.int32], unit_bytes: int) -> None:
        """Write a payload (uint8) to units, in the given order."""
        memory, rows = self._rows(unit_bytes), _as_rows(payload, unit_bytes)
        with torch.inference_mode():
            runs = _runs(units)
            if runs is None:
                memory.index_copy_(0, self._indices(units), rows)
            else:
                for first, last, unit in runs:
                    memory[unit : unit + last - first].copy_(rows[first:last])
        self._settle()

    def new_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate memory for a message with a payload of `num_bytes`."""
        return torch.empty(num_bytes + TRAILER_BYTES, dtype=torch.uint8, device=self._bytes.device)

    def _rows(self, unit_bytes: int) -> torch.Tensor:
        return _as_rows(self._bytes, unit_bytes)

    def _indices(self, units: npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(units.astype(np.int64)).to(self._bytes.device)

    def _settle(self) -> None:
        """Wait for the copies, as UCX does not know CUDA streams."""
        if self._bytes.is_cuda:
            torch.cuda.current_stream(self._bytes.device).synchronize()


def end_with(message: torch.Tensor, tag: int) -> None:
    """Write the tag at the end of a message."""
    trailer = np.array([tag], dtype="<i8").view(np.uint8)
    with torch.inference_mode():
        message[-TRAILER_BYTES:].copy_(torch.from_numpy(trailer))


def ends_with(message: torch.Tensor, tag: int) -> bool:
    """Whether a message has arrived completely."""
    trailer = message[-TRAILER_BYTES:].cpu().numpy().copy()
    return bool(trailer.view("<i8")[0] == tag)


def _as_rows(memory: torch.Tensor, unit_bytes: int) -> torch.Tensor:
    """Return a view of the memory as `[num_units, unit]`, in the widest elements that fit."""
    is_wide = unit_bytes % 8 == 0 and memory.numel() % 8 == 0
    return memory.view(torch.int64 if is_wide else torch.uint8).view(
        -1, unit_bytes // 8 if is_wide else unit_bytes
    )


def _runs(units: npt.NDArray[np.int32]) -> list[tuple[int, int, int]] | None:
    """Return runs of neighbours: start and end in `units`, first unit; None = runs are short."""
    edges = np.flatnonzero(np.diff(units) != 1) + 1
    if len(units) < _LONG_RUN * (len(edges) + 1):
        return None
    firsts = [0, *edges.tolist()]
    lasts = [*edges.tolist(), len(units)]
    return [(first, last, int(units[first])) for first, last in zip(firsts, lasts, strict=True)]
