"""What a step has computed, as a drafter reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.kernels.step import StepInputs
    from pdserve.worker.step import PreparedStep


@dataclass(frozen=True, slots=True)
class StepStates:
    """One step: T tokens of R requests. Of prompts any chunk, of others the last token and a draft.

    Tensors are on the model's device, equal to the last bit on all ranks of the TP group. Those of
    `inputs` are overwritten by the next step's, the others are nobody else's.

    Attributes:
        rows: `[R]`, the requests' rows.
        start: `[R]`, position of each one's first token here; the others follow it.
        query_start: `[R + 1]`, where in T its tokens are.
        num_valid: `[R]`, how many of its tokens stand, from the first one on. Those behind them
            are of a draft that was wrong: their KV and states are void, and the next step
            computes their positions again.
        sampled: `R`, what each put out: what follows its last valid token is the last of these,
            and what follows the valid ones before that are those before. Empty if its tokens do
            not end here, or a rule left it none: the next step may then have the same token again.
        inputs: What the model read: token ids, positions, and where their KV lies.
        hidden: `[T, hidden_size]`, final states, normed: what the head reads.
        aux: For each of the drafter's `aux_layers` `[T, hidden_size]`, the residual stream before
            that layer, not normed.
    """

    rows: NDArray[np.int64]
    start: NDArray[np.int64]
    query_start: NDArray[np.int64]
    num_valid: NDArray[np.int64]
    sampled: list[list[int]]
    inputs: StepInputs
    hidden: Tensor
    aux: tuple[Tensor, ...]


def states_of(
    prepared: PreparedStep, hidden: Tensor, aux: Sequence[Tensor], token_ids: Sequence[list[int]]
) -> StepStates:
    """Return what a step has computed.

    Args:
        hidden, aux: See `StepStates`.
        token_ids: What those put out that sample, in their order.
    """
    num_valid = prepared.query_start[1:] - prepared.query_start[:-1]
    sampled: list[list[int]] = [[] for _ in prepared.request_ids]
    drafts = prepared.drafts or [[]] * len(prepared.sampling)
    for index, tokens, draft in zip(prepared.sampling.tolist(), token_ids, drafts, strict=True):
        sampled[index] = tokens
        num_valid[index] -= len(draft) - max(0, len(tokens) - 1)
    return StepStates(
        rows=prepared.rows,
        start=prepared.start,
        query_start=prepared.query_start,
        num_valid=num_valid,
        sampled=sampled,
        inputs=prepared.inputs,
        hidden=hidden,
        aux=tuple(aux),
    )
