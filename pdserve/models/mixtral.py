"""Mixtral: the shared decoder with experts in every layer, under its own names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.models.decoder import Decoder

if TYPE_CHECKING:
    from pdserve.models.weights import Slot

_NAMES = {
    ".mlp.": ".block_sparse_moe.",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
}
"""Names of parts in the layers, and in checkpoints."""


class MixtralForCausalLM(Decoder):
    """Jiang et al. 2024."""

    def slots(self) -> dict[str, Slot]:
        """See `Decoder`."""
        return {_stored_name(name): slot for name, slot in super().slots().items()}


def _stored_name(name: str) -> str:
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name
