"""Multi-token prediction (DeepSeek-V3, section 2.2): a layer of the model's checkpoint that drafts.

It follows the model's layers (`num_nextn_predict_layers`), and is like them except for its input:
the model's final state at a position and the embedding of the token after it, each normed, then
joined and projected. It shares embedding and output head with the model. The same layer drafts
further tokens from its own states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from pdserve.errors import ConfigError
from pdserve.models.decoder import DecoderLayer
from pdserve.models.layers.linear import Linear
from pdserve.models.layers.parameter import Parameter, Placement
from pdserve.models.layers.rope import cos_sin_table
from pdserve.parallel.dispatch import SlicedExperts

if TYPE_CHECKING:
    from torch import Tensor

    from pdserve.kernels.backend import KernelBackend
    from pdserve.kernels.step import StepInputs
    from pdserve.models.arch import ModelArch
    from pdserve.models.registry import LoadedModel
    from pdserve.models.slots import Slot

NOT_READ: tuple[str, ...] = ("model.", "lm_head.")
"""Prefixes of names that belong to the model, or are shared with it."""


class MtpHead:
    """See the module, and `DraftHead`.

    Args:
        target: The model, whose embedding and output head it shares.

    Raises:
        ConfigError: The model has no such layer.
    """

    aux_layers: tuple[int, ...] = ()
    has_output = False
    offsets: Tensor | None = None

    def __init__(self, target: LoadedModel, device: torch.device, kernels: KernelBackend) -> None:
        arch = _with_one_layer_more(target.arch)
        moe, size = arch.moe, arch.hidden_size
        self.hidden_size = size
        placement = Placement(device, target.dtype, kernels)
        if moe is not None:
            experts = SlicedExperts(moe.num_experts, placement.world.tp)
            placement = Placement(device, target.dtype, kernels, experts=experts)
        table = cos_sin_table(arch.rope, arch.rotary_dim, target.max_model_len).to(device)
        self._prefix = f"model.layers.{target.arch.num_layers}."
        self._layer = DecoderLayer(arch, target.arch.num_layers, table, placement)
        self._join = Linear(2 * size, {"eh_proj": size}, placement)
        self._norms = {
            name: Parameter((size,), placement) for name in ("enorm", "hnorm", "shared_head.norm")
        }
        self._rms_norm, self._eps = kernels.rms_norm, arch.rms_norm_eps
        self._embed, self._logits = target.model.embed, target.model.logits

    def slots(self) -> dict[str, Slot]:
        """See `DraftHead`."""
        slots = dict(self._layer.slots(self._prefix))
        slots.update(self._join.slots(self._prefix))
        for name, norm in self._norms.items():
            slots[f"{self._prefix}{name}.weight"] = norm.slot()
        return slots

    def enter(self, hidden: Tensor, aux: tuple[Tensor, ...]) -> Tensor:
        """See `DraftHead`."""
        return hidden

    def forward(self, step: StepInputs, states: Tensor, kv_layers: list[Tensor]) -> Tensor:
        """See `DraftHead`."""
        embedded = self._normed("enorm", self._embed(step.token_ids))
        joined = torch.cat([embedded, self._normed("hnorm", states)], dim=-1)
        stream = self._join.packed(joined)
        return stream.add_(self._layer(None, stream, step, kv_layers[0]))

    def logits(self, states: Tensor) -> Tensor:
        """See `DraftHead`."""
        return self._logits(self._normed("shared_head.norm", states))

    def _normed(self, name: str, x: Tensor) -> Tensor:
        return self._rms_norm(x, self._norms[name].value, self._eps)


def _with_one_layer_more(arch: ModelArch) -> ModelArch:
    if not arch.num_extra_layers:
        raise ConfigError(
            f"num_nextn_predict_layers is absent or 0, so this {arch.architecture} has no layer "
            "that predicts further tokens: use another method"
        )
    moe = arch.moe
    if moe is not None:
        moe = msgspec.structs.replace(moe, layers=(*moe.layers, True))
    return msgspec.structs.replace(
        arch, num_layers=arch.num_layers + 1, windows=(*arch.windows, None), moe=moe
    )
