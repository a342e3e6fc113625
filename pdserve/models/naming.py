"""How the checkpoints of each family name and pack what the decoder calls by one name.

A row of `_NAMINGS` for each family whose names are not Llama's. Knows no layers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.models.slots import Slot

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """What differs from Llama's names.

    Attributes:
        parts: The checkpoint's name of some parts, by the decoder's; they stand between dots.
        merged: Matrices of the checkpoint, and whose rows they have, in this order.
        lifted: End of the names of vectors that are stored as matrices of one row.
        unread: Beginnings of names that are not of the decoder.
        stacked: Tensors of all experts, and the matrices whose rows alternate in their columns.
    """

    parts: Mapping[str, str] = field(default_factory=dict)
    merged: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lifted: str | None = None
    unread: tuple[str, ...] = ()
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_LLAMA = Naming()
_MIXTRAL = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_GATE_UP = {"gate_up_proj": ("gate_proj", "up_proj")}
_AFTER_ALONE = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
_HUNYUAN = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
_BIAS = "mlp.gate.e_score_correction_bias"
_NAMINGS = {
    "Ernie4_5_MoeForCausalLM": Naming(
        parts={_BIAS: "mlp.moe_statics.e_score_correction_bias"},
        lifted="e_score_correction_bias",
        unread=("model.mtp_",),
    ),
    "Exaone4ForCausalLM": Naming(parts=_AFTER_ALONE),
    "Gemma3ForCausalLM": Naming(
        parts={"post_attention_layernorm": "pre_feedforward_layernorm", **_AFTER_ALONE}
    ),
    "Glm4ForCausalLM": Naming(merged=_GATE_UP),
    "GlmForCausalLM": Naming(merged=_GATE_UP),
    "GptOssForCausalLM": Naming(
        parts={"gate": "router"},
        stacked={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    ),
    "HunYuanDenseV1ForCausalLM": Naming(parts=_HUNYUAN),
    "HunYuanMoEV1ForCausalLM": Naming(
        parts={**_HUNYUAN, "mlp.gate": "mlp.gate.wg", "shared_experts": "shared_mlp"}
    ),
    "MiniMaxM2ForCausalLM": Naming(
        parts={_BIAS: "block_sparse_moe.e_score_correction_bias", **_MIXTRAL}
    ),
    "MixtralForCausalLM": Naming(parts=_MIXTRAL),
    "Olmo2ForCausalLM": Naming(parts=_AFTER_ALONE),
    "Olmo3ForCausalLM": Naming(parts=_AFTER_ALONE),
    "Phi3ForCausalLM": Naming(
        merged={
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            **_GATE_UP,
        }
    ),
    "Qwen2MoeForCausalLM": Naming(parts={"shared_experts": "shared_expert"}),
}


def unread_of(architecture: str) -> tuple[str, ...]:
    """Return beginnings of names in a family's checkpoints that are not of the decoder."""
    return _NAMINGS.get(architecture, _LLAMA).unread


def as_stored(architecture: str, slots: Mapping[str, Slot]) -> dict[str, Slot]:
    """Return a decoder's slots under the names of a family's checkpoints."""
    naming, stored = _NAMINGS.get(architecture, _LLAMA), dict(slots)
    for merged, (first, *others) in naming.merged.items():
        for name in [name for name in stored if f".{first}." in name]:
            parts = [stored.pop(name.replace(first, part)) for part in (first, *others)]
            stored[name.replace(first, merged)] = _merged(parts)
    if naming.stacked:
        stored = _with_stacked_experts(stored, naming.stacked)
    if naming.lifted is not None:
        stored = {
            name: _lifted(slot) if name.endswith(naming.lifted) else slot
            for name, slot in stored.items()
        }
    if not naming.parts:
        return stored
    longest_first = sorted(naming.parts, key=len, reverse=True)
    ours = re.compile(rf"(?<![^.])({'|'.join(map(re.escape, longest_first))})(?![^.])")
    return {
        ours.sub(lambda found: naming.parts[found[1]], name): slot for name, slot in stored.items()
    }


def _merged(parts: list[Slot]) -> Slot:
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


def _lifted(slot: Slot) -> Slot:
    """Return the slot of a matrix whose only row is a whole vector."""
    load = slot.load
    return Slot((1, *slot.shape), None if load is None else lambda tensor: load(tensor[0]))


def _with_stacked_experts(
    slots: dict[str, Slot], stacked: Mapping[str, tuple[str, ...]]
) -> dict[str, Slot]:
    """Replace the slots of experts by those of tensors that hold one matrix of all of them."""
    found: dict[str, dict[tuple[int, int], Slot]] = {}
    whose = {part: name for name, parts in stacked.items() for part in parts}
    kept = {}
    for name, slot in slots.items():
        its = re.fullmatch(r"(.*\.experts\.)(\d+)\.(\w+)\.(weight|bias)", name)
        if its is None:
            kept[name] = slot
            continue
        prefix, expert, part, kind = its.groups()
        whole = prefix + whose[part] + ("_bias" if kind == "bias" else "")
        place = stacked[whose[part]].index(part)
        found.setdefault(whole, {})[int(expert), place] = slot
    for whole, parts in found.items():
        experts: list[list[Slot]] = [[] for _ in range(1 + max(parts)[0])]
        for (expert, _), slot in sorted(parts.items()):
            experts[expert].append(slot)
        kept[whole] = _stacked(experts)
    return kept


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
