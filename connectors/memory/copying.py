"""Bytes on their way from one rank's KV memory to another's: a part of them at a time.

It knows pieces and memory; not who asked for them, nor whether anybody still wants them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from pdserve.connectors.slicing import Pieces

POLLS_ON_THE_WIRE: Final = 3


class Copy:
    """One transfer. It takes `POLLS_ON_THE_WIRE` landings, however small it is."""

    def __init__(self, pieces: Pieces) -> None:
        units_at_once = -(-len(pieces) // POLLS_ON_THE_WIRE)
        self._parts = list(pieces.parts(units_at_once * pieces.unit_bytes))
        self._num_left = POLLS_ON_THE_WIRE
        self.num_bytes = pieces.num_bytes
        self.num_descriptors = pieces.num_descriptors

    def land(self, source: torch.Tensor, dest: torch.Tensor) -> bool:
        """Let the next part arrive; True if it was the last.

        Args:
            source, dest: Whole KV memories, contiguous.
        """
        if self._num_left <= len(self._parts):
            part = self._parts.pop(0)
            with torch.inference_mode():
                _units(dest, part.unit_bytes)[torch.from_numpy(part.dest_units).long()] = _units(
                    source, part.unit_bytes
                )[torch.from_numpy(part.source_units).long()]
        self._num_left -= 1
        return self._num_left == 0


def _units(kv: torch.Tensor, unit_bytes: int) -> torch.Tensor:
    """`[num_units, unit_bytes]`, the same memory."""
    return kv.view(-1).view(torch.uint8).view(-1, unit_bytes)
