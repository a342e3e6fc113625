"""The decoder that Llama and its relatives share: a stack of attention and gated MLP.

Written as for one device; a layer's own loading is where a slice of a weight would be
taken. Knows rows of tokens and slots of KV, no requests and no sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pdserve.models.layers.attention import Attention
from pdserve.models.layers.embedding import Embedding
from pdserve.models.layers.mlp import GatedMLP
from pdserve.models.layers.norm import RMSNorm
from pdserve.models.layers.rope import cos_sin_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pdserve.models.arch import ModelArch
    from pdserve.models.layers.parameter import Placement
    from pdserve.models.weights import Slot


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tokens, flattened over its requests. T tokens of R requests.

    Attributes:
        token_ids: `[T]` int64.
        positions: `[T]` int64, position of each token in its request.
        slot_mapping: `[T]` int64, `block * block_size + offset` to store its KV at.
        block_tables: `[R, max_blocks]` int32.
        query_start: `[R + 1]` int32, first row of each request, and T.
        context_lens: `[R]` int32, tokens of each request with KV after this step.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor


class LayerHooks(Protocol):
    """Called around each layer, for KV that arrives or leaves layer by layer."""

    def wait_for_layer_load(self, layer: int) -> None:
        """Return once `layer`'s KV may be read."""
        ...

    def save_kv_layer(self, layer: int) -> None:
        """`layer`'s KV of this step is written."""
        ...


class DecoderLayer:
    """One layer; `residual` is the stream it reads and adds to."""

    def __init__(self, arch: ModelArch, layer: int, cos_sin: Tensor, placement: Placement) -> None:
        self.attention = Attention(arch, layer, cos_sin, placement)
        self.mlp = GatedMLP(arch, placement)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how each parameter is loaded, by name."""
        yield from self.attention.slots(prefix)
        yield from self.mlp.slots(prefix)

    def __call__(
        self, x: Tensor | None, residual: Tensor, step: StepInputs, kv_layer: Tensor
    ) -> Tensor:
        """Run the layer.

        Args:
            x: `[T, hidden_size]`, what the layer before it has not yet added to `residual`;
                None for the first layer.
            residual: `[T, hidden_size]`, changed in place.
            step: The tokens' places.
            kv_layer: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`; this step's keys
                and values are written to it.

        Returns:
            `[T, hidden_size]`, the MLP's result, not yet added to `residual`.
        """
        return self.mlp(self.attention(x, residual, step, kv_layer), residual)


class Decoder:
    """A whole causal language model.

    Args:
        max_positions: Positions that the rotary table covers: the longest request.
    """

    def __init__(self, arch: ModelArch, placement: Placement, *, max_positions: int) -> None:
        table = cos_sin_table(arch.rope, arch.head_dim, max_positions).to(placement.device)
        self.arch = arch
        self._embedding = Embedding(arch, placement)
        self._layers = [
            DecoderLayer(arch, layer, table, placement) for layer in range(arch.num_layers)
        ]
        self._norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, placement)

    def slots(self) -> dict[str, Slot]:
        """How each tensor of the checkpoint is loaded, by name."""
        slots = dict(self._embedding.slots("model."))
        for index, layer in enumerate(self._layers):
            slots.update(layer.slots(f"model.layers.{index}."))
        slots["model.norm.weight"] = self._norm.slot()
        return slots

    def forward(
        self, step: StepInputs, kv_layers: list[Tensor], hooks: LayerHooks | None = None
    ) -> Tensor:
        """Compute the final hidden states of a step, and write its KV.

        Args:
            step: The tokens and their places.
            kv_layers: Per layer `[num_blocks, 2, num_kv_heads, block_size, head_dim]`.
            hooks: Called around each layer.

        Returns:
            `[T, hidden_size]`, normed.
        """
        residual = self._embedding(step.token_ids)
        x: Tensor | None = None
        for index, layer in enumerate(self._layers):
            if hooks is not None:
                hooks.wait_for_layer_load(index)
            x = layer(x, residual, step, kv_layers[index])
            if hooks is not None:
                hooks.save_kv_layer(index)
        assert x is not None
        return self._norm.add(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of some rows: `[M, hidden_size] -> [M, vocab_size]` fp32."""
        return self._embedding.logits(hidden)
