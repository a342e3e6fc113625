"""One step's inputs, in one piece of memory.

The host fills arrays, and one copy (`upload`) brings them over.

Knows what a step's fields are called and how large they get; not what is in them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from pdserve.kernels.reference.sampling import Draws
from pdserve.kernels.step import StepInputs
from pdserve.worker.device import Upload

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.worker.device import Device

T = TypeVar("T")

_ALIGNMENT = 256
"""Bytes: kernels are compiled for aligned addresses, and for those alone."""
_TABLE_ALIGNMENT = 16
"""Entries of a table's row, on a device: the same kernels whatever the longest request is."""


@dataclass(frozen=True, slots=True)
class StepFields(Generic[T]):
    """Flat fields of a step of at most T tokens of R rows, each of maximum size.

    Attributes:
        query_start: `[R + 1]` int32.
        context_lens: `[R]` int32.
        logit_rows: `[L]` int64, tokens whose logits are wanted.
        fed_tokens, fed_from: `[R]` int64, tokens that the step before sampled, by their place in
            this step, and there.
        drawn_rows, scale, min_p, top_k, top_p, uniform: `[L]`, as `Draws` names them.
        token_ids, positions, slot_mapping: `[T]` int64.
        block_tables: `[R * table_width]` int32. Last, as it is copied only as far as it is used.
    """

    query_start: T
    context_lens: T
    logit_rows: T
    fed_tokens: T
    fed_from: T
    drawn_rows: T
    scale: T
    min_p: T
    top_k: T
    top_p: T
    uniform: T
    token_ids: T
    positions: T
    slot_mapping: T
    block_tables: T


class GraphSize(NamedTuple):
    """The size of a captured step: tokens, and the requests that they may belong to."""

    num_tokens: int
    num_requests: int


class StepBuffers:
    """The inputs of the step that is prepared, and of the one that runs.

    Args:
        num_rows: Maximum requests of one step, those of its padding included.
        max_blocks: Maximum blocks of one request.
        max_num_tokens: Maximum tokens of one step.
        max_logits: Maximum rows of logits of one step; 0 means `num_rows`.

    Attributes:
        max_num_tokens, max_logits: Likewise.
    """

    def __init__(
        self,
        device: Device,
        *,
        num_rows: int,
        max_blocks: int,
        max_num_tokens: int,
        max_logits: int = 0,
    ) -> None:
        self._device = device
        self.max_num_tokens = max_num_tokens
        self.max_logits = max_logits = max_logits or num_rows
        self._max_width = -(-max_blocks // _TABLE_ALIGNMENT) * _TABLE_ALIGNMENT
        sizes = StepFields(
            query_start=(torch.int32, num_rows + 1),
            context_lens=(torch.int32, num_rows),
            logit_rows=(torch.int64, max_logits),
            fed_tokens=(torch.int64, num_rows),
            fed_from=(torch.int64, num_rows),
            drawn_rows=(torch.int32, max_logits),
            scale=(torch.float32, max_logits),
            min_p=(torch.float32, max_logits),
            top_k=(torch.int32, max_logits),
            top_p=(torch.int64, max_logits),
            uniform=(torch.int64, max_logits),
            token_ids=(torch.int64, max_num_tokens),
            positions=(torch.int64, max_num_tokens),
            slot_mapping=(torch.int64, max_num_tokens),
            block_tables=(torch.int32, num_rows * self._max_width),
        )
        *_, self._tables_at, num_bytes = _places(sizes)
        self._memory = Upload(device, (num_bytes,), torch.uint8)
        self._arrays = [
            StepFields(*(field.numpy() for field in _values(_cut(piece, sizes))))
            for piece in self._memory.pieces
        ]
        self._there = _cut(self._memory.there, sizes)

    @property
    def arrays(self) -> StepFields[NDArray[Any]]:
        """Those that `begin` returned."""
        return self._arrays[self._memory.turn]

    def begin(self) -> StepFields[NDArray[Any]]:
        """Return the arrays of the next step, once nothing reads their earlier contents.

        They hold whatever an earlier step left.
        """
        self._memory.begin()
        return self.arrays

    def table_width(self, max_blocks: int) -> int:
        """Return the row length of this step's tables, if its longest request has `max_blocks`.

        On a device it is constant, as graphs require.
        """
        return max_blocks if self._device.shares_memory else self._max_width

    def pad(self, num_requests: int, num_tokens: int, size: GraphSize) -> int:
        """Pad a step to the size of a graph, with requests that read no context and store nothing.

        Each extra token gets such a request, the last of which takes all that are left; requests
        still missing then have no token.

        Returns:
            Number of requests with tokens.
        """
        arrays, width = self.arrays, self._max_width
        end, last = size
        arrays.token_ids[num_tokens:end] = 0
        arrays.positions[num_tokens:end] = 0
        arrays.slot_mapping[num_tokens:end] = -1
        arrays.context_lens[num_requests:last] = 0
        starts = np.arange(num_tokens, num_tokens + last - num_requests)
        np.minimum(starts, end, out=arrays.query_start[num_requests:last], casting="same_kind")
        arrays.query_start[last] = end
        num_padded = min(last, num_requests + end - num_tokens)
        arrays.block_tables[num_requests * width : num_padded * width] = 0
        return num_padded

    def upload(self, num_rows: int) -> None:
        """Bring the arrays over, with the tables of the first `num_rows` requests."""
        self._memory.send(self._tables_at + num_rows * self._max_width * torch.int32.itemsize)

    def feed(self, num: int, sampled: Tensor) -> None:
        """Insert `num` tokens sampled by the previous step, after this one's upload.

        Args:
            sampled: On the device; an invalid token, which ends its request, becomes token 0.
        """
        there = self._there
        taken = sampled.index_select(0, there.fed_from[:num]).clamp_(min=0)
        there.token_ids.index_copy_(0, there.fed_tokens[:num], taken)

    def rehearse(self, num_requests: int, num_tokens: int) -> StepInputs:
        """Bring a step that stores nothing to the device, over prompts of equal length.

        Args:
            num_requests: Number of requests, enough to hold the tokens.
            num_tokens: Total of all requests.
        """
        arrays, width = self.begin(), self._max_width
        ends = np.arange(1, num_requests + 1) * num_tokens // num_requests
        arrays.token_ids[:num_tokens] = 0
        arrays.positions[:num_tokens] = 0
        arrays.slot_mapping[:num_tokens] = -1
        arrays.query_start[0] = 0
        arrays.query_start[1 : num_requests + 1] = ends
        arrays.context_lens[:num_requests] = np.diff(ends, prepend=0)
        arrays.block_tables[: num_requests * width] = 0
        self.upload(num_requests)
        return self.inputs(num_tokens, num_requests, width)

    def stage_padding(self, size: GraphSize) -> None:
        """Bring a step of a size that computes nothing to the device."""
        arrays = self.begin()
        arrays.logit_rows[:] = 0
        self.upload(self.pad(0, 0, size))

    def graph_inputs(self, size: GraphSize) -> StepInputs:
        """Return the device's inputs for a graph of a size."""
        return self.inputs(*size, self._max_width, is_padded=True)

    def inputs(
        self, num_tokens: int, num_rows: int, table_width: int, *, is_padded: bool = False
    ) -> StepInputs:
        """Return the device's inputs for the kernels; the next upload overwrites them."""
        there = self._there
        return StepInputs(
            token_ids=there.token_ids[:num_tokens],
            positions=there.positions[:num_tokens],
            slot_mapping=there.slot_mapping[:num_tokens],
            block_tables=there.block_tables[: num_rows * table_width].view(num_rows, table_width),
            query_start=there.query_start[: num_rows + 1],
            context_lens=there.context_lens[:num_rows],
            is_padded=is_padded,
        )

    def draws(self, num_draws: int) -> Draws:
        """Return the sampling parameters of a step, likewise."""
        return Draws(*_draws_of(self._there, num_draws))

    def draws_to_fill(self, num_draws: int) -> list[NDArray[Any]]:
        """Return the fields of `arrays` for sampling, in the order of `Draws`."""
        return _draws_of(self.arrays, num_draws)

    def logit_rows(self, num_rows: int) -> Tensor:
        """Return the first `num_rows` of the field on the device, likewise."""
        return self._there.logit_rows[:num_rows]


def _draws_of(each: StepFields[Any], num_draws: int) -> list[Any]:
    columns = each.drawn_rows, each.scale, each.min_p, each.top_k, each.top_p, each.uniform
    return [column[:num_draws] for column in columns]


def _values(each: StepFields[T]) -> list[T]:
    return [getattr(each, field.name) for field in fields(each)]


def _places(sizes: StepFields[tuple[torch.dtype, int]]) -> list[int]:
    """Return the first byte of each field, placed one after the other, and the end."""
    lengths = [
        -(-size * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for dtype, size in _values(sizes)
    ]
    return [0, *itertools.accumulate(lengths)]


def _cut(memory: Tensor, sizes: StepFields[tuple[torch.dtype, int]]) -> StepFields[Tensor]:
    """Return views of the fields in `memory`."""
    return StepFields(
        *(
            memory[start : start + size * dtype.itemsize].view(dtype)
            for start, (dtype, size) in zip(_places(sizes), _values(sizes), strict=False)
        )
    )
