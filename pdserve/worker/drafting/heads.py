"""Drafts by a head that goes on from the model's own states, with KV of its own (EAGLE, MTP).

    observe -> states of a step are kept, by row, until there are enough to be worth a pass
    propose -> the head computes what it lacks, then the tokens of each draft one by one

The head's row at position p is made of the model's state there and of the token at p + 1. Rows
that it computed from its own guesses are computed again from the model's states once they exist.

A head has KV of what this engine has computed: of a cached prefix only if the blocks hold the
head's KV of the same tokens (`contents`), of one from another engine nothing. Then it begins at the
first block after the prefix, with a shorter memory than the model, as if the request began there.
This can make a draft wrong, but never a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from pdserve.worker import kv_memory
from pdserve.worker.drafting.contents import BlockContents
from pdserve.worker.drafting.drafter import lists_from
from pdserve.worker.drafting.model import rehearsed
from pdserve.worker.step_buffers import StepBuffers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.connectors.base import KVLayout
    from pdserve.models.registry import DraftHead
    from pdserve.parallel.group import Group
    from pdserve.wire.step import NewRequest
    from pdserve.worker.device import Device
    from pdserve.worker.drafting.drafter import StepStates
    from pdserve.worker.drafting.guesses import Guesses
    from pdserve.worker.input_batch import InputBatch

_MAX_KEPT: Final = 64
"""States of a request that wait to be computed: a pass of so many takes less than twice one's."""


class HeadDrafter:
    """See the module, and `StateDrafter`.

    Args:
        layout: Layout of its KV, with as many blocks as the model's.
        batch: Holds the tokens and blocks of the requests.
        tp: Ranks that each have the head; all use the first one's drafts.
        guesses: Choose from the head's logits.
        max_num_tokens: Maximum tokens of a step of the model.
    """

    def __init__(
        self,
        head: DraftHead,
        layout: KVLayout,
        batch: InputBatch,
        tp: Group,
        guesses: Guesses,
        *,
        device: Device,
        max_num_tokens: int,
    ) -> None:
        num_rows = batch.num_rows
        self._head, self._guesses = head, guesses
        self.aux_layers = head.aux_layers
        self._kv_layers = list(kv_memory.allocate(layout, device.torch).unbind(1))
        self._block_size = layout.block_size
        self._batch, self._tp = batch, tp
        self._buffers = StepBuffers(
            device,
            num_rows=num_rows,
            max_blocks=batch.max_blocks,
            max_num_tokens=max_num_tokens + num_rows * _MAX_KEPT,
        )
        self._contents = BlockContents(batch, layout.block_size)
        self._first_block = np.zeros(num_rows, dtype=np.int64)
        self._num_computed = np.zeros(num_rows, dtype=np.int64)
        self._kept: dict[int, list[Tensor]] = {}
        self._num_kept = np.zeros(num_rows, dtype=np.int64)
        self._last: dict[int, Tensor] = {}

    def warm_up(self, steps: Sequence[tuple[int, int]]) -> None:
        """See `DraftModel`."""
        for inputs in rehearsed(self._buffers, steps):
            zeros = self._kv_layers[0].new_zeros(len(inputs.token_ids), self._head.hidden_size)
            states = self._head.enter(zeros, (zeros,) * len(self.aux_layers))
            followed = self._head.forward(inputs, states, self._kv_layers)
            self._head.logits(followed[: len(inputs.context_lens)])

    def add(self, row: int, request: NewRequest) -> None:
        """See `Drafter`."""
        known = self._contents.add(row, request.cache_salt)
        self._begin(row, request.num_computed_tokens)
        if known >= request.num_computed_tokens:
            self._first_block[row] = 0
            self._num_computed[row] = request.num_computed_tokens

    def _begin(self, row: int, position: int) -> None:
        """Start a row at the first block boundary at or after `position`."""
        first = -(-position // self._block_size)
        self._first_block[row] = first
        self._num_computed[row] = first * self._block_size
        self._num_kept[row] = 0
        self._kept[row] = []
        self._last.pop(row, None)

    def remove(self, row: int) -> None:
        """See `Drafter`."""
        del self._kept[row]
        self._contents.remove(row)
        self._guesses.remove(row)
        self._last.pop(row, None)

    def note(self, row: int, token_ids: Sequence[int]) -> None:
        """See `Drafter`: the batch has them."""
        self._guesses.note(row, token_ids)

    def observe(self, states: StepStates) -> None:
        """See `StateDrafter`."""
        full = []
        for index, row in enumerate(states.rows.tolist()):
            start, at = int(states.start[index]), int(states.query_start[index])
            end = start + int(states.num_valid[index])
            if start > self._num_computed[row] + self._num_kept[row]:
                self._begin(row, start)  # the positions between were loaded
            skipped = max(0, int(self._num_computed[row] + self._num_kept[row]) - start)
            if start + skipped >= end:
                continue
            rows = slice(at + skipped, at + end - start)
            aux = tuple(layer[rows] for layer in states.aux)
            self._kept[row].append(self._head.enter(states.hidden[rows], aux).clone())
            self._num_kept[row] += end - start - skipped
            if self._num_kept[row] >= _MAX_KEPT:
                full.append(row)
        self._catch_up(full)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """See `Drafter`. Every rank of the group must ask for the same."""
        return lists_from(self._tp, 0, wanted, self._draft(wanted))

    def _draft(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        self._catch_up(wanted)
        num_tokens = self._batch.num_tokens(np.array([*wanted], dtype=np.int64))
        able = [
            (row, int(num))
            for row, num in zip(wanted, num_tokens, strict=True)
            if row in self._last and self._num_computed[row] == num - 1
        ]
        if not able:
            return {}
        rows = np.array([row for row, _ in able], dtype=np.int64)
        at = np.array([num for _, num in able], dtype=np.int64)
        most = np.array([wanted[row] for row, _ in able], dtype=np.int64)
        states = torch.cat([self._last[row] for row, _ in able])
        drafts: dict[int, list[int]] = {row: [] for row, _ in able}
        for depth in range(int(most.max())):
            logits, num_outputs = self._head.logits(states), self._batch.num_outputs(rows)
            tokens = self._guesses.choose(logits, rows, num_outputs, depth)
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                drafts[row].append(token)
            goes_on = most > depth + 1
            if not goes_on.any():
                break
            rows, at, most = rows[goes_on], at[goes_on], most[goes_on]
            self._batch.write_ahead(rows, at + depth, tokens[goes_on])
            here = at + depth - 1
            states = self._compute(rows, here, here + 1, states[goes_on], are_guesses=True)
        return drafts

    def _catch_up(self, wanted: Iterable[int]) -> None:
        """Compute the kept states of some rows, as far as the tokens after them are known."""
        rows = np.array([row for row in wanted if self._num_kept[row]], dtype=np.int64)
        if not len(rows):
            return
        start = self._num_computed[rows]
        end = np.minimum(start + self._num_kept[rows], self._batch.num_tokens(rows) - 1)
        rows, start, end = rows[start < end], start[start < end], end[start < end]
        if not len(rows):
            return
        states = []
        for row, num in zip(rows.tolist(), (end - start).tolist(), strict=True):
            kept = torch.cat(self._kept[row])
            states.append(kept[:num])
            self._kept[row] = [kept[num:]] if num < len(kept) else []
        self._num_kept[rows] -= end - start
        computed = self._compute(rows, start, end, torch.cat(states))
        last = np.cumsum(end - start) - 1
        for row, place in zip(rows.tolist(), last.tolist(), strict=True):
            self._last[row] = computed[place : place + 1].clone()
        self._num_computed[rows] = end

    def _compute(
        self,
        rows: NDArray[np.int64],
        start: NDArray[np.int64],
        end: NDArray[np.int64],
        states: Tensor,
        *,
        are_guesses: bool = False,
    ) -> Tensor:
        """Run the head at some positions; return the states that follow."""
        for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
            is_prefix = not (are_guesses or self._first_block[row])
            self._contents.write(row, first, last, is_prefix=is_prefix)
        inputs, _ = self._batch.inputs_of(
            self._buffers, rows, start, end, first_block=self._first_block[rows], ahead=1
        )
        return self._head.forward(inputs, states, self._kv_layers)
