"""Phi-3 and Phi-4: the shared decoder, whose checkpoints hold merged matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.models.decoder import Decoder
from pdserve.models.weights import Slot

if TYPE_CHECKING:
    from torch import Tensor

_MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Matrices of checkpoints, and whose rows they have, in this order."""


class Phi3ForCausalLM(Decoder):
    """Abdin et al. 2024: Llama's form."""

    def slots(self) -> dict[str, Slot]:
        """See `Decoder`."""
        slots = super().slots()
        for merged, (first, *others) in _MERGED.items():
            for name in [name for name in slots if f".{first}." in name]:
                parts = [slots.pop(name.replace(first, part)) for part in (first, *others)]
                slots[name.replace(first, merged)] = _stacked(parts)
        return slots


def _stacked(parts: list[Slot]) -> Slot:
    """Return the slot of a matrix of all rows; a rank reads the whole and takes its own."""
    _, *columns = parts[0].shape
    shape = (sum(part.shape[0] for part in parts), *columns)

    def load(tensor: Tensor) -> None:
        first = 0
        for part in parts:
            rows = tensor[first : first + part.shape[0]]
            assert part.load is not None
            part.load(rows if part.region is None else rows[part.region])
            first += len(rows)

    return Slot(shape, None if parts[0].load is None else load)
