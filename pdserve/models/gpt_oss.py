"""gpt-oss: the shared decoder with sinks and experts, which its checkpoints stack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.models.decoder import Decoder
from pdserve.models.weights import Slot

if TYPE_CHECKING:
    from torch import Tensor

_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Tensors of checkpoints, and the matrices of each expert whose rows alternate in their columns."""


class GptOssForCausalLM(Decoder):
    """OpenAI 2025, arXiv 2508.10925."""

    def slots(self) -> dict[str, Slot]:
        """See `Decoder`."""
        slots = super().slots()
        for name in [name for name in slots if ".mlp.gate." in name]:
            slots[name.replace(".gate.", ".router.")] = slots.pop(name)
        moe = self.arch.moe
        assert moe is not None
        for layer in range(self.arch.num_layers):
            prefix = f"model.layers.{layer}.mlp.experts."
            for stacked, parts in _STACKED.items():
                for field, end in (("weight", ""), ("bias", "_bias")):
                    slots[prefix + stacked + end] = _stacked(
                        [
                            [slots.pop(f"{prefix}{expert}.{part}.{field}") for part in parts]
                            for expert in range(moe.num_experts)
                        ]
                    )
        return slots


def _stacked(experts: list[list[Slot]]) -> Slot:
    """Return the slot of `[E, columns, parts * rows]`, or of biases `[E, parts * rows]`.

    A rank reads from the first to the last of its experts, and of each its own part.
    """
    num_parts, (rows, *columns) = len(experts[0]), experts[0][0].shape
    shape = (len(experts), *columns, num_parts * rows)
    here = [index for index, parts in enumerate(experts) if parts[0].load is not None]
    if not here:
        return Slot(shape, None)
    region = experts[here[0]][0].region
    assert region is not None
    of_rows, *of_columns = region

    def load(tensor: Tensor) -> None:
        for index in here:
            expert = tensor[index - here[0]].movedim(-1, 0)
            for place, part in enumerate(experts[index]):
                assert part.load is not None
                part.load(expert[place::num_parts])

    its = slice(here[0], here[-1] + 1)
    return Slot(shape, load, (its, *of_columns, _of_parts(of_rows, num_parts)))


def _of_parts(rows: slice, num_parts: int) -> slice:
    """Where some rows of all parts lie."""
    return slice(rows.start and rows.start * num_parts, rows.stop and rows.stop * num_parts)
