"""Drafts by Medusa heads: each head's likeliest token, from the state behind the newest one.

The states of a step are kept until a request's next one, and heads run where there is room for a
draft. No state crosses between engines: when a request comes with its tokens from another engine,
its first step makes the state, and runs without a draft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.models.medusa import MedusaHeads
    from pdserve.wire.step import NewRequest
    from pdserve.worker.drafting.drafter import StepStates


_MOST_KEPT: Final = 8
"""States of a step that are held for each request that sampled in it: of long prompts only those
that are used."""


class MedusaDrafter:
    """See the module.

    Args:
        largest: Returns the index of the largest logit of each row, `[M, len(heads.vocab)]`, in
            the whole vocabulary of the heads; the same on all ranks that share it.
    """

    aux_layers: tuple[int, ...] = ()

    def __init__(self, heads: MedusaHeads, largest: Callable[[Tensor], NDArray[np.int64]]) -> None:
        self._heads = heads
        self._largest = largest
        self._newest: dict[int, tuple[Tensor, int]] = {}
        token_ids = heads.token_ids
        self._token_ids = None if token_ids is None else token_ids.numpy()

    def warm_up(self, steps: Sequence[tuple[int, int]]) -> None:
        """See `DraftModel`."""
        heads = self._heads
        for num_rows in dict.fromkeys(num_rows for num_rows, _ in steps):
            states = torch.zeros(
                num_rows, heads.hidden_size, dtype=heads.dtype, device=heads.device
            )
            self._largest(heads(states, heads.num_heads))

    def add(self, row: int, request: NewRequest) -> None:
        """See `Drafter`: nobody has seen its states here."""

    def remove(self, row: int) -> None:
        """See `Drafter`."""
        self._newest.pop(row, None)

    def note(self, row: int, token_ids: Sequence[int]) -> None:
        """See `Drafter`: the states tell."""

    def observe(self, states: StepStates) -> None:
        """See `StateDrafter`: keep the state that each newest token was sampled from.

        A reference is kept, so that requests that get no drafts cost next to nothing.
        """
        sampling = [index for index, tokens in enumerate(states.sampled) if tokens]
        if not sampling:
            return
        hidden = states.hidden
        first, num_valid = states.query_start.tolist(), states.num_valid.tolist()
        last = [first[index] + num_valid[index] - 1 for index in sampling]
        if len(hidden) > _MOST_KEPT * len(sampling):
            hidden, last = hidden[last], list(range(len(last)))
        rows = states.rows.tolist()
        for index, at in zip(sampling, last, strict=True):
            self._newest[rows[index]] = hidden, at

    def skip(self, rows: Sequence[int]) -> None:
        """Forget the states of rows that a step has advanced unseen."""
        for row in rows:
            self._newest.pop(row, None)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """See `Drafter`."""
        rows = [row for row in wanted if row in self._newest]
        if not rows:
            return {}
        num_heads = min(max(wanted[row] for row in rows), self._heads.num_heads)
        found = self._largest(self._heads(self._states_of(rows), num_heads))
        if self._token_ids is not None:
            found = self._token_ids[found]
        drafts: list[list[int]] = found.reshape(num_heads, -1).T.tolist()
        return dict(zip(rows, drafts, strict=True))

    def _states_of(self, rows: list[int]) -> Tensor:
        kept = [self._newest[row] for row in rows]
        hidden = kept[0][0]
        if all(each is hidden for each, _ in kept):
            return hidden[[at for _, at in kept]]
        return torch.stack([each[at] for each, at in kept])
