"""Drafts by Medusa heads: each head's likeliest token, from the state behind the newest one.

Costs one row of state per request, and the heads where there is room for a draft. Nothing of it
crosses between engines: where a request comes with its tokens from another engine, its first step
makes the state, and runs without a draft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.models.medusa import MedusaHeads
    from pdserve.wire.step import NewRequest
    from pdserve.worker.drafting.states import StepStates


class MedusaDrafter:
    """See the module.

    Args:
        num_rows: Of the batch.
        largest: Index of the largest of each row of logits `[M, len(heads.vocab)]` in the whole
            vocabulary of the heads; the same on all ranks that share it.
    """

    aux_layers: tuple[int, ...] = ()

    def __init__(
        self, heads: MedusaHeads, num_rows: int, largest: Callable[[Tensor], NDArray[np.int64]]
    ) -> None:
        self._heads = heads
        self._largest = largest
        self._hidden = torch.zeros(num_rows, heads.hidden_size, dtype=heads.dtype)
        self._is_known = np.zeros(num_rows, dtype=np.bool_)
        token_ids = heads.token_ids
        self._token_ids = None if token_ids is None else token_ids.numpy()

    def add(self, row: int, request: NewRequest) -> None:
        """See `Drafter`: nobody has seen its states here."""
        self._is_known[row] = False

    def remove(self, row: int) -> None:
        """See `Drafter`."""
        self._is_known[row] = False

    def note(self, row: int, token_ids: Sequence[int]) -> None:
        """See `Drafter`: the states tell."""

    def observe(self, states: StepStates) -> None:
        """See `StateDrafter`: keep the state that each newest token was sampled from."""
        sampling = [index for index, tokens in enumerate(states.sampled) if tokens]
        if not sampling:
            return
        rows = states.rows[sampling]
        last = states.query_start[sampling] + states.num_valid[sampling] - 1
        self._hidden[torch.from_numpy(rows)] = states.hidden[torch.from_numpy(last)]
        self._is_known[rows] = True

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """See `Drafter`."""
        rows = [row for row in wanted if self._is_known[row]]
        if not rows:
            return {}
        num_heads = min(max(wanted[row] for row in rows), self._heads.num_heads)
        found = self._largest(self._heads(self._hidden[rows], num_heads))
        if self._token_ids is not None:
            found = self._token_ids[found]
        drafts: list[list[int]] = found.reshape(num_heads, -1).T.tolist()
        return dict(zip(rows, drafts, strict=True))
