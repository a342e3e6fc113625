"""The decoder that Llama and its relatives share: layers of attention and feed-forward halves.

It is written as for one device: each layer loads this rank's slices, and each half layer ends in
one sum. A pipeline stage has a run of the layers; the first embeds, the last norms and has the
head. Knows rows of tokens and slots of KV, no requests and no sampling.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch

from pdserve.kernels.step import StepInputs
from pdserve.models.layers.attention import GroupedQueryAttention
from pdserve.models.layers.embedding import Embedding
from pdserve.models.layers.mla import LatentAttention
from pdserve.models.layers.mlp import GatedMLP
from pdserve.models.layers.moe import MoE
from pdserve.models.layers.norm import ResidualScale, RMSNorm
from pdserve.models.layers.parameter import Placement
from pdserve.models.layers.rope import cos_sin_table, no_rotation
from pdserve.parallel.dispatch import SlicedExperts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pdserve.models.arch import ModelArch
    from pdserve.models.slots import Slot


class LayerHooks(Protocol):
    """Called around each layer, for KV that arrives or leaves layer by layer."""

    def wait_for_layer_load(self, layer: int) -> None:
        """Return once `layer`'s KV may be read."""
        ...

    def save_kv_layer(self, layer: int) -> None:
        """Called once `layer`'s KV of this step is written."""
        ...


@dataclass(slots=True)
class StreamTap:
    """Captures the residual stream before some layers of one step, for drafters.

    Attributes:
        layers: Indices in the whole model, ascending; one after the last stands for the final norm.
        states: The stream before each of them that this stage has, `[T, hidden_size]`, after the
            step.
    """

    layers: tuple[int, ...]
    states: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class WantedStates:
    """The tokens of one step whose final states are read.

    The second half of the last layer affects no KV, so it runs only for these.

    Attributes:
        rows: `[M]` int64, indices of the step's tokens.
        sums: `[T]` fp32, after the step: the sum of each token's stream before that half, which is
            not finite if any element is not.
    """

    rows: Tensor
    sums: Tensor = field(init=False)


class AttentionHalf(Protocol):
    """The first half of a layer: norm, attention, projection."""

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how to load each parameter; `prefix` is that of the layer."""
        ...

    def __call__(
        self, x: Tensor | None, residual: Tensor, step: StepInputs, kv_layer: Tensor
    ) -> Tensor:
        """Add `x` to `residual`; return the result, which is not yet added."""
        ...


class FeedForwardHalf(Protocol):
    """The second half of a layer: norm and MLP, or norm and experts."""

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how to load each parameter; `prefix` is that of the layer."""
        ...

    def __call__(self, x: Tensor, residual: Tensor, num_tokens: int) -> Tensor:
        """Add `x` to `residual`; return the result, which is not yet added."""
        ...


class DecoderLayer:
    """One layer; `residual` is the stream that it reads and adds to.

    Args:
        layer: Index in the whole model.
        cos_sin: The rotary table.

    Attributes:
        has_experts: Whether its second half has experts, which other engine cores may share.
    """

    def __init__(self, arch: ModelArch, layer: int, cos_sin: Tensor, placement: Placement) -> None:
        self.attention = _attention(arch, layer, cos_sin, placement)
        self.has_experts = arch.moe is not None and arch.moe.layers[layer]
        self.mlp = _feed_forward(arch, layer, placement)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how to load each parameter, by name."""
        yield from self.attention.slots(prefix)
        yield from self.mlp.slots(prefix)

    def __call__(
        self, x: Tensor | None, residual: Tensor, step: StepInputs, kv_layer: Tensor
    ) -> Tensor:
        """Run both halves, between which a `Decoder` has more to do and so calls them itself.

        R rows of T are this rank's share of the residual stream, or all.

        Args:
            x: `[R, hidden_size]`, the previous layer's result, not yet added to `residual`; None
                for the first layer of a stage.
            residual: `[R, hidden_size]`, changed in place.
            step: The tokens' places.
            kv_layer: `[num_blocks, planes, num_kv_heads, block_size, head_dim]`; this step's
                KV is written to it. Keys and values are two planes, latents one.

        Returns:
            `[R, hidden_size]`, the second half's result, not yet added to `residual`.
        """
        return self.mlp(self.attention(x, residual, step, kv_layer), residual, len(step.positions))


class Decoder:
    """A causal language model, or one pipeline stage of it.

    Args:
        placement: This rank's placement; its stage is that of `placement.world.pp`.
        max_positions: Positions that the rotary table covers, those of the longest request.
        layers: Layers of this stage; None: all.

    Attributes:
        vocab: Token ids whose logits this rank computes.
    """

    def __init__(
        self,
        arch: ModelArch,
        placement: Placement,
        *,
        max_positions: int,
        layers: range | None = None,
    ) -> None:
        tables = {
            rope: (
                no_rotation(max_positions)
                if rope is None
                else cos_sin_table(rope, arch.rotary_dim, max_positions)
            ).to(placement.device)
            for rope in {arch.rope_of(layer) for layer in range(arch.num_layers)}
        }
        self.arch = arch
        self._placement = placement
        self._stream = placement.stream
        self._embedding = Embedding(arch, placement)
        self.vocab = self._embedding.rows
        self._stage = range(arch.num_layers) if layers is None else layers
        self._layers = [
            DecoderLayer(arch, layer, tables[arch.rope_of(layer)], placement)
            for layer in self._stage
        ]
        self._norm = RMSNorm(arch, placement)
        self._is_first = placement.world.pp.is_first
        self._is_last = placement.world.pp.is_last

    def slots(self) -> dict[str, Slot]:
        """How to load each tensor of the checkpoint, by name, for all stages."""
        slots = dict(self._embedding.slots("model."))
        for index in range(self.arch.num_layers):
            prefix = f"model.layers.{index}."
            if index in self._stage:
                slots.update(self._layers[index - self._stage.start].slots(prefix))
            else:
                slots.update(self._slots_elsewhere(index, prefix))
        norm = self._norm.slot()
        slots["model.norm.weight"] = norm if self._is_last else norm.elsewhere()
        return slots

    def _slots_elsewhere(self, layer: int, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield the slots of another stage's layer, as one rank would load it."""
        moe = self.arch.moe
        here = self._placement
        alone = Placement(here.device, here.dtype, here.kernels)
        if moe is not None:
            alone = replace(alone, experts=SlicedExperts(moe.num_experts, alone.world.tp))
        for name, slot in DecoderLayer(self.arch, layer, torch.empty(0), alone).slots(prefix):
            yield name, slot.elsewhere()

    def hidden_rows(self, num_tokens: int) -> int:
        """Rows that a stage sends to the next for `num_tokens` tokens."""
        return self._stream.num_rows(num_tokens)

    def forward(
        self,
        step: StepInputs,
        kv_layers: list[Tensor],
        hooks: LayerHooks | None = None,
        hidden: Tensor | None = None,
        tap: StreamTap | None = None,
        wanted: WantedStates | None = None,
    ) -> Tensor:
        """Run this stage over a step's tokens, and write its KV.

        Args:
            step: The tokens and their places.
            kv_layers: Per layer of this stage
                `[num_blocks, planes, num_kv_heads, block_size, head_dim]`, of this rank's heads.
            hooks: Called around each layer's attention, with its index in this stage.
            hidden: `[hidden_rows(T), hidden_size]` from the previous stage, changed in place; None
                on the first.
            tap: Filled in.
            wanted: Only on the last stage; filled in. None: all tokens.

        Returns:
            On the last stage the final hidden states, normed: of all tokens, `[T, hidden_size]`,
            or of those that are wanted, `[M, hidden_size]`. On others
            `[hidden_rows(T), hidden_size]` to send on.
        """
        residual = self._embedding(step.token_ids) if hidden is None else hidden
        num_tokens = len(step.positions)
        x: Tensor | None = None
        for index, layer in enumerate(self._layers):
            if hooks is not None:
                hooks.wait_for_layer_load(index)
            if tap is not None:
                self._fill(tap, self._stage[index], x, residual, num_tokens)
            x = layer.attention(x, residual, step, kv_layers[index])
            if hooks is not None:
                hooks.save_kv_layer(index)
            if wanted is not None and layer is self._layers[-1]:
                x, residual = self._narrowed(x, residual, num_tokens, wanted)
                num_tokens = len(wanted.rows)
            if num_tokens:
                x = layer.mlp(x, residual, num_tokens)
        assert x is not None
        if not self._is_last:
            # The next stage's first norm would add them, with this rounding.
            return residual.add_(x)
        if tap is not None:
            self._fill(tap, self.arch.num_layers, x, residual, num_tokens)
        return self._stream.gather(self._norm.add(x, residual), num_tokens)

    def _narrowed(
        self, x: Tensor, residual: Tensor, num_tokens: int, wanted: WantedStates
    ) -> tuple[Tensor, Tensor]:
        """Keep the wanted rows of the stream and of the pending addition to it."""
        x, residual = (self._stream.gather(each, num_tokens) for each in (x, residual))
        wanted.sums = x.sum(-1, dtype=torch.float32) + residual.sum(-1, dtype=torch.float32)
        x, residual = (self._stream.share(each[wanted.rows]) for each in (x, residual))
        return x, residual

    def _fill(
        self, tap: StreamTap, layer: int, x: Tensor | None, residual: Tensor, num_tokens: int
    ) -> None:
        """Copy the stream before `layer` if it is asked for, because it keeps changing."""
        if layer in tap.layers:
            stream = residual.clone() if x is None else residual + x
            tap.states.append(self._stream.gather(stream, num_tokens))

    def idle_forward(self) -> None:
        """Take part, with no token, in the layers whose experts other engine cores share."""
        for layer in self._layers:
            if layer.has_experts:
                layer.mlp(
                    self._placement.empty(0, self.arch.hidden_size),
                    self._placement.empty(0, self.arch.hidden_size),
                    0,
                )

    def embed(self, token_ids: Tensor) -> Tensor:
        """Look tokens up, on the first stage: `[T] -> [T, hidden_size]`, on each rank of TP."""
        return self._stream.gather(self._embedding(token_ids), len(token_ids))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of some rows for this rank's part of the vocabulary; on the last stage.

        Args:
            hidden: `[M, hidden_size]`.

        Returns:
            `[M, len(vocab)]` fp32.
        """
        return self._embedding.logits(hidden)


class FinishedAttention:
    """An attention half whose result is normed, or multiplied."""

    def __init__(self, half: AttentionHalf, finish: RMSNorm | ResidualScale) -> None:
        self._half, self._finish = half, finish

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """See `AttentionHalf`."""
        yield from self._half.slots(prefix)
        if isinstance(self._finish, RMSNorm):
            yield f"{prefix}post_self_attn_layernorm.weight", self._finish.slot()

    def __call__(
        self, x: Tensor | None, residual: Tensor, step: StepInputs, kv_layer: Tensor
    ) -> Tensor:
        """See `AttentionHalf`."""
        return self._finish(self._half(x, residual, step, kv_layer))


class FinishedFeedForward:
    """A feed-forward half whose result is normed, or multiplied."""

    def __init__(self, half: FeedForwardHalf, finish: RMSNorm | ResidualScale) -> None:
        self._half, self._finish = half, finish

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """See `FeedForwardHalf`."""
        yield from self._half.slots(prefix)
        if isinstance(self._finish, RMSNorm):
            yield f"{prefix}post_mlp_layernorm.weight", self._finish.slot()

    def __call__(self, x: Tensor, residual: Tensor, num_tokens: int) -> Tensor:
        """See `FeedForwardHalf`."""
        return self._finish(self._half(x, residual, num_tokens))


def _attention(arch: ModelArch, layer: int, cos_sin: Tensor, placement: Placement) -> AttentionHalf:
    made = GroupedQueryAttention if arch.mla is None else LatentAttention
    half, finish = made(arch, layer, cos_sin, placement), _finish(arch, placement)
    return half if finish is None else FinishedAttention(half, finish)


def _feed_forward(arch: ModelArch, layer: int, placement: Placement) -> FeedForwardHalf:
    is_dense = arch.moe is None or not arch.moe.layers[layer]
    half = GatedMLP(arch, placement) if is_dense else MoE(arch, layer, placement)
    finish = _finish(arch, placement)
    return half if finish is None else FinishedFeedForward(half, finish)


def _finish(arch: ModelArch, placement: Placement) -> RMSNorm | ResidualScale | None:
    """What is done to the result of a half layer before it is added to the stream."""
    if arch.norms.after:
        return RMSNorm(arch, placement)
    return None if arch.residual_scale == 1.0 else ResidualScale(arch.residual_scale)
