"""The requests that a worker knows, as arrays, and the inputs of a step cut from them.

Each request keeps one row from the step that brings it to the step that forgets it, so
nothing is ever moved; a step gathers the rows it computes. What a step costs here grows
with its requests by a few array operations, never with tokens in Python.

Knows token ids, block tables and counts; no device memory but the step's own inputs.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from pdserve.errors import InternalError
from pdserve.worker.step import AwaitedRows, PreparedStep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.kernels.step import StepInputs
    from pdserve.wire.ids import BlockId, RequestId
    from pdserve.wire.step import NewRequest, SchedulerOutput
    from pdserve.worker.graphs import StepGraphs
    from pdserve.worker.step import AwaitedTokens
    from pdserve.worker.step_buffers import GraphSize, StepBuffers


class InputBatch:
    """Rows of requests.

    Args:
        buffers: Buffers that steps are written to, with as many rows.

    Attributes:
        num_rows: Maximum number of requests known at once.
        max_blocks: Maximum blocks of one request.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        buffers: StepBuffers,
    ) -> None:
        self._block_size = block_size
        self.num_rows = num_rows
        self.max_blocks = -(-max_model_len // block_size)
        # Zero pages are shared until they are written: long contexts cost nothing unused.
        self._token_ids = np.zeros((num_rows, max_model_len), dtype=np.int32)
        self._block_tables = np.zeros((num_rows, self.max_blocks), dtype=np.int32)
        self._num_blocks = np.zeros(num_rows, dtype=np.int64)
        self._num_prompt = np.zeros(num_rows, dtype=np.int64)
        self._num_tokens = np.zeros(num_rows, dtype=np.int64)
        self._num_computed = np.zeros(num_rows, dtype=np.int64)
        self._sits_out = np.zeros(num_rows, dtype=np.bool_)
        self._awaited = AwaitedRows(num_rows)
        self._row_of: dict[RequestId, int] = {}
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._last_prompt: list[int] = []
        self._last_prompt_array = np.zeros(0, dtype=np.int32)

        self._buffers = buffers

    def remove(self, request_id: RequestId) -> int | None:
        """Forget a request and return its row, or None if it is not known here."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)
            self._awaited.change_hands(row)
        return row

    def add(self, request: NewRequest) -> int:
        """Take a request and return its row.

        Raises:
            InternalError: It is already known, or there is no room for it.
        """
        request_id = request.request_id
        if request_id in self._row_of:
            raise InternalError(f"request {request_id} is new to a worker that knows it")
        if not self._free_rows:
            raise InternalError(f"request {request_id}: all {len(self._row_of)} rows are taken")
        num_prompt = len(request.prompt_token_ids)
        num_tokens = num_prompt + len(request.output_token_ids)
        if num_tokens > self._token_ids.shape[1]:
            raise InternalError(
                f"request {request_id} has {num_tokens} tokens, a row {self._token_ids.shape[1]}"
            )
        row = self._free_rows.pop()
        self._row_of[request_id] = row
        self._token_ids[row, :num_prompt] = self._array_of(request.prompt_token_ids)
        self._token_ids[row, num_prompt:num_tokens] = request.output_token_ids
        self._num_prompt[row] = num_prompt
        self._num_tokens[row] = num_tokens
        self._num_computed[row] = request.num_computed_tokens
        self._sits_out[row] = False
        self._num_blocks[row] = 0
        self._append_blocks(row, request.block_ids)
        return row

    def _array_of(self, prompt: list[int]) -> NDArray[np.int32]:
        """`prompt` as an array. The choices of one prompt share the list and come in a row."""
        if prompt is not self._last_prompt:
            self._last_prompt, self._last_prompt_array = prompt, np.array(prompt, dtype=np.int32)
        return self._last_prompt_array

    def update(self, step: SchedulerOutput) -> NDArray[np.int64]:
        """Apply the changes to known requests; return their rows.

        Raises:
            InternalError: One of them is not known.
        """
        rows = self.rows(step.known_ids)
        self._num_computed[rows] = step.num_computed_tokens
        for request_id, block_ids in step.new_block_ids.items():
            self._append_blocks(self._row_of[request_id], block_ids)
        if step.sampled_token_ids:
            self.extend(rows, step.sampled_token_ids)
        return rows

    def has_unfinished(self, step: SchedulerOutput) -> bool:
        """Return whether a step ends before the last token of one of its requests."""
        known, num_new = step.known_ids, step.num_scheduled_tokens
        computed = zip(known, step.num_computed_tokens, strict=True)
        ends = np.array([num + num_new[each] for each, num in computed], dtype=np.int64)
        return bool((ends < self._num_tokens[self.rows(known)]).any()) or any(
            new.num_computed_tokens + num_new[new.request_id]
            < len(new.prompt_token_ids) + len(new.output_token_ids)
            for new in step.new_requests
        )

    def rows(self, request_ids: list[RequestId]) -> NDArray[np.int64]:
        """Return the rows of requests.

        Raises:
            InternalError: One of them is not known.
        """
        try:
            return np.array([self._row_of[i] for i in request_ids], dtype=np.int64)
        except KeyError as error:
            raise InternalError(f"request {error.args[0]} is not known to this worker") from None

    def extend(self, rows: NDArray[np.int64], token_ids: list[list[int]]) -> None:
        """Append any number of tokens to each of `rows`, which are distinct."""
        num = np.fromiter(map(len, token_ids), np.int64, len(rows))
        flat = np.fromiter(itertools.chain.from_iterable(token_ids), np.int32, num.sum())
        first = np.repeat(self._num_tokens[rows] - np.cumsum(num) + num, num)
        self._token_ids[np.repeat(rows, num), first + np.arange(len(flat))] = flat
        self._num_tokens[rows] += num
        self._sits_out[rows] &= num == 0

    def wait_for(self, places: NDArray[np.int64], rows: NDArray[np.int64]) -> AwaitedTokens:
        """Count one more token for each of `rows`, which so far only the device has.

        The step prepared next takes it on the device. `settle` comes before the step after that.

        Args:
            places: The index of each among the tokens of its step.
        """
        awaited = self._awaited.begin(places, rows, self._num_tokens[rows])
        self._num_tokens[rows] += 1
        return awaited

    def settle(self, awaited: AwaitedTokens, token_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Write tokens of a step that have come to the requests still present.

        Returns:
            `[M]`, which of the awaited tokens had their request.
        """
        is_there = self._awaited.end(awaited)
        mine = token_ids[awaited.places[is_there]]
        self._token_ids[awaited.rows[is_there], awaited.positions[is_there]] = mine
        return is_there

    def _append_blocks(self, row: int, block_ids: list[BlockId]) -> None:
        have = self._num_blocks[row]
        self._block_tables[row, have : have + len(block_ids)] = block_ids
        self._num_blocks[row] += len(block_ids)

    def prepare(
        self,
        num_scheduled_tokens: dict[RequestId, int],
        graphs: StepGraphs[Any] | None = None,
        prompt_graphs: StepGraphs[Any] | None = None,
        drafts: Mapping[RequestId, list[int]] | None = None,
    ) -> PreparedStep:
        """Cut a step's inputs; they belong to the device once they are uploaded.

        Args:
            graphs: Run it if each request computes its last token, and its draft.
            prompt_graphs: Run it if they do not.
            drafts: Tokens computed after the last ones of their requests; none is empty.

        Raises:
            InternalError: A request is not known, would compute tokens it does not have, or
                lacks blocks for them.
        """
        request_ids = list(num_scheduled_tokens)
        rows = self.rows(request_ids)
        num_requests = len(request_ids)
        num_new = np.fromiter(num_scheduled_tokens.values(), np.int64, num_requests)
        start = self._num_computed[rows]
        num_tokens = self._num_tokens[rows]
        if self._sits_out[rows].any():
            start = np.where(self._sits_out[rows], np.minimum(start, num_tokens - num_new), start)
        end = start + num_new
        if drafts:
            num_drafted = self._write_drafts(request_ids, end == num_tokens, drafts)
            end += num_drafted
            num_tokens = num_tokens + num_drafted
        self._check(request_ids, rows, start, end, num_tokens)
        sampling = np.flatnonzero(end == num_tokens)
        num_outputs = (num_tokens - self._num_prompt[rows])[sampling]
        query_start, width = self._fill(self._buffers, rows, start, end)
        arrays = self._buffers.arrays
        if drafts:
            num_outputs -= num_drafted[sampling]
            num_wanted = num_drafted[sampling] + 1
            ends = np.cumsum(num_wanted)
            num_logits = int(ends[-1]) if len(ends) else 0
            wanted = np.arange(num_logits) + np.repeat(query_start[1:][sampling] - ends, num_wanted)
        else:
            num_logits, wanted = len(sampling), query_start[1:][sampling] - 1
        total = int(query_start[-1])
        does_all_sample = num_logits == total
        if not does_all_sample:
            arrays.logit_rows[:num_logits] = wanted
        fed_from = self._awaited.index_of(rows)
        fed = np.flatnonzero(fed_from >= 0)
        arrays.fed_from[: len(fed)] = fed_from[fed]
        arrays.fed_tokens[: len(fed)] = query_start[1:][fed] - 1
        size = None
        if graphs and does_all_sample:
            size = graphs.size_for(total, num_requests)
        elif prompt_graphs and not does_all_sample:
            size = prompt_graphs.size_for(total, num_requests, num_logits)
        num_tables = num_requests
        if size is not None:
            num_tables = self._buffers.pad(num_requests, total, size)
            arrays.logit_rows[num_logits:] = 0
        return PreparedStep(
            inputs=self._buffers.inputs(total, num_requests, width),
            graph=size,
            request_ids=request_ids,
            rows=rows,
            start=start,
            end=end,
            query_start=query_start,
            sampling=sampling,
            num_outputs=num_outputs,
            drafts=[drafts.get(request_ids[i], []) for i in sampling] if drafts else None,
            logit_rows=None if does_all_sample else self._buffers.logit_rows(num_logits),
            num_fed=len(fed),
            num_tables=num_tables,
        )

    def inputs_of(
        self,
        buffers: StepBuffers,
        rows: NDArray[np.int64],
        start: NDArray[np.int64],
        end: NDArray[np.int64],
        *,
        first_block: NDArray[np.int64] | None = None,
        ahead: int = 0,
        graph: GraphSize | None = None,
    ) -> tuple[StepInputs, NDArray[np.int64]]:
        """Return the inputs of a step of another model over the same requests.

        Args:
            buffers: Where they are written; the next call overwrites them.
            rows: `[R]`, distinct.
            start, end: `[R]`, positions that are computed: from `start` up to, excluding, `end`;
                they have tokens, written ahead or not, and blocks.
            first_block: `[R]`, each one's first block that is read, none behind `start`;
                positions do not change. None: all are read.
            ahead: Offset from a position to the token that is read for it.
            graph: Size of the graph that runs it.

        Returns:
            The inputs, and `[R + 1]`, the first token of each request in them.
        """
        query_start, width = self._fill(buffers, rows, start, end)
        total, arrays = int(query_start[-1]), buffers.arrays
        if ahead:
            token_rows = np.repeat(rows, end - start)
            arrays.token_ids[:total] = self._token_ids[token_rows, arrays.positions[:total] + ahead]
        if first_block is not None:
            tables = arrays.block_tables[: len(rows) * width].reshape(len(rows), width)
            at = np.minimum(first_block[:, None] + np.arange(width), width - 1)
            tables[:] = np.take_along_axis(tables, at, axis=1)
            arrays.context_lens[: len(rows)] -= first_block * self._block_size
        buffers.upload(len(rows) if graph is None else buffers.pad(len(rows), total, graph))
        return buffers.inputs(total, len(rows), width), query_start

    def _fill(
        self,
        buffers: StepBuffers,
        rows: NDArray[np.int64],
        start: NDArray[np.int64],
        end: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], int]:
        """Write tokens and their places; return each request's first one, and the tables' width."""
        num_requests, num_new = len(rows), end - start
        arrays = buffers.begin()
        if (num_new == 1).all():
            total, query_start, token_rows = num_requests, np.arange(num_requests + 1), rows
            positions = arrays.positions[:total]
            positions[:] = start
        else:
            query_start = np.zeros(num_requests + 1, dtype=np.int64)
            np.cumsum(num_new, out=query_start[1:])
            total, token_rows = int(query_start[-1]), np.repeat(rows, num_new)
            positions = arrays.positions[:total]
            shifts = np.repeat(query_start[:-1] - start, num_new)
            np.subtract(np.arange(total), shifts, out=positions)
        arrays.token_ids[:total] = self._token_ids[token_rows, positions]
        block, offset = np.divmod(positions, self._block_size)
        slots = arrays.slot_mapping[:total]
        np.multiply(self._block_tables[token_rows, block], self._block_size, out=slots)
        slots += offset

        max_blocks = -(-int(end.max()) // self._block_size)
        width = buffers.table_width(max_blocks)
        tables = arrays.block_tables[: num_requests * width].reshape(num_requests, width)
        tables[:, :max_blocks] = self._block_tables[rows, :max_blocks]
        arrays.query_start[: num_requests + 1] = query_start
        arrays.context_lens[:num_requests] = end
        return query_start, width

    def num_tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens of requests, `[R]`."""
        return self._num_tokens[rows]

    def num_outputs(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of output tokens of requests, `[R]`."""
        return self._num_tokens[rows] - self._num_prompt[rows]

    def num_held(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens that the blocks of requests can hold, `[R]`."""
        return self._num_blocks[rows] * self._block_size

    def blocks(self, row: int) -> NDArray[np.int32]:
        """Return the blocks of a request, in token order; valid until the next update."""
        return self._block_tables[row, : self._num_blocks[row]]

    def tokens(self, row: int, start: int, end: int) -> list[int]:
        """Return the tokens at positions `start` to `end`, as far as there are some."""
        found: list[int] = self._token_ids[row, start : min(end, self._num_tokens[row])].tolist()
        return found

    def write_ahead(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64], token_ids: NDArray[np.int64]
    ) -> None:
        """Write a token behind those of each request, which does not count as one of them."""
        self._token_ids[rows, positions] = token_ids

    def _write_drafts(
        self,
        request_ids: list[RequestId],
        ends_there: NDArray[np.bool_],
        drafts: Mapping[RequestId, list[int]],
    ) -> NDArray[np.int64]:
        """Write drafts after their requests' tokens, without counting them; return their lengths.

        Args:
            ends_there: Whether the step computes the last token of each request.
        """
        lengths = np.zeros(len(request_ids), dtype=np.int64)
        for index, request_id in enumerate(request_ids):
            draft = drafts.get(request_id)
            if draft is None:
                continue
            row = self._row_of[request_id]
            first = int(self._num_tokens[row])
            if not ends_there[index] or first + len(draft) > self._token_ids.shape[1]:
                raise InternalError(f"request {request_id} cannot have a draft at token {first}")
            self._token_ids[row, first : first + len(draft)] = draft
            lengths[index] = len(draft)
        return lengths

    def upload(self, prepared: PreparedStep, sampled: Tensor | None = None) -> None:
        """Bring a step's inputs, and what else its buffers hold, to the device.

        Args:
            sampled: `[M]` int64 on the device, the tokens of the last `wait_for`.
        """
        self._buffers.upload(prepared.num_tables)
        if prepared.num_fed:
            assert sampled is not None
            self._buffers.feed(prepared.num_fed, sampled)

    def _check(
        self,
        request_ids: list[RequestId],
        rows: NDArray[np.int64],
        start: NDArray[np.int64],
        end: NDArray[np.int64],
        num_tokens: NDArray[np.int64],
    ) -> None:
        """Stale or missing KV would become wrong tokens: refuse the step instead."""
        held = self._num_blocks[rows] * self._block_size
        wrong = (end > num_tokens) | (end > held) | (end <= start)
        if wrong.any():
            i = int(wrong.argmax())
            raise InternalError(
                f"request {request_ids[i]} cannot compute tokens {start[i]} to {end[i]}: it has "
                f"{num_tokens[i]} tokens and blocks for {held[i]}"
            )

    def sit_out(self, rows: NDArray[np.int64]) -> None:
        """Make `rows` compute their last token again until they get another one.

        Steps planned before this is known would have them compute a token that does not exist.
        """
        self._sits_out[rows] = True

    def prompt_targets(self, row: int, start: int, end: int) -> NDArray[np.int32]:
        """Return the prompt tokens that positions `start` to `end` predict: those after them."""
        return self._token_ids[row, start + 1 : min(end + 1, int(self._num_prompt[row]))]
