"""Token embedding and output head, which may share one weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from pdserve.kernels.ops import PackedLinear
from pdserve.models.layers.linear import Linear
from pdserve.models.layers.parameter import Parameter
from pdserve.models.weights import Slot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pdserve.models.arch import ModelArch
    from pdserve.models.layers.parameter import Placement


class Embedding:
    """Rows of a table by token id, and logits over the same vocabulary.

    A tied head reads the embedding's weight: where the kernels repack weights it is a
    second copy, elsewhere the same tensor.
    """

    def __init__(self, arch: ModelArch, placement: Placement) -> None:
        self._table = Parameter((arch.vocab_size, arch.hidden_size), placement)
        self._own_head = (
            None
            if arch.tie_embeddings
            else Linear(
                arch.hidden_size, {"lm_head": arch.vocab_size}, placement, out_dtype=torch.float32
            )
        )
        self._tied_head: PackedLinear | None = None

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how each parameter is loaded, by name; a tied head has no name of its own."""
        table = self._table.slot()
        if self._own_head is not None:
            yield f"{prefix}embed_tokens.weight", table
            yield from self._own_head.slots("")
            return

        def load_both(tensor: Tensor) -> None:
            table.load(tensor)
            self._tied_head = PackedLinear(self._table.value, out_dtype=torch.float32)

        yield f"{prefix}embed_tokens.weight", Slot(table.shape, load_both)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`[T]` int64 -> `[T, hidden_size]`."""
        return functional.embedding(token_ids, self._table.value)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[M, hidden_size] -> [M, vocab_size]` fp32."""
        if self._own_head is not None:
            return self._own_head.packed(hidden)
        assert self._tied_head is not None, "the weights are not loaded"
        return self._tied_head(hidden)
