"""Drafts by a smaller model of the same vocabulary, with KV of its own (`method: draft_model`).

    propose -> computes tokens that the draft model lacks, as far as a step has room
            -> for requests that lack none, the next tokens, one by one

Its KV lies under the same block ids as the model's own, in separate memory: an allocated block has
room for both. The number of tokens of a request that the draft model has computed is tracked here:
blocks of a prefix cache hold its KV, too, if that was computed for the same tokens (`contents`),
and those that came from another engine do not. Blocks that requests share are written by each of
them, with the same values, as their tokens are the same. Even if they differed, only the draft
model reads its KV, and a wrong draft changes no token.

Source: Leviathan, Kalman, Matias, arXiv 2211.17192.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from pdserve.worker import kv_memory
from pdserve.worker.drafting.contents import BlockContents
from pdserve.worker.drafting.drafter import lists_from
from pdserve.worker.graphs import StepGraphs, decode_sizes, num_graph_rows
from pdserve.worker.step_buffers import StepBuffers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.connectors.base import KVLayout
    from pdserve.kernels.step import StepInputs
    from pdserve.models.registry import LoadedModel
    from pdserve.parallel.group import Group
    from pdserve.wire.step import NewRequest
    from pdserve.worker.device import Device
    from pdserve.worker.drafting.guesses import Guesses
    from pdserve.worker.input_batch import InputBatch
    from pdserve.worker.step_buffers import GraphSize

_NEWEST: Final = 2
"""Tokens that a request lacks whose draft was right: the last one of that, and what came behind."""
_MAX_CATCH_UP: Final = 128
"""Tokens beside those that the draft model computes in a step, of all requests: about as much work
as another draft or two."""


class DraftModel:
    """Drafts for the rows of a batch, made inside the step that verifies them.

    Args:
        layout: Layout of its KV, with as many blocks as the model's.
        batch: Holds the tokens and blocks of the requests.
        guesses: Choose from its logits.

    Raises:
        ConfigError: There is not enough memory for its KV.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        layout: KVLayout,
        batch: InputBatch,
        guesses: Guesses,
        *,
        device: Device,
    ) -> None:
        num_rows = batch.num_rows
        self._model, self._experts = loaded.model, loaded.experts
        self._max_len, self._guesses = loaded.max_model_len, guesses
        max_graph_rows = num_graph_rows(num_rows, 1)
        self._kv_layers = list(kv_memory.allocate(layout, device.torch).unbind(1))
        self._batch = batch
        self._buffers = StepBuffers(
            device,
            num_rows=max_graph_rows,
            max_blocks=-(-loaded.max_model_len // layout.block_size),
            max_num_tokens=_MAX_CATCH_UP + _NEWEST * num_rows,
        )
        self._graphs: StepGraphs[Tensor] | None = None
        if device.has_graphs and loaded.experts is None:
            sizes = decode_sizes(max_graph_rows)
            stage = self._buffers.stage_padding
            self._graphs = StepGraphs(device, sizes, stage, self._replayed)
        self._contents = BlockContents(batch, layout.block_size)
        self._num_computed = np.zeros(num_rows, dtype=np.int64)
        # Drafted tokens computed behind them: they count as far as the draft proved right.
        self._guessed: dict[int, list[int]] = {}
        self._behind: set[int] = set()

    def warm_up(self, steps: Sequence[tuple[int, int]]) -> None:
        """Launch all kernels that drafts may need on a device; see `rehearsed`."""
        for inputs in rehearsed(self._buffers, steps):
            hidden = self._model.forward(inputs, self._kv_layers)
            self._model.logits(hidden[: len(inputs.context_lens)])

    def capture(self) -> None:
        """Capture the steps to replay: a draft takes one short step per token.

        Raises:
            RuntimeError: A step cannot be captured; then no graph is kept.
        """
        if self._graphs is not None:
            self._graphs.capture()

    def close(self) -> None:
        """Release the graphs."""
        if self._graphs is not None:
            self._graphs.close()

    def _replayed(self, size: GraphSize) -> Tensor:
        """Return logits of what follows the first tokens in the buffers."""
        inputs = self._buffers.graph_inputs(size)
        return self._model.logits(self._model.forward(inputs, self._kv_layers))

    def add(self, row: int, request: NewRequest) -> None:
        """See `Drafter`: what its blocks do not hold is to be computed."""
        self._num_computed[row] = self._contents.add(row, request.cache_salt)

    def note(self, row: int, token_ids: Sequence[int]) -> None:
        """See `Drafter`: the batch has them."""
        self._guesses.note(row, token_ids)

    def remove(self, row: int) -> None:
        """See `Drafter`."""
        self._guessed.pop(row, None)
        self._behind.discard(row)
        self._contents.remove(row)
        self._guesses.remove(row)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """See `Drafter`; rows that lack too many tokens have no draft yet.

        Args:
            wanted: Maximum draft length by row; the rows have blocks for it.
        """
        rows = np.array([*wanted, *(self._behind - wanted.keys())], dtype=np.int64)
        rows = rows[self._batch.num_tokens(rows) <= self._max_len]
        if not len(rows):
            return {}
        self._settle(rows)
        rows, start, end = self._spans(rows)
        is_whole = end == self._batch.num_tokens(rows)
        most = np.array([wanted.get(row, 0) for row in rows.tolist()], dtype=np.int64)
        drafting = is_whole & (most > 0)
        self._behind.difference_update(rows[is_whole].tolist())
        self._behind.update(rows[~is_whole].tolist())
        has_work = start < end
        tokens = self._compute(rows[has_work], start[has_work], end[has_work], drafting[has_work])
        self._num_computed[rows] = end
        return self._go_on(rows[drafting], end[drafting], most[drafting], tokens)

    def _settle(self, rows: NDArray[np.int64]) -> None:
        """Count the computed tokens of former drafts, as far as those proved right."""
        for row in rows.tolist():
            guessed = self._guessed.pop(row, [])
            first = end = int(self._num_computed[row])
            followed = self._batch.tokens(row, first, first + len(guessed))
            for token_id, right in zip(guessed, followed, strict=False):
                if token_id != right:
                    break
                end += 1
            self._num_computed[row] = end
            self._contents.write(row, first, end)

    def _spans(
        self, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return rows, those that lack the least first, and the span of each to compute now."""
        num_tokens = self._batch.num_tokens(rows)
        # The last token is computed, even if again: its successor is wanted.
        start = np.minimum(self._num_computed[rows], num_tokens - 1)
        lacking = np.minimum(num_tokens, self._batch.num_held(rows)) - start
        order = np.argsort(lacking, kind="stable")
        lacking = lacking[order]
        most = _MAX_CATCH_UP + _NEWEST * len(rows)
        num = np.clip(most - np.cumsum(lacking) + lacking, 0, lacking)
        return rows[order], start[order], start[order] + num

    def _go_on(
        self,
        rows: NDArray[np.int64],
        num_tokens: NDArray[np.int64],
        most: NDArray[np.int64],
        tokens: NDArray[np.int64],
    ) -> dict[int, list[int]]:
        """Return drafts that begin with `tokens`, up to the wanted length and last position."""
        drafts = {row: [token] for row, token in zip(rows.tolist(), tokens.tolist(), strict=True)}
        most = np.minimum(most, self._max_len - num_tokens + 1)
        for depth in range(1, max(most, default=0)):
            goes_on = most > depth
            rows, most, num_tokens = rows[goes_on], most[goes_on], num_tokens[goes_on]
            at = num_tokens + depth - 1
            self._batch.write_ahead(rows, at, tokens[goes_on])
            tokens = self._compute(rows, at, at + 1, np.ones(len(rows), dtype=np.bool_))
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                drafts[row].append(token)
        self._guessed.update((row, draft[:-1]) for row, draft in drafts.items())
        return drafts

    def _compute(
        self,
        rows: NDArray[np.int64],
        start: NDArray[np.int64],
        end: NDArray[np.int64],
        drafting: NDArray[np.bool_],
    ) -> NDArray[np.int64]:
        """Compute tokens and write their KV; return the next tokens where `drafting`."""
        if not len(rows):
            return np.zeros(0, dtype=np.int64)
        for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
            self._contents.write(row, first, last)
        num_tokens = int((end - start).sum())
        graph = None if self._graphs is None else self._graphs.size_for(num_tokens, len(rows))
        inputs, query_start = self._batch.inputs_of(self._buffers, rows, start, end, graph=graph)
        last = query_start[1:][drafting] - 1
        if self._graphs is not None and graph is not None:
            return self._choose(rows[drafting], end[drafting], self._graphs.replay(graph)[last])
        if self._experts is not None:
            self._experts.begin_step([len(inputs.token_ids)])
        hidden = self._model.forward(inputs, self._kv_layers)
        if self._experts is not None:
            self._experts.end_step()
        if not len(last):
            return last
        return self._choose(rows[drafting], end[drafting], self._model.logits(hidden[last]))

    def _choose(
        self, rows: NDArray[np.int64], at: NDArray[np.int64], logits: Tensor
    ) -> NDArray[np.int64]:
        """Return a token for each row at a position."""
        depth = int((at - self._batch.num_tokens(rows)).max(initial=0))  # of all rows alike
        return self._guesses.choose(logits, rows, self._batch.num_outputs(rows), depth)


class FirstRanksDrafts:
    """Shares the drafts of a TP group's first rank with all of its ranks.

    Drafts decide what a step computes: ranks must not differ in them, and the same arithmetic on
    another processor may differ in the last bit.

    Args:
        own: The drafter, on the first rank.
    """

    def __init__(self, own: DraftModel | None, tp: Group) -> None:
        self._own = own
        self._tp = tp

    def warm_up(self, steps: Sequence[tuple[int, int]]) -> None:
        """See `DraftModel`."""
        if self._own is not None:
            self._own.warm_up(steps)

    def capture(self) -> None:
        """See `DraftModel`."""
        if self._own is not None:
            self._own.capture()

    def close(self) -> None:
        """See `DraftModel`."""
        if self._own is not None:
            self._own.close()

    def add(self, row: int, request: NewRequest) -> None:
        """See `Drafter`."""
        if self._own is not None:
            self._own.add(row, request)

    def note(self, row: int, token_ids: Sequence[int]) -> None:
        """See `Drafter`."""
        if self._own is not None:
            self._own.note(row, token_ids)

    def remove(self, row: int) -> None:
        """See `Drafter`."""
        if self._own is not None:
            self._own.remove(row)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """See `Drafter`. Every rank of the group must ask for the same."""
        drafts = {} if self._own is None else self._own.propose(wanted)
        return lists_from(self._tp, 0, wanted, drafts)


def rehearsed(buffers: StepBuffers, steps: Sequence[tuple[int, int]]) -> Iterator[StepInputs]:
    """Bring those of the model's rehearsed steps that fit into the buffers to a device, one by one.

    Args:
        steps: As returned by `rehearsed_steps`.
    """
    for num_rows, num_tokens in steps:
        if num_tokens <= buffers.max_num_tokens:
            yield buffers.rehearse(num_rows, num_tokens)
