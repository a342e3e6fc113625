"""EAGLE heads: one decoder layer that drafts from a model's states.

For each token a head reads the model's state at its position and the embedding of the token after
it. It computes a state that predicts the token after that one, and that replaces the model's state
where the model has none yet. It has its own KV.

    EAGLE-1 (Li et al., arXiv 2401.15077): the model's final state, embedding and output head.
    EAGLE-3 (Li et al., arXiv 2503.01840): the joined residual streams before several layers, the
    model's embedding, and its own output head over the likeliest part of the vocabulary.

Files are as SafeAILab's EAGLE and the `speculators` project write them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch

from pdserve.errors import ConfigError
from pdserve.models.arch import ModelArch
from pdserve.models.config_json import Fields, read_config
from pdserve.models.layers.attention import GroupedQueryAttention
from pdserve.models.layers.linear import Linear
from pdserve.models.layers.mlp import GatedMLP
from pdserve.models.layers.parameter import Parameter
from pdserve.models.layers.rope import cos_sin_table
from pdserve.models.reading import parse_arch
from pdserve.models.slots import Slot

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from pdserve.kernels.step import StepInputs
    from pdserve.models.layers.parameter import Placement
    from pdserve.models.registry import DraftHead, LoadedModel
    from pdserve.models.weights import Checkpoint

_SPECULATORS = "speculators_config"
_NORM_OF_INPUT = "input_layernorm.weight"
_LAYER = "model.layers.0."
_ORIGINAL = "model.midlayer."
"""SafeAILab's name of the layer of EAGLE-3."""
_OFFSETS = "model.d2t"
NOT_READ = (_OFFSETS, "model.t2d", "model.embed_tokens.")
"""Prefixes of names that belong to the model, or are not weights."""


class EagleArch(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a head.

    Attributes:
        layer: Its decoder layer, as a model of one layer.
        aux_layers: For EAGLE-3: the layers of the model before which the stream is read, ascending.
        draft_vocab_size: For EAGLE-3: number of tokens that it can draft.
        norm_before_residual: For EAGLE-3: whether the residual is the normed state.
    """

    layer: ModelArch
    aux_layers: tuple[int, ...] = ()
    draft_vocab_size: int = 0
    norm_before_residual: bool = False


def read_eagle(directory: Path, method: str, target: ModelArch) -> EagleArch:
    """Read the `config.json` of a head.

    Args:
        method: eagle or eagle3.
        target: The model that it drafts for.

    Raises:
        ConfigError: It cannot be read, is for another method, or does not fit the model.
    """
    config = read_config(directory)
    top = Fields("EAGLE", config)
    layer = config
    if _SPECULATORS in config:
        top.only("speculators_model_type", method)
        section = config.get("transformer_layer_config")
        if not isinstance(section, dict):
            raise top.error("transformer_layer_config", section, "an object is needed")
        layer = section
    top.only("norm_before_fc", False)
    arch = parse_arch({**layer, "architectures": ["LlamaForCausalLM"], "model_type": None})
    if arch.num_layers != 1:
        raise top.error("num_hidden_layers", arch.num_layers, "heads of one layer are served")
    for name, found, wanted in (
        ("vocab_size", arch.vocab_size, target.vocab_size),
        ("hidden_size", arch.hidden_size, target.hidden_size),
    ):
        if found != wanted:
            raise top.error(name, found, f"the model's is {wanted}: use a head that is made for it")
    if method == "eagle":
        return EagleArch(layer=arch)
    draft_vocab_size = top.count("draft_vocab_size", arch.vocab_size)
    if draft_vocab_size > arch.vocab_size:
        raise top.error("draft_vocab_size", draft_vocab_size, f"vocab_size is {arch.vocab_size}")
    return EagleArch(
        layer=arch,
        aux_layers=_aux_layers(top, target.num_layers),
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=top.flag("norm_before_residual", default=_SPECULATORS in config),
    )


def _aux_layers(top: Fields, num_layers: int) -> tuple[int, ...]:
    """The named layers, or those of published EAGLE-3 heads."""
    name = "eagle_aux_hidden_state_layer_ids"
    inner = top.section("eagle_config")
    named: Any = top.get(name) or (inner and inner.get(name))
    if named is None:
        named = [2, num_layers // 2, num_layers - 3]
    is_list = isinstance(named, list) and all(type(each) is int for each in named)
    if not is_list or len({*named}) != len(named) or not all(0 <= n <= num_layers for n in named):
        raise top.error(name, named, f"different layers from 0 to {num_layers} are needed")
    return tuple(sorted(named))


class EagleHead:
    """EAGLE-1.

    Args:
        embed: `[T]` token ids to `[T, hidden_size]`: the model's.
        logits: `[M, hidden_size]` to `[M, len(vocab)]`: the model's output head.
        has_fc_bias: Whether the layer that joins its two inputs has a bias.
    """

    aux_layers: tuple[int, ...] = ()
    has_output = False
    offsets: Tensor | None = None

    def __init__(
        self,
        arch: EagleArch,
        placement: Placement,
        *,
        max_positions: int,
        embed: Callable[[Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
        has_fc_bias: bool = False,
    ) -> None:
        layer = arch.layer
        self.hidden_size = layer.hidden_size
        table = cos_sin_table(layer.rope, layer.head_dim, max_positions).to(placement.device)
        self._fc = Linear(
            2 * layer.hidden_size, {"fc": layer.hidden_size}, placement, bias=has_fc_bias
        )
        self._attention = GroupedQueryAttention(layer, 0, table, placement)
        self._mlp = GatedMLP(layer, placement)
        self._embed, self.logits = embed, logits

    def slots(self) -> dict[str, Slot]:
        """See `DraftHead`. The layer has no norm of its input."""
        prefix = _LAYER
        slots = dict(self._fc.slots("model."))
        slots.update(self._attention.slots(prefix))
        norm = slots.pop(prefix + _NORM_OF_INPUT)
        assert norm.load is not None
        norm.load(torch.ones(norm.shape))
        slots.update(self._mlp.slots(prefix))
        return slots

    def enter(self, hidden: Tensor, aux: tuple[Tensor, ...]) -> Tensor:
        """See `DraftHead`."""
        return hidden

    def forward(self, step: StepInputs, states: Tensor, kv_layers: list[Tensor]) -> Tensor:
        """See `DraftHead`."""
        stream = self._fc.packed(torch.cat([self._embed(step.token_ids), states], dim=-1))
        attended = self._attention.after_norm(stream, step, kv_layers[0])
        return stream + self._mlp(attended, stream, len(step.positions))


class Eagle3Head:
    """EAGLE-3.

    Args:
        embed: `[T]` token ids to `[T, hidden_size]`: the model's.
        prefix: Prefix of the layer's names.
        offsets: See `DraftHead`.
    """

    has_output = True

    def __init__(
        self,
        arch: EagleArch,
        placement: Placement,
        *,
        max_positions: int,
        embed: Callable[[Tensor], Tensor],
        prefix: str,
        offsets: Tensor | None,
    ) -> None:
        layer = arch.layer
        size = self.hidden_size = layer.hidden_size
        table = cos_sin_table(layer.rope, layer.head_dim, max_positions).to(placement.device)
        self.aux_layers = arch.aux_layers
        self._prefix = prefix
        self._before_residual = arch.norm_before_residual
        self._fc = Linear(len(arch.aux_layers) * size, {"fc": size}, placement)
        self._attention = GroupedQueryAttention(layer, 0, table, placement, in_features=2 * size)
        self._mlp = GatedMLP(layer, placement)
        self._hidden_norm = Parameter((size,), placement)
        self._norm = Parameter((size,), placement)
        self._head = Linear(
            size, {"lm_head": arch.draft_vocab_size}, placement, out_dtype=torch.float32
        )
        self._rms_norm, self._eps = placement.kernels.rms_norm, layer.rms_norm_eps
        self._embed = embed
        self.offsets = offsets

    def slots(self) -> dict[str, Slot]:
        """See `DraftHead`."""
        slots = dict(self._fc.slots("model."))
        slots.update(self._attention.slots(self._prefix))
        slots.update(self._mlp.slots(self._prefix))
        slots[f"{self._prefix}hidden_norm.weight"] = self._hidden_norm.slot()
        slots["model.norm.weight"] = self._norm.slot()
        slots.update(self._head.slots("model."))
        return slots

    def enter(self, hidden: Tensor, aux: tuple[Tensor, ...]) -> Tensor:
        """See `DraftHead`."""
        return self._fc.packed(torch.cat(aux, dim=-1))

    def forward(self, step: StepInputs, states: Tensor, kv_layers: list[Tensor]) -> Tensor:
        """See `DraftHead`."""
        normed = self._rms_norm(states, self._hidden_norm.value, self._eps)
        stream = (normed if self._before_residual else states).clone()
        joined = torch.cat([self._attention.norm(self._embed(step.token_ids)), normed], dim=-1)
        attended = self._attention.after_norm(joined, step, kv_layers[0])
        return stream.add_(self._mlp(attended, stream, len(step.positions)))

    def logits(self, states: Tensor) -> Tensor:
        """See `DraftHead`."""
        return self._head.packed(self._rms_norm(states, self._norm.value, self._eps))


def make_eagle(
    arch: EagleArch,
    source: Checkpoint,
    placement: Placement,
    *,
    target: LoadedModel,
) -> DraftHead:
    """Make a head, whose weights are still to be loaded.

    Args:
        source: Its checkpoint.
        target: The model that it drafts for.

    Raises:
        ConfigError: It lacks the mapping of its tokens to the model's, or that does not fit.
    """
    if not arch.aux_layers:
        return EagleHead(
            arch,
            placement,
            max_positions=target.max_model_len,
            embed=target.model.embed,
            logits=target.model.logits,
            has_fc_bias="model.fc.bias" in source,
        )
    offsets, size = source.integers(_OFFSETS), arch.draft_vocab_size
    if offsets is None and size < arch.layer.vocab_size:
        raise ConfigError(
            f"draft_vocab_size is {size}, but there is no tensor d2t that maps those tokens"
        )
    if offsets is not None and offsets.shape != (size,):
        raise ConfigError(
            f"d2t has the shape {list(offsets.shape)}, but draft_vocab_size is {size}"
        )
    if offsets is not None:
        first, last = (torch.arange(size) + offsets).aminmax()
        if first < 0 or last >= arch.layer.vocab_size:
            raise ConfigError(
                f"d2t names {int(first if first < 0 else last)}, but the model's tokens are 0 to "
                f"{arch.layer.vocab_size - 1}: use a head that is made for it"
            )
    is_original = f"{_ORIGINAL}{_NORM_OF_INPUT}" in source
    return Eagle3Head(
        arch,
        placement,
        max_positions=target.max_model_len,
        embed=target.model.embed,
        prefix=_ORIGINAL if is_original else _LAYER,
        offsets=offsets,
    )
