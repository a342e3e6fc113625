"""Token embedding and output head over a vocabulary split by rows over the TP group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdserve.kernels.reference.linear import take_rows
from pdserve.models.slots import Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from pdserve.kernels.reference.linear import PackedLinear
    from pdserve.models.arch import ModelArch
    from pdserve.models.layers.parameter import Placement
    from pdserve.parallel.group import Group


def vocab_rows(vocab_size: int, tp: Group) -> range:
    """Ids of this rank's rows: `ceil(vocab_size / ranks)` of them, from `index` times that on.

    If it does not divide, the last ranks have fewer or none; nothing is padded.
    """
    each = -(-vocab_size // tp.size)
    return range(min(tp.index * each, vocab_size), min((tp.index + 1) * each, vocab_size))


class Embedding:
    """Rows of a table by token id, and logits over the same vocabulary.

    The embedding is on the first pipeline stage, the head on the last. A rank that has both, tied,
    stores them once, in the layout of the head.

    Attributes:
        rows: Token ids whose rows of embedding and head this rank has.
    """

    def __init__(self, arch: ModelArch, placement: Placement) -> None:
        pp = placement.world.pp
        self.rows = vocab_rows(arch.vocab_size, placement.world.tp)
        self._vocab_size = arch.vocab_size
        self._shape = arch.vocab_size, arch.hidden_size
        self._is_tied = arch.tie_embeddings
        self._placement = placement
        self._logits_scale = arch.logits_scale
        self._scale = float(torch.tensor(arch.embedding_scale, dtype=placement.dtype))
        self._stream = placement.stream
        self._head = self._new_head() if pp.is_last else None
        self._reads_head = pp.is_first and pp.is_last and arch.tie_embeddings
        self._table: Tensor | None = None
        self._has_table = pp.is_first and not self._reads_head
        if self._has_table and not self.rows:
            self._table = placement.empty(0, arch.hidden_size)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how to load each parameter, by name; a tied head has no own name."""
        tied_head = self._is_tied and self._head is not None
        yield (
            f"{prefix}embed_tokens.weight",
            self._slot(
                self._load_table if self._has_table else self._load_head if tied_head else None
            ),
        )
        if not self._is_tied:
            yield "lm_head.weight", self._slot(None if self._head is None else self._load_head)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Look up tokens, whichever ranks have their rows.

        Args:
            token_ids: `[T]` int64.

        Returns:
            This rank's rows of the residual stream: `[T, hidden_size]`, or a share of them.
        """
        first_id, num_ids = self.rows.start, self._vocab_size
        if self._reads_head:
            assert self._head is not None
            found = self._head.rows(token_ids, first_id=first_id, num_ids=num_ids)
        else:
            assert self._table is not None, "the weights are not loaded, or another stage's"
            found = take_rows(self._table, token_ids, first_id=first_id, num_ids=num_ids)
        if self._scale != 1.0:
            found = found * self._scale
        return self._stream.sum(found)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of this rank's `rows`: `[M, hidden_size] -> [M, len(rows)]` fp32."""
        assert self._head is not None, "the head is on the last stage"
        logits = self._head(hidden)
        return logits if self._logits_scale == 1.0 else logits.mul_(self._logits_scale)

    def _new_head(self) -> PackedLinear:
        return self._placement.kernels.linear(
            len(self.rows),
            self._shape[1],
            dtype=self._placement.dtype,
            device=self._placement.device,
            out_dtype=torch.float32,
        )

    def _slot(self, load: Callable[[Tensor], None] | None) -> Slot:
        region = slice(self.rows.start, self.rows.stop), slice(0, self._shape[1])
        slot = Slot(self._shape, load, region)
        return slot if self.rows else slot.elsewhere()

    def _load_table(self, tensor: Tensor) -> None:
        self._table = self._placement.empty(*tensor.shape).copy_(tensor)

    def _load_head(self, tensor: Tensor) -> None:
        assert self._head is not None
        self._head.write(0, tensor)
