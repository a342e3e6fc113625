"""The tokens of one step and their positions, for all operations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tokens, flattened over its requests. T tokens of R requests.

    Attributes:
        token_ids: ``[T]`` int64.
        positions: ``[T]`` int64, position of each token in its request.
        slot_mapping: ``[T]`` int64, ``block * block_size + offset`` to store its KV at.
        block_tables: ``[R, max_blocks]`` int32.
        query_start: ``[R + 1]`` int32, first row of each request, and T.
        context_lens: ``[R]`` int32, tokens of each request with KV after this step.
        is_padded: Whether requests may have query tokens and no context, as in graphs.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor
    is_padded: bool = False
