"""Rows of KV memory into a message, and back.

Messages end in their tag: one that was cut short, or is empty, is not taken for whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

TRAILER_BYTES: Final = 8
# A run of so many units on average is copied run by run, shorter ones by their indices.
_LONG_RUN = 4


class Staging:
    """Copies between one rank's KV memory and messages, on the device that it lies on."""

    def __init__(self, kv: torch.Tensor) -> None:
        self._bytes = kv.view(-1).view(torch.uint8)

    @property
    def num_bytes(self) -> int:
        """All of the memory."""
        return self._bytes.numel()

    def gather(self, units: npt.NDArray[np.int32], unit_bytes: int, payload: torch.Tensor) -> None:
        """Fill a payload (uint8) with units, in their order."""
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
        """Write a payload to units, in their order."""
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
        """Make memory for a message with so large a payload."""
        return torch.empty(num_bytes + TRAILER_BYTES, dtype=torch.uint8, device=self._bytes.device)

    def _rows(self, unit_bytes: int) -> torch.Tensor:
        return _as_rows(self._bytes, unit_bytes)

    def _indices(self, units: npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(units.astype(np.int64)).to(self._bytes.device)

    def _settle(self) -> None:
        """UCX knows no streams: what it is given must be there."""
        if self._bytes.is_cuda:
            torch.cuda.current_stream(self._bytes.device).synchronize()


def end_with(message: torch.Tensor, tag: int) -> None:
    """Write the tag that a message ends in."""
    trailer = np.array([tag], dtype="<i8").view(np.uint8)
    with torch.inference_mode():
        message[-TRAILER_BYTES:].copy_(torch.from_numpy(trailer))


def ends_with(message: torch.Tensor, tag: int) -> bool:
    """Whether a message has come whole."""
    trailer = message[-TRAILER_BYTES:].cpu().numpy().copy()
    return bool(trailer.view("<i8")[0] == tag)


def _as_rows(memory: torch.Tensor, unit_bytes: int) -> torch.Tensor:
    """The same memory as `[num_units, unit]`, in the widest elements that fit."""
    is_wide = unit_bytes % 8 == 0 and memory.numel() % 8 == 0
    return memory.view(torch.int64 if is_wide else torch.uint8).view(
        -1, unit_bytes // 8 if is_wide else unit_bytes
    )


def _runs(units: npt.NDArray[np.int32]) -> list[tuple[int, int, int]] | None:
    """Runs of neighbours: where each begins and ends in `units`, and its first; None = short."""
    edges = np.flatnonzero(np.diff(units) != 1) + 1
    if len(units) < _LONG_RUN * (len(edges) + 1):
        return None
    firsts = [0, *edges.tolist()]
    lasts = [*edges.tolist(), len(units)]
    return [(first, last, int(units[first])) for first, last in zip(firsts, lasts, strict=True)]
